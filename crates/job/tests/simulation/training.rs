//! A model of what ranks do together: meet, take the furthest state, step, save, finish.

use std::ops::RangeInclusive;

use baton_job::{
    Generation, Rank,
    exit::Outcome,
    message::{LoaderNews, RankNews, Restore, Restored, SaveProblem, StateSource, StepNews},
};
use baton_recipe::{
    Step,
    guard::{BatchMark, Diagnosis, Divergence},
    progress::Progress,
};

use crate::{
    cluster::{Cluster, Happening},
    fact::{Fact, Meeting},
    plan::Trap,
    process::{Doing, Pid, Process, Wake, killed},
};

/// A group of the whole history.
pub(crate) type GroupId = usize;

/// A state that a generation may begin with.
struct State {
    step: u64,
    /// The generation that came to it; none of fresh weights.
    of: Option<Generation>,
    spoiled: bool,
}

/// The ranks of one generation that have met.
pub(crate) struct Group {
    generation: Generation,
    /// By rank.
    members: Vec<Pid>,
    source: StateSource,
    step: u64,
    /// The state leads to divergence.
    spoiled: bool,
    /// Times that the job went back.
    rollbacks: usize,
    started: usize,
    doing: Together,
    /// The checkpoint that is being written.
    writing: Option<Writing>,
}

#[derive(Clone, Copy)]
struct Writing {
    step: u64,
    spoiled: bool,
}

#[derive(Clone, PartialEq)]
enum Together {
    TakingState,
    Stepping,
    /// Writing the last checkpoint.
    Ending(Outcome),
    Finished(Outcome),
    /// A member left.
    Broken,
}

impl Cluster {
    /// The ranks have met once the last of them has found the others.
    pub(crate) fn meet(&mut self, pid: Pid) {
        let process = &self.processes[pid];
        let (Doing::Meeting(peers), Some(place)) = (&process.doing, &process.place) else { return };
        let complete = peers.len() == place.world_size as usize
            && peers.iter().zip(0..).all(|(peer, rank)| {
                let other = &self.processes[peer.pid];
                let there = other.place.as_ref().is_some_and(|there| {
                    (there.generation, there.rank) == (place.generation, Rank(rank))
                });
                there
                    && other.is_healthy()
                    && other.listening == peer.listening
                    && other.doing == process.doing
            });
        if !complete {
            return;
        }
        let members: Vec<Pid> = peers.iter().map(|peer| peer.pid).collect();
        let restore = self.processes[members[0]].restore();
        let (source, state) = self.state_to_take(&members, &restore);
        let State { step: start, spoiled, .. } = state;
        let held = members.iter().filter_map(|member| self.processes[*member].step).collect();
        let generation = place.generation;
        self.log(|| {
            format!("generation {generation} meets at step {start}: processes {members:?}")
        });
        let place_of = |pid: &Pid| (self.processes[*pid].agent, self.processes[*pid].local_rank);
        self.facts.push(Fact::Met(Meeting {
            generation,
            places: members.iter().map(place_of).collect(),
            held,
            start,
            state_of: state.of,
        }));
        let group = self.groups.len();
        for &member in &members {
            let process = &mut self.processes[member];
            process.group = Some(group);
            // While it takes over another state it holds none.
            process.step = process.step.filter(|step| *step == start);
            self.say(member, RankNews::Met);
            let at = self.soon(1..=100);
            self.wake(member, at, Wake::Start);
        }
        let doing = Together::TakingState;
        self.groups.push(Group {
            generation,
            members,
            source,
            step: start,
            spoiled,
            rollbacks: restore.rollbacks.len(),
            started: 0,
            doing,
            writing: None,
        });
    }

    /// The furthest state that one of the ranks holds, else the newest good commit's, else a fresh one.
    fn state_to_take(&self, members: &[Pid], restore: &Restore) -> (StateSource, State) {
        let held = (0..).zip(members).filter_map(|(rank, member)| {
            let process = &self.processes[*member];
            let (of, spoiled) = (Some(process.state_of), process.spoiled);
            Some((Rank(rank), State { step: process.step?, of, spoiled }))
        });
        // The first of those that are equally far.
        let furthest = held.reduce(|one, next| if next.1.step > one.1.step { next } else { one });
        if let Some((rank, state)) = furthest {
            return (StateSource::Survivor { rank }, state);
        }
        match self.store.newest(restore) {
            Some((commit, spoiled)) => {
                let restored = Restored { name: commit.name.clone(), ..Restored::default() };
                let of = Some(commit.generation);
                let state = State { step: commit.step.0, of, spoiled: *spoiled };
                (StateSource::Checkpoint(restored), state)
            }
            None => (StateSource::Fresh, State { step: 0, of: None, spoiled: false }),
        }
    }

