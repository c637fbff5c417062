//! A model of one rank process: it does what it is told, in its own time, and says what a real one
//! says.

use baton_job::{
    Generation, Rank,
    exit::{Class, Failure, Outcome},
    ids::{Incarnation, LocalRank},
    message::{Pulse, RankCommand, RankNews, RankSays, Restore},
    session,
    time::Time,
};
use baton_recipe::Step;

use crate::{
    agent::AgentId,
    cluster::{Cluster, Happening},
    training::GroupId,
};

/// A process of the whole history, in the order of their starts.
pub(crate) type Pid = usize;

/// Where others can meet a process: it listens anew for each generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) pid: Pid,
    pub(crate) listening: u64,
}

impl Address {
    fn parse(text: &str) -> Option<Self> {
        let (pid, listening) = text.split_once('/')?;
        Some(Self { pid: pid.parse().ok()?, listening: listening.parse().ok()? })
    }
}

/// A place taken in a generation.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) generation: Generation,
    pub(crate) rank: Rank,
    pub(crate) world_size: u32,
    pub(crate) restore: Restore,
}

/// What a process does in its place.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Doing {
    /// Starting, or letting go of what it did before.
    Preparing,
    /// Listening, until it is told to begin.
    Listening,
    /// Looking for the others, then taking the state.
    Meeting(Vec<Address>),
    /// Training or saving.
    Training,
    /// Alone with its state.
    Waiting,
    /// Finished; about to exit.
    Done,
}

/// What a process will find when it looks up again.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wake {
    /// It can listen.
    Listen,
    /// Nobody came to the meeting.
    MeetingTimeout,
    /// It has the state.
    Start,
    /// Its collective broke.
    GiveUp,
    /// The last checkpoint is durable.
    Finish,
}

/// Its votes in the next step.
#[derive(Clone, Debug, Default)]
pub(crate) struct Votes {
    pub(crate) save: bool,
    pub(crate) stop: Option<String>,
    pub(crate) pause: bool,
}

/// One rank process.
pub(crate) struct Process {
    pub(crate) agent: AgentId,
    /// Which life of the agent started it.
    pub(crate) life: u64,
    pub(crate) local_rank: LocalRank,
    pub(crate) incarnation: Incarnation,
    pub(crate) alive: bool,
    /// It answers nothing and nobody.
    pub(crate) hangs: bool,
    /// It was asked to end.
    pub(crate) ending: bool,
    /// Its last finished step, if it holds state.
    pub(crate) step: Option<u64>,
    /// The generation in which it came to that state.
    pub(crate) state_of: Generation,
    /// That state leads to divergence.
    pub(crate) spoiled: bool,
    pub(crate) place: Option<Place>,
    pub(crate) doing: Doing,
    /// Grows with every place, so that wishes of an earlier one are dropped.
    pub(crate) listening: u64,
    pub(crate) votes: Votes,
    pub(crate) group: Option<GroupId>,
    /// Samples it could not use.
    pub(crate) skipped: u64,
    /// Pipes keep order: when the last message each way arrives.
    heard_until: Time,
    said_until: Time,
}

impl Process {
    pub(crate) fn is_healthy(&self) -> bool {
        self.alive && !self.hangs
    }

    pub(crate) fn generation(&self) -> Option<Generation> {
        self.place.as_ref().map(|place| place.generation)
    }

    pub(crate) fn restore(&self) -> Restore {
        self.place.as_ref().map(|place| place.restore.clone()).unwrap_or_default()
    }

