//! The connection to the coordinator, and what it orders.

use super::{
    Action, Link, Session,
    slot::{Process, Seat, Slot},
};
use crate::{
    exit::Outcome,
    gpu::xid::Suspicion,
    ids::{Generation, Incarnation, LocalRank, Rank},
    message::{Directive, Hello, Hold, Holding, Launch, RankCommand, RankPhase, Report},
    time::Time,
};

impl Session {
    pub(super) fn connected(&mut self, now: Time) {
        if self.leaving.is_some() {
            // Nobody should count on it any more.
            return;
        }
        self.link = Link::Up;
        self.retries = 0;
        self.farewell_until = None;
        let hello = Hello {
            node: self.node.clone(),
            slots: u32::try_from(self.slots.len()).unwrap_or(u32::MAX),
            holding: self.holding(),
        };
        self.actions.push(Action::Send(Report::Hello(hello)));
        // What the coordinator heard before it knows to be old.
        let evaluations = self.evaluations.iter().cloned().map(Action::Send);
        self.actions.extend(evaluations);
        for message in std::mem::take(&mut self.warnings) {
            self.warn(message);
        }
        self.report_going(now);
    }

    pub(super) fn disconnected(&mut self, now: Time) {
        let pause = self.policy.reconnect * (1 << self.retries.min(4));
        self.retries = self.retries.saturating_add(1);
        let was_up = self.link == Link::Up;
        self.link = Link::Down { retry_at: now.after(pause) };
        if let Some(going) = self.going.as_ref().filter(|_| was_up) {
            // Nobody else tells the ranks now.
            let reason = going.reason.clone();
            self.drain_ranks(reason);
        }
    }

    pub(super) fn holding(&self) -> Option<Holding> {
        let generation = self.generation;
        let ranks: Vec<_> =
            self.slots.iter().filter_map(|slot| slot.standing(generation)).collect();
        let known = generation != Generation(0);
        known.then(|| Holding { generation, ranks, commit: self.commit.clone() })
    }

    pub(super) fn directed(&mut self, now: Time, directive: Directive) {
        if self.leaving.is_some() {
            return;
        }
        match directive {
            Directive::Launch(launch) if launch.generation > self.generation => {
                self.launch(now, launch)
            }
            // Told again, because an agent without ranks reconnected: all is done already, but for what has changed
            // since.
            Directive::Launch(launch) if launch.generation == self.generation => {
                self.hold(launch.hold);
            }
            Directive::Begin { generation, peers } if generation == self.generation => {
                self.begin(&peers);
            }
            Directive::Checkpoint { generation } if generation == self.generation => {
                // One vote is enough. Were all to vote, one would do so after the step at which the
                // others have saved, and there would be two checkpoints for one wish.
                let is_first = |slot: &Slot| slot.seat.as_ref().is_some_and(|s| s.rank == Rank(0));
                self.tell_where(is_first, &RankCommand::Checkpoint { generation });
            }
            Directive::Drain { generation, reason } if generation == self.generation => {
                self.tell_all(&RankCommand::Drain { generation, reason });
            }
            Directive::Hold(hold) if hold.number > self.hold.number => self.hold(hold),
            Directive::Heard { number } => {
                if number == self.beats {
                    self.round_trip = Some(now.since(self.beat_sent_at));
                }
            }
            Directive::Warm { local_ranks } => self.warm_up(&local_ranks),
            Directive::Release { reason } => self.leave(now, Outcome::Drained { reason }),
            Directive::Dismiss { outcome } => self.leave(now, outcome),
            _ => self.stale_messages += 1,
        }
    }

