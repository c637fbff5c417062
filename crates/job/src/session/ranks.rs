//! Messages of rank processes, ends of processes, hangs, and GPU errors.

use baton_recipe::spec::is_recorded;

use super::{
    Action, ConnectionState, Session,
    hang::LastReport,
    slot::{Assignment, Process, Slot},
};
use crate::{
    exit::{Class, Failure},
    gpu::xid::Xid,
    ids::{Incarnation, LocalRank},
    message::{AgentHeartbeat, AgentReport, MachineStats, RankMessage, RankPhase, RankReport},
    time::Time,
};

/// Most evaluations that are part of a hello.
const MAX_KEPT_EVALUATIONS: usize = 256;

/// Most warnings about GPUs that are kept while the coordinator is away. The oldest are kept, because later ones are
/// usually their consequences.
const MAX_KEPT_WARNINGS: usize = 64;

impl Session {
    pub(super) fn rank_reported(
        &mut self,
        now: Time,
        local_rank: LocalRank,
        incarnation: Incarnation,
        message: RankMessage,
    ) {
        let Some(slot) = self.slot_mut(local_rank).filter(|slot| slot.incarnation == incarnation)
        else {
            self.stale_messages += 1;
            return;
        };
        let assignment = slot
            .assignment
            .clone()
            .filter(|assignment| assignment.generation == message.generation);
        let (Some(assignment), Process::Alive { phase }) = (assignment, &mut slot.process) else {
            self.stale_messages += 1;
            return;
        };
        if let Some(next) = phase_after(&message.report) {
            *phase = next;
        }
        let heartbeat = match &message.report {
            RankReport::Heartbeat(heartbeat) => *heartbeat,
            _ => slot.last_report.map(|last| last.heartbeat).unwrap_or_default(),
        };
        slot.last_report = Some(LastReport { at: now, heartbeat });
        if let RankReport::Saved(commit) = &message.report {
            self.commit = Some(commit.clone());
        }
        match &message.report {
            RankReport::Stepped(report) if is_recorded(self.policy.log_every, report.step) => {
                // A connection may be refused just after it was made, or nobody may read what is sent.
                let is_answered = self.connection == ConnectionState::Up && self.answered;
                self.steps.add(report.clone(), is_answered);
            }
            RankReport::Evaluated { .. } => self.keep_evaluation(message.report.clone()),
            _ => {}
        }
        let has_started = matches!(message.report, RankReport::Started { .. });
        let report = AgentReport::Rank {
            generation: assignment.generation,
            rank: assignment.rank,
            report: message.report,
        };
        self.report(report);
        if has_started {
            self.keep_spare();
        }
    }

    fn keep_evaluation(&mut self, evaluation: RankReport) {
        // Texts are long, and only those of the newest evaluation are shown.
        if let Some(RankReport::Evaluated { texts, .. }) = self.evaluations.back_mut() {
            texts.clear();
        }
        self.evaluations.push_back(evaluation);
        if self.evaluations.len() > MAX_KEPT_EVALUATIONS {
            self.evaluations.pop_front();
        }
    }

    /// Requests a spare process, but not before all ranks train: until then they need the machine's resources.
    pub(super) fn keep_spare(&mut self) {
        let trains =
            |slot: &Slot| matches!(slot.process, Process::Alive { phase: RankPhase::Training });
        let all_train = self.slots.iter().filter(|slot| slot.assignment.is_some()).all(trains);
        let stays = self.leaving.is_none() && self.departure.is_none();
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
        let failure = slot.possible_cause.explain(now, failure);
        let before = std::mem::replace(&mut slot.process, Process::Empty { done: None });
        match before {
            Process::Alive { phase: phase @ RankPhase::Done { .. } } => {
                slot.process = Process::Empty { done: Some(phase) };
            }
            Process::Alive { .. } => {
                // The slot stays empty until the next launch.
                if let Some(assignment) = slot.assignment.take() {
                    let report = RankReport::Exited(failure);
                    self.report(AgentReport::Rank {
                        generation: assignment.generation,
                        rank: assignment.rank,
                        report,
                    });
                } else if slot.warm.take().is_some() {
                    self.report(AgentReport::WarmFailed { local_rank, failure });
                }
            }
            Process::Stopping { .. } | Process::Empty { .. } => {
                let is_to_be_warm = slot.warm.is_some() && slot.assignment.is_none();
                match self.leaving {
                    Some(_) => {}
                    None if is_to_be_warm => self.spawn(local_rank),
                    None => self.spawn_if_empty(local_rank),
                }
            }
        }
    }

