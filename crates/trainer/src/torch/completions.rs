//! Texts that a language model writes in an evaluation: it continues the prompts of samples.

use std::{ops::Range, path::PathBuf};

use baton_data::{Batch, Inputs, NO_LABEL};
use baton_recipe::{JobSpec, spec::Generate};
use baton_text::{Tokenizer, tokenizer::VOCABULARY_FILE};

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
    loaded: Option<(Tokenizer, Sampling)>,
}

/// A sample whose prompt is continued.
#[derive(Debug)]
pub(super) struct PromptedSample {
    pub(super) prompt: Prompt,
    /// The tokens that follow in the sample.
    pub(super) reference: Vec<i64>,
}

impl Completions {
    /// Those of a recipe; `None` without `evaluation.generate`.
    ///
    /// # Errors
    /// The model has no tokenizer.
    pub(super) fn of(spec: &JobSpec) -> Result<Option<Self>, Error> {
        let Some(generate) = spec.evaluation.generate.clone() else { return Ok(None) };
        let folder = PathBuf::from(&spec.model.path);
        let mut completions = Self { generate, seed: spec.seed, folder, loaded: None };
        if !completions.folder.join(VOCABULARY_FILE).is_file() {
            // Fails, with the reason.
            completions.load()?;
        }
        Ok(Some(completions))
    }

    /// Loads the tokenizer, unless that was done before.
    ///
    /// # Errors
    /// It cannot be read.
    pub(super) fn load(&mut self) -> Result<(), Error> {
        if self.loaded.is_none() {
            let tokenizer = Tokenizer::load(&self.folder).map_err(|error| failed(&error))?;
            let Generate { max_tokens, temperature, top_p, .. } = self.generate;
            let stops = tokenizer.ends().iter().copied().map(i64::from).collect();
            let sampling = Sampling { max_tokens, stops, temperature, top_p, seed: self.seed };
            self.loaded = Some((tokenizer, sampling));
        }
        Ok(())
    }

    /// How tokens are chosen.
    ///
    /// # Errors
    /// [`load`](Self::load) was not called.
    pub(super) fn sampling(&self) -> Result<&Sampling, Error> {
        self.loaded().map(|(_, sampling)| sampling)
    }

    /// The text of tokens, without the one that ends it.
    ///
    /// # Errors
    /// The tokenizer cannot decode them.
    pub(super) fn text(&self, tokens: &[i64]) -> Result<String, Error> {
        let (tokenizer, sampling) = self.loaded()?;
        let kept = match tokens {
            [kept @ .., last] if sampling.stops.contains(last) => kept,
            all => all,
        };
        let tokens: Vec<u32> =
            kept.iter().map(|token| u32::try_from(*token).unwrap_or_default()).collect();
        tokenizer.decode(&tokens).map_err(|error| failed(&error))
    }

    fn loaded(&self) -> Result<&(Tokenizer, Sampling), Error> {
        let missing =
            || Error::Recipe("evaluation.generate: the tokenizer is not loaded".to_owned());
        self.loaded.as_ref().ok_or_else(missing)
    }
}

fn failed(error: &baton_text::Error) -> Error {
    Error::Recipe(format!("evaluation.generate: {error}"))
}

/// The prompts of the samples of a batch.
pub(super) fn prompts(batch: &Batch) -> Vec<PromptedSample> {
    let Inputs::Tokens { tokens, lengths } = &batch.inputs else { return Vec::new() };
    let mut end = 0;
    let prompted = |(length, sample): (&i64, &u64)| {
        let start = end;
        end += *length as usize;
        let (tokens, labels) = (tokens.get(start..end)?, batch.labels.get(start..end)?);
        let reference = completion(labels);
        let prompt = Prompt { tokens: tokens.get(..reference.start)?.to_vec(), number: *sample };
        Some(PromptedSample { prompt, reference: tokens.get(reference)?.to_vec() })
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
            .map(|sample| (sample.prompt.number, sample.prompt.tokens, sample.reference))
            .collect();
        assert_eq!(
            found,
            [(10, vec![0, 1], vec![2, 3]), (11, vec![4], vec![5]), (12, vec![6, 7], vec![8]),]
        );
    }
}
