//! Reports of agents about their ranks: progress, losses and divergences.

use super::{
    Action, Engine, EvaluationResult, Incident, JobEventKind, MetricPoint, Record,
    WrittenDiagnosis,
    drain::DrainStage,
    job_event,
    lifecycle::Phase,
    membership::{Member, MemberKind},
    plausible::is_plausible,
    transitions::RESTORE_TIMEOUT,
};
use crate::{
    exit::{Failure, crash},
    ids::{Attachment, Generation, NodeId, Rank},
    message::{
        AgentReport, Commit, LoaderReport, MAX_SHOWN_TEXTS, RankHeartbeat, RankReport, Restore,
        Restored, Rollback, SaveProblem, StateSource, StepReport,
    },
    time::Time,
};
use baton_recipe::{
    Epoch, Step,
    guard::Diagnosis,
    progress::{Accuracy, Progress},
    spec::is_recorded,
};

impl Engine {
    pub(super) fn reported(
        &mut self,
        now: Time,
        node: &NodeId,
        attachment: Attachment,
        report: AgentReport,
    ) {
        if self.nodes.get(node).is_none_or(|n| n.attachment != attachment) {
            self.stale_messages += 1;
            return;
        }
        match report {
            AgentReport::Hello(_) => self.stale_messages += 1,
            AgentReport::NodeDeparting { reason, seconds_left } => {
                self.node_departing(now, node, &reason, seconds_left);
            }
            AgentReport::Warm { local_rank } => self.warmed_up(now, node, local_rank),
            AgentReport::WarmFailed { local_rank, failure } => {
                self.warm_up_failed(now, node, local_rank, &failure);
            }
            AgentReport::Heartbeat(heartbeat) => self.agent_heartbeat(now, node, heartbeat),
            AgentReport::CheckpointAdvised { reason } => {
                let text = format!("node {node}: {reason}; a checkpoint is being saved");
                self.note(now, JobEventKind::CheckpointAdvised, text);
            }
            AgentReport::GpuWarning { message } => {
                self.note(now, JobEventKind::GpuWarning, format!("node {node}: {message}"));
            }
            AgentReport::Rank { generation, rank, report } => {
                let runs_here = self.lifecycle.world().is_some_and(|world| world.runs(node, rank));
                let is_current = generation == self.lifecycle.generation && runs_here;
                if is_current && is_plausible(&report) {
                    self.rank_reported(now, rank, report);
                } else {
                    self.stale_messages += 1;
                }
            }
        }
    }

