//! A model of one rank process: it obeys commands with delays, and sends the reports of a real one.

use baton_job::{
    Generation, Rank,
    exit::{Failure, Outcome},
    ids::{Incarnation, LocalRank},
    message::{RankCommand, RankReport},
    session::Event,
    time::Time,
};

use crate::{
    fleet::{Fleet, FleetEvent},
    machine::{MachineId, up_to},
    settings::millis,
};

/// Identity of a process, unique in the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pid {
    pub(crate) machine: MachineId,
    /// Number of the agent that started it; see `Machine::life`.
    pub(crate) life: u64,
    pub(crate) local_rank: LocalRank,
    pub(crate) incarnation: Incarnation,
}

/// A rank's assignment in a generation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Assignment {
    pub(crate) generation: Generation,
    pub(crate) rank: Rank,
}

/// A running process.
pub(crate) struct Process {
    pub(crate) incarnation: Incarnation,
    /// Time when its libraries are loaded.
    ready_at: Time,
    pub(crate) assignment: Option<Assignment>,
    /// Whether it has begun to meet the others, or trains with them.
    pub(crate) takes_part: bool,
    /// Generation whose last state it has in memory.
    pub(crate) state_of: Option<Generation>,
    /// Whether it has reported that it is done.
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
        let slot = &mut machine.slots[local.0 as usize];
        assert!(slot.is_none(), "two processes in one slot of {}", machine.node);
        *slot = Some(Process {
            incarnation,
            ready_at,
            assignment: None,
            takes_part: false,
            state_of: None,
            is_done: false,
        });
        let pid = Pid { machine: id, life: machine.life, local_rank: local, incarnation };
        self.queue.schedule(ready_at, FleetEvent::Warms(pid));
    }

    pub(crate) fn warms(&mut self, pid: Pid) {
        if self.process(pid).is_some() {
            let Pid { machine, local_rank, incarnation, .. } = pid;
            self.drive(machine, Event::RankWarm { local_rank, incarnation });
        }
    }

    pub(crate) fn send_command(
        &mut self,
        id: MachineId,
        local_rank: LocalRank,
        command: RankCommand,
    ) {
        let Some(pid) = self.occupant(id, local_rank) else { return };
        let assignment = self.process(pid).and_then(|process| process.assignment);
        let is_of =
            |generation| assignment.is_some_and(|assignment| assignment.generation == generation);
        match command {
            RankCommand::Join { generation, rank, world_size, .. } => {
                self.join(pid, Assignment { generation, rank }, world_size);
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
            | RankCommand::Pause { .. }
            | RankCommand::Profile { .. }
            | RankCommand::CoordinatorLost { .. }
            | RankCommand::BreakOff { .. }
            | RankCommand::Checkpoint { .. } => {}
        }
    }

    fn join(&mut self, pid: Pid, assignment: Assignment, world_size: u32) {
        self.open_group(assignment.generation, world_size);
        self.leave_group(pid);
        let left = self.soon(up_to(self.settings.leave()));
        let Some(process) = self.process_mut(pid) else { return };
        process.assignment = Some(assignment);
        let at = left.max(process.ready_at);
        self.queue.schedule(at, FleetEvent::Listens(pid, assignment.generation));
    }

    pub(crate) fn listens(&mut self, pid: Pid, generation: Generation) {
        let Some(process) = self.process(pid) else { return };
        if process.assignment.is_some_and(|assignment| assignment.generation == generation) {
            let step = process.state_of.and_then(|of| self.step_of(of));
            let address = format!("10.{}.{}.7:40000", pid.machine / 256, pid.machine % 256);
            self.send_report(pid, RankReport::Ready { address, step });
        }
    }

    pub(crate) fn loss_detected(&mut self, pid: Pid, generation: Generation) {
        let Some(process) = self.process_mut(pid) else { return };
        let is_there =
            process.assignment.is_some_and(|assignment| assignment.generation == generation);
        if is_there && !process.is_done && std::mem::take(&mut process.takes_part) {
            self.send_report(
                pid,
                RankReport::Lost { detail: "a rank is gone".to_owned(), unreached: Vec::new() },
            );
        }
    }

    /// Reports that it is done, and exits.
    pub(crate) fn done(&mut self, pid: Pid, outcome: Outcome, digest: String) {
        self.send_report(pid, RankReport::Done { outcome, digest });
        if let Some(process) = self.process_mut(pid) {
            process.is_done = true;
        }
        let at = self.soon(0..=30);
        let failure = baton_job::session::failure_of(Some(75), None, false);
        self.queue.schedule(at, FleetEvent::ProcessEnds(pid, failure));
    }

    /// The process ends, and its agent is notified.
    pub(crate) fn end_process(&mut self, pid: Pid, failure: Failure) {
        if self.process(pid).is_none() {
            return;
        }
        self.leave_group(pid);
        let Pid { machine, local_rank, incarnation, .. } = pid;
        self.machines[machine].slots[local_rank.0 as usize] = None;
        self.drive(machine, Event::RankExited { local_rank, incarnation, failure });
    }
}
