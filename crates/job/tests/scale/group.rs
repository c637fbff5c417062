//! A model of what the ranks of a generation do together: meet, take the furthest state, step, save, stop.

use std::time::Duration;

use baton_job::{
    Generation, Rank,
    exit::Outcome,
    ids::LocalRank,
    message::{RankNews, Restore, Restored, SaveTimes, StateSource, StepNews},
    time::Time,
};
use baton_recipe::{Step, progress::Progress};

use crate::{
    fleet::{Fleet, Happening},
    machine::MachineId,
    process::Pid,
    settings::millis,
};

/// Rank 0 tells no more often.
const TOLD_EVERY: Duration = Duration::from_millis(100);

/// The ranks of one generation.
pub(crate) struct Group {
    world_size: u32,
    /// By rank: those that have begun to meet the others.
    members: Vec<Option<Pid>>,
    begun: u32,
    doing: Together,
    pub(crate) step: u64,
    source: StateSource,
    /// Why they stop after the present update, if they do.
    pub(crate) stop: Option<String>,
    told_at: Time,
    is_saving: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Together {
    /// Not all have begun.
    Gathering,
    Meeting,
    TakingState,
    /// An update is under way, or a wait for one.
    Stepping,
    /// The last checkpoint is written.
    Ending,
    /// A machine is gone, and nobody noticed.
    Stuck,
    /// A member left, or all are done.
    Over,
}

impl Fleet {
    pub(crate) fn group_mut(&mut self, generation: Generation) -> Option<&mut Group> {
        self.groups.get_mut(&generation)
    }

    /// The last step of a generation that has taken a state.
    pub(crate) fn step_of(&self, generation: Generation) -> Option<Step> {
        self.groups.get(&generation).map(|group| Step(group.step))
    }

    pub(crate) fn open_group(&mut self, generation: Generation, world_size: u32) {
        self.groups.entry(generation).or_insert_with(|| Group {
            world_size,
            members: vec![None; world_size as usize],
            begun: 0,
            doing: Together::Gathering,
            step: 0,
            source: StateSource::Fresh,
            stop: None,
            told_at: Time(0),
            is_saving: false,
        });
    }

