//! One number for a whole state.

use baton_recipe::progress::Progress;

use crate::{Error, Learner};

/// BLAKE3 of the whole state and the position: equal exactly if training went the same way.
pub(crate) fn of<L: Learner>(learner: &mut L, progress: &Progress) -> Result<String, Error> {
    let mut digest = baton_checkpoint::StateDigest::new();
    for region in learner.regions() {
        digest.region(region.name, &region.buffer.to_host()?);
    }
    // Where saves fell is no part of the result: kills and drains move them.
    let position = (progress.step, progress.epoch, progress.cursor, &progress.best);
    digest.bytes("position", &serde_json::to_vec(&position)?);
    Ok(digest.finish())
}
