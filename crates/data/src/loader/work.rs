//! Prepares one sample: the work of a decoding thread while it does not hold the lock.

use std::time::Instant;

use baton_recipe::spec::OnBadSample;
use tracing::trace_span;

use super::{
    PROFILE_TARGET, Preprocessing,
    queue::{Claim, SampleResult},
};
use crate::{
    Dataset, Decoder, Error,
    dataset::{InputLocation, Shard},
};

/// With this many consecutive bad samples, the data set itself must be bad, so the last fault becomes an error.
const MAX_CONSECUTIVE_BAD: u64 = 100;

/// Decoder and buffers of a decoding thread.
pub(super) struct Worker<'a> {
    dataset: &'a Dataset,
    decoder: Decoder,
    /// Pixels of the last image before an operation.
    copy: Vec<u8>,
    /// Stored bytes of the last array.
    array: Vec<u8>,
    /// Elements of the last array.
    values: Vec<f32>,
    /// Tokens and labels of the last text.
    tokens: (Vec<i64>, Vec<i64>),
    /// Values of the extra fields of the last sample.
    extras: Vec<Vec<f32>>,
    /// Target values of the last sample.
    targets: Vec<f32>,
}

impl<'a> Worker<'a> {
    pub(super) fn new(dataset: &'a Dataset) -> Result<Self, Error> {
        let (copy, array, values, targets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let tokens = (Vec::new(), Vec::new());
        let extras = vec![Vec::new(); dataset.extra_lens().len()];
        let decoder = Decoder::new()?;
        Ok(Self { dataset, decoder, copy, array, values, tokens, extras, targets })
    }

    /// Prepares the claimed sample. If it is bad and bad samples are skipped, training uses the next good sample of the
    /// data set instead, so that batches stay full and the choice is the same on every rank and in every run;
    /// evaluation leaves the sample out.
    pub(super) fn make(&mut self, claim: &mut Claim) -> Result<SampleResult<'_>, Error> {
        let _span = trace_span!(target: PROFILE_TARGET, "decode").entered();
        let started = Instant::now();
        let len = self.dataset.len();
        let (mut skipped, mut last_fault) = (0, None);
        let sample = loop {
            let sample = claim.sample.saturating_add(skipped);
            // Do not wrap the claimed number itself around, so that an invalid one is reported.
            let sample = if skipped > 0 { sample % len } else { sample };
            let error = match self.make_one(sample, claim) {
                Ok(label) => break Some((sample, label)),
                Err(error) => error,
            };
            let may_skip =
                self.dataset.on_bad_sample() == OnBadSample::Skip && error.is_bad_sample();
            if !may_skip || skipped + 1 == MAX_CONSECUTIVE_BAD.min(len) {
                return Err(error);
            }
            skipped += 1;
            last_fault = Some(error);
            if matches!(claim.preprocessing, Preprocessing::Evaluate { .. }) {
                break None;
            }
        };
        Ok(SampleResult {
            sample,
            values: &self.values,
            tokens: (&self.tokens.0, &self.tokens.1),
            extras: &self.extras,
            targets: &self.targets,
            skipped,
            last_fault,
            busy: started.elapsed(),
        })
    }

    /// Prepares a sample: writes pixels to the claim's memory, values to this thread's buffers. Returns its class.
    fn make_one(&mut self, sample: u64, claim: &mut Claim) -> Result<i64, Error> {
        let (shard, local) = self.dataset.find(sample)?;
        match shard.location(local)? {
            InputLocation::Image(location) => {
                let transform = claim.preprocessing.transform(
                    claim.epoch,
                    sample,
                    location.width,
                    location.height,
                );
                let out = &mut claim.pixels;
                self.decoder.render_stored(&shard.beton, local, &location, &transform, out)?;
                claim.preprocessing.change_image(claim.epoch, sample, out, &mut self.copy);
            }
            InputLocation::Array(column) => {
                shard.beton.array_as_f32(column, local, &mut self.array, &mut self.values)?;
                let shape = &column.array_type().shape;
                claim.preprocessing.change_signal(claim.epoch, sample, shape, &mut self.values);
            }
            InputLocation::Tokens(column) => {
                let (tokens, labels) = &mut self.tokens;
                column.read(&shard.beton, local, &mut self.array, (tokens, labels))?;
            }
        }
        let Shard { beton, extras, labels, .. } = &*shard;
        for (column, values) in extras.iter().zip(&mut self.extras) {
            column.read(beton, local, &mut self.array, values)?;
        }
        labels.read_targets(beton, local, &mut self.array, &mut self.targets)?;
        labels.class(beton, local)
    }

    /// Asks the operating system to fetch samples in the background. Other threads fetch remote shards; waiting here for one
    /// would come before the wait for the claimed sample.
    pub(super) fn read_ahead(&self, samples: &[u64]) {
        for sample in samples {
            if let Some((shard, local)) = self.dataset.find_open(*sample) {
                shard.read_ahead(local);
            }
        }
    }
}