    pub(crate) fn begin(&mut self, pid: Pid, generation: Generation) {
        let Some(process) = self.process_mut(pid) else { return };
        process.takes_part = true;
        let Some(seat) = process.seat else { return };
        let Some(group) = self.groups.get_mut(&generation) else { return };
        if group.doing != Together::Gathering {
            return self.lose_touch_soon(vec![pid], generation);
        }
        group.members[seat.rank.0 as usize] = Some(pid);
        group.begun += 1;
        if group.begun == group.world_size {
            group.doing = Together::Meeting;
            let at = self.now.after(Duration::from_secs_f64(self.settings.meet()));
            self.queue.schedule(at, Happening::Meet(generation));
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
        if group.doing != Together::Meeting {
            return;
        }
        let members = self.members_of(generation);
        let held: Vec<Option<u64>> = members
            .iter()
            .map(|member| {
                let of = self.process(*member)?.state_of?;
                Some(self.groups.get(&of)?.step)
            })
            .collect();
        let furthest = held.iter().flatten().max().copied();
        let newest = || self.store.newest(&Restore::default()).map(|(commit, _)| commit.clone());
        let (step, source) = match furthest {
            Some(step) => {
                let holder = held.iter().position(|one| *one == Some(step)).unwrap_or_default();
                (step, StateSource::Survivor { rank: Rank(holder as u32) })
            }
            None => match newest() {
                Some(commit) => {
                    let restored = Restored { name: commit.name, ..Restored::default() };
                    (commit.step.0, StateSource::Checkpoint(restored))
                }
                None => (0, StateSource::Fresh),
            },
        };
        let all_hold_it = held.iter().all(|one| *one == Some(step));
        let takes = if all_hold_it { 0.0 } else { self.settings.restore() };
        if let Some(group) = self.group_mut(generation) {
            group.doing = Together::TakingState;
            group.step = step;
            group.source = source;
        }
        for member in members {
            // Who takes over another state holds none meanwhile.
            let keeps =
                self.process(member).and_then(|p| p.state_of).and_then(|of| self.step_of(of));
            if let Some(process) = self.process_mut(member).filter(|_| keeps != Some(Step(step))) {
                process.state_of = None;
            }
            self.say(member, RankNews::Met);
        }
        let at = self.now.after(Duration::from_secs_f64(takes));
        self.queue.schedule(at, Happening::Start(generation));
    }

    pub(crate) fn start(&mut self, generation: Generation) {
        let Some(group) = self.group_mut(generation) else { return };
        if group.doing != Together::TakingState {
            return;
        }
        group.doing = Together::Stepping;
        let (step, ranks, source) = (group.step, group.world_size.into(), group.source.clone());
        self.ledger.trains(self.now, step, ranks);
        let progress = Progress { step: Step(step), ..Progress::default() };
        for member in self.members_of(generation) {
            if let Some(process) = self.process_mut(member) {
                process.state_of = Some(generation);
            }
            self.say(
                member,
                RankNews::Started { source: source.clone(), progress: progress.clone() },
            );
        }
        self.next_step(generation, millis(self.settings.first()));
    }

    /// The next update ends so much later than an ordinary one.
    fn next_step(&mut self, generation: Generation, later_ms: u64) {
        let Some(group) = self.groups.get(&generation) else { return };
        let at = Time(self.now.0 + self.settings.step_ms(group.world_size) + later_ms);
        self.queue.schedule(at, Happening::StepEnds(generation));
    }

    pub(crate) fn step_ends(&mut self, generation: Generation) {
        let now = self.now;
        let Some(group) = self.groups.get_mut(&generation) else { return };
        if group.doing != Together::Stepping {
            return;
        }
        group.step += 1;
        let (step, stop, world_size) = (group.step, group.stop.clone(), group.world_size);
        let rank_0 = group.members[0];
        let is_told = now.since(group.told_at) >= TOLD_EVERY;
        if is_told {
            group.told_at = now;
        }
        let saves = step.is_multiple_of(self.settings.save_every_steps()) && !group.is_saving;
        let nominal = self.settings.step_ms(self.settings.world_size());
        self.ledger.update(now, step, nominal, self.settings.step_ms(world_size));
        let Some(rank_0) = rank_0 else { return };
        if is_told {
            let global_batch = u64::from(self.settings.virtual_ranks());
            let per_second =
                global_batch as f64 * 1_000.0 / self.settings.step_ms(world_size) as f64;
            let news = StepNews {
                step: Step(step),
                global_batch,
                samples_per_second: per_second,
                ..StepNews::default()
            };
            self.say(rank_0, RankNews::Stepped(news));
        }
        if stop.is_some() {
            self.say(rank_0, RankNews::Stopping { step: Step(step) });
            self.say(rank_0, RankNews::Copied { step: Step(step) });
            if let Some(group) = self.group_mut(generation) {
                group.doing = Together::Ending;
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

    /// A checkpoint is committed some time after the update that it is of, if its generation lives so long.
    fn save(&mut self, generation: Generation, step: u64) {
        if let Some(group) = self.group_mut(generation) {
            group.is_saving = true;
        }
        let at = self.now.after(Duration::from_secs_f64(self.settings.save()));
        self.queue.schedule(at, Happening::Commit(generation, step));
    }

    pub(crate) fn commit(&mut self, generation: Generation, step: u64) {
        let Some(group) = self.groups.get_mut(&generation) else { return };
        group.is_saving = false;
        let (doing, rank_0) = (group.doing, group.members.first().copied().flatten());
        let Some(rank_0) =
            rank_0.filter(|_| matches!(doing, Together::Stepping | Together::Ending))
        else {
            return;
        };
        let Ok(commit) = self.store.commit(generation, step, false) else {
            panic!("generation {generation} trains below the fence");
        };
        self.ledger.commits += 1;
        let (stall_seconds, seconds) = (self.settings.stall(), self.settings.save());
        let took = Some(SaveTimes { stall_seconds, seconds });
        self.say(rank_0, RankNews::Saved(baton_job::message::Commit { took, ..commit }));
        if doing == Together::Ending && self.step_of(generation) == Some(Step(step)) {
            self.stop(generation, step);
        }
    }

    /// All are done.
    fn stop(&mut self, generation: Generation, step: u64) {
        let members = self.members_of(generation);
        let Some(group) = self.group_mut(generation) else { return };
        group.doing = Together::Over;
        let outcome = Outcome::Drained { reason: group.stop.clone().unwrap_or_default() };
        for member in members {
            self.done(member, outcome.clone(), format!("digest of step {step}"));
        }
    }

    /// A member dies or is called away: the others lose touch soon.
    pub(crate) fn leave_group(&mut self, pid: Pid) {
        let Some(process) = self.process_mut(pid) else { return };
        let takes_part = std::mem::take(&mut process.takes_part);
        let Some(seat) = process.seat.filter(|_| takes_part) else { return };
        let Some(group) = self.group_mut(seat.generation) else { return };
        if group.doing == Together::Over {
            return;
        }
        let was = std::mem::replace(&mut group.doing, Together::Over);
        let others = std::mem::take(&mut group.members);
        let others = others.into_iter().flatten().filter(|other| *other != pid).collect();
        if was == Together::Stepping {
            self.ledger.breaks(self.now);
        }
        self.lose_touch_soon(others, seat.generation);
    }

    fn lose_touch_soon(&mut self, members: Vec<Pid>, generation: Generation) {
        for member in members {
            let at = self.soon(0..=300);
            self.queue.schedule(at, Happening::LosesTouch(member, generation));
        }
    }

    /// A machine is gone with its ranks. Packets to it are lost: the others wait until they are called away.
    pub(crate) fn vanish_with_its_ranks(&mut self, id: MachineId) {
        for local_rank in (0..self.settings.ranks() as u32).map(LocalRank) {
            let Some(pid) = self.occupant(id, local_rank) else { continue };
            let process = self.machines[id].places[local_rank.0 as usize].take();
            let took_part = process.filter(|process| process.takes_part).and_then(|p| p.seat);
            let Some(seat) = took_part else { continue };
            let Some(group) = self.group_mut(seat.generation) else { continue };
            if group.doing == Together::Over {
                continue;
            }
            debug_assert_eq!(group.members[seat.rank.0 as usize], Some(pid));
            if std::mem::replace(&mut group.doing, Together::Stuck) == Together::Stepping {
                self.ledger.breaks(self.now);
            }
        }
    }
}