    /// Kills hanging processes. Their failure is reported at once, because a killed process that waits for a broken
    /// disk may take long to end.
    pub(super) fn kill_hanging_ranks(&mut self, now: Time) {
        let hang_timeout = self.policy.hang_timeout;
        // If this agent itself was suspended, it has not received the heartbeats of that time.
        let was_suspended = now.since(self.hang_checked_at) > hang_timeout / 2;
        self.hang_checked_at = now;
        if hang_timeout.is_zero() || self.leaving.is_some() {
            return;
        }
        for local_rank in self.local_ranks() {
            let Some(slot) = self.slot_mut(local_rank) else { continue };
            let Some(last_report) = slot.watched_report().copied() else { continue };
            if was_suspended {
                slot.last_report = Some(LastReport { at: now, ..last_report });
                continue;
            }
            let Some(failure) = last_report.hang_failure(now, hang_timeout) else { continue };
            let failure = slot.possible_cause.explain(now, failure);
            slot.process = Process::Stopping { kill_at: None };
            let assignment = slot.assignment.take();
            self.actions.push(Action::Kill(local_rank));
            if let Some(Assignment { generation, rank, .. }) = assignment {
                let report = RankReport::Exited(failure);
                self.report(AgentReport::Rank { generation, rank, report });
            }
        }
    }

    /// Reports an error of a GPU, and records it as a possible cause if a rank on it fails.
    pub(super) fn gpu_failed(&mut self, now: Time, local_ranks: &[LocalRank], gpu: &str, xid: Xid) {
        for &local_rank in local_ranks {
            if let Some(slot) = self.slot_mut(local_rank) {
                slot.possible_cause.record(now, xid, gpu);
            }
        }
        if self.recent_xids.is_new(now, xid, gpu) {
            self.warn(xid.describe(gpu));
        }
    }

    /// Sends a warning about a GPU; if the coordinator is away, after the next connection.
    pub(super) fn warn(&mut self, message: String) {
        if self.connection == ConnectionState::Up {
            self.report(AgentReport::GpuWarning { message });
        } else if self.warnings.len() < MAX_KEPT_WARNINGS {
            self.warnings.push(message);
        }
    }

    /// Sends a heartbeat with the machine statistics.
    pub(super) fn send_heartbeat(&mut self, now: Time, stats: Option<MachineStats>) {
        self.heartbeats_sent += 1;
        self.heartbeat_sent_at = now;
        let (number, round_trip) = (self.heartbeats_sent, self.round_trip);
        self.report(AgentReport::Heartbeat(AgentHeartbeat { number, round_trip, stats }));
    }

    pub(super) fn report(&mut self, report: AgentReport) {
        if self.connection == ConnectionState::Up {
            self.actions.push(Action::Send(report));
        }
    }
}

/// The phase of a rank after a report; `None` if the report does not change the phase.
fn phase_after(report: &RankReport) -> Option<RankPhase> {
    match report {
        RankReport::Ready { address, step } => {
            Some(RankPhase::Ready { address: address.clone(), step: *step })
        }
        RankReport::Started { .. } => Some(RankPhase::Training),
        RankReport::Lost { .. } => Some(RankPhase::Waiting),
        RankReport::Diverged(diagnosis) => Some(RankPhase::Diverged(diagnosis.clone())),
        RankReport::Done { outcome, digest } => {
            Some(RankPhase::Done { outcome: outcome.clone(), digest: digest.clone() })
        }
        RankReport::Met
        | RankReport::Stepped(_)
        | RankReport::Evaluated { .. }
        | RankReport::EndsEarly { .. }
        | RankReport::Loader(_)
        | RankReport::Heartbeat(_)
        | RankReport::Saved(_)
        | RankReport::SaveWaits { .. }
        | RankReport::Stopping { .. }
        | RankReport::Copied { .. }
        | RankReport::SaveFailed { .. }
        | RankReport::SavedLocally { .. }
        | RankReport::LocalSaveFailed { .. }
        | RankReport::Profiled { .. }
        | RankReport::Exited(_) => None,
    }
}

/// The failure of a rank process that reported none, from its exit code or signal and from whether the kernel has
/// killed processes because memory ran out since it was started.
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
             data.prefetch_batches or the number of ranks, or use a machine with more memory"
                .to_owned()
        }
        (_, Some(9)) => {
            "its process was killed (signal 9); if no user did that, see `dmesg`".to_owned()
        }
        (_, Some(signal)) => format!("its process was ended by signal {signal}; see its log"),
        (Some(code), None) => format!("its process ended with exit code {code}; see its log"),
        (None, None) => "its process ended; see its log".to_owned(),
    };
    Failure { class, message }
}
