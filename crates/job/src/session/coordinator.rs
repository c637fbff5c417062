//! The connection to the coordinator, and its directives.

use super::{
    Action, ConnectionState, Session,
    slot::{Assignment, Process, Slot},
};
use crate::{
    exit::Outcome,
    gpu::xid::PossibleCause,
    ids::{Generation, Incarnation, LocalRank, Rank},
    mesh_secret::MeshSecret,
    message::{
        AgentReport, Directive, Hello, Launch, PauseState, ProfileRequest, RankCommand, RankPhase,
        RunningRanks,
    },
    time::Time,
};

impl Session {
    pub(super) fn connected(&mut self, now: Time) {
        if self.leaving.is_some() {
            // The coordinator must not assign ranks to this node any more.
            return;
        }
        self.connection = ConnectionState::Up;
        self.answered = false;
        if self.departure.take_if(|departure| departure.job_is_over).is_some() {
            // There is a coordinator after all.
            self.final_report_deadline = None;
        }
        let hello = Hello {
            node: self.node.clone(),
            slots: u32::try_from(self.slots.len()).unwrap_or(u32::MAX),
            job: self.job,
            pause: self.pause,
            running: self.running_ranks(),
        };
        self.actions.push(Action::Send(AgentReport::Hello(hello)));
        for message in std::mem::take(&mut self.warnings) {
            self.warn(message);
        }
        self.report_departure(now);
    }

    pub(super) fn disconnected(&mut self, now: Time) {
        let pause = self.policy.first_retry_delay * (1 << self.retries.min(4));
        self.retries = self.retries.saturating_add(1);
        let was_up = self.connection == ConnectionState::Up;
        self.connection = ConnectionState::Down { retry_at: now.after(pause) };
        if was_up {
            self.send_coordinator_lost(true);
        }
        if let Some(departure) = self.departure.as_ref().filter(|_| was_up) {
            // The coordinator cannot drain the ranks now.
            let reason = departure.reason.clone();
            self.drain_ranks(reason);
        }
    }

    /// Connects to the new address at once: the coordinator there waits for its agents only for a while.
    pub(super) fn redirected(&mut self, now: Time) {
        self.disconnected(now);
        self.retries = 0;
        self.connection = ConnectionState::Down { retry_at: now };
    }

    /// The ranks of this node in the newest generation, for the hello.
    pub(super) fn running_ranks(&self) -> Option<RunningRanks> {
        let generation = self.generation;
        let entry = |(local_rank, slot): (u32, &Slot)| {
            slot.hello_entry(generation).map(|entry| (LocalRank(local_rank), entry))
        };
        let running: Vec<_> = (0..).zip(&self.slots).filter_map(entry).collect();
        let holds_state =
            |(_, (_, phase)): &&(LocalRank, (Rank, RankPhase))| phase.may_hold_state();
        let holders =
            running.iter().filter(holds_state).map(|(local_rank, _)| *local_rank).collect();
        let ranks = running.into_iter().map(|(_, entry)| entry).collect();
        let known = generation != Generation(0);
        let (commit, steps) = (self.commit.clone(), self.steps.to_vec());
        let evaluations = self.evaluations.iter().cloned().collect();
        known.then_some(RunningRanks { generation, ranks, holders, commit, steps, evaluations })
    }

