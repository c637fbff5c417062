//! What agents report of their ranks: progress, losses and divergences.

use super::{
    Action, Engine, Evaluation, Incident, Measured, NoticeKind, Record, WrittenDiagnosis,
    drain::DrainStage,
    lifecycle::Phase,
    membership::{Kind, Member},
    notice,
};
use crate::{
    exit::{Failure, Outcome, crash},
    ids::{Attachment, NodeId, Rank},
    message::{
        Commit, LoaderNews, Pulse, RankNews, Report, Restore, Rollback, SaveProblem, StateSource,
        StepNews,
    },
    time::Time,
};
use baton_recipe::{Epoch, Step, guard::Diagnosis, progress::Progress};

impl Engine {
    pub(super) fn reported(
        &mut self,
        now: Time,
        node: &NodeId,
        attachment: Attachment,
        report: Report,
    ) {
        if self.nodes.get(node).is_none_or(|n| n.attachment != attachment) {
            self.stale_messages += 1;
            return;
        }
        match report {
            Report::Hello(_) => self.stale_messages += 1,
            Report::DrainRequested { reason, seconds_left } => {
                self.node_must_leave(now, node, &reason, seconds_left);
            }
            Report::Warm { local_rank } => self.warmed_up(now, node, local_rank),
            Report::WarmFailed { local_rank, failure } => {
                self.warm_up_failed(now, node, local_rank, &failure);
            }
            Report::Beat(beat) => self.heartbeat(now, node, beat),
            Report::Advised { reason } => {
                let text = format!("node {node}: {reason}; a checkpoint is taken");
                self.announce(NoticeKind::Advised, text);
            }
            Report::GpuWarning { message } => {
                self.announce(NoticeKind::GpuWarning, format!("node {node}: {message}"));
            }
            Report::Rank { generation, rank, news } => {
                let runs_here = self.lifecycle.world().is_some_and(|world| world.runs(node, rank));
                if generation == self.lifecycle.generation && runs_here {
                    self.rank_reported(now, rank, news);
                } else {
                    self.stale_messages += 1;
                }
            }
        }
    }

    /// News of a rank of the present generation.
    pub(super) fn rank_reported(&mut self, now: Time, rank: Rank, news: RankNews) {
        match news {
            RankNews::Ready { address, step } => {
                self.advance(step);
                self.results.reached = self.results.reached.max(step.unwrap_or_default());
                if let Phase::Forming { world, .. } = &mut self.lifecycle.phase {
                    world.set_ready(now, rank, address, step);
                    self.begin_when_all_ready(now);
                }
            }
            RankNews::Met => self.met(now, rank),
            RankNews::Started { source, progress } => self.started(now, rank, &source, &progress),
            RankNews::Stepped(news) => self.stepped(now, news),
            RankNews::Evaluated { step, epoch, accuracy, ema, extent } => {
                let found = Evaluation { step, accuracy, ema, extent };
                // An agent that reconnects reports its evaluations again.
                if !self.results.knows_of(self.lifecycle.generation, &found) {
                    self.evaluated(epoch, found);
                }
            }
            RankNews::Diverged(diagnosis) => self.diverged(now, diagnosis),
            RankNews::EndsEarly { reason } => {
                self.announce(NoticeKind::EndsEarly, format!("training is complete: {reason}"));
            }
            RankNews::Loader(news) => self.loader_reported(rank, news),
            RankNews::Pulse(pulse) => self.pulse(now, rank, pulse),
            RankNews::Saved(commit) => self.saved(now, commit),
            RankNews::SaveWaits { step, behind, seconds } => {
                self.announce(NoticeKind::SaveWaits, notice::describe_wait(step, behind, seconds));
            }
            RankNews::Stopping { step } => self.drain_advanced(now, step, DrainStage::Agreed),
            RankNews::Copied { step } => self.drain_advanced(now, step, DrainStage::Copied),
            RankNews::SaveFailed(SaveProblem { message, fence }) => {
                self.results.save_problem = Some(message.clone());
                self.announce(NoticeKind::SaveFailed, message.clone());
                // Our own newer generation is no news, and not this rank's to report.
                if fence.is_some_and(|fence| fence > self.lifecycle.generation) {
                    self.taken_over(now, message);
                }
            }
            RankNews::Lost { detail } => {
                let cause = format!("rank {rank} lost touch with the others: {detail}");
                self.lost(now, &[rank], Member::Lost, crash(cause));
            }
            RankNews::Done { outcome, digest } => {
                if let Some(world) = self.lifecycle.world_mut() {
                    world.set(rank, Member::Done { outcome, digest });
                }
                self.end_when_all_done(now);
            }
            RankNews::Exited(failure) => self.exited(now, rank, failure),
        }
    }

    // ---- progress ----