    /// Handles a report about a rank of the current generation.
    pub(super) fn rank_reported(&mut self, now: Time, rank: Rank, report: RankReport) {
        match report {
            RankReport::Ready { address, step } => {
                self.advance(step);
                self.results.reached = self.results.reached.max(step.unwrap_or_default());
                if let Phase::Forming { world, .. } = &mut self.lifecycle.phase {
                    if let Some(placement) = world.placement_of(rank) {
                        self.nodes.record_state(placement, step.is_some());
                    }
                    world.set_ready(now, rank, address, step);
                    self.begin_when_all_ready(now);
                }
            }
            RankReport::Met => self.met(now, rank),
            RankReport::Started { source, progress } => self.started(now, rank, &source, &progress),
            RankReport::Stepped(report) => self.stepped(now, report),
            RankReport::Evaluated { step, epoch, accuracy, ema, extent, mut texts } => {
                texts.truncate(MAX_SHOWN_TEXTS);
                let evaluation = EvaluationResult { step, accuracy, ema, extent, texts };
                let by = (self.lifecycle.generation, self.lifecycle.began_at);
                if !self.results.is_repeated(by, &evaluation) {
                    self.evaluated(by.0, epoch, evaluation);
                }
            }
            RankReport::Diverged(diagnosis) => self.diverged(now, diagnosis),
            RankReport::EndsEarly { reason } => {
                let text = format!("training is complete: {reason}");
                self.note(now, JobEventKind::EndsEarly, text);
            }
            RankReport::Loader(report) => self.loader_reported(now, rank, report),
            RankReport::Heartbeat(heartbeat) => self.rank_heartbeat(now, rank, heartbeat),
            RankReport::Saved(commit) => self.saved(now, commit),
            RankReport::SaveWaits { step, behind, seconds } => {
                let text = job_event::describe_save_wait(step, behind, seconds);
                self.note(now, JobEventKind::SaveWaits, text);
            }
            RankReport::Stopping { step } => {
                // Not every update is reported.
                self.results.reached = self.results.reached.max(step);
                self.drain_advanced(now, step, DrainStage::Agreed);
            }
            RankReport::Copied { step } => self.drain_advanced(now, step, DrainStage::Copied),
            RankReport::SaveFailed(SaveProblem { fence: Some(fence), .. })
                if self.is_opening(fence) =>
            {
                let text = format!(
                    "the save in progress is given up because generation {fence} begins; the ranks keep their state, and \
                     save it when the next save is due"
                );
                self.note(now, JobEventKind::SaveFailed, text);
            }
            RankReport::SaveFailed(SaveProblem { message, fence, .. }) => {
                self.results.save_problem = Some(message.clone());
                self.note(now, JobEventKind::SaveFailed, message.clone());
                if let Some(fence) = fence {
                    self.refused_by_fence(now, fence, message);
                }
            }
            RankReport::SavedLocally { step, seconds } => {
                self.saved_locally(now, rank, step, seconds)
            }
            RankReport::LocalSaveFailed { message } => {
                let node = self.lifecycle.world().and_then(|world| world.placement_of(rank));
                let node = node.map(|placement| placement.node.to_string()).unwrap_or_default();
                let text = format!(
                    "node {node}: the local checkpoint failed, and training continues: {message}"
                );
                self.note(now, JobEventKind::SaveFailed, text);
            }
            RankReport::Profiled { name, problem } => self.profiled(rank, &name, problem),
            RankReport::Lost { detail, unreached } => {
                if let Some(world) = self.lifecycle.world_mut() {
                    world.set_unreached(rank, &unreached);
                }
                let cause = format!("rank {rank} lost its connection to the others: {detail}");
                self.lost(now, &[rank], Member::Lost, crash(cause));
            }
            RankReport::Done { outcome, digest } => {
                if let Some(world) = self.lifecycle.world_mut() {
                    world.set(rank, Member::Done { outcome, digest });
                }
                self.end_when_all_done(now);
            }
            RankReport::Exited(failure) => self.exited(now, rank, failure),
        }
    }

    // ---- progress ----

    /// Records that a rank holds the state after `step`. Progress resets the failure counts.
    fn advance(&mut self, step: Option<Step>) {
        if self.results.advance(step) {
            self.lifecycle.failures = 0;
            let trains = self.lifecycle.training_world().is_some();
            if let Some(world) = self.lifecycle.world() {
                self.nodes.reset_failure_counts(world, trains);
            }
        }
    }

    fn met(&mut self, now: Time, rank: Rank) {
        let Phase::Meeting { world, until } = &mut self.lifecycle.phase else { return };
        if !world.set_connected(rank) {
            return;
        }
        *until = (*until).max(now.after(RESTORE_TIMEOUT));
        if let Some(recovery) = self.recoveries.in_progress(self.lifecycle.generation) {
            recovery.met_at.get_or_insert(now);
        }
    }

    fn started(&mut self, now: Time, rank: Rank, source: &StateSource, progress: &Progress) {
        self.advance(Some(progress.step));
        self.lifecycle.began_at = Some(progress.step);
        if rank == Rank(0) {
            // Only rank 0's report counts: another rank's may arrive after the first step.
            self.results.reached = progress.step;
            // It was not used: its machine is gone, or it is damaged.
            self.results.local.take_if(|local| local.step > progress.step);
            if let StateSource::Checkpoint(Restored { commit: Some(commit), .. }) = source {
                let text = format!(
                    "checkpoint {} was saved before; the journal did not know it",
                    commit.name
                );
                self.record_commit(now, commit.clone(), text);
            }
            self.record_past_evaluations(progress);
            if let Some(recovery) = self.recoveries.in_progress(self.lifecycle.generation) {
                recovery.lost_steps = recovery.step_before.0.saturating_sub(progress.step.0);
            }
            self.actions.push(Action::AddPoint(MetricPoint::BeganAt(progress.step)));
            let text = job_event::describe_start(source, progress);
            self.lifecycle.began_with = Some(text.clone());
            self.publish_at(JobEventKind::TrainingStarted, Some(progress.step), text);
        }
        self.state_is_shared();
        if let Some(world) = self.lifecycle.world_mut() {
            world.set(rank, Member::Started);
        }
        self.train_when_all_started(now);
    }

