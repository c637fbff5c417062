//! What follows when the `baton up` of a trial has ended. Pure functions.

use baton_job::exit;

use super::record::SavedEnd;
use crate::supervise::Exit;

/// What follows from the end of a trial's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AfterTrial {
    /// It has a result.
    Result,
    /// It has none, and another try would end the same way.
    Diverged,
    /// It has saved and stopped, as this sweep asked for.
    Saved,
    /// This sweep asked it to stop, and its state since the last checkpoint is lost.
    NotSaved,
    /// It has saved and stopped because its machine will be taken away, or a user wants it: so do the others.
    StopsAll,
    /// Its input is bad, as that of other trials may be: no further trial is started.
    BadInput,
    /// A user has stopped it: it is tried again at the next start.
    StoppedByUser,
    /// It says that it has ended, but its report could not be written.
    WithoutReport,
    /// It has failed: it is tried again at the next start.
    Failed,
}

/// What follows from `exit`, with the `end` that the run folder has, of a trial that was asked to stop or not.
pub(super) fn after(exit: Exit, end: &SavedEnd, is_stopping: bool) -> AfterTrial {
    let code = match exit {
        Exit::Code(code) => u8::try_from(code).unwrap_or(exit::FAILED),
        Exit::Signal(_) => exit::FAILED,
    };
    match (code, end) {
        (_, SavedEnd::Diverged(_)) => AfterTrial::Diverged,
        (exit::OK | exit::LIMIT_REACHED, SavedEnd::Open) => AfterTrial::WithoutReport,
        (exit::OK | exit::LIMIT_REACHED, _) => AfterTrial::Result,
        (exit::DRAINED, _) if is_stopping => AfterTrial::Saved,
        (exit::DRAINED, _) => AfterTrial::StopsAll,
        (exit::BAD_INPUT, _) => AfterTrial::BadInput,
        _ if is_stopping => AfterTrial::NotSaved,
        (exit::STOPPED, _) => AfterTrial::StoppedByUser,
        _ => AfterTrial::Failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPEN: SavedEnd = SavedEnd::Open;

    #[test]
    fn a_trial_has_a_result_only_if_its_run_folder_has() {
        let limit = SavedEnd::LimitReached(String::new());
        assert_eq!(after(Exit::Code(0), &SavedEnd::Completed, false), AfterTrial::Result);
        assert_eq!(after(Exit::Code(4), &limit, false), AfterTrial::Result);
        // Or it would be started without end.
        assert_eq!(after(Exit::Code(0), &OPEN, false), AfterTrial::WithoutReport);
        let diverged = SavedEnd::Diverged(String::new());
        assert_eq!(after(Exit::Code(2), &diverged, false), AfterTrial::Diverged);
    }

    #[test]
    fn a_trial_that_others_let_save_ends_the_sweep_and_one_that_was_asked_does_not() {
        assert_eq!(after(Exit::Code(75), &OPEN, false), AfterTrial::StopsAll);
        assert_eq!(after(Exit::Code(75), &OPEN, true), AfterTrial::Saved);
        assert_eq!(after(Exit::Code(130), &OPEN, true), AfterTrial::NotSaved);
        assert_eq!(after(Exit::Signal(9), &OPEN, true), AfterTrial::NotSaved);
    }

    #[test]
    fn only_bad_input_ends_the_sweep_for_good() {
        assert_eq!(after(Exit::Code(2), &OPEN, false), AfterTrial::BadInput);
        assert_eq!(after(Exit::Code(3), &OPEN, false), AfterTrial::StoppedByUser);
        for exit in [Exit::Code(1), Exit::Code(101), Exit::Code(-1), Exit::Signal(9)] {
            assert_eq!(after(exit, &OPEN, false), AfterTrial::Failed);
        }
    }
}
