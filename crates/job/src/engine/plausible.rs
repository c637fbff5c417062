//! Numbers and names that no rank sends. With them, sums would overflow, and a status would show nonsense.

use baton_recipe::{Epoch, progress::MAX_NEWEST_EVALUATIONS};

use crate::message::RankReport;

/// Largest number of steps, samples or bytes, which every reader of JSON can represent.
const MAX_COUNT: u64 = 1 << 53;
/// Largest number of epochs.
const MAX_EPOCH: Epoch = Epoch(1 << 30);

/// Whether a rank of this program may have sent a report.
pub(super) fn is_plausible(report: &RankReport) -> bool {
    let counts = |counts: &[u64]| counts.iter().all(|count| *count <= MAX_COUNT);
    match report {
        RankReport::Ready { step, .. } => counts(&[step.unwrap_or_default().0]),
        RankReport::Started { progress, .. } => {
            let past = &progress.newest_evaluations;
            counts(&[progress.step.0, progress.cursor])
                && progress.epoch <= MAX_EPOCH
                && past.len() <= MAX_NEWEST_EVALUATIONS
                && past.iter().all(|past| past.step <= progress.step && past.epoch <= MAX_EPOCH)
        }
        RankReport::Stepped(step) => {
            counts(&[step.step.0, step.total_steps, step.steps_per_epoch])
                && counts(&[step.step_of_epoch, step.global_batch])
                && step.epoch <= MAX_EPOCH
        }
        RankReport::Evaluated { step, epoch, .. } => counts(&[step.0]) && *epoch <= MAX_EPOCH,
        RankReport::Heartbeat(heartbeat) => counts(&[heartbeat.step.0]),
        RankReport::Diverged(diagnosis) => {
            counts(&[diagnosis.step.0, diagnosis.batch.cursor])
                && diagnosis.batch.epoch <= MAX_EPOCH
        }
        RankReport::Saved(commit) => {
            let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
            counts(&[commit.step.0, commit.bytes]) && commit.name.bytes().all(is_plain)
        }
        RankReport::SaveWaits { step, .. }
        | RankReport::Stopping { step }
        | RankReport::Copied { step }
        | RankReport::SavedLocally { step, .. } => counts(&[step.0]),
        RankReport::Met
        | RankReport::EndsEarly { .. }
        | RankReport::Loader(_)
        | RankReport::SaveFailed(_)
        | RankReport::LocalSaveFailed { .. }
        | RankReport::Profiled { .. }
        | RankReport::Lost { .. }
        | RankReport::Done { .. }
        | RankReport::Exited(_) => true,
    }
}