    /// Records that all ranks have the state, as the first of them trains: they get it together, and the reports of the
    /// others may be late.
    fn state_is_shared(&mut self) {
        if let Some(world) = self.lifecycle.world().filter(|world| !world.has(MemberKind::Started))
        {
            let alive = world.members().filter(|(_, member)| **member != Member::Gone);
            alive.for_each(|(placement, _)| self.nodes.record_state(placement, true));
        }
    }

    fn stepped(&mut self, now: Time, report: StepReport) {
        self.state_is_shared();
        self.advance(Some(report.step));
        self.results.reached = report.step;
        self.lifecycle.note_step();
        self.finish_recovery(now);
        if is_recorded(self.spec.train.log_every, report.step) {
            self.actions.push(Action::AddPoint(MetricPoint::Step(report.clone())));
        }
        self.results.latest = Some(report);
        self.actions.extend(self.accounting.persist_if_due(now));
    }

    /// Ends the recovery in progress: at the first update, or where a pause comes before it.
    pub(super) fn finish_recovery(&mut self, now: Time) {
        let (generation, spent) = (self.lifecycle.generation, self.accounting.spent(now));
        // The rate before the recovery.
        let pace = self.results.latest.as_ref().and_then(StepReport::seconds_per_step);
        if let Some(recovery) = self.recoveries.finish(now, generation, spent, pace) {
            let text = job_event::describe_recovery(&recovery);
            self.actions.push(Action::Persist(Record::Recovery(recovery)));
            self.publish(JobEventKind::Recovered, text);
        }
    }

    /// Handles updates and evaluations of the time without a connection to the node of rank 0. It sends the last ones
    /// before that too.
    pub(super) fn reported_meanwhile(
        &mut self,
        now: Time,
        node: &NodeId,
        steps: Vec<StepReport>,
        evaluations: Vec<RankReport>,
    ) {
        if !self.lifecycle.world().is_some_and(|world| world.runs(node, Rank(0))) {
            return;
        }
        // After a rollback, the latest one is later than what training has reached. A coordinator that restarted knows
        // none.
        let known = self.results.latest.as_ref().map(|last| last.step.min(self.results.reached));
        let new_steps = steps.into_iter().filter(|report| known.is_none_or(|it| report.step > it));
        let is_evaluation = |report: &RankReport| matches!(report, RankReport::Evaluated { .. });
        let evaluations = evaluations.into_iter().filter(is_evaluation);
        for report in new_steps.map(RankReport::Stepped).chain(evaluations) {
            if is_plausible(&report) {
                self.rank_reported(now, Rank(0), report);
            }
        }
    }

    fn evaluated(&mut self, generation: Generation, epoch: Epoch, evaluation: EvaluationResult) {
        let (step, text) = (evaluation.step, job_event::describe_evaluation(epoch, &evaluation));
        self.results.record_evaluation(generation, evaluation.clone());
        self.actions.push(Action::Persist(Record::Evaluated {
            generation,
            evaluation: evaluation.clone(),
        }));
        self.actions.push(Action::AddPoint(MetricPoint::Evaluation(evaluation)));
        self.publish_at(JobEventKind::Evaluated, Some(step), text);
    }

    /// Records the evaluations before this position that are not known: the rank or the agent that should have reported one
    /// may have been lost before it did.
    pub(super) fn record_past_evaluations(&mut self, progress: &Progress) {
        for (epoch, evaluation) in EvaluationResult::all_of(progress) {
            if !self.results.has(&evaluation) {
                let current = self.lifecycle.generation;
                let by = self.results.generation_of(&evaluation, progress.step, current);
                self.evaluated(by, epoch, evaluation);
            }
        }
        let recorded = self.results.best.take();
        self.results.best.clone_from(&progress.best);
        let Some((step, accuracy)) = &progress.best else { return };
        let is_known = |known: &(Step, Accuracy)| {
            known.1.is_better_than(accuracy) || *known == (*step, accuracy.clone())
        };
        if !recorded.is_some_and(|recorded| is_known(&recorded)) {
            let (step, accuracy) = (*step, accuracy.clone());
            self.actions.push(Action::Persist(Record::Best { step, accuracy }));
        }
    }

