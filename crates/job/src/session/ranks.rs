//! What rank processes and GPUs say, and how they end.

use super::{
    Action, Link, Session,
    hang::Heard,
    slot::{Process, Seat, Slot},
};
use crate::{
    exit::{Class, Failure},
    gpu::xid::Xid,
    ids::{Incarnation, LocalRank},
    message::{Beat, RankNews, RankPhase, RankSays, Report, Vitals},
    time::Time,
};

/// Evaluations that are reported again to a coordinator that comes back.
const EVALUATIONS_KEPT: usize = 256;

/// Warnings about GPUs that are kept for a coordinator that comes back; the oldest ones, as others follow from them.
const WARNINGS_KEPT: usize = 64;

impl Session {
    pub(super) fn rank_said(
        &mut self,
        now: Time,
        local_rank: LocalRank,
        incarnation: Incarnation,
        says: RankSays,
    ) {
        let Some(slot) = self.slot_mut(local_rank).filter(|slot| slot.incarnation == incarnation)
        else {
            self.stale_messages += 1;
            return;
        };
        let seat = slot.seat.clone().filter(|seat| seat.generation == says.generation);
        let (Some(seat), Process::Alive { phase }) = (seat, &mut slot.process) else {
            self.stale_messages += 1;
            return;
        };
        if let Some(next) = phase_after(&says.news) {
            *phase = next;
        }
        let pulse = match &says.news {
            RankNews::Pulse(pulse) => *pulse,
            _ => slot.heard.map(|heard| heard.pulse).unwrap_or_default(),
        };
        slot.heard = Some(Heard { at: now, pulse });
        if let RankNews::Saved(commit) = &says.news {
            self.commit = Some(commit.clone());
        }
        let has_started = matches!(says.news, RankNews::Started { .. });
        let is_evaluation = matches!(says.news, RankNews::Evaluated { .. });
        let report = Report::Rank { generation: seat.generation, rank: seat.rank, news: says.news };
        if is_evaluation {
            self.evaluations.push_back(report.clone());
            if self.evaluations.len() > EVALUATIONS_KEPT {
                self.evaluations.pop_front();
            }
        }
        self.report(report);
        if has_started {
            self.keep_spare();
        }
    }

    /// Not before all ranks train: until then they need the machine more.
    pub(super) fn keep_spare(&mut self) {
        let trains =
            |slot: &Slot| matches!(slot.process, Process::Alive { phase: RankPhase::Training });
        let all_train = self.slots.iter().filter(|slot| slot.seat.is_some()).all(trains);
        let stays = self.leaving.is_none() && self.going.is_none();
        if self.policy.warm_spare && stays && all_train {
            self.actions.push(Action::KeepSpare);
        }
    }

    pub(super) fn rank_exited(
        &mut self,
        now: Time,
        local_rank: LocalRank,
        incarnation: Incarnation,
        failure: Failure,
    ) {
        let Some(slot) = self.slot_mut(local_rank).filter(|slot| slot.incarnation == incarnation)
        else {
            self.stale_messages += 1;
            return;
        };
        let failure = slot.suspicion.explain(now, failure);
        let before = std::mem::replace(&mut slot.process, Process::Empty { done: None });
        match before {
            Process::Alive { phase: phase @ RankPhase::Done { .. } } => {
                slot.process = Process::Empty { done: Some(phase) };
            }
            Process::Alive { .. } => {
                // The seat stays empty until the coordinator says otherwise.
                if let Some(seat) = slot.seat.take() {
                    let news = RankNews::Exited(failure);
                    self.report(Report::Rank {
                        generation: seat.generation,
                        rank: seat.rank,
                        news,
                    });
                } else if slot.warm.take().is_some() {
                    self.report(Report::WarmFailed { local_rank, failure });
                }
            }
            Process::Stopping { .. } | Process::Empty { .. } => {
                let is_to_be_warm = slot.warm.is_some() && slot.seat.is_none();
                match self.leaving {
                    Some(_) => {}
                    None if is_to_be_warm => self.spawn(local_rank),
                    None => self.spawn_if_empty(local_rank),
                }
            }
        }
    }

