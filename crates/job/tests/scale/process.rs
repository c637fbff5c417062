//! A model of one rank process: it does what it is told, in its own time, and says what a real one says.

use baton_job::{
    Generation, Rank,
    exit::{Failure, Outcome},
    ids::{Incarnation, LocalRank},
    message::{RankCommand, RankNews},
    session::Event,
    time::Time,
};

use crate::{
    fleet::{Fleet, Happening},
    machine::{MachineId, up_to},
    settings::millis,
};

/// One process of the whole run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pid {
    pub(crate) machine: MachineId,
    /// Which agent started it.
    pub(crate) life: u64,
    pub(crate) local_rank: LocalRank,
    pub(crate) incarnation: Incarnation,
}

/// A place taken in a generation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seat {
    pub(crate) generation: Generation,
    pub(crate) rank: Rank,
}

/// A process that lives.
pub(crate) struct Process {
    pub(crate) incarnation: Incarnation,
    /// When it has loaded all it needs.
    ready_at: Time,
    pub(crate) seat: Option<Seat>,
    /// It has begun to meet the others, or trains with them.
    pub(crate) takes_part: bool,
    /// It holds the last state of this generation.
    pub(crate) state_of: Option<Generation>,
    /// It has said that it is done.
    pub(crate) is_done: bool,
}

impl Fleet {
    pub(crate) fn process(&self, pid: Pid) -> Option<&Process> {
        self.machines[pid.machine].process(pid)
    }

    pub(crate) fn process_mut(&mut self, pid: Pid) -> Option<&mut Process> {
        self.machines[pid.machine].process_mut(pid)
    }

    pub(crate) fn spawn(&mut self, id: MachineId, local: LocalRank, incarnation: Incarnation) {
        let start = millis(self.settings.start());
        let ready_at = self.soon(start * 4 / 5..=start * 6 / 5);
        let machine = &mut self.machines[id];
        let place = &mut machine.places[local.0 as usize];
        assert!(place.is_none(), "two processes in one place of {}", machine.node);
        *place = Some(Process {
            incarnation,
            ready_at,
            seat: None,
            takes_part: false,
            state_of: None,
            is_done: false,
        });
        let pid = Pid { machine: id, life: machine.life, local_rank: local, incarnation };
        self.queue.schedule(ready_at, Happening::Warms(pid));
    }

    pub(crate) fn warms(&mut self, pid: Pid) {
        if self.process(pid).is_some() {
            let Pid { machine, local_rank, incarnation, .. } = pid;
            self.drive(machine, Event::RankWarm { local_rank, incarnation });
        }
    }

    pub(crate) fn tell(&mut self, id: MachineId, local_rank: LocalRank, command: RankCommand) {
        let Some(pid) = self.occupant(id, local_rank) else { return };
        let seat = self.process(pid).and_then(|process| process.seat);
        let is_of = |generation| seat.is_some_and(|seat| seat.generation == generation);
        match command {
            RankCommand::Join { generation, rank, world_size, .. } => {
                self.join(pid, Seat { generation, rank }, world_size);
            }
            RankCommand::Begin { generation, .. } if is_of(generation) => {
                self.begin(pid, generation);
            }
            RankCommand::Drain { generation, reason } if is_of(generation) => {
                if let Some(group) = self.group_mut(generation) {
                    group.stop.get_or_insert(reason);
                }
            }
            RankCommand::Begin { .. }
            | RankCommand::Drain { .. }
            | RankCommand::Hold { .. }
            | RankCommand::Checkpoint { .. } => {}
        }
    }

    fn join(&mut self, pid: Pid, seat: Seat, world_size: u32) {
        self.open_group(seat.generation, world_size);
        self.leave_group(pid);
        let left = self.soon(up_to(self.settings.leave()));
        let Some(process) = self.process_mut(pid) else { return };
        process.seat = Some(seat);
        let at = left.max(process.ready_at);
        self.queue.schedule(at, Happening::Listens(pid, seat.generation));
    }

    pub(crate) fn listens(&mut self, pid: Pid, generation: Generation) {
        let Some(process) = self.process(pid) else { return };
        if process.seat.is_some_and(|seat| seat.generation == generation) {
            let step = process.state_of.and_then(|of| self.step_of(of));
            let address = format!("10.{}.{}.7:40000", pid.machine / 256, pid.machine % 256);
            self.say(pid, RankNews::Ready { address, step });
        }
    }

    pub(crate) fn loses_touch(&mut self, pid: Pid, generation: Generation) {
        let Some(process) = self.process_mut(pid) else { return };
        let is_there = process.seat.is_some_and(|seat| seat.generation == generation);
        if is_there && !process.is_done && std::mem::take(&mut process.takes_part) {
            self.say(pid, RankNews::Lost { detail: "a rank is gone".to_owned() });
        }
    }

    /// Says that it is done, and exits.
    pub(crate) fn done(&mut self, pid: Pid, outcome: Outcome, digest: String) {
        self.say(pid, RankNews::Done { outcome, digest });
        if let Some(process) = self.process_mut(pid) {
            process.is_done = true;
        }
        let at = self.soon(0..=30);
        let failure = baton_job::session::failure_of(Some(75), None, false);
        self.queue.schedule(at, Happening::Dies(pid, failure));
    }

    /// The process ends, and its agent sees it.
    pub(crate) fn die(&mut self, pid: Pid, failure: Failure) {
        if self.process(pid).is_none() {
            return;
        }
        self.leave_group(pid);
        let Pid { machine, local_rank, incarnation, .. } = pid;
        self.machines[machine].places[local_rank.0 as usize] = None;
        self.drive(machine, Event::RankExited { local_rank, incarnation, failure });
    }
}
