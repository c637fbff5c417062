//! A model of one rank process: it obeys commands with delays, and sends the reports of a real one.

use baton_job::{
    Generation, Rank,
    exit::{Class, Failure, Outcome},
    ids::{Incarnation, LocalRank},
    message::{RankCommand, RankHeartbeat, RankMessage, RankReport, Restore},
    session,
    time::Time,
};
use baton_recipe::Step;

use crate::{
    agent::AgentId,
    cluster::{Cluster, SimEvent},
    training::GroupId,
};

/// Index of a process, in the order of starts.
pub(crate) type Pid = usize;

/// Address on which a process waits for the other ranks; a new one for each generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) pid: Pid,
    pub(crate) listen_number: u64,
}

impl Address {
    fn parse(text: &str) -> Option<Self> {
        let (pid, listen_number) = text.split_once('/')?;
        Some(Self { pid: pid.parse().ok()?, listen_number: listen_number.parse().ok()? })
    }
}

/// A rank's assignment in a generation.
#[derive(Clone, Debug)]
pub(crate) struct Assignment {
    pub(crate) generation: Generation,
    pub(crate) rank: Rank,
    pub(crate) world_size: u32,
    pub(crate) restore: Restore,
}

/// Phase of a process.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ProcessPhase {
    /// Starting, or leaving the previous generation.
    Preparing,
    /// Listening, until the command to begin.
    Listening,
    /// Connecting to the others, then restoring the state.
    Meeting(Vec<Address>),
    /// Training or saving.
    Training,
    /// Waiting for the next generation.
    Waiting,
    /// Finished; about to exit.
    Done,
}

/// What a process does when a wait is over.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wake {
    /// It listens.
    Listen,
    /// The other ranks did not connect in time.
    MeetingTimeout,
    /// The state is restored.
    Start,
    /// Its collective failed.
    GiveUp,
    /// The last checkpoint is durable.
    Finish,
}

/// Votes of a process in the next step.
#[derive(Clone, Debug, Default)]
pub(crate) struct Votes {
    pub(crate) save: bool,
    pub(crate) stop: Option<String>,
    pub(crate) pause: bool,
}

/// One rank process.
pub(crate) struct Process {
    pub(crate) agent: AgentId,
    /// Start number of the agent that started it.
    pub(crate) life: u64,
    pub(crate) local_rank: LocalRank,
    pub(crate) incarnation: Incarnation,
    pub(crate) alive: bool,
    /// Whether it hangs.
    pub(crate) hangs: bool,
    /// Whether it was asked to exit.
    pub(crate) ending: bool,
    /// Its last finished step, if it has state.
    pub(crate) step: Option<u64>,
    /// Generation that produced that state.
    pub(crate) state_of: Generation,
    /// Whether that state leads to divergence.
    pub(crate) corrupted: bool,
    pub(crate) assignment: Option<Assignment>,
    pub(crate) phase: ProcessPhase,
    /// Number of assignments so far; waits of earlier ones are ignored.
    pub(crate) listen_number: u64,
    pub(crate) votes: Votes,
    pub(crate) group: Option<GroupId>,
    /// Number of samples it could not use.
    pub(crate) skipped: u64,
    /// When the last message in each direction arrives, because sockets keep order.
    commands_until: Time,
    reports_until: Time,
}

impl Process {
    pub(crate) fn is_healthy(&self) -> bool {
        self.alive && !self.hangs
    }

    pub(crate) fn generation(&self) -> Option<Generation> {
        self.assignment.as_ref().map(|assignment| assignment.generation)
    }

    pub(crate) fn restore(&self) -> Restore {
        self.assignment.as_ref().map(|assignment| assignment.restore.clone()).unwrap_or_default()
    }

    fn address(&self, pid: Pid) -> Address {
        Address { pid, listen_number: self.listen_number }
    }
}

