//! When checkpoints are begun, carried on and waited for. All ranks call these functions after the same update.

use baton_checkpoint::SaveId;
use baton_job::{
    Rank,
    message::{Commit, RankNews, SaveProblem},
};

use crate::{Error, GenerationContext, Learner, Trainer, controls::Votes};

impl<L: Learner> Trainer<L> {
    /// Carries on the checkpoint that is being written, and begins one that a user asked for.
    pub(crate) fn drive_checkpoint(
        &mut self,
        votes: Votes,
        context: &mut GenerationContext<'_>,
    ) -> Result<(), Error> {
        if !votes.writing
            && let Some(written) = self.saver.advance(&self.job, context.collective)?
        {
            // A failure is reported, and training goes on: the next one may fit again.
            let _ = self.note_written(written, context);
            if self.saver.take_wish() {
                self.begin_writing(context);
            }
        }
        if votes.save && self.position.progress.saved != Some(self.position.progress.step) {
            self.save_when_possible(context);
        }
        Ok(())
    }

    /// Begins a checkpoint that the recipe asks for, once the one before it is written. None is left out:
    /// a rollback goes to the newest, which has to be the same however fast the store is.
    pub(crate) fn save_when_due(
        &mut self,
        context: &mut GenerationContext<'_>,
    ) -> Result<(), Error> {
        if let Some((behind, seconds)) = self.saver.at_work_on() {
            if context.collective.rank() == Rank(0) {
                let step = self.position.progress.step;
                (context.report)(RankNews::SaveWaits { step, behind, seconds });
            }
            // A failure is reported, and training goes on: the next one may fit again.
            let _ = self.finish_writing(context)?;
        }
        self.begin_writing(context);
        Ok(())
    }

    /// Begins a checkpoint now, or once the one that is being written is done.
    pub(crate) fn save_when_possible(&mut self, context: &GenerationContext<'_>) {
        if self.saver.is_at_work() {
            self.saver.want_another();
        } else {
            self.begin_writing(context);
        }
    }

    fn begin_writing(&mut self, context: &GenerationContext<'_>) {
        let progress = &mut self.position.progress;
        // A failed try counts as saved too, else a full disk would make it try for ever.
        progress.saved = Some(progress.step);
        let id = SaveId { generation: context.generation, step: progress.step };
        let (learner, restore) = (&mut self.learner, context.restore);
        self.saver.start(learner, progress, id, restore, &self.job, &*context.collective);
    }

    /// Waits for the checkpoint that is being written; for no other.
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
                Ok(commit) => RankNews::Saved(commit.clone()),
                Err(problem) => RankNews::SaveFailed(problem.clone()),
            });
        }
        written.map(|_| ())
    }

    /// Makes sure that leaving now loses nothing.
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
            (context.report)(RankNews::Copied { step: self.position.progress.step });
        }
        self.finish_writing(context)?.map_err(|problem| Error::LastSave(problem.message))
    }
}
