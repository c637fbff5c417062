//! The making of one sample: what a decoding thread does without the lock.

use std::time::Instant;

use baton_recipe::spec::OnBadSample;

use super::{
    View,
    queue::{Claim, Made},
};
use crate::{Dataset, Decoder, Error, dataset::InputPlace};

/// So many bad samples one after the other are no accident: the data set is not what it should be.
const MOST_BAD_IN_A_ROW: u64 = 100;

/// A thread's tools.
pub(super) struct Worker<'a> {
    dataset: &'a Dataset,
    decoder: Decoder,
    /// The last array as stored.
    array: Vec<u8>,
    /// Its elements.
    values: Vec<f32>,
    /// Values that are the last sample's label.
    targets: Vec<f32>,
}

impl<'a> Worker<'a> {
    pub(super) fn new(dataset: &'a Dataset) -> Result<Self, Error> {
        let (array, values, targets) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Self { dataset, decoder: Decoder::new()?, array, values, targets })
    }

    /// Makes the claimed sample, or, where bad ones are skipped, what takes its place: in training the
    /// next good one of the data set, so that batches stay full and every rank and run takes the same;
    /// in evaluation nothing.
    pub(super) fn make(&mut self, claim: &mut Claim) -> Result<Made<'_>, Error> {
        let begun = Instant::now();
        let len = self.dataset.len();
        let (mut skipped, mut reason) = (0, None);
        let sample = loop {
            let sample = claim.sample.saturating_add(skipped);
            // The first is not wrapped around, so that one out of range is told.
            let sample = if skipped > 0 { sample % len } else { sample };
            let error = match self.one(sample, claim) {
                Ok(label) => break Some((sample, label)),
                Err(error) => error,
            };
            let may_skip = self.dataset.on_bad_sample() == OnBadSample::Skip && error.is_of_data();
            if !may_skip || skipped + 1 == MOST_BAD_IN_A_ROW.min(len) {
                return Err(error);
            }
            skipped += 1;
            reason = Some(error);
            if matches!(claim.view, View::Evaluate { .. }) {
                break None;
            }
        };
        let (values, targets) = (&self.values, &self.targets);
        Ok(Made { sample, values, targets, skipped, reason, busy: begun.elapsed() })
    }

    /// Makes a sample: pixels go into the claim, values into this thread's own memory. Returns its class.
    fn one(&mut self, sample: u64, claim: &mut Claim) -> Result<i64, Error> {
        let (shard, local) = self.dataset.find(sample)?;
        match shard.place(local)? {
            InputPlace::Image(place) => {
                let frame = claim.view.frame(claim.epoch, sample, place.width, place.height);
                let out = &mut claim.pixels;
                self.decoder.render_stored(&shard.beton, local, &place, &frame, out)?;
            }
            InputPlace::Array(column) => {
                shard.beton.array_as_f32(column, local, &mut self.array, &mut self.values)?;
            }
        }
        shard.read_targets(local, &mut self.array, &mut self.targets)?;
        shard.label(local)
    }

    /// Tells the system that samples will be read soon.
    pub(super) fn read_ahead(&self, samples: &[u64]) {
        for sample in samples {
            if let Ok((shard, local)) = self.dataset.find(*sample) {
                shard.read_ahead(local);
            }
        }
    }
}