    pub(super) fn handle_directive(&mut self, now: Time, directive: Directive) {
        if self.leaving.is_some() {
            return;
        }
        let stale_before = self.stale_messages;
        match directive {
            Directive::Launch(launch) if launch.generation > self.generation => {
                self.launch(now, launch)
            }
            // A repeated launch, because an agent without ranks reconnected. Only the pause state may have changed.
            Directive::Launch(launch) if launch.generation == self.generation => {
                self.set_pause(launch.pause);
            }
            Directive::Begin { generation, peers, secret } if generation == self.generation => {
                self.begin(&peers, &secret);
            }
            Directive::Checkpoint { generation } if generation == self.generation => {
                // One vote is enough. If all ranks voted, a late vote could come after the step at which the others
                // have saved, and there would be two checkpoints for one request.
                let is_first =
                    |slot: &Slot| slot.assignment.as_ref().is_some_and(|s| s.rank == Rank(0));
                self.send_where(is_first, &RankCommand::Checkpoint { generation });
            }
            Directive::Drain { generation, reason } if generation == self.generation => {
                self.send_to_all(&RankCommand::Drain { generation, reason });
            }
            Directive::Profile { generation, name, steps } if generation == self.generation => {
                let request = ProfileRequest { name, steps, node: self.node.clone() };
                self.send_to_all(&RankCommand::Profile { generation, request });
            }
            Directive::Pause(pause) if pause.number > self.pause.number => self.set_pause(pause),
            Directive::HeartbeatAck { number } => {
                if number == self.heartbeats_sent {
                    self.round_trip = Some(now.since(self.heartbeat_sent_at));
                }
            }
            Directive::Warm { local_ranks } => self.warm_up(&local_ranks),
            Directive::Release { reason } => self.leave(now, Outcome::Drained { reason }),
            Directive::Dismiss { outcome } => self.leave(now, outcome),
            _ => self.stale_messages += 1,
        }
        if self.stale_messages == stale_before {
            // Only now: a connection may be refused just after it was made, or nobody may read what is sent.
            self.send_coordinator_lost(false);
            (self.answered, self.retries, self.final_report_deadline) = (true, 0, None);
        }
    }

    pub(super) fn launch(&mut self, now: Time, launch: Launch) {
        if launch.generation > self.generation {
            self.generation = launch.generation;
            self.evaluations.clear();
            self.steps.clear();
        }
        if launch.pause.number > self.pause.number {
            self.pause = launch.pause;
        }
        let paused = self.pause.paused;
        for (local_rank, assignment) in self.assignments(&launch) {
            let hangs = launch.replace.contains(&local_rank);
            let kill_at = now.after(self.policy.kill_after);
            let Some(slot) = self.slot_mut(local_rank) else { continue };
            slot.assignment = assignment;
            slot.last_report = None;
            slot.warm = None;
            match (&slot.process, &slot.assignment) {
                (Process::Alive { phase }, Some(assignment)) if !hangs && phase.is_reusable() => {
                    let command = assignment.join(paused);
                    slot.process = Process::Alive { phase: RankPhase::Joining };
                    self.actions.push(Action::SendToRank { local_rank, command });
                }
                (Process::Alive { .. }, _) if hangs => {
                    slot.process = Process::Stopping { kill_at: None };
                    self.actions.push(Action::Kill(local_rank));
                }
                (Process::Alive { .. }, _) => {
                    slot.process = Process::Stopping { kill_at: Some(kill_at) };
                    self.actions.push(Action::Terminate(local_rank));
                }
                (Process::Stopping { .. } | Process::Empty { .. }, _) => {
                    self.spawn_if_empty(local_rank)
                }
            }
        }
    }

    /// Each local rank with its assignment in the new generation, if it has one.
    pub(super) fn assignments(&self, launch: &Launch) -> Vec<(LocalRank, Option<Assignment>)> {
        let locals = (0u32..).zip(&self.slots).map(|(local, _)| LocalRank(local));
        let assignment_of = |local: LocalRank| {
            let (rank, _) = launch.ranks.iter().find(|(_, other)| *other == local)?;
            Some(Assignment {
                generation: launch.generation,
                rank: *rank,
                world_size: launch.world_size,
                restore: launch.restore.clone(),
            })
        };
        locals.map(|local| (local, assignment_of(local))).collect()
    }