    /// A rank has the state.
    pub(crate) fn start(&mut self, pid: Pid) {
        let Some(id) = self.processes[pid].group else { return };
        let group = &mut self.groups[id];
        if group.doing != Together::TakingState {
            return;
        }
        group.started += 1;
        let all = group.started == group.members.len();
        let progress = Progress { step: Step(group.step), ..Progress::default() };
        let source = group.source.clone();
        let group = &self.groups[id];
        self.processes[pid].step = Some(group.step);
        self.processes[pid].state_of = group.generation;
        self.processes[pid].spoiled = group.spoiled;
        self.processes[pid].doing = Doing::Training;
        self.say(pid, RankNews::Started { source, progress });
        if all {
            self.go_on(id, None);
        }
    }

    /// What is due after a step: an end, a save, or the next step.
    fn go_on(&mut self, id: GroupId, drained: Option<Outcome>) {
        let finished = self.groups[id].step >= self.plan.total_steps;
        let ending = drained.or_else(|| finished.then_some(Outcome::Completed));
        if let Some(outcome) = ending {
            self.groups[id].doing = Together::Ending(outcome);
            return self.save(id);
        }
        self.groups[id].doing = Together::Stepping;
        let step_ms = self.plan.step_ms;
        let at = self.soon(step_ms..=step_ms + step_ms / 4);
        self.schedule(at, Happening::StepEnds(id));
    }

    pub(crate) fn step_ends(&mut self, id: GroupId) {
        if self.groups[id].doing != Together::Stepping {
            return;
        }
        let members = self.groups[id].members.clone();
        let is_asked = |member: &Pid| self.processes[*member].votes.pause;
        if members.iter().any(is_asked) {
            return self.mind_votes(id, false);
        }
        if self.goes_wrong(id) {
            return self.diverge(id);
        }
        self.groups[id].step += 1;
        let step = self.groups[id].step;
        self.groups[id].spoiled |= self.spoils(id, step);
        let spoiled = self.groups[id].spoiled;
        self.make_step(&members, step, spoiled);
        let news = StepNews {
            step: Step(step),
            total_steps: self.plan.total_steps,
            ..StepNews::default()
        };
        self.say(members[0], RankNews::Stepped(news));
        self.tell_of_loaders(&members);
        let save = self.plan.save_every > 0 && step.is_multiple_of(self.plan.save_every);
        self.mind_votes(id, save);
    }

    /// After a step, or a moment of standing still: what the ranks want.
    fn mind_votes(&mut self, id: GroupId, mut save: bool) {
        let (step, members) = (self.groups[id].step, self.groups[id].members.clone());
        let mut drained = None;
        for &member in &members {
            let votes = &mut self.processes[member].votes;
            save |= std::mem::take(&mut votes.save);
            drained = drained.or_else(|| votes.stop.clone());
        }
        let drained = drained.map(|reason| Outcome::Drained { reason });
        if save && drained.is_none() && step < self.plan.total_steps {
            self.save(id);
        }
        self.go_on(id, drained);
    }

    /// Now and then a rank says how its loader does, and now and then that it lost samples.
    fn tell_of_loaders(&mut self, members: &[Pid]) {
        for &member in members {
            if self.rng.u8(0..8) > 0 {
                continue;
            }
            if self.rng.u8(0..4) == 0 {
                self.processes[member].skipped += self.rng.u64(1..=4);
            }
            let skipped = self.processes[member].skipped;
            self.say(member, RankNews::Loader(LoaderNews { skipped, ..LoaderNews::default() }));
        }
    }

    /// Whether the next update of a group does.
    fn goes_wrong(&self, id: GroupId) -> bool {
        let Some(trap) = self.plan.trap else { return false };
        let group = &self.groups[id];
        match trap.spoils_after {
            Some(_) => group.spoiled && group.step >= trap.step,
            None => group.step == trap.step && group.rollbacks < trap.cured_by,
        }
    }

    /// Whether the state of a group goes bad with its update to `step`.
    fn spoils(&self, id: GroupId, step: u64) -> bool {
        let uncured = |trap: &Trap| self.groups[id].rollbacks < trap.cured_by;
        let trap = self.plan.trap.filter(uncured);
        trap.is_some_and(|trap| trap.spoils_after == Some(step))
    }