    /// A rank holds the state after `step`. Progress makes up for earlier failures.
    fn advance(&mut self, step: Option<Step>) {
        if self.results.advance(step) {
            self.lifecycle.failures = 0;
            if let Some(world) = self.lifecycle.world() {
                self.nodes.reset_failure_counts(world);
            }
        }
    }

    fn met(&mut self, now: Time, rank: Rank) {
        let Phase::Meeting { world, .. } = &mut self.lifecycle.phase else { return };
        if world.set_met(rank)
            && let Some(recovery) = self.recoveries.under_way(self.lifecycle.generation)
        {
            recovery.met_at.get_or_insert(now);
        }
    }

    fn started(&mut self, now: Time, rank: Rank, source: &StateSource, progress: &Progress) {
        self.advance(Some(progress.step));
        self.lifecycle.began_at = Some(progress.step);
        if rank == Rank(0) {
            // Another rank's report may come after the first step.
            self.results.reached = progress.step;
            // The rank that was to report it may have died before.
            if let Some((epoch, found)) = Evaluation::last_of(progress)
                && !self.results.knows(&found)
            {
                self.evaluated(epoch, found);
            }
            self.results.best.clone_from(&progress.best);
            if let Some(recovery) = self.recoveries.under_way(self.lifecycle.generation) {
                recovery.lost_steps = recovery.step_before.0.saturating_sub(progress.step.0);
            }
            self.actions.push(Action::Measured(Measured::BeganAt(progress.step)));
            let text = notice::describe_start(source, progress);
            self.lifecycle.began_with = Some(text.clone());
            self.announce_at(NoticeKind::TrainingStarted, Some(progress.step), text);
        }
        if let Some(world) = self.lifecycle.world_mut() {
            world.set(rank, Member::Started);
        }
        self.train_when_all_started(now);
    }

    fn stepped(&mut self, now: Time, news: StepNews) {
        self.advance(Some(news.step));
        self.results.reached = news.step;
        let (generation, spent) = (self.lifecycle.generation, self.accounting.spent(now));
        // From before the recovery.
        let pace = self.results.latest.as_ref().and_then(StepNews::seconds_per_step);
        if let Some(recovery) = self.recoveries.finish(now, generation, spent, pace) {
            let text = notice::describe_recovery(&recovery);
            self.actions.push(Action::Persist(Record::Recovery(recovery)));
            self.announce(NoticeKind::Recovered, text);
        }
        self.actions.push(Action::Measured(Measured::Step(news.clone())));
        self.results.latest = Some(news);
        self.actions.extend(self.accounting.persist_now_and_then(now));
    }

    fn evaluated(&mut self, epoch: Epoch, evaluation: Evaluation) {
        let generation = self.lifecycle.generation;
        let (step, text) = (evaluation.step, notice::describe_evaluation(epoch, &evaluation));
        self.results.take_evaluation(generation, evaluation.clone());
        self.actions.push(Action::Persist(Record::Evaluated {
            generation,
            evaluation: evaluation.clone(),
        }));
        self.actions.push(Action::Measured(Measured::Evaluation(evaluation)));
        self.announce_at(NoticeKind::Evaluated, Some(step), text);
    }

    /// Takes note of a checkpoint, unless a newer one is known already.
    pub(super) fn saved(&mut self, now: Time, commit: Commit) {
        if !self.results.is_new(&commit) {
            return;
        }
        self.actions.push(Action::Persist(Record::Saved(commit.clone())));
        self.actions.extend(self.accounting.persist(now));
        let text = notice::describe_commit(&commit);
        self.announce_at(NoticeKind::Saved, Some(commit.step), text);
        self.drain_advanced(now, commit.step, DrainStage::Durable);
        self.results.save_problem = None;
        self.results.commit = Some(commit);
    }

    /// Keeps the newest report of a rank's loader, and says when it begins to lose samples.
    fn loader_reported(&mut self, rank: Rank, news: LoaderNews) {
        let world = self.lifecycle.world_mut().filter(|world| !world.is_gone(rank));
        let Some(world) = world else { return };
        world.set_loader(rank, Some(news.clone()));
        let Some(place) = world.place_of(rank) else { return };
        if self.results.skips.count(place, news.skipped) {
            self.announce(NoticeKind::SamplesSkipped, notice::describe_skips(rank, &news));
        }
    }

    /// Keeps what a rank does, and says if it holds the others up.
    fn pulse(&mut self, now: Time, rank: Rank, pulse: Pulse) {
        let world = self.lifecycle.world_mut().filter(|world| !world.is_gone(rank));
        let Some(world) = world else { return };
        let Some(slowness) = world.pulses.hear(now, rank, pulse) else { return };
        if let Some(place) = world.place_of(rank) {
            let text = notice::describe_straggler(place, pulse, slowness);
            self.announce_at(NoticeKind::Straggler, Some(pulse.step), text);
        }
    }