    pub(super) fn spawn_if_empty(&mut self, local_rank: LocalRank) {
        let paused = self.pause.paused;
        let Some(slot) = self.slot_mut(local_rank) else { return };
        let (Process::Empty { .. }, Some(assignment)) = (&slot.process, &slot.assignment) else {
            return;
        };
        let command = assignment.join(paused);
        let generation = assignment.generation;
        self.spawn(local_rank);
        self.actions.push(Action::SendToRank { local_rank, command });
        if self.ranks_know_of_loss {
            let command = RankCommand::CoordinatorLost { generation, lost: true };
            self.actions.push(Action::SendToRank { local_rank, command });
        }
    }

    /// Starts processes in slots without a rank, so that they are ready when the node is needed.
    pub(super) fn warm_up(&mut self, local_ranks: &[LocalRank]) {
        for &local_rank in local_ranks {
            let Some(slot) = self.slot_mut(local_rank).filter(|slot| slot.assignment.is_none())
            else {
                continue;
            };
            let is_ready = slot.warm == Some(true);
            slot.warm = Some(is_ready && slot.is_alive());
            match &slot.process {
                Process::Empty { .. } => self.spawn(local_rank),
                Process::Alive { .. } if is_ready => self.report(AgentReport::Warm { local_rank }),
                Process::Alive { .. } => {
                    slot.process = Process::Stopping { kill_at: None };
                    self.actions.push(Action::Kill(local_rank));
                }
                // A new process is started after this one has ended.
                Process::Stopping { .. } => {}
            }
        }
    }

    /// A process has loaded its libraries and the job.
    pub(super) fn rank_warm(&mut self, local_rank: LocalRank, incarnation: Incarnation) {
        let Some(slot) = self.slot_mut(local_rank) else { return };
        if slot.incarnation == incarnation && slot.is_alive() && slot.warm.is_some() {
            slot.warm = Some(true);
            self.report(AgentReport::Warm { local_rank });
        }
    }

    pub(super) fn spawn(&mut self, local_rank: LocalRank) {
        let Some(slot) = self.slot_mut(local_rank) else { return };
        slot.incarnation = slot.incarnation.next();
        slot.process = Process::Alive { phase: RankPhase::Joining };
        slot.possible_cause = PossibleCause::default();
        let incarnation = slot.incarnation;
        self.actions.push(Action::Spawn { local_rank, incarnation });
    }

    /// Pauses or resumes, unless a newer pause state is known.
    pub(super) fn set_pause(&mut self, pause: PauseState) {
        if pause.number > self.pause.number {
            self.pause = pause;
            let (generation, paused) = (self.generation, pause.paused);
            self.send_to_all(&RankCommand::Pause { generation, paused });
        }
    }

    pub(super) fn begin(&mut self, peers: &[String], secret: &MeshSecret) {
        let generation = self.generation;
        for local_rank in self.local_ranks() {
            let Some(slot) = self.slot_mut(local_rank) else { continue };
            // Received twice after a reconnect; a rank that has met the others must not meet again.
            if let Process::Alive { phase: phase @ RankPhase::Ready { .. } } = &mut slot.process {
                *phase = RankPhase::Meeting;
                let (peers, secret) = (peers.to_vec(), secret.clone());
                let command = RankCommand::Begin { generation, peers, secret };
                self.actions.push(Action::SendToRank { local_rank, command });
            }
        }
    }

    /// Tells the ranks when the coordinator is lost and when there is one again.
    fn send_coordinator_lost(&mut self, lost: bool) {
        if self.ranks_know_of_loss != lost {
            self.ranks_know_of_loss = lost;
            let generation = self.generation;
            self.send_to_all(&RankCommand::CoordinatorLost { generation, lost });
        }
    }

    /// Sends a command to every assigned rank.
    pub(super) fn send_to_all(&mut self, command: &RankCommand) {
        self.send_where(|_| true, command);
    }

    pub(super) fn send_where(&mut self, filter: impl Fn(&Slot) -> bool, command: &RankCommand) {
        for local_rank in self.local_ranks() {
            if self.slot_mut(local_rank).is_some_and(|slot| slot.is_assigned() && filter(slot)) {
                self.actions.push(Action::SendToRank { local_rank, command: command.clone() });
            }
        }
    }
}