    pub(super) fn saved(&mut self, now: Time, commit: Commit) {
        let text = job_event::describe_commit(&commit);
        self.record_commit(now, commit, text);
    }

    /// Records a checkpoint, unless it or a newer one is known already.
    pub(super) fn record_commit(&mut self, now: Time, commit: Commit, text: String) {
        if !self.results.is_new(&commit) {
            return;
        }
        self.actions.push(Action::Persist(Record::Saved(commit.clone())));
        self.actions.extend(self.accounting.persist(now));
        self.publish_at(JobEventKind::Saved, Some(commit.step), text);
        self.drain_advanced(now, commit.step, DrainStage::Durable);
        self.results.save_problem = None;
        self.results.record_commit(commit);
    }

    /// Records that the node of `rank` has completed its local checkpoint.
    fn saved_locally(&mut self, now: Time, rank: Rank, step: Step, seconds: f64) {
        let world = self.lifecycle.world();
        let Some(placement) = world.and_then(|world| world.placement_of(rank)) else { return };
        self.results.record_local(placement.node.clone(), step, seconds);
        self.drain_advanced(now, step, DrainStage::SavedLocally);
    }

    /// Stores the newest report of a rank's loader, and publishes an event when it skips samples.
    fn loader_reported(&mut self, now: Time, rank: Rank, report: LoaderReport) {
        let world = self.lifecycle.world_mut().filter(|world| !world.is_gone(rank));
        let Some(world) = world else { return };
        world.set_loader(rank, Some(report.clone()));
        let Some(placement) = world.placement_of(rank) else { return };
        if self.results.skips.count(placement, report.skipped) {
            let text = job_event::describe_skips(rank, &report);
            self.note(now, JobEventKind::SamplesSkipped, text);
        }
    }

    /// Stores a rank's heartbeat, and publishes an event if the rank delays the others.
    fn rank_heartbeat(&mut self, now: Time, rank: Rank, heartbeat: RankHeartbeat) {
        let world = self.lifecycle.world_mut().filter(|world| !world.is_gone(rank));
        let Some(world) = world else { return };
        if let Some(progress) = heartbeat.evaluation
            && let Some(seconds) = progress.total_seconds()
        {
            // Until the texts are written, the last evaluation is the best estimate.
            let at_least = self.results.evaluation_seconds.filter(|_| progress.total_texts > 0);
            self.results.evaluation_seconds = Some(seconds.max(at_least.unwrap_or(0.0)));
        }
        let Some(slowdown) = world.rank_heartbeats.record(now, rank, heartbeat) else { return };
        if let Some(placement) = world.placement_of(rank) {
            let text = job_event::describe_straggler(placement, heartbeat, slowdown);
            self.publish_at(JobEventKind::Straggler, Some(heartbeat.step), text);
        }
    }

    /// Records whether a rank's process holds state.
    pub(super) fn record_state(&mut self, rank: Rank, holds_state: bool) {
        if let Some(placement) = self.lifecycle.world().and_then(|world| world.placement_of(rank)) {
            self.nodes.record_state(placement, holds_state);
        }
    }

    // ---- losses ----

    fn exited(&mut self, now: Time, rank: Rank, failure: Failure) {
        let world = self.lifecycle.world();
        if world.is_some_and(|world| world.is_done(rank)) {
            return;
        }
        if let Some(placement) = world.and_then(|world| world.placement_of(rank)) {
            self.results.skips.remove(placement);
        }
        let message = format!("rank {rank}: {}", failure.message);
        self.publish(JobEventKind::RankFailed, message.clone());
        let failure = Failure { message, ..failure };
        if !failure.class.is_retriable() {
            return self.failed_for_good(now, rank, failure);
        }
        self.record_state(rank, false);
        self.lost(now, &[rank], Member::Gone, failure);
    }