impl Cluster {
    pub(crate) fn spawn(
        &mut self,
        agent: AgentId,
        local_rank: LocalRank,
        incarnation: Incarnation,
    ) -> Pid {
        self.processes.push(Process {
            agent,
            life: self.agents[agent].life,
            local_rank,
            incarnation,
            alive: true,
            hangs: false,
            ending: false,
            step: None,
            state_of: Generation(0),
            corrupted: false,
            assignment: None,
            phase: ProcessPhase::Preparing,
            listen_number: 0,
            votes: Votes::default(),
            group: None,
            skipped: 0,
            commands_until: Time(0),
            reports_until: Time(0),
        });
        let pid = self.processes.len() - 1;
        let (warm, heartbeat) =
            (self.soon(50..=1_000), self.now.after(session::RANK_HEARTBEAT_INTERVAL));
        self.schedule(warm, SimEvent::Warms(pid));
        self.schedule(heartbeat, SimEvent::Heartbeat(pid));
        pid
    }

    /// Sends a heartbeat, unless the process hangs.
    pub(crate) fn rank_heartbeat(&mut self, pid: Pid) {
        if !self.processes[pid].alive {
            return;
        }
        if self.processes[pid].is_healthy() {
            let step = Step(self.processes[pid].step.unwrap_or_default());
            self.send_report(
                pid,
                RankReport::Heartbeat(RankHeartbeat { step, ..RankHeartbeat::default() }),
            );
        }
        self.schedule(self.now.after(session::RANK_HEARTBEAT_INTERVAL), SimEvent::Heartbeat(pid));
    }

    pub(crate) fn send_command(&mut self, pid: Pid, command: RankCommand) {
        let at = self.soon(0..=5).max(self.processes[pid].commands_until);
        self.processes[pid].commands_until = at;
        self.schedule(at, SimEvent::Commanded(pid, command));
    }

    pub(crate) fn send_report(&mut self, pid: Pid, report: RankReport) {
        let Some(generation) = self.processes[pid].generation() else { return };
        let at = self.soon(0..=5).max(self.processes[pid].reports_until);
        self.processes[pid].reports_until = at;
        self.schedule(at, SimEvent::RankMessage(pid, RankMessage { generation, report }));
    }

    pub(crate) fn commanded(&mut self, pid: Pid, command: RankCommand) {
        if !self.processes[pid].is_healthy() || self.processes[pid].phase == ProcessPhase::Done {
            return;
        }
        self.log(|| format!("process {pid} receives {command:?}"));
        let current = self.processes[pid].generation();
        match command {
            RankCommand::Join { generation, rank, world_size, restore, paused } => {
                self.join(pid, Assignment { generation, rank, world_size, restore });
                self.processes[pid].votes.pause = paused;
            }
            RankCommand::Begin { generation, peers, .. } if current == Some(generation) => {
                if self.processes[pid].phase == ProcessPhase::Listening {
                    let peers = peers.iter().filter_map(|peer| Address::parse(peer)).collect();
                    self.processes[pid].phase = ProcessPhase::Meeting(peers);
                    // Shorter than the coordinator's timeout.
                    let timeout = self.plan.rendezvous().mul_f64(0.8);
                    self.wake(pid, self.now.after(timeout), Wake::MeetingTimeout);
                    self.meet(pid);
                }
            }
            RankCommand::Pause { generation, paused } if current == Some(generation) => {
                self.processes[pid].votes.pause = paused;
            }
            RankCommand::Checkpoint { generation } if current == Some(generation) => {
                self.processes[pid].votes.save = true;
            }
            RankCommand::Drain { generation, reason } if current == Some(generation) => {
                self.processes[pid].votes.stop = Some(reason);
            }
            RankCommand::Begin { .. }
            | RankCommand::Checkpoint { .. }
            | RankCommand::Pause { .. }
            | RankCommand::Profile { .. }
            | RankCommand::CoordinatorLost { .. }
            | RankCommand::BreakOff { .. }
            | RankCommand::Drain { .. } => {}
        }
    }

    fn join(&mut self, pid: Pid, assignment: Assignment) {
        let was_busy =
            matches!(self.processes[pid].phase, ProcessPhase::Meeting(_) | ProcessPhase::Training);
        if was_busy {
            // About the generation that it leaves, so this report is stale.
            let detail = "a newer generation".to_owned();
            self.send_report(pid, RankReport::Lost { detail, unreached: Vec::new() });
        }
        let prepared = if self.processes[pid].assignment.is_none() {
            self.soon(50..=1_000)
        } else {
            self.soon(0..=200)
        };
        self.leave_group(pid, 0..=300);
        let process = &mut self.processes[pid];
        let state_of = process.state_of;
        let is_good =
            |step: &u64| assignment.restore.invalidated_by(state_of, Step(*step)).is_none();
        process.step = process.step.filter(is_good);
        process.assignment = Some(assignment);
        process.phase = ProcessPhase::Preparing;
        process.listen_number += 1;
        process.votes = Votes::default();
        self.wake(pid, prepared, Wake::Listen);
    }