    pub(super) fn launch(&mut self, now: Time, launch: Launch) {
        if launch.generation > self.generation {
            self.generation = launch.generation;
            self.evaluations.clear();
        }
        if launch.hold.number > self.hold.number {
            self.hold = launch.hold;
        }
        let paused = self.hold.paused;
        self.farewell_until = None;
        for (local_rank, seat) in self.seats(&launch) {
            let hangs = launch.replace.contains(&local_rank);
            let kill_at = now.after(self.policy.kill_after);
            let Some(slot) = self.slot_mut(local_rank) else { continue };
            slot.seat = seat;
            slot.heard = None;
            slot.warm = None;
            match (&slot.process, &slot.seat) {
                (Process::Alive { phase }, Some(seat)) if !hangs && phase.is_reusable() => {
                    let command = seat.join(paused);
                    slot.process = Process::Alive { phase: RankPhase::Joining };
                    self.actions.push(Action::Tell { local_rank, command });
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

    /// Each local rank with its place in the new generation, if it has one.
    pub(super) fn seats(&self, launch: &Launch) -> Vec<(LocalRank, Option<Seat>)> {
        let locals = (0u32..).zip(&self.slots).map(|(local, _)| LocalRank(local));
        let seat_of = |local: LocalRank| {
            let (rank, _) = launch.ranks.iter().find(|(_, other)| *other == local)?;
            Some(Seat {
                generation: launch.generation,
                rank: *rank,
                world_size: launch.world_size,
                restore: launch.restore.clone(),
            })
        };
        locals.map(|local| (local, seat_of(local))).collect()
    }

    pub(super) fn spawn_if_empty(&mut self, local_rank: LocalRank) {
        let paused = self.hold.paused;
        let Some(slot) = self.slot_mut(local_rank) else { return };
        let (Process::Empty { .. }, Some(seat)) = (&slot.process, &slot.seat) else { return };
        let command = seat.join(paused);
        self.spawn(local_rank);
        self.actions.push(Action::Tell { local_rank, command });
    }

    pub(super) fn warm_up(&mut self, local_ranks: &[LocalRank]) {
        for &local_rank in local_ranks {
            let Some(slot) = self.slot_mut(local_rank).filter(|slot| slot.seat.is_none()) else {
                continue;
            };
            let is_ready = slot.warm == Some(true);
            slot.warm = Some(is_ready && slot.is_alive());
            match &slot.process {
                Process::Empty { .. } => self.spawn(local_rank),
                Process::Alive { .. } if is_ready => self.report(Report::Warm { local_rank }),
                Process::Alive { .. } => {
                    slot.process = Process::Stopping { kill_at: None };
                    self.actions.push(Action::Kill(local_rank));
                }
                // Another one follows.
                Process::Stopping { .. } => {}
            }
        }
    }

    pub(super) fn warm(&mut self, local_rank: LocalRank, incarnation: Incarnation) {
        let Some(slot) = self.slot_mut(local_rank) else { return };
        if slot.incarnation == incarnation && slot.is_alive() && slot.warm.is_some() {
            slot.warm = Some(true);
            self.report(Report::Warm { local_rank });
        }
    }

    pub(super) fn spawn(&mut self, local_rank: LocalRank) {
        let Some(slot) = self.slot_mut(local_rank) else { return };
        slot.incarnation = slot.incarnation.next();
        slot.process = Process::Alive { phase: RankPhase::Joining };
        slot.suspicion = Suspicion::default();
        let incarnation = slot.incarnation;
        self.actions.push(Action::Spawn { local_rank, incarnation });
    }

    /// Stands still or goes on, unless something newer is known.
    pub(super) fn hold(&mut self, hold: Hold) {
        if hold.number > self.hold.number {
            self.hold = hold;
            let (generation, paused) = (self.generation, hold.paused);
            self.tell_all(&RankCommand::Hold { generation, paused });
        }
    }

    pub(super) fn begin(&mut self, peers: &[String]) {
        let generation = self.generation;
        for local_rank in self.locals() {
            let Some(slot) = self.slot_mut(local_rank) else { continue };
            // Told twice after a reconnect; a rank that has met the others must not meet again.
            if let Process::Alive { phase: phase @ RankPhase::Ready { .. } } = &mut slot.process {
                *phase = RankPhase::Meeting;
                let command = RankCommand::Begin { generation, peers: peers.to_vec() };
                self.actions.push(Action::Tell { local_rank, command });
            }
        }
    }

    pub(super) fn tell_all(&mut self, command: &RankCommand) {
        self.tell_where(|_| true, command);
    }

    pub(super) fn tell_where(&mut self, wanted: impl Fn(&Slot) -> bool, command: &RankCommand) {
        for local_rank in self.locals() {
            if self.slot_mut(local_rank).is_some_and(|slot| slot.is_seated() && wanted(slot)) {
                self.actions.push(Action::Tell { local_rank, command: command.clone() });
            }
        }
    }
}