    /// Handles ranks that lost their connection, or whose processes ended.
    pub(super) fn lost(&mut self, now: Time, ranks: &[Rank], state: Member, failure: Failure) {
        // Before `Meeting`, ranks are not connected to each other yet.
        if state == Member::Lost && matches!(self.lifecycle.phase, Phase::Forming { .. }) {
            return;
        }
        let Some(world) = self.lifecycle.world_mut() else { return };
        let death_was_known = world.has(MemberKind::Gone);
        let unfinished: Vec<Rank> =
            ranks.iter().copied().filter(|rank| !world.is_done(*rank)).collect();
        if unfinished.is_empty() {
            return;
        }
        for rank in unfinished {
            world.set(rank, state.clone());
        }
        if state == Member::Gone {
            self.nodes.count_failures(world, ranks);
        }
        let (until, lost_at, failure) = match &mut self.lifecycle.phase {
            Phase::Reattaching { lost_at, .. } => {
                lost_at.get_or_insert(now);
                return self.finish_reattaching(now);
            }
            Phase::Detecting { until, lost_at, failure: first, .. } => {
                let is_cause = state == Member::Gone && !death_was_known;
                (*until, *lost_at, if is_cause { failure } else { first.clone() })
            }
            _ => (now.after(self.policy.loss_window), now, failure),
        };
        let Some(world) = self.lifecycle.take_world() else { return };
        self.wait_for_losses(
            now,
            world,
            (until, lost_at),
            failure,
            "; waiting to learn which ranks were lost",
        );
    }

    // ---- divergences ----

    /// Where the state of a generation comes from: the job's rule, with all rollbacks and checkpoints so far.
    #[must_use]
    pub fn restore(&self) -> Restore {
        let origin = self.origin.restore.clone();
        let rollbacks = self.divergences.rollbacks().cloned().collect();
        let before = origin.invalidated.iter().chain(&origin.rollbacks).cloned();
        let ended = self.divergences.ends(&self.spec);
        let invalidated = before.chain(ended).collect();
        let restore = Restore { rollbacks, invalidated, ..origin };
        let commit = self.results.newest_valid_commit(&restore);
        let last_saved =
            commit.map(|commit| (commit.generation, commit.step)).or(restore.last_saved);
        Restore { last_saved, ..restore }
    }

    /// Handles the report of a rank of the current generation that training diverged.
    fn diverged(&mut self, now: Time, diagnosis: Diagnosis) {
        let generation = self.lifecycle.generation;
        // No rank trains before `Meeting`, and only the first of the ranks' equal reports counts.
        if matches!(self.lifecycle.phase, Phase::Forming { .. })
            || self.divergences.is_rollback_due(generation)
        {
            return;
        }
        let rollback = self.divergences.remedy(&diagnosis, &self.spec, generation.next());
        let max_rollbacks = self.spec.guard.max_rollbacks;
        let incident = Incident { generation, diagnosis, rollback };
        self.actions.push(Action::Persist(Record::Diverged(incident.clone())));
        self.record_incident(&incident);
        let (number, latest) = (self.divergences.incidents.len(), self.results.latest.clone());
        let written = WrittenDiagnosis::new(number, self.origin.job, &self.spec, &incident, latest);
        let rollbacks = self.divergences.rollbacks().count();
        let message =
            job_event::describe_divergence(&incident, rollbacks, max_rollbacks, &written.name());
        self.actions.push(Action::WriteDiagnosis(Box::new(written)));
        self.publish_at(JobEventKind::Diverged, Some(incident.diagnosis.step), message);
        match incident.rollback {
            Some(_) => self.begin_rollback(now, &incident.diagnosis),
            None => {
                self.end(now, self.divergences.end_of_job(&incident.diagnosis, &self.spec));
            }
        }
    }

    /// Records an incident, when it happens or when it is replayed.
    pub(super) fn record_incident(&mut self, incident: &Incident) {
        self.divergences.incidents.push(incident.clone());
        if let Some(Rollback { before, suspect_from, .. }) = incident.rollback {
            self.results.roll_back(suspect_from.unwrap_or(before));
        }
    }

    /// Ends the current generation for a rollback. As before any new generation, waits for nodes that are disconnected.
    fn begin_rollback(&mut self, now: Time, diagnosis: &Diagnosis) {
        let failure = crash(format!("rolling back: {}", diagnosis.divergence));
        let Some(world) = self.lifecycle.world_mut() else { return };
        world.mark_all_lost();
        if matches!(self.lifecycle.phase, Phase::Reattaching { .. }) {
            return self.finish_reattaching(now);
        }
        if let Some(world) = self.lifecycle.take_world() {
            self.wait_for_losses(now, world, (now, now), failure, "");
        }
    }
}
