//! When and how training is evaluated.

use serde::{Deserialize, Serialize};

use super::{JobSpec, is_default, rules::Rules, train};
use crate::{progress::Extent, task};

/// When and how training is evaluated.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Evaluation {
    /// Epochs between evaluations, at least 1; the last epoch is always evaluated, on the whole validation
    /// set, or on `samples` of it.
    pub every_epochs: u32,
    /// Side of the images in pixels; 0 means the resolution at the end of training.
    pub resolution: u32,
    /// Side of the centre crop as a fraction of the short side, above 0 and at most 1.
    pub crop_ratio: f64,
    /// Images per forward pass; changes only the last bits of the result.
    pub batch: u32,
    /// Average the outputs with those of the mirrored image; images only.
    pub flip: bool,
    /// Fraction of the validation set used before the last epoch; always the same, evenly spread samples.
    pub subset: f64,
    /// Most samples of the validation set that any evaluation uses, evenly spread; 0 means all.
    #[serde(skip_serializing_if = "is_default")]
    pub samples: u64,
    /// Metric that decides which evaluation and which checkpoint is best, also for `limits.patience` and the guard;
    /// absent means the task's first metric.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best: Option<String>,
    /// Texts that a language model writes in every evaluation, and their metrics; absent means none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generate: Option<Generate>,
}

/// Texts that a language model writes: it continues the prompts of samples of the validation set, and what it writes is
/// compared with their completions. Of plain text, which has no prompt, it continues the first half.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Generate {
    /// Number of samples, at least 1, evenly spread over the evaluated ones; the metric `bleu` is over all of them
    /// (Papineni et al. 2002, as sacrebleu computes it, 0..100).
    pub samples: u32,
    /// Most tokens of a text, at least 1.
    pub max_tokens: u32,
    /// Divisor of scores before a token is drawn, 0..100; 0 takes the most likely token.
    pub temperature: f64,
    /// Draw only the most likely tokens, as many as have this share of the probability together, above 0 and at most 1.
    pub top_p: f64,
    /// Language that the texts should be in; the metric `valid_syntax` is the share that can be parsed: `python`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub syntax: Option<SyntaxLanguage>,
}

impl Default for Generate {
    fn default() -> Self {
        Self { samples: 16, max_tokens: 256, temperature: 0.0, top_p: 1.0, syntax: None }
    }
}

/// A language whose syntax can be checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SyntaxLanguage {
    /// Python 3.
    Python,
}

impl Default for Evaluation {
    fn default() -> Self {
        Self {
            every_epochs: 1,
            resolution: 0,
            crop_ratio: 224.0 / 256.0,
            batch: 64,
            flip: false,
            subset: 1.0,
            samples: 0,
            best: None,
            generate: None,
        }
    }
}

impl Evaluation {
    /// Number of samples that an evaluation of this extent uses, of a validation set of `all`.
    #[must_use]
    pub fn samples_of(&self, all: u64, extent: Extent) -> u64 {
        let samples = match extent {
            Extent::Full => all,
            Extent::Subset => (all as f64 * self.subset).ceil() as u64,
        };
        match self.samples {
            0 => samples,
            most => samples.min(most),
        }
    }

    /// Number of texts that a language model writes in an evaluation of `samples` samples.
    #[must_use]
    pub fn texts(&self, samples: u64) -> u64 {
        self.generate.as_ref().map_or(0, |generate| u64::from(generate.samples).min(samples))
    }

    /// Number of batches of an evaluation of `samples` samples, and of those after them, whose prompts are continued.
    #[must_use]
    pub fn batches(&self, samples: u64) -> [u64; 2] {
        [samples, self.texts(samples)].map(|count| count.div_ceil(u64::from(self.batch)))
    }

    /// Positions of the samples of a batch among the `samples` of an evaluation. The batches of [`texts`](Self::texts)
    /// follow the others.
    #[must_use]
    pub fn positions(&self, batch: u64, samples: u64) -> Vec<u64> {
        let size = u64::from(self.batch);
        let range = |batch: u64, end: u64| batch * size..((batch + 1) * size).min(end);
        let ([batches, _], texts) = (self.batches(samples), self.texts(samples));
        match batch.checked_sub(batches) {
            None => range(batch, samples).collect(),
            Some(batch) => range(batch, texts).map(|text| spread(text, texts, samples)).collect(),
        }
    }
}