    pub(crate) fn wake(&mut self, pid: Pid, at: Time, wake: Wake) {
        let listen_number = self.processes[pid].listen_number;
        self.schedule(at, SimEvent::Woken { pid, listen_number, wake });
    }

    pub(crate) fn woken(&mut self, pid: Pid, listen_number: u64, wake: Wake) {
        let process = &self.processes[pid];
        if !process.is_healthy() || process.listen_number != listen_number {
            return;
        }
        match (wake, &process.phase) {
            (Wake::Listen, ProcessPhase::Preparing) => {
                let Address { pid, listen_number } = process.address(pid);
                let step = process.step.map(Step);
                self.processes[pid].phase = ProcessPhase::Listening;
                self.send_report(
                    pid,
                    RankReport::Ready { address: format!("{pid}/{listen_number}"), step },
                );
            }
            (Wake::MeetingTimeout, ProcessPhase::Meeting(peers)) if process.group.is_none() => {
                let is_missing = |peer: &&(u32, Address)| {
                    let (process, number) = (&self.processes[peer.1.pid], peer.1.listen_number);
                    !process.is_healthy() || process.listen_number != number
                };
                let peers: Vec<(u32, Address)> = (0..).zip(peers.iter().copied()).collect();
                let missing = peers.iter().filter(is_missing).map(|(rank, _)| Rank(*rank));
                let missing = missing.collect();
                self.report_loss(pid, "the other ranks did not connect", missing);
            }
            (Wake::Start, ProcessPhase::Meeting(_)) => self.start(pid),
            (Wake::GiveUp, ProcessPhase::Meeting(_) | ProcessPhase::Training) => {
                self.processes[pid].group = None;
                self.report_loss(pid, "a rank is gone", Vec::new());
            }
            (Wake::Finish, ProcessPhase::Training) => self.finish(pid),
            _ => {}
        }
    }

    fn report_loss(&mut self, pid: Pid, detail: &str, unreached: Vec<Rank>) {
        self.processes[pid].phase = ProcessPhase::Waiting;
        self.send_report(pid, RankReport::Lost { detail: detail.to_owned(), unreached });
    }

    /// Reports that it is done, and exits.
    pub(crate) fn done(&mut self, pid: Pid, outcome: Outcome) {
        let digest = format!("digest of step {:?}", self.processes[pid].step);
        self.send_report(pid, RankReport::Done { outcome, digest });
        self.processes[pid].phase = ProcessPhase::Done;
        let at = self.soon(0..=30);
        self.schedule(at, SimEvent::ProcessEnds(pid));
    }

    /// The process ends.
    pub(crate) fn end_process(&mut self, pid: Pid, failure: Failure) {
        if !self.processes[pid].alive {
            return;
        }
        self.log(|| format!("process {pid} ends: {failure}"));
        self.processes[pid].alive = false;
        self.leave_group(pid, 0..=300);
        self.disconnect_from(pid);
        let at = self.soon(0..=20).max(self.processes[pid].reports_until);
        self.schedule(at, SimEvent::Exited(pid, failure));
    }

    /// Ranks that try to connect to a process that has ended give up.
    fn disconnect_from(&mut self, gone: Pid) {
        for pid in 0..self.processes.len() {
            let looks = match &self.processes[pid].phase {
                ProcessPhase::Meeting(peers) => peers.iter().any(|peer| peer.pid == gone),
                _ => false,
            };
            if looks && self.processes[pid].group.is_none() {
                let at = self.soon(0..=300);
                self.wake(pid, at, Wake::GiveUp);
            }
        }
    }

    /// The process stops answering. Its peers detect that after their timeout.
    pub(crate) fn hang(&mut self, pid: Pid) {
        self.processes[pid].hangs = true;
        self.leave_group(pid, 1_000..=4_000);
    }
}

pub(crate) fn killed() -> Failure {
    session::failure_of(None, Some(9), false)
}

pub(crate) fn bad_input() -> Failure {
    Failure { class: Class::BadInput, message: "a file is not a beton file".to_owned() }
}