    // ---- losses ----

    fn exited(&mut self, now: Time, rank: Rank, failure: Failure) {
        let world = self.lifecycle.world();
        if world.is_some_and(|world| world.is_done(rank)) {
            return;
        }
        if let Some(place) = world.and_then(|world| world.place_of(rank)) {
            self.results.skips.forget(place);
        }
        let message = format!("rank {rank}: {}", failure.message);
        self.announce(NoticeKind::RankFailed, message.clone());
        self.lost(now, &[rank], Member::Gone, Failure { message, ..failure });
    }

    /// Ranks lost touch, or their processes are gone.
    pub(super) fn lost(&mut self, now: Time, ranks: &[Rank], how: Member, failure: Failure) {
        if !failure.class.is_retriable() {
            return self.end(now, Outcome::Failed { failure });
        }
        // Before the meeting there is nobody to lose touch with.
        if how == Member::Lost && matches!(self.lifecycle.phase, Phase::Forming { .. }) {
            return;
        }
        let Some(world) = self.lifecycle.world_mut() else { return };
        let death_was_known = world.has(Kind::Gone);
        let unfinished: Vec<Rank> =
            ranks.iter().copied().filter(|rank| !world.is_done(*rank)).collect();
        if unfinished.is_empty() {
            return;
        }
        for rank in unfinished {
            world.set(rank, how.clone());
        }
        if how == Member::Gone {
            self.nodes.count_failures(world, ranks);
        }
        let (until, lost_at, failure) = match &mut self.lifecycle.phase {
            Phase::Reattaching { lost_at, .. } => {
                lost_at.get_or_insert(now);
                return self.finish_reattaching(now);
            }
            Phase::Settling { until, lost_at, failure: first, .. } => {
                let explains = how == Member::Gone && !death_was_known;
                (*until, *lost_at, if explains { failure } else { first.clone() })
            }
            _ => (now.after(self.policy.settle), now, failure),
        };
        let Some(world) = self.lifecycle.take_world() else { return };
        self.wait_for_losses(now, world, (until, lost_at), failure, "; waiting to hear who died");
    }

    // ---- divergences ----

    /// Where the state of a generation comes from: the job's rule, and what has been rolled back.
    #[must_use]
    pub fn restore(&self) -> Restore {
        let rollbacks = self.divergences.rollbacks().cloned().collect();
        Restore { rollbacks, ..self.origin.restore.clone() }
    }

    /// A rank of the present generation says that training went wrong.
    fn diverged(&mut self, now: Time, diagnosis: Diagnosis) {
        let generation = self.lifecycle.generation;
        // Nothing trains before the meeting, and every rank reports the same.
        if matches!(self.lifecycle.phase, Phase::Forming { .. })
            || self.divergences.is_rollback_due(generation)
        {
            return;
        }
        let (guard, began_at) = (&self.spec.guard, self.lifecycle.began_at);
        let rollback = self.divergences.remedy(&diagnosis, guard, began_at, generation.next());
        let most = guard.max_rollbacks;
        let incident = Incident { generation, diagnosis, rollback };
        self.actions.push(Action::Persist(Record::Diverged(incident.clone())));
        self.remember(&incident);
        let (number, latest) = (self.divergences.incidents.len(), self.results.latest.clone());
        let written = WrittenDiagnosis::new(number, self.origin.job, &self.spec, &incident, latest);
        let rollbacks = self.divergences.rollbacks().count();
        let message = notice::describe_divergence(&incident, rollbacks, most, &written.name());
        self.actions.push(Action::Write(Box::new(written)));
        self.announce_at(NoticeKind::Diverged, Some(incident.diagnosis.step), message);
        match incident.rollback {
            Some(_) => self.go_back(now, &incident.diagnosis),
            None => {
                self.end(now, self.divergences.end_of_job(&incident.diagnosis, &self.spec));
            }
        }
    }

    /// Takes in an incident, when it happens or when it is replayed.
    pub(super) fn remember(&mut self, incident: &Incident) {
        self.divergences.incidents.push(incident.clone());
        if let Some(Rollback { before, .. }) = incident.rollback {
            self.results.roll_back(before);
        }
    }

    /// No rank of this generation may go on. A node that is away is waited for, as for any new
    /// generation.
    fn go_back(&mut self, now: Time, diagnosis: &Diagnosis) {
        let failure = crash(format!("rolling back: {}", diagnosis.divergence));
        let Some(world) = self.lifecycle.world_mut() else { return };
        world.all_lose_touch();
        if matches!(self.lifecycle.phase, Phase::Reattaching { .. }) {
            return self.finish_reattaching(now);
        }
        if let Some(world) = self.lifecycle.take_world() {
            self.wait_for_losses(now, world, (now, now), failure, "");
        }
    }
}
