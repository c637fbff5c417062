//! A model of what ranks do together: meet, restore the newest state, step, save, finish.

use std::ops::RangeInclusive;

use baton_job::{
    Generation, Rank,
    exit::Outcome,
    message::{LoaderReport, RankReport, Restore, Restored, SaveProblem, StateSource, StepReport},
};
use baton_recipe::{
    Step,
    guard::{BatchMark, Diagnosis, Divergence},
    progress::Progress,
};

use crate::{
    cluster::{Cluster, SimEvent},
    fact::{Fact, Meeting},
    plan::PlannedDivergence,
    process::{Pid, Process, ProcessPhase, Wake},
};

/// Index of a group.
pub(crate) type GroupId = usize;

/// A state with which a generation may start.
struct StartState {
    step: u64,
    /// Generation that produced it; `None` for fresh weights.
    of: Option<Generation>,
    corrupted: bool,
}

/// The ranks of one generation that have met.
pub(crate) struct Group {
    generation: Generation,
    /// Processes by rank.
    members: Vec<Pid>,
    source: StateSource,
    step: u64,
    /// Whether the state leads to divergence.
    corrupted: bool,
    /// Number of rollbacks so far.
    rollbacks: usize,
    started: usize,
    phase: GroupPhase,
    /// The checkpoint that is being written.
    writing: Option<Writing>,
}

#[derive(Clone, Copy)]
struct Writing {
    step: u64,
    corrupted: bool,
}

#[derive(Clone, PartialEq)]
enum GroupPhase {
    Restoring,
    Stepping,
    /// Writing the last checkpoint.
    SavingLast(Outcome),
    Finished(Outcome),
    /// A member has left.
    Broken,
}

impl Cluster {
    /// Forms a group if all ranks of the generation are connecting.
    pub(crate) fn meet(&mut self, pid: Pid) {
        let process = &self.processes[pid];
        let (ProcessPhase::Meeting(peers), Some(assignment)) =
            (&process.phase, &process.assignment)
        else {
            return;
        };
        let complete = peers.len() == assignment.world_size as usize
            && peers.iter().zip(0..).all(|(peer, rank)| {
                let other = &self.processes[peer.pid];
                let there = other.assignment.as_ref().is_some_and(|there| {
                    (there.generation, there.rank) == (assignment.generation, Rank(rank))
                });
                there
                    && other.is_healthy()
                    && other.listen_number == peer.listen_number
                    && other.phase == process.phase
            });
        if !complete {
            return;
        }
        let members: Vec<Pid> = peers.iter().map(|peer| peer.pid).collect();
        let restore = self.processes[members[0]].restore();
        let (source, state) = self.state_to_take(&members, &restore);
        let StartState { step: start, corrupted, .. } = state;
        let steps = members.iter().filter_map(|member| self.processes[*member].step).collect();
        let generation = assignment.generation;
        self.log(|| {
            format!("generation {generation} meets at step {start}: processes {members:?}")
        });
        let slot_of = |pid: &Pid| (self.processes[*pid].agent, self.processes[*pid].local_rank);
        self.facts.push(Fact::Met(Meeting {
            generation,
            slots: members.iter().map(slot_of).collect(),
            steps,
            start,
            state_of: state.of,
        }));
        let group = self.groups.len();
        for &member in &members {
            let process = &mut self.processes[member];
            process.group = Some(group);
            // A process that takes over another state has no state meanwhile.
            process.step = process.step.filter(|step| *step == start);
            self.send_report(member, RankReport::Met);
            let at = self.soon(1..=100);
            self.wake(member, at, Wake::Start);
        }
        let phase = GroupPhase::Restoring;
        self.groups.push(Group {
            generation,
            members,
            source,
            step: start,
            corrupted,
            rollbacks: restore.rollbacks.len(),
            started: 0,
            phase,
            writing: None,
        });
    }

    /// The newest state of the ranks; if none has state, that of the newest valid commit; otherwise a fresh one.
    fn state_to_take(&self, members: &[Pid], restore: &Restore) -> (StateSource, StartState) {
        let steps = (0..).zip(members).filter_map(|(rank, member)| {
            let process = &self.processes[*member];
            let (of, corrupted) = (Some(process.state_of), process.corrupted);
            Some((Rank(rank), StartState { step: process.step?, of, corrupted }))
        });
        // The first of several ranks with the same step.
        let newest = steps.reduce(|one, next| if next.1.step > one.1.step { next } else { one });
        if let Some((rank, state)) = newest {
            return (StateSource::Survivor { rank }, state);
        }
        match self.store.newest(restore) {
            Some((commit, corrupted)) => {
                let restored = Restored { name: commit.name.clone(), ..Restored::default() };
                let of = Some(commit.generation);
                let state = StartState { step: commit.step.0, of, corrupted: *corrupted };
                (StateSource::Checkpoint(restored), state)
            }
            None => (StateSource::fresh(), StartState { step: 0, of: None, corrupted: false }),
        }
    }

