//! A model of what the ranks of a generation do together: meet, restore the newest state, step, save, stop.

use std::time::Duration;

use baton_job::{
    Generation, Rank,
    exit::Outcome,
    ids::LocalRank,
    message::{RankReport, Restore, Restored, SaveTimes, StateSource, StepReport},
    time::Time,
};
use baton_recipe::{Step, progress::Progress};

use crate::{
    fleet::{Fleet, FleetEvent},
    machine::MachineId,
    process::Pid,
    settings::millis,
};

/// Shortest time between two step reports of rank 0.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);

/// The ranks of one generation.
pub(crate) struct Group {
    world_size: u32,
    /// By rank: the processes that have begun to meet the others.
    members: Vec<Option<Pid>>,
    /// Number of these processes.
    begun: u32,
    phase: GroupPhase,
    pub(crate) step: u64,
    source: StateSource,
    /// Why the ranks stop after the present update, if they do.
    pub(crate) stop: Option<String>,
    reported_at: Time,
    is_saving: bool,
}

/// Phase of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GroupPhase {
    /// Not all ranks have begun to meet.
    Gathering,
    Meeting,
    Restoring,
    /// Training.
    Stepping,
    /// Writing the last checkpoint.
    Stopping,
    /// A machine has vanished, and the others wait for it.
    Stuck,
    /// A member has left, or all are done.
    Dissolved,
}

impl Fleet {
    pub(crate) fn group_mut(&mut self, generation: Generation) -> Option<&mut Group> {
        self.groups.get_mut(&generation)
    }

    /// The last step of a generation.
    pub(crate) fn step_of(&self, generation: Generation) -> Option<Step> {
        self.groups.get(&generation).map(|group| Step(group.step))
    }

    pub(crate) fn open_group(&mut self, generation: Generation, world_size: u32) {
        self.groups.entry(generation).or_insert_with(|| Group {
            world_size,
            members: vec![None; world_size as usize],
            begun: 0,
            phase: GroupPhase::Gathering,
            step: 0,
            source: StateSource::fresh(),
            stop: None,
            reported_at: Time(0),
            is_saving: false,
        });
    }

    pub(crate) fn begin(&mut self, pid: Pid, generation: Generation) {
        let Some(process) = self.process_mut(pid) else { return };
        process.takes_part = true;
        let Some(assignment) = process.assignment else { return };
        let Some(group) = self.groups.get_mut(&generation) else { return };
        if group.phase != GroupPhase::Gathering {
            return self.schedule_loss(vec![pid], generation);
        }
        group.members[assignment.rank.0 as usize] = Some(pid);
        group.begun += 1;
        if group.begun == group.world_size {
            group.phase = GroupPhase::Meeting;
            let at = self.now.after(Duration::from_secs_f64(self.settings.meet()));
            self.queue.schedule(at, FleetEvent::Meet(generation));
        }
    }

    fn members_of(&self, generation: Generation) -> Vec<Pid> {
        self.groups
            .get(&generation)
            .into_iter()
            .flat_map(|group| group.members.iter().flatten().copied())
            .collect()
    }

