//! Whole-state views of a learner's memory.

use std::ops::Range;

use baton_collectives::BufferMut;
use baton_job::progress::Progress;

use crate::{Error, Learner};

/// A copy of a part of a buffer, on the host.
pub(crate) fn read(buffer: &BufferMut<'_>, range: Range<usize>) -> Result<Vec<f32>, Error> {
    let mut values = vec![0.0; range.len()];
    buffer.copy_to_host(range.start, &mut values)?;
    Ok(values)
}

/// BLAKE3 of the whole state and the position: equal exactly if training went the same way.
pub(crate) fn digest<L: Learner>(learner: &mut L, progress: &Progress) -> Result<String, Error> {
    let mut digest = baton_checkpoint::StateDigest::new();
    for region in learner.regions() {
        let len = region.buffer.len();
        digest.region(region.name, &read(&region.buffer, 0..len)?);
    }
    // Where saves fell is no part of the result: kills and drains move them.
    let position = (progress.step, progress.epoch, progress.cursor, progress.best);
    digest.bytes("position", &serde_json::to_vec(&position)?);
    Ok(digest.finish())
}