    fn address(&self, pid: Pid) -> Address {
        Address { pid, listening: self.listening }
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
            spoiled: false,
            place: None,
            doing: Doing::Preparing,
            listening: 0,
            votes: Votes::default(),
            group: None,
            skipped: 0,
            heard_until: Time(0),
            said_until: Time(0),
        });
        let pid = self.processes.len() - 1;
        let (warm, pulse) = (self.soon(50..=1_000), self.now.after(session::PULSE));
        self.schedule(warm, Happening::Warms(pid));
        self.schedule(pulse, Happening::Pulses(pid));
        pid
    }

    /// It tells what it does, unless it hangs.
    pub(crate) fn pulses(&mut self, pid: Pid) {
        if !self.processes[pid].alive {
            return;
        }
        if self.processes[pid].is_healthy() {
            let step = Step(self.processes[pid].step.unwrap_or_default());
            self.say(pid, RankNews::Pulse(Pulse { step, ..Pulse::default() }));
        }
        self.schedule(self.now.after(session::PULSE), Happening::Pulses(pid));
    }

    pub(crate) fn tell(&mut self, pid: Pid, command: RankCommand) {
        let at = self.soon(0..=5).max(self.processes[pid].heard_until);
        self.processes[pid].heard_until = at;
        self.schedule(at, Happening::Commanded(pid, command));
    }

    pub(crate) fn say(&mut self, pid: Pid, news: RankNews) {
        let Some(generation) = self.processes[pid].generation() else { return };
        let at = self.soon(0..=5).max(self.processes[pid].said_until);
        self.processes[pid].said_until = at;
        self.schedule(at, Happening::Said(pid, RankSays { generation, news }));
    }

    pub(crate) fn commanded(&mut self, pid: Pid, command: RankCommand) {
        if !self.processes[pid].is_healthy() || self.processes[pid].doing == Doing::Done {
            return;
        }
        self.log(|| format!("process {pid} is told {command:?}"));
        let current = self.processes[pid].generation();
        match command {
            RankCommand::Join { generation, rank, world_size, restore, paused } => {
                self.join(pid, Place { generation, rank, world_size, restore });
                self.processes[pid].votes.pause = paused;
            }
            RankCommand::Begin { generation, peers } if current == Some(generation) => {
                if self.processes[pid].doing == Doing::Listening {
                    let peers = peers.iter().filter_map(|peer| Address::parse(peer)).collect();
                    self.processes[pid].doing = Doing::Meeting(peers);
                    // Less than the coordinator's own patience.
                    let patience = self.plan.rendezvous().mul_f64(0.8);
                    self.wake(pid, self.now.after(patience), Wake::MeetingTimeout);
                    self.meet(pid);
                }
            }
            RankCommand::Hold { generation, paused } if current == Some(generation) => {
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
            | RankCommand::Hold { .. }
            | RankCommand::Drain { .. } => {}
        }
    }

    fn join(&mut self, pid: Pid, place: Place) {
        let was_busy = matches!(self.processes[pid].doing, Doing::Meeting(_) | Doing::Training);
        if was_busy {
            // Of the generation it leaves: too late for everybody.
            self.say(pid, RankNews::Lost { detail: "a newer generation".to_owned() });
        }
        let prepared = if self.processes[pid].place.is_none() {
            self.soon(50..=1_000)
        } else {
            self.soon(0..=200)
        };
        self.leave_group(pid, 0..=300);
        let process = &mut self.processes[pid];
        let state_of = process.state_of;
        let is_good = |step: &u64| place.restore.condemned_by(state_of, Step(*step)).is_none();
        process.step = process.step.filter(is_good);
        process.place = Some(place);
        process.doing = Doing::Preparing;
        process.listening += 1;
        process.votes = Votes::default();
        self.wake(pid, prepared, Wake::Listen);
    }

    pub(crate) fn wake(&mut self, pid: Pid, at: Time, wake: Wake) {
        let listening = self.processes[pid].listening;
        self.schedule(at, Happening::Woken { pid, listening, wake });
    }

    pub(crate) fn woken(&mut self, pid: Pid, listening: u64, wake: Wake) {
        let process = &self.processes[pid];
        if !process.is_healthy() || process.listening != listening {
            return;
        }
        match (wake, &process.doing) {
            (Wake::Listen, Doing::Preparing) => {
                let Address { pid, listening } = process.address(pid);
                let step = process.step.map(Step);
                self.processes[pid].doing = Doing::Listening;
                self.say(pid, RankNews::Ready { address: format!("{pid}/{listening}"), step });
            }
            (Wake::MeetingTimeout, Doing::Meeting(_)) if process.group.is_none() => {
                self.lose_touch(pid, "nobody came");
            }
            (Wake::Start, Doing::Meeting(_)) => self.start(pid),
            (Wake::GiveUp, Doing::Meeting(_) | Doing::Training) => {
                self.processes[pid].group = None;
                self.lose_touch(pid, "a rank is gone");
            }
            (Wake::Finish, Doing::Training) => self.finish(pid),
            _ => {}
        }
    }

    fn lose_touch(&mut self, pid: Pid, detail: &str) {
        self.processes[pid].doing = Doing::Waiting;
        self.say(pid, RankNews::Lost { detail: detail.to_owned() });
    }

    /// Says that it is done, and exits.
    pub(crate) fn done(&mut self, pid: Pid, outcome: Outcome) {
        let digest = format!("digest of step {:?}", self.processes[pid].step);
        self.say(pid, RankNews::Done { outcome, digest });
        self.processes[pid].doing = Doing::Done;
        let at = self.soon(0..=30);
        self.schedule(at, Happening::Dies(pid));
    }

    /// The process ends, whatever it did.
    pub(crate) fn die(&mut self, pid: Pid, failure: Failure) {
        if !self.processes[pid].alive {
            return;
        }
        self.log(|| format!("process {pid} dies: {failure}"));
        self.processes[pid].alive = false;
        self.leave_group(pid, 0..=300);
        self.refuse_those_who_look_for(pid);
        let at = self.soon(0..=20).max(self.processes[pid].said_until);
        self.schedule(at, Happening::Exited(pid, failure));
    }

    fn refuse_those_who_look_for(&mut self, gone: Pid) {
        for pid in 0..self.processes.len() {
            let looks = match &self.processes[pid].doing {
                Doing::Meeting(peers) => peers.iter().any(|peer| peer.pid == gone),
                _ => false,
            };
            if looks && self.processes[pid].group.is_none() {
                let at = self.soon(0..=300);
                self.wake(pid, at, Wake::GiveUp);
            }
        }
    }

    /// The process stops answering. Its peers find out when their patience ends.
    pub(crate) fn hang(&mut self, pid: Pid) {
        self.processes[pid].hangs = true;
        self.leave_group(pid, 1_000..=4_000);
    }
}

pub(crate) fn killed() -> Failure {
    session::failure_of(None, Some(9), false)
}

pub(crate) fn bad_input() -> Failure {
    Failure { class: Class::BadInput, message: "a file is no beton file".to_owned() }
}