    pub(crate) fn meet(&mut self, generation: Generation) {
        let Some(group) = self.groups.get(&generation) else { return };
        if group.phase != GroupPhase::Meeting {
            return;
        }
        let members = self.members_of(generation);
        let states: Vec<Option<u64>> = members
            .iter()
            .map(|member| {
                let of = self.process(*member)?.state_of?;
                Some(self.groups.get(&of)?.step)
            })
            .collect();
        let newest_step = states.iter().flatten().max().copied();
        let newest = || self.store.newest(&Restore::default()).map(|(commit, _)| commit.clone());
        let (step, source) = match newest_step {
            Some(step) => {
                let rank_with_state =
                    states.iter().position(|one| *one == Some(step)).unwrap_or_default();
                (step, StateSource::Survivor { rank: Rank(rank_with_state as u32) })
            }
            None => match newest() {
                Some(commit) => {
                    let restored = Restored { name: commit.name, ..Restored::default() };
                    (commit.step.0, StateSource::Checkpoint(restored))
                }
                None => (0, StateSource::fresh()),
            },
        };
        let all_have_it = states.iter().all(|one| *one == Some(step));
        let takes = if all_have_it { 0.0 } else { self.settings.restore() };
        if let Some(group) = self.group_mut(generation) {
            group.phase = GroupPhase::Restoring;
            group.step = step;
            group.source = source;
        }
        for member in members {
            // A process that takes over another state has no state meanwhile.
            let keeps =
                self.process(member).and_then(|p| p.state_of).and_then(|of| self.step_of(of));
            if let Some(process) = self.process_mut(member).filter(|_| keeps != Some(Step(step))) {
                process.state_of = None;
            }
            self.send_report(member, RankReport::Met);
        }
        let at = self.now.after(Duration::from_secs_f64(takes));
        self.queue.schedule(at, FleetEvent::Start(generation));
    }

    pub(crate) fn start(&mut self, generation: Generation) {
        let Some(group) = self.group_mut(generation) else { return };
        if group.phase != GroupPhase::Restoring {
            return;
        }
        group.phase = GroupPhase::Stepping;
        let (step, ranks, source) = (group.step, group.world_size.into(), group.source.clone());
        self.ledger.trains(self.now, step, ranks);
        let progress = Progress { step: Step(step), ..Progress::default() };
        for member in self.members_of(generation) {
            if let Some(process) = self.process_mut(member) {
                process.state_of = Some(generation);
            }
            self.send_report(
                member,
                RankReport::Started { source: source.clone(), progress: progress.clone() },
            );
        }
        self.next_step(generation, millis(self.settings.first()));
    }

    /// Schedules the end of the next update, `later_ms` later than usual.
    fn next_step(&mut self, generation: Generation, later_ms: u64) {
        let Some(group) = self.groups.get(&generation) else { return };
        let at = Time(self.now.0 + self.settings.step_ms(group.world_size) + later_ms);
        self.queue.schedule(at, FleetEvent::StepEnds(generation));
    }

    pub(crate) fn step_ends(&mut self, generation: Generation) {
        let now = self.now;
        let Some(group) = self.groups.get_mut(&generation) else { return };
        if group.phase != GroupPhase::Stepping {
            return;
        }
        group.step += 1;
        let (step, stop, world_size) = (group.step, group.stop.clone(), group.world_size);
        let rank_0 = group.members[0];
        let is_reported = now.since(group.reported_at) >= REPORT_INTERVAL;
        if is_reported {
            group.reported_at = now;
        }
        let saves = step.is_multiple_of(self.settings.save_every_steps()) && !group.is_saving;
        let nominal = self.settings.step_ms(self.settings.world_size());
        self.ledger.update(now, step, nominal, self.settings.step_ms(world_size));
        let Some(rank_0) = rank_0 else { return };
        if is_reported {
            let global_batch = u64::from(self.settings.virtual_ranks());
            let per_second =
                global_batch as f64 * 1_000.0 / self.settings.step_ms(world_size) as f64;
            let report = StepReport {
                step: Step(step),
                global_batch,
                samples_per_second: per_second,
                ..StepReport::default()
            };
            self.send_report(rank_0, RankReport::Stepped(report));
        }
        if stop.is_some() {
            self.send_report(rank_0, RankReport::Stopping { step: Step(step) });
            self.send_report(rank_0, RankReport::Copied { step: Step(step) });
            if let Some(group) = self.group_mut(generation) {
                group.phase = GroupPhase::Stopping;
            }
            self.ledger.breaks(now);
            return self.save(generation, step);
        }
        if saves {
            self.save(generation, step);
        }
        let stall = if saves { millis(self.settings.stall()) } else { 0 };
        self.next_step(generation, stall);
    }

