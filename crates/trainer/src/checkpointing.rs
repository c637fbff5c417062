//! Decides when a checkpoint is started, advanced and waited for. All ranks call these functions after the same update.

use baton_checkpoint::SaveId;
use baton_job::{
    Rank,
    message::{Commit, RankReport, SaveProblem},
};

use crate::{Error, GenerationContext, Learner, Trainer, controls::Votes};

impl<L: Learner> Trainer<L> {
    /// Advances the checkpoint that is being written, and starts one that a user asked for.
    pub(crate) fn drive_checkpoint(
        &mut self,
        votes: Votes,
        context: &mut GenerationContext<'_>,
    ) -> Result<(), Error> {
        if !votes.writing
            && let Some(written) = self.saver.advance(&self.job, context.collective)?
        {
            // A failure is reported and training continues: the next checkpoint may succeed.
            let _ = self.note_written(written, context);
            if self.saver.take_request() {
                self.begin_writing(context);
            }
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
            if context.collective.rank() == Rank(0) {
                let step = self.position.progress.step;
                (context.report)(RankReport::SaveWaits { step, behind, seconds });
            }
            // A failure is reported and training continues: the next checkpoint may succeed.
            let _ = self.finish_writing(context)?;
        }
        self.begin_writing(context);
        Ok(())
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
        let id = SaveId { generation: context.generation, step: progress.step };
        let (learner, restore) = (&mut self.learner, context.restore);
        self.saver.start(learner, progress, id, restore, &self.job, &*context.collective);
    }

    /// Waits for the checkpoint that is being written, if any. Does not start one that was requested meanwhile. The
    /// inner result is that of the checkpoint.
    pub(crate) fn finish_writing(
        &mut self,
        context: &mut GenerationContext<'_>,
    ) -> Result<Result<(), SaveProblem>, Error> {
        let written = self.saver.finish(&self.job, context.collective)?;
        Ok(written.map_or(Ok(()), |written| self.note_written(written, context)))
    }

    fn note_written(
        &mut self,
        written: Result<Commit, SaveProblem>,
        context: &mut GenerationContext<'_>,
    ) -> Result<(), SaveProblem> {
        if let Ok(commit) = &written {
            self.position.durable = Some(commit.step);
        }
        if context.collective.rank() == Rank(0) {
            (context.report)(match &written {
                Ok(commit) => RankReport::Saved(commit.clone()),
                Err(problem) => RankReport::SaveFailed(problem.clone()),
            });
        }
        written.map(|_| ())
    }

    /// Saves the current state, unless a checkpoint of it is committed already.
    pub(crate) fn ensure_saved(
        &mut self,
        context: &mut GenerationContext<'_>,
    ) -> Result<(), Error> {
        let _ = self.finish_writing(context)?;
        if self.position.durable == Some(self.position.progress.step) {
            return Ok(());
        }
        self.begin_writing(context);
        if context.collective.rank() == Rank(0) {
            (context.report)(RankReport::Copied { step: self.position.progress.step });
        }
        self.finish_writing(context)?.map_err(|problem| Error::LastSave(problem.message))
    }
}