    /// A rank has restored the state.
    pub(crate) fn start(&mut self, pid: Pid) {
        let Some(id) = self.processes[pid].group else { return };
        let group = &mut self.groups[id];
        if group.phase != GroupPhase::Restoring {
            return;
        }
        group.started += 1;
        let all = group.started == group.members.len();
        let progress = Progress { step: Step(group.step), ..Progress::default() };
        let source = group.source.clone();
        let group = &self.groups[id];
        self.processes[pid].step = Some(group.step);
        self.processes[pid].state_of = group.generation;
        self.processes[pid].corrupted = group.corrupted;
        self.processes[pid].phase = ProcessPhase::Training;
        self.send_report(pid, RankReport::Started { source, progress });
        if all {
            self.next_step(id, None);
        }
    }

    /// Schedules what follows a step: the end or the next step.
    fn next_step(&mut self, id: GroupId, drained: Option<Outcome>) {
        let finished = self.groups[id].step >= self.plan.total_steps;
        let ending = drained.or_else(|| finished.then_some(Outcome::Completed));
        if let Some(outcome) = ending {
            self.groups[id].phase = GroupPhase::SavingLast(outcome);
            return self.save(id);
        }
        self.groups[id].phase = GroupPhase::Stepping;
        let step_ms = self.plan.step_ms;
        let at = self.soon(step_ms..=step_ms + step_ms / 4);
        self.schedule(at, SimEvent::StepEnds(id));
    }

    pub(crate) fn step_ends(&mut self, id: GroupId) {
        if self.groups[id].phase != GroupPhase::Stepping {
            return;
        }
        let members = self.groups[id].members.clone();
        let votes_to_pause = |member: &Pid| self.processes[*member].votes.pause;
        if members.iter().any(votes_to_pause) {
            return self.act_on_votes(id, false);
        }
        if self.will_diverge(id) {
            return self.diverge(id);
        }
        self.groups[id].step += 1;
        let step = self.groups[id].step;
        self.groups[id].corrupted |= self.corrupts(id, step);
        let corrupted = self.groups[id].corrupted;
        self.make_step(&members, step, corrupted);
        let report = StepReport {
            step: Step(step),
            total_steps: self.plan.total_steps,
            ..StepReport::default()
        };
        self.send_report(members[0], RankReport::Stepped(report));
        self.report_loaders(&members);
        let save = self.plan.save_every > 0 && step.is_multiple_of(self.plan.save_every);
        self.act_on_votes(id, save);
    }

    /// Acts on the ranks' votes, after a step or during a pause.
    fn act_on_votes(&mut self, id: GroupId, mut save: bool) {
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
        self.next_step(id, drained);
    }

    /// Sometimes a rank sends a loader report, and sometimes this has skipped samples.
    fn report_loaders(&mut self, members: &[Pid]) {
        for &member in members {
            if self.rng.u8(0..8) > 0 {
                continue;
            }
            if self.rng.u8(0..4) == 0 {
                self.processes[member].skipped += self.rng.u64(1..=4);
            }
            let skipped = self.processes[member].skipped;
            self.send_report(
                member,
                RankReport::Loader(LoaderReport { skipped, ..LoaderReport::default() }),
            );
        }
    }

    /// Whether the next update of a group diverges.
    fn will_diverge(&self, id: GroupId) -> bool {
        let Some(divergence) = self.plan.divergence else { return false };
        let group = &self.groups[id];
        match divergence.corrupts_after {
            Some(_) => group.corrupted && group.step >= divergence.step,
            None => group.step == divergence.step && group.rollbacks < divergence.cured_by,
        }
    }

    /// Whether the update to `step` corrupts the state of a group.
    fn corrupts(&self, id: GroupId, step: u64) -> bool {
        let uncured =
            |divergence: &PlannedDivergence| self.groups[id].rollbacks < divergence.cured_by;
        let divergence = self.plan.divergence.filter(uncured);
        divergence.is_some_and(|divergence| divergence.corrupts_after == Some(step))
    }

    /// All ranks of a group detect the divergence and wait.
    fn diverge(&mut self, id: GroupId) {
        let group = &mut self.groups[id];
        group.phase = GroupPhase::Broken;
        let diagnosis = Diagnosis {
            divergence: Divergence::LossNotFinite,
            step: Step(group.step),
            batch: BatchMark::default(),
            lr: 0.1,
            loss: None,
            gradient_norm: None,
            samples: Vec::new(),
            evaluated: None,
        };
        for member in group.members.clone() {
            let process = &mut self.processes[member];
            process.group = None;
            process.phase = ProcessPhase::Waiting;
            process.step = process.step.filter(|_| self.plan.keeps_state);
            self.send_report(member, RankReport::Diverged(diagnosis.clone()));
        }
    }

