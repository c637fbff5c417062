//! Decides when a checkpoint is started, advanced and waited for. All ranks call these functions after the same update.

use std::{
    thread,
    time::{Duration, Instant},
};

use baton_checkpoint::SaveId;
use baton_job::{
    Rank,
    message::{Activity, Commit, RankReport, SaveProblem},
};

use crate::{
    Error, GenerationContext, Learner, Trainer, agree::gather, controls::Votes,
    local_saves::LOCAL_TIMEOUT,
};

/// Time between two looks at a local checkpoint that is being written.
const LOCAL_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Pauses before the last save is tried again, the last of them again and again.
pub(crate) const LAST_SAVE_PAUSES: [Duration; 4] = [
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(4),
    Duration::from_secs(8),
];

impl<L: Learner> Trainer<L> {
    /// Advances the checkpoint that is being written, and starts one that a user asked for.
    pub(crate) fn drive_checkpoint(
        &mut self,
        votes: Votes,
        context: &mut GenerationContext<'_>,
    ) -> Result<(), Error> {
        self.saver.continue_removal(&self.job.store);
        if !votes.writing
            && let Some(written) = self.saver.advance(&self.job, context.collective)?
        {
            // A failure is reported and training continues: the next checkpoint may succeed.
            let _ = self.note_written(written, context);
        }
        if !self.saver.is_active() && self.saver.take_request() {
            self.begin_writing(context);
        }
        if votes.save && self.position.progress.saved != Some(self.position.progress.step) {
            self.save_when_possible(context);
        }
        Ok(())
    }

    /// Starts a checkpoint that the recipe asks for, after the previous one is written. None is skipped: a rollback
    /// restores the newest checkpoint, which must not depend on the speed of the store.
    pub(crate) fn save_when_due(
        &mut self,
        context: &mut GenerationContext<'_>,
    ) -> Result<(), Error> {
        if let Some((behind, seconds)) = self.saver.active_save() {
            let step = self.position.progress.step;
            if context.collective.rank() == Rank(0) {
                (context.report)(RankReport::SaveWaits { step, behind, seconds });
            }
            // The store may be away, and nobody hears of a notice meanwhile.
            self.save_locally(context);
            self.wait_for_local(context);
        }
        // A failure is reported and training continues: the next checkpoint may succeed.
        let _ = self.finish_writing(context)?;
        self.begin_writing(context);
        Ok(())
    }

    /// Waits for the local checkpoint while this rank's part of one for the store is being written, and up to 2 s longer: the
    /// rank may wait for the others' parts next, and can report nothing then.
    fn wait_for_local(&mut self, context: &mut GenerationContext<'_>) {
        let mut until = Instant::now() + LOCAL_TIMEOUT;
        while self.local.is_active() && Instant::now() < until {
            if self.saver.is_busy() {
                until = Instant::now() + LOCAL_TIMEOUT;
            }
            self.local.collect(LOCAL_POLL_INTERVAL, context.report);
        }
        self.local.collect(Duration::ZERO, context.report);
    }

    /// Starts a checkpoint now, or as soon as the one that is being written is done.
    pub(crate) fn save_when_possible(&mut self, context: &GenerationContext<'_>) {
        if self.saver.is_active() {
            self.saver.request_another();
        } else {
            self.begin_writing(context);
        }
    }

    fn begin_writing(&mut self, context: &GenerationContext<'_>) {
        let progress = &mut self.position.progress;
        // A failed attempt counts as saved too; otherwise a full disk would cause endless attempts.
        progress.saved = Some(progress.step);
        let generation = self.saves_as.unwrap_or(context.generation);
        let id = SaveId { generation, step: progress.step };
        let (learner, restore) = (&mut self.learner, context.restore);
        self.saver.start(learner, progress, id, restore, &self.job, &*context.collective);
    }

    /// Batches were skipped: a checkpoint of the same step that an earlier generation has saved is from before them, and does not
    /// count. A generation saves a step only once.
    pub(crate) fn position_has_moved(&mut self, context: &GenerationContext<'_>) {
        let generation = self.saves_as.unwrap_or(context.generation);
        let id = SaveId { generation, step: self.position.progress.step };
        let is_being_written = self.saver.active_save().is_some_and(|(step, _)| step == id.step);
        if !is_being_written && self.position.durable != Some(id) {
            (self.position.progress.saved, self.position.durable) = (None, None);
        }
    }

    /// Waits for the checkpoint that is being written, if any. Does not start one that was requested meanwhile. The
    /// inner result is that of the checkpoint.
    pub(crate) fn finish_writing(
        &mut self,
        context: &mut GenerationContext<'_>,
    ) -> Result<Result<(), SaveProblem>, Error> {
        let written = self.saver.finish(&self.job, context.collective)?;
        let result = written.map_or(Ok(()), |written| self.note_written(written, context));
        // An evaluation may follow the commit.
        self.saver.finish(&self.job, context.collective)?;
        Ok(result)
    }

    /// Saves the state once, if this rank has one that is not saved, as well as it can be after a failure.
    pub(crate) fn try_to_save(&mut self, context: &mut GenerationContext<'_>) {
        if self.step().is_none() {
            return;
        }
        let _ = self.finish_writing(context);
        if self.step() != self.position.durable_step() {
            self.begin_writing(context);
            let _ = self.finish_writing(context);
        }
    }

    /// Adds the last evaluation to the checkpoint of the same state, now or when that checkpoint is committed.
    pub(crate) fn add_evaluation(&mut self, context: &GenerationContext<'_>) {
        let progress = &self.position.progress;
        if progress.evaluated_at == Some(progress.step) && progress.saved == Some(progress.step) {
            self.saver.note_evaluation(progress.clone());
            self.begin_adding_evaluation(context);
        }
    }

