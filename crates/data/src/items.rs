//! What the positions of an epoch's order stand for.

use baton_recipe::{JobSpec, spec::Order};

use crate::{Dataset, Error, InputType, TextSize, packing::Packing};

/// The items of a training set: samples, or sequences of several texts.
#[derive(Debug, Default)]
pub struct Items {
    /// Which texts share a sequence; `None`: every sample is an item.
    packing: Option<Packing>,
    /// Number of predicted tokens of each text; empty if the samples are not texts.
    predicted: Vec<u32>,
}

impl Items {
    /// The items of the set at `location`.
    ///
    /// # Errors
    /// A text is longer than a sequence.
    pub fn new(spec: &JobSpec, location: &str, set: &Dataset) -> Result<Self, Error> {
        let sizes = checked_sizes(spec, location, set)?;
        if sizes.is_empty() {
            return Ok(Self::default());
        }
        let lengths: Vec<u32> = sizes.iter().map(|size| size.tokens).collect();
        let seed = (spec.data.order != Order::Sequential).then_some(spec.seed);
        Ok(Self {
            packing: spec.data.packing.then(|| Packing::new(&lengths, spec.data.sequence, seed)),
            predicted: sizes.iter().map(|size| size.predicted).collect(),
        })
    }

    /// Checks a set that is only evaluated: longer texts might be beyond the model's positions.
    ///
    /// # Errors
    /// A text is longer than a sequence.
    pub fn check(spec: &JobSpec, location: &str, set: &Dataset) -> Result<(), Error> {
        checked_sizes(spec, location, set).map(|_| ())
    }

    /// Whether an item is not a single sample.
    #[must_use]
    pub fn are_packed(&self) -> bool {
        self.packing.is_some()
    }

    /// Whether the samples are texts.
    #[must_use]
    pub fn are_texts(&self) -> bool {
        !self.predicted.is_empty()
    }

    /// Number of items of a set of `samples`.
    #[must_use]
    pub fn count(&self, samples: u64) -> u64 {
        self.packing.as_ref().map_or(samples, Packing::len)
    }

    /// The samples of an item in an epoch.
    #[must_use]
    pub fn samples(&self, epoch: u32, item: u64) -> Vec<u64> {
        match &self.packing {
            None => vec![item],
            Some(packing) => packing.texts(epoch, item).collect(),
        }
    }

    /// Number of predicted tokens in these items; 0 if they are not texts.
    pub fn weight(&self, epoch: u32, items: impl Iterator<Item = u64>) -> u64 {
        let samples = items.flat_map(|item| self.samples(epoch, item));
        let predicted = |sample: u64| self.predicted.get(sample as usize).copied();
        samples.map(|sample| u64::from(predicted(sample).unwrap_or_default())).sum()
    }
}

/// The sizes of all texts of a set, none of which is longer than a sequence; empty if the samples are not texts.
fn checked_sizes(spec: &JobSpec, location: &str, set: &Dataset) -> Result<Vec<TextSize>, Error> {
    if *set.input_type() != InputType::Tokens {
        return Ok(Vec::new());
    }
    let sizes = set.text_sizes()?;
    let sequence = spec.data.sequence;
    let too_long = sizes.iter().filter(|size| size.tokens > sequence).count();
    match sizes.iter().map(|size| size.tokens).max() {
        Some(longest) if longest > sequence => Err(Error::Source {
            source_text: location.to_owned(),
            problem: format!(
                "{too_long} texts have more than data.sequence = {sequence} tokens, the longest {longest}: raise \
                 data.sequence, or cut them with `baton data tokenize --sequence {sequence}`"
            ),
        }),
        _ => Ok(sizes),
    }
}