/// The place of the `number`-th of `count` samples that are evenly spread over `all`.
#[must_use]
pub fn spread(number: u64, count: u64, all: u64) -> u64 {
    (u128::from(number) * u128::from(all) / u128::from(count.max(1))) as u64
}

impl JobSpec {
    /// Side of the evaluation images in pixels; by default the resolution at the end of training.
    #[must_use]
    pub fn evaluation_resolution(&self) -> u32 {
        match self.evaluation.resolution {
            0 => self.train.phases.last().map_or(self.train.resolution, |last| last.resolution),
            side => side,
        }
    }

    /// Sides of all images in pixels: of training from its beginning on, and of the evaluation.
    pub fn resolutions(&self) -> impl Iterator<Item = u32> {
        let phases = self.train.phases.iter().map(|phase| phase.resolution);
        let ends = [self.train.resolution, self.evaluation_resolution()];
        ends.into_iter().chain(phases)
    }
}

pub(super) fn check(spec: &JobSpec, rules: &mut Rules) {
    let evaluation = &spec.evaluation;
    rules.at_least_1("evaluation.every_epochs", evaluation.every_epochs);
    let sides = train::sides(spec);
    rules.check(
        evaluation.resolution == 0 || sides.contains(&evaluation.resolution),
        "evaluation.resolution",
        evaluation.resolution,
        &format!("must be 0 (as in training) or {}..4096 pixels", sides.start()),
    );
    rules.at_least_1("evaluation.batch", evaluation.batch);
    rules.above_0_to_1("evaluation.crop_ratio", evaluation.crop_ratio);
    rules.above_0_to_1("evaluation.subset", evaluation.subset);
    if let Some(best) = &evaluation.best {
        check_metric(spec, "evaluation.best", best, rules);
    }
    if let Some(generate) = &evaluation.generate {
        rules.check(
            spec.model.arch.is_causal_lm(),
            "evaluation.generate",
            "a section",
            "needs model.arch = \"causal_lm\"",
        );
        rules.at_least_1("evaluation.generate.samples", generate.samples);
        rules.at_least_1("evaluation.generate.max_tokens", generate.max_tokens);
        rules.check(
            (0.0..=100.0).contains(&generate.temperature),
            "evaluation.generate.temperature",
            generate.temperature,
            "must be between 0 and 100",
        );
        rules.above_0_to_1("evaluation.generate.top_p", generate.top_p);
    }
}

/// Checks that a name is a metric of the recipe's task.
pub(super) fn check_metric(spec: &JobSpec, field: &'static str, name: &str, rules: &mut Rules) {
    let names: Vec<_> = task::metrics(spec).into_iter().map(|metric| metric.name).collect();
    let rule = format!("is not a metric of this recipe; its metrics are {}", names.join(", "));
    rules.check(names.iter().any(|known| known == name), field, name, &rule);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_those_of_samples_that_are_evenly_spread() {
        let chosen = |samples, all| {
            let generate = Some(Generate { samples, ..Generate::default() });
            let evaluation = Evaluation { batch: 2, generate, ..Evaluation::default() };
            let [batches, text_batches] = evaluation.batches(all);
            let batches = batches..batches + text_batches;
            batches.map(|batch| evaluation.positions(batch, all)).collect::<Vec<_>>()
        };
        assert_eq!(chosen(3, 10), [vec![0, 3], vec![6]]);
        assert_eq!(chosen(1, 7), [[0]]);
        assert_eq!(chosen(5, 3), [vec![0, 1], vec![2]]);
        assert!(chosen(3, 0).is_empty());
        assert_eq!(spread(1, 2, u64::MAX), u64::MAX / 2);
    }

    #[test]
    fn every_sample_is_in_one_batch() {
        let evaluation = Evaluation { batch: 4, ..Evaluation::default() };
        assert_eq!(evaluation.batches(9), [3, 0]);
        let all: Vec<u64> = (0..3).flat_map(|batch| evaluation.positions(batch, 9)).collect();
        assert!(all.into_iter().eq(0..9));
    }
}
