//! Texts that a language model writes in an evaluation: it continues the prompts of samples.

use std::ops::Range;

use baton_data::{Batch, Inputs, NO_LABEL};
use baton_recipe::JobSpec;
use baton_text::Tokenizer;

use crate::{
    learner::Error,
    sampling::{Prompt, Sampling},
};

/// How completions are written, and read as text.
#[derive(Debug)]
pub(super) struct Completions {
    tokenizer: Tokenizer,
    pub(super) sampling: Sampling,
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
        let Some(generate) = &spec.evaluation.generate else { return Ok(None) };
        let tokenizer = Tokenizer::load(&spec.model.path)
            .map_err(|error| Error::Recipe(format!("evaluation.generate: {error}")))?;
        let sampling = Sampling {
            max_tokens: generate.max_tokens,
            stops: tokenizer.ends().iter().copied().map(i64::from).collect(),
            temperature: generate.temperature,
            top_p: generate.top_p,
            seed: spec.seed,
        };
        Ok(Some(Self { tokenizer, sampling }))
    }

    /// The text of tokens, without the one that ends it.
    ///
    /// # Errors
    /// The tokenizer cannot decode them.
    pub(super) fn text(&self, tokens: &[i64]) -> Result<String, Error> {
        let kept = match tokens {
            [kept @ .., last] if self.sampling.stops.contains(last) => kept,
            all => all,
        };
        let tokens: Vec<u32> =
            kept.iter().map(|token| u32::try_from(*token).unwrap_or_default()).collect();
        let text = self.tokenizer.decode(&tokens);
        text.map_err(|error| Error::Recipe(format!("evaluation.generate: {error}")))
    }
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
