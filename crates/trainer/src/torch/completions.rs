//! Texts that a language model writes in an evaluation: it continues the prompts of samples.

use std::{cell::OnceCell, ops::Range, path::PathBuf};

use baton_data::{Batch, Inputs, NO_LABEL};
use baton_job::message::GeneratedText;
use baton_recipe::{JobSpec, spec::Generate};
use baton_text::{Tokenizer, tokenizer::VOCABULARY_FILE};

use super::network::{NetworkState, TorchNetwork};
use crate::{
    learner::Error,
    sampling::{Prompt, Sampling},
};

/// How completions are written, and read as text.
#[derive(Debug)]
pub(super) struct Completions {
    generate: Generate,
    seed: u64,
    /// Folder of the model.
    folder: PathBuf,
    /// Loaded for the first evaluation: for a vocabulary of 256,000 it takes a second, which a recovery should not.
    loaded: OnceCell<(Tokenizer, Sampling)>,
}

impl Completions {
    /// Those of a recipe; `None` without `evaluation.generate`.
    ///
    /// # Errors
    /// The model has no tokenizer.
    pub(super) fn of(spec: &JobSpec) -> Result<Option<Self>, Error> {
        let Some(generate) = spec.evaluation.generate.clone() else { return Ok(None) };
        let folder = PathBuf::from(&spec.model.path);
        let completions = Self { generate, seed: spec.seed, folder, loaded: OnceCell::new() };
        if !completions.folder.join(VOCABULARY_FILE).is_file() {
            // Fails, with the reason.
            completions.loaded()?;
        }
        Ok(Some(completions))
    }

    /// The texts that a network writes for the prompts of a batch; `None` if `is_interrupted`, which is called after every
    /// token, returned true.
    ///
    /// # Errors
    /// The tokenizer cannot be read, or cannot decode a text; the device failed.
    pub(super) fn write(
        &self,
        batch: &Batch,
        network: &dyn TorchNetwork,
        state: NetworkState<'_>,
        is_interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Vec<GeneratedText>>, Error> {
        let (tokenizer, sampling) = self.loaded()?;
        let (prompts, references): (Vec<Prompt>, Vec<Vec<i64>>) =
            prompts(batch).into_iter().unzip();
        let mut written: Vec<Vec<i64>> = vec![Vec::new(); prompts.len()];
        let mut interrupted = false;
        let mut on_token = |text: usize, token: i64| {
            written[text].push(token);
            interrupted = is_interrupted();
            !interrupted
        };
        // Where scores are not finite, as after a few updates in fp16, the texts end.
        network.generate(&prompts, state, sampling, &mut on_token)?;
        if interrupted {
            return Ok(None);
        }
        let ids = |tokens: &[i64]| -> Vec<u32> {
            tokens.iter().map(|token| u32::try_from(*token).unwrap_or_default()).collect()
        };
        let until_end = |tokens: &[i64]| {
            tokenizer.decode_until_end(&ids(tokens)).map_err(|error| failed(&error))
        };
        let texts = prompts.iter().zip(references).zip(written);
        let texts = texts.map(|((prompt, reference), written)| {
            // A chat has ends of turns in its prompt.
            let shown = tokenizer.decode(&ids(&prompt.tokens)).map_err(|error| failed(&error))?;
            let (reference, text) = (until_end(&reference)?, until_end(&written)?);
            Ok(GeneratedText { sample: prompt.number, prompt: shown, reference, text })
        });
        texts.collect::<Result<_, Error>>().map(Some)
    }

    fn loaded(&self) -> Result<&(Tokenizer, Sampling), Error> {
        if let Some(loaded) = self.loaded.get() {
            return Ok(loaded);
        }
        let tokenizer = Tokenizer::load(&self.folder).map_err(|error| failed(&error))?;
        let Generate { max_tokens, temperature, top_p, .. } = self.generate;
        let stops = tokenizer.ends().iter().copied().map(i64::from).collect();
        let sampling = Sampling { max_tokens, stops, temperature, top_p, seed: self.seed };
        Ok(self.loaded.get_or_init(|| (tokenizer, sampling)))
    }
}

fn failed(error: &baton_text::Error) -> Error {
    Error::Recipe(format!("evaluation.generate: {error}"))
}

/// The prompts of the samples of a batch, each with the tokens that follow in the sample.
fn prompts(batch: &Batch) -> Vec<(Prompt, Vec<i64>)> {
    let Inputs::Tokens { tokens, lengths } = &batch.inputs else { return Vec::new() };
    let mut end = 0;
    let prompted = |(length, sample): (&i64, &u64)| {
        let start = end;
        end += *length as usize;
        let (tokens, labels) = (tokens.get(start..end)?, batch.labels.get(start..end)?);
        let reference = completion(labels);
        let prompt = Prompt { tokens: tokens.get(..reference.start)?.to_vec(), number: *sample };
        Some((prompt, tokens.get(reference)?.to_vec()))
    };
    lengths.iter().zip(&batch.samples).filter_map(prompted).collect()
}

/// The first run of tokens that are predicted. Of a text of which all are, the second half.
fn completion(labels: &[i64]) -> Range<usize> {
    let is_label = |label: &i64| *label != i64::from(NO_LABEL);
    let start = labels.iter().skip(1).position(is_label).map_or(labels.len(), |start| start + 1);
    let length = labels.iter().skip(start).take_while(|label| is_label(label)).count();
    let end = start + length;
    match start == 1 && end == labels.len() {
        true => (end / 2).max(1)..end,
        false => start..end,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_completion_is_compared_or_the_second_half_of_a_plain_text() {
        let none = i64::from(NO_LABEL);
        assert_eq!(completion(&[none, none, 5, 6, none, 7]), 2..4);
        assert_eq!(completion(&[none, none, 5, 6]), 2..4);
        assert_eq!(completion(&[none, 5, none]), 1..2);
        assert_eq!(completion(&[4, 5, 6, 7, 8]), 2..5);
        assert_eq!(completion(&[none, 5]), 1..2);
    }

    #[test]
    fn every_sample_has_its_prompt() {
        let none = i64::from(NO_LABEL);
        let inputs = Inputs::Tokens { tokens: (0..9).collect(), lengths: vec![4, 2, 3] };
        let labels = vec![none, none, 2, 3, none, 5, none, none, 8];
        let batch = Batch { inputs, labels, samples: vec![10, 11, 12], ..Batch::default() };
        let found: Vec<_> = prompts(&batch)
            .into_iter()
            .map(|(prompt, reference)| (prompt.number, prompt.tokens, reference))
            .collect();
        assert_eq!(
            found,
            [(10, vec![0, 1], vec![2, 3]), (11, vec![4], vec![5]), (12, vec![6, 7], vec![8])]
        );
    }
}
