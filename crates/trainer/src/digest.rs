//! Digest of the whole training state.

use baton_recipe::progress::Progress;

use crate::{Error, Learner};

/// BLAKE3 hash of state and position. Two runs have equal digests exactly if they computed the same results.
pub(crate) fn of<L: Learner>(learner: &mut L, progress: &Progress) -> Result<String, Error> {
    let mut digest = baton_checkpoint::StateDigest::default();
    for region in learner.regions() {
        digest.region(region.name, &region.buffer.to_host()?);
    }
    // The steps of checkpoints are not part of the result: kills and drains change them.
    let position = (progress.step, progress.epoch, progress.cursor, &progress.best);
    digest.bytes("position", &serde_json::to_vec(&position)?);
    Ok(digest.finish())
}