    /// Kills who hangs. Its death is told at once: a process that waits for a broken disk dies when the disk
    /// likes.
    pub(super) fn kill_hanging_ranks(&mut self, now: Time) {
        let patience = self.policy.hang;
        // Who slept itself knows nothing of the others.
        let slept = now.since(self.hang_checked_at) > patience / 2;
        self.hang_checked_at = now;
        if patience.is_zero() || self.leaving.is_some() {
            return;
        }
        for local_rank in self.locals() {
            let Some(slot) = self.slot_mut(local_rank) else { continue };
            let Some(heard) = slot.watched().copied() else { continue };
            if slept {
                slot.heard = Some(Heard { at: now, ..heard });
                continue;
            }
            let Some(failure) = heard.verdict(now, patience) else { continue };
            let failure = slot.suspicion.explain(now, failure);
            slot.process = Process::Stopping { kill_at: None };
            let seat = slot.seat.take();
            self.actions.push(Action::Kill(local_rank));
            if let Some(Seat { generation, rank, .. }) = seat {
                let news = RankNews::Exited(failure);
                self.report(Report::Rank { generation, rank, news });
            }
        }
    }

    /// An error of a GPU is told, and remembered as what a rank on it may die of.
    pub(super) fn gpu_failed(&mut self, now: Time, local_ranks: &[LocalRank], gpu: &str, xid: Xid) {
        for &local_rank in local_ranks {
            if let Some(slot) = self.slot_mut(local_rank) {
                slot.suspicion.note(now, xid, gpu);
            }
        }
        if self.told.is_news(now, xid, gpu) {
            self.warn(xid.describe(gpu));
        }
    }

    /// Tells of a GPU, at the latest in the next connection.
    pub(super) fn warn(&mut self, message: String) {
        if self.link == Link::Up {
            self.report(Report::GpuWarning { message });
        } else if self.warnings.len() < WARNINGS_KEPT {
            self.warnings.push(message);
        }
    }

    /// Says that this agent lives, and how its machine does.
    pub(super) fn beat(&mut self, now: Time, vitals: Option<Vitals>) {
        self.beats += 1;
        self.beat_sent_at = now;
        let (number, round_trip) = (self.beats, self.round_trip);
        self.report(Report::Beat(Beat { number, round_trip, vitals }));
    }

    pub(super) fn report(&mut self, report: Report) {
        if self.link == Link::Up {
            self.actions.push(Action::Send(report));
        }
    }
}

/// The phase that a rank's news puts it in; news about other things change nothing.
fn phase_after(news: &RankNews) -> Option<RankPhase> {
    match news {
        RankNews::Ready { address, step } => {
            Some(RankPhase::Ready { address: address.clone(), step: *step })
        }
        RankNews::Started { .. } => Some(RankPhase::Training),
        RankNews::Lost { .. } => Some(RankPhase::Waiting),
        RankNews::Diverged(diagnosis) => Some(RankPhase::Diverged(diagnosis.clone())),
        RankNews::Done { outcome, digest } => {
            Some(RankPhase::Done { outcome: outcome.clone(), digest: digest.clone() })
        }
        RankNews::Met
        | RankNews::Stepped(_)
        | RankNews::Evaluated { .. }
        | RankNews::EndsEarly { .. }
        | RankNews::Loader(_)
        | RankNews::Pulse(_)
        | RankNews::Saved(_)
        | RankNews::SaveWaits { .. }
        | RankNews::Stopping { .. }
        | RankNews::Copied { .. }
        | RankNews::SaveFailed { .. }
        | RankNews::Exited(_) => None,
    }
}

/// How a rank process that left no last words ended, from its exit code or signal, and whether the kernel
/// has killed processes for memory since it was started.
#[must_use]
pub fn failure_of(code: Option<i32>, signal: Option<i32>, memory_ran_out: bool) -> Failure {
    let class = match code {
        Some(code) if code == i32::from(crate::exit::BAD_INPUT) => Class::BadInput,
        _ if signal == Some(9) && memory_ran_out => Class::OutOfMemory,
        _ => Class::Crash,
    };
    let message = match (code, signal) {
        (_, Some(9)) if memory_ran_out => {
            "the kernel killed its process because memory ran out: lower train.global_batch, \
             data.prefetch_batches or the number of ranks, or take a machine with more memory"
                .to_owned()
        }
        (_, Some(9)) => {
            "its process was killed (signal 9); if nobody did that, look into dmesg".to_owned()
        }
        (_, Some(signal)) => format!("its process was ended by signal {signal}; see its log"),
        (Some(code), None) => format!("its process ended with exit code {code}; see its log"),
        (None, None) => "its process ended; see its log".to_owned(),
    };
    Failure { class, message }
}