    fn begin_adding_evaluation(&mut self, context: &GenerationContext<'_>) {
        if let Some(durable) = self.position.durable {
            let generation = self.saves_as.unwrap_or(context.generation);
            let restore = context.restore;
            let rank = context.collective.rank();
            self.saver.add_evaluation(durable, (generation, restore), &self.job, rank);
        }
    }

    /// Whether the ranks may save their last state as the generation after theirs, although it has been claimed: the job's
    /// coordinator has claimed it, and was lost before the ranks learned it. `baton_checkpoint`'s module `fence` explains why that
    /// is safe.
    pub(crate) fn may_save_as_next(
        &self,
        problem: &SaveProblem,
        context: &mut GenerationContext<'_>,
    ) -> Result<bool, Error> {
        let next = context.generation.next();
        if problem.fence != Some(next) {
            return Ok(false);
        }
        let is_of_job = || {
            let claimant = self.job.store.claimant(next).ok().flatten();
            claimant.is_some_and(|claimant| claimant.job == self.job.id)
        };
        // The others of a rank that saves alone may have diverged, and then the next generation is a rollback.
        let mine = context.controls.has_lost_coordinator()
            && !context.controls.saves_alone()
            && (context.collective.rank() != Rank(0) || is_of_job());
        let all: Vec<bool> = gather(context.collective, &mine)?;
        Ok(all.into_iter().all(|may| may))
    }

    /// Whether other ranks, which had no coordinator or save alone, have committed the checkpoint of this state: it has the
    /// same bits.
    fn is_saved_by_others(
        &mut self,
        problem: &SaveProblem,
        context: &mut GenerationContext<'_>,
    ) -> Result<bool, Error> {
        // It is the same on all ranks.
        if !problem.exists {
            return Ok(false);
        }
        let generation = self.saves_as.unwrap_or(context.generation);
        let id = SaveId { generation, step: self.position.progress.step };
        let found = (context.collective.rank() == Rank(0)).then(|| {
            let manifest = self.job.store.manifest(&id.name()).ok();
            manifest.filter(|manifest| manifest.job == self.job.id).map(|it| it.to_commit())
        });
        let all: Vec<Option<Commit>> = gather(context.collective, &found.flatten())?;
        let Some(commit) = all.into_iter().next().flatten() else { return Ok(false) };
        let _ = self.note_written(Ok(commit), context);
        Ok(true)
    }

    fn note_written(
        &mut self,
        written: Result<Commit, SaveProblem>,
        context: &mut GenerationContext<'_>,
    ) -> Result<(), SaveProblem> {
        if let Ok(commit) = &written {
            self.position.durable =
                Some(SaveId { generation: commit.generation, step: commit.step });
            self.begin_adding_evaluation(context);
        }
        if let Err(problem) = &written {
            tracing::warn!("no checkpoint: {}", problem.message);
        }
        if context.collective.rank() == Rank(0) {
            (context.report)(match &written {
                Ok(commit) => RankReport::Saved(commit.clone()),
                Err(problem) => RankReport::SaveFailed(problem.clone()),
            });
        }
        written.map(|_| ())
    }

    /// Saves the current state, unless a checkpoint of it is committed already. If it cannot be written, all ranks try
    /// again until it can: a full disk is cleaned up and a bucket comes back, but the state would be gone. A drain has a
    /// deadline of its own, and a user can stop the job. If the store expects a newer generation, the coordinator is about to
    /// open it with these ranks and their state, or ends them.
    ///
    /// # Errors
    /// The other ranks are lost, or a newer generation begins: the state is kept.
    pub(crate) fn ensure_saved(
        &mut self,
        context: &mut GenerationContext<'_>,
    ) -> Result<(), Error> {
        let step = self.position.progress.step;
        let being_written = self.saver.active_save().map(|(step, _)| step);
        let is_copied = [being_written, self.position.durable_step()].contains(&Some(step));
        let report_copied = |context: &mut GenerationContext<'_>| {
            if context.collective.rank() == Rank(0) {
                (context.report)(RankReport::Copied { step });
            }
        };
        if is_copied {
            report_copied(context);
        }
        let is_waiting = self.saver.is_active();
        if is_waiting {
            // The store may be slow, or away.
            self.save_locally(context);
            self.wait_for_local(context);
        }
        let _ = self.finish_writing(context)?;
        if self.position.durable_step() == Some(step) {
            return Ok(());
        }
        // Another rank of this machine that saves alone may have been first.
        let exists = SaveProblem { exists: true, ..SaveProblem::default() };
        if context.controls.saves_alone() && self.is_saved_by_others(&exists, context)? {
            return Ok(());
        }
        let [.., longest] = self.last_save_pauses;
        let mut pauses = self.last_save_pauses.into_iter();
        let mut is_first = true;
        loop {
            // Each attempt counts from its own start, or the rank would seem to hang.
            context.controls.activity().set(Activity::Saving);
            self.begin_writing(context);
            if std::mem::take(&mut is_first) {
                if !is_copied {
                    report_copied(context);
                }
                self.save_locally(context);
            }
            self.wait_for_local(context);
            let Err(problem) = self.finish_writing(context)? else { return Ok(()) };
            if self.is_saved_by_others(&problem, context)? {
                return Ok(());
            }
            if self.saves_as.is_none() && self.may_save_as_next(&problem, context)? {
                self.saves_as = Some(context.generation.next());
                continue;
            }
            thread::sleep(pauses.next().unwrap_or(longest));
        }
    }
}