    /// Schedules the commit of a checkpoint; it happens only if the generation still exists then.
    fn save(&mut self, generation: Generation, step: u64) {
        if let Some(group) = self.group_mut(generation) {
            group.is_saving = true;
        }
        let at = self.now.after(Duration::from_secs_f64(self.settings.save()));
        self.queue.schedule(at, FleetEvent::Commit(generation, step));
    }

    pub(crate) fn commit(&mut self, generation: Generation, step: u64) {
        let Some(group) = self.groups.get_mut(&generation) else { return };
        group.is_saving = false;
        let (phase, rank_0) = (group.phase, group.members.first().copied().flatten());
        let Some(rank_0) =
            rank_0.filter(|_| matches!(phase, GroupPhase::Stepping | GroupPhase::Stopping))
        else {
            return;
        };
        let Ok(commit) = self.store.commit(generation, step, false) else {
            panic!("generation {generation} trains below the fence");
        };
        self.ledger.commits += 1;
        let (stall_seconds, seconds) = (self.settings.stall(), self.settings.save());
        let took = Some(SaveTimes { stall_seconds, seconds });
        self.send_report(rank_0, RankReport::Saved(baton_job::message::Commit { took, ..commit }));
        if phase == GroupPhase::Stopping && self.step_of(generation) == Some(Step(step)) {
            self.stop(generation, step);
        }
    }

    /// All ranks are done.
    fn stop(&mut self, generation: Generation, step: u64) {
        let members = self.members_of(generation);
        let Some(group) = self.group_mut(generation) else { return };
        group.phase = GroupPhase::Dissolved;
        let outcome = Outcome::Drained { reason: group.stop.clone().unwrap_or_default() };
        for member in members {
            self.done(member, outcome.clone(), format!("digest of step {step}"));
        }
    }

    /// A member ends or joins another generation: the others detect the loss soon.
    pub(crate) fn leave_group(&mut self, pid: Pid) {
        let Some(process) = self.process_mut(pid) else { return };
        let takes_part = std::mem::take(&mut process.takes_part);
        let Some(assignment) = process.assignment.filter(|_| takes_part) else { return };
        let Some(group) = self.group_mut(assignment.generation) else { return };
        if group.phase == GroupPhase::Dissolved {
            return;
        }
        let was = std::mem::replace(&mut group.phase, GroupPhase::Dissolved);
        let others = std::mem::take(&mut group.members);
        let others = others.into_iter().flatten().filter(|other| *other != pid).collect();
        if was == GroupPhase::Stepping {
            self.ledger.breaks(self.now);
        }
        self.schedule_loss(others, assignment.generation);
    }

    fn schedule_loss(&mut self, members: Vec<Pid>, generation: Generation) {
        for member in members {
            let at = self.soon(0..=300);
            self.queue.schedule(at, FleetEvent::LossDetected(member, generation));
        }
    }

    /// A machine vanishes with its ranks. Packets to it are lost, so the other ranks wait until the next generation.
    pub(crate) fn machine_vanishes(&mut self, id: MachineId) {
        for local_rank in (0..self.settings.ranks() as u32).map(LocalRank) {
            let Some(pid) = self.occupant(id, local_rank) else { continue };
            let process = self.machines[id].slots[local_rank.0 as usize].take();
            let took_part = process.filter(|process| process.takes_part).and_then(|p| p.assignment);
            let Some(assignment) = took_part else { continue };
            let Some(group) = self.group_mut(assignment.generation) else { continue };
            if group.phase == GroupPhase::Dissolved {
                continue;
            }
            debug_assert_eq!(group.members[assignment.rank.0 as usize], Some(pid));
            if std::mem::replace(&mut group.phase, GroupPhase::Stuck) == GroupPhase::Stepping {
                self.ledger.breaks(self.now);
            }
        }
    }
}