    fn make_step(&mut self, members: &[Pid], step: u64, corrupted: bool) {
        let generations =
            members.iter().filter_map(|member| self.processes[*member].generation()).collect();
        for &member in members {
            let process = &mut self.processes[member];
            process.step = Some(step);
            process.corrupted = corrupted;
            process.state_of = process.generation().unwrap_or_default();
        }
        self.facts.push(Fact::Stepped { step, generations });
    }

    /// Starts to write a checkpoint while training continues. Only one is written at a time; the last one may have to
    /// wait.
    fn save(&mut self, id: GroupId) {
        let group = &mut self.groups[id];
        if group.writing.is_none() {
            group.writing = Some(Writing { step: group.step, corrupted: group.corrupted });
            let at = self.soon(5..=200);
            self.schedule(at, SimEvent::ShardsWritten(id));
        }
    }

    /// The manifest is sent to the store; it arrives even if the ranks end.
    pub(crate) fn shards_written(&mut self, id: GroupId) {
        if self.groups[id].phase != GroupPhase::Broken {
            let at = self.soon(1..=400);
            self.schedule(at, SimEvent::ManifestLands(id));
        }
    }

    pub(crate) fn manifest_lands(&mut self, id: GroupId) {
        let generation = self.groups[id].generation;
        let Some(Writing { step, corrupted }) = self.groups[id].writing.take() else { return };
        let fence = self.store.fence;
        let committed = self.store.commit(generation, step, corrupted);
        self.facts.push(match committed {
            Ok(_) => Fact::Committed { generation, step, fence },
            Err(_) => Fact::CommitRefused,
        });
        let Group { phase, members, step: now_at, .. } = &self.groups[id];
        let (phase, members, is_newest) = (phase.clone(), members.clone(), step == *now_at);
        if !matches!(phase, GroupPhase::Stepping | GroupPhase::SavingLast(_)) {
            return;
        }
        let is_safe = committed.is_ok();
        self.send_report(
            members[0],
            match committed {
                Ok(commit) => RankReport::Saved(commit),
                Err(_) => RankReport::SaveFailed(SaveProblem {
                    message: "a newer generation uses the store".to_owned(),
                    fence: Some(fence),
                    exists: false,
                }),
            },
        );
        match phase {
            GroupPhase::SavingLast(outcome) if is_safe && is_newest => {
                self.groups[id].phase = GroupPhase::Finished(outcome);
                for member in members {
                    let at = self.soon(0..=50);
                    self.wake(member, at, Wake::Finish);
                }
            }
            // Refused, or an older step: again, until a newer generation begins.
            GroupPhase::SavingLast(_) => self.save(id),
            _ => {}
        }
    }

    /// Whether a process no longer needs the other ranks.
    pub(crate) fn has_finished(&self, process: &Process) -> bool {
        let in_finished_group = process
            .group
            .is_some_and(|id| matches!(self.groups[id].phase, GroupPhase::Finished(_)));
        process.phase == ProcessPhase::Done || in_finished_group
    }

    pub(crate) fn finish(&mut self, pid: Pid) {
        let Some(id) = self.processes[pid].group else { return };
        if let GroupPhase::Finished(outcome) = &self.groups[id].phase {
            let outcome = outcome.clone();
            self.done(pid, outcome);
        }
    }

    /// A member ends, hangs or joins another generation: the others detect that after a time in the range `notice_ms`.
    pub(crate) fn leave_group(&mut self, pid: Pid, notice_ms: RangeInclusive<u64>) {
        let Some(id) = self.processes[pid].group.take() else { return };
        let group = &mut self.groups[id];
        if matches!(group.phase, GroupPhase::Finished(_) | GroupPhase::Broken) {
            return;
        }
        let was_stepping = group.phase == GroupPhase::Stepping;
        let step = group.step + 1;
        group.phase = GroupPhase::Broken;
        let others: Vec<Pid> =
            group.members.iter().copied().filter(|other| *other != pid).collect();
        if was_stepping && !self.will_diverge(id) && self.rng.bool() {
            // Some of the others have finished the update.
            let reached: Vec<Pid> = others.iter().copied().filter(|_| self.rng.bool()).collect();
            let corrupted = self.groups[id].corrupted || self.corrupts(id, step);
            self.make_step(&reached, step, corrupted);
        }
        for other in others {
            let at = self.soon(notice_ms.clone());
            self.wake(other, at, Wake::GiveUp);
        }
    }
}