    /// All ranks of a group see it and wait.
    fn diverge(&mut self, id: GroupId) {
        let group = &mut self.groups[id];
        group.doing = Together::Broken;
        let diagnosis = Diagnosis {
            divergence: Divergence::LossNotFinite,
            step: Step(group.step),
            batch: BatchMark::default(),
            lr: 0.1,
            loss: None,
            gradient_norm: None,
            samples: Vec::new(),
        };
        for member in group.members.clone() {
            let process = &mut self.processes[member];
            process.group = None;
            process.doing = Doing::Waiting;
            process.step = process.step.filter(|_| self.plan.keeps_state);
            self.say(member, RankNews::Diverged(diagnosis.clone()));
        }
    }

    fn make_step(&mut self, members: &[Pid], step: u64, spoiled: bool) {
        let generations =
            members.iter().filter_map(|member| self.processes[*member].generation()).collect();
        for &member in members {
            let process = &mut self.processes[member];
            process.step = Some(step);
            process.spoiled = spoiled;
            process.state_of = process.generation().unwrap_or_default();
        }
        self.facts.push(Fact::Stepped { step, generations });
    }

    /// One checkpoint is written at a time, while training goes on. The last one waits for its turn.
    fn save(&mut self, id: GroupId) {
        let group = &mut self.groups[id];
        if group.writing.is_none() {
            group.writing = Some(Writing { step: group.step, spoiled: group.spoiled });
            let at = self.soon(5..=200);
            self.schedule(at, Happening::ShardsWritten(id));
        }
    }

    /// From here on the manifest is on its way: it lands whatever happens to those who sent it.
    pub(crate) fn shards_written(&mut self, id: GroupId) {
        if self.groups[id].doing != Together::Broken {
            let at = self.soon(1..=400);
            self.schedule(at, Happening::ManifestLands(id));
        }
    }

    pub(crate) fn manifest_lands(&mut self, id: GroupId) {
        let generation = self.groups[id].generation;
        let Some(Writing { step, spoiled }) = self.groups[id].writing.take() else { return };
        let fence = self.store.fence;
        let committed = self.store.commit(generation, step, spoiled);
        self.facts.push(match committed {
            Ok(_) => Fact::Committed { generation, step, fence },
            Err(_) => Fact::CommitRefused,
        });
        let Group { doing, members, step: now_at, .. } = &self.groups[id];
        let (doing, members, is_newest) = (doing.clone(), members.clone(), step == *now_at);
        if !matches!(doing, Together::Stepping | Together::Ending(_)) {
            return;
        }
        let is_safe = committed.is_ok();
        self.say(
            members[0],
            match committed {
                Ok(commit) => RankNews::Saved(commit),
                Err(_) => RankNews::SaveFailed(SaveProblem {
                    message: "a newer generation has the store".to_owned(),
                    fence: Some(fence),
                }),
            },
        );
        match doing {
            Together::Ending(outcome) if is_safe && is_newest => {
                self.groups[id].doing = Together::Finished(outcome);
                for member in members {
                    let at = self.soon(0..=50);
                    self.wake(member, at, Wake::Finish);
                }
            }
            Together::Ending(_) if is_newest => {
                members.into_iter().for_each(|member| self.die(member, killed()));
            }
            Together::Ending(_) => self.save(id),
            _ => {}
        }
    }

    /// Whether a process needs the others no more.
    pub(crate) fn has_finished(&self, process: &Process) -> bool {
        let in_finished_group =
            process.group.is_some_and(|id| matches!(self.groups[id].doing, Together::Finished(_)));
        process.doing == Doing::Done || in_finished_group
    }

    pub(crate) fn finish(&mut self, pid: Pid) {
        let Some(id) = self.processes[pid].group else { return };
        if let Together::Finished(outcome) = &self.groups[id].doing {
            let outcome = outcome.clone();
            self.done(pid, outcome);
        }
    }

    /// A member dies, hangs or is called away: the others lose touch after some of `notice_ms`.
    pub(crate) fn leave_group(&mut self, pid: Pid, notice_ms: RangeInclusive<u64>) {
        let Some(id) = self.processes[pid].group.take() else { return };
        let group = &mut self.groups[id];
        if matches!(group.doing, Together::Finished(_) | Together::Broken) {
            return;
        }
        let was_stepping = group.doing == Together::Stepping;
        let step = group.step + 1;
        group.doing = Together::Broken;
        let others: Vec<Pid> =
            group.members.iter().copied().filter(|other| *other != pid).collect();
        if was_stepping && !self.goes_wrong(id) && self.rng.bool() {
            // The update had reached some of them.
            let reached: Vec<Pid> = others.iter().copied().filter(|_| self.rng.bool()).collect();
            let spoiled = self.groups[id].spoiled || self.spoils(id, step);
            self.make_step(&reached, step, spoiled);
        }
        for other in others {
            let at = self.soon(notice_ms.clone());
            self.wake(other, at, Wake::GiveUp);
        }
    }
}
