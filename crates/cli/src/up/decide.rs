//! What the end of a child means while the end of the job is not known. Pure.

use baton_job::exit::{BAD_INPUT, DRAINED, LIMIT_REACHED};

use crate::supervise::Exit;

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Start it again.
    Restart,
    /// It cannot do what it was started for: give up and say why.
    GiveUp,
    /// The job is saved and stopped, and nobody was told.
    Drained,
    /// The same, because a budget is used up.
    LimitReached,
}

/// The coordinator ended. Before it has served, it found something wrong; later it is missed: exit
/// code 0 then means that somebody told this process alone to quit.
pub(super) fn after_coordinator(exit: Exit, has_served: bool) -> Next {
    match exit {
        _ if !has_served => Next::GiveUp,
        Exit::Code(code) if code == i32::from(BAD_INPUT) => Next::GiveUp,
        Exit::Code(code) if code == i32::from(DRAINED) => Next::Drained,
        Exit::Code(code) if code == i32::from(LIMIT_REACHED) => Next::LimitReached,
        Exit::Code(_) | Exit::Signal(_) => Next::Restart,
    }
}

/// What the dynamic loader exits with when it does not find a library. It has said which.
pub(crate) const NOT_LOADED: i32 = 127;

/// The agent ended. Exit code 75 means that its machine is taken away, or that a user told it to go. The
/// coordinator stands on the same machine, and so the whole job saves and stops.
pub(super) fn after_agent(exit: Exit) -> Next {
    match exit {
        Exit::Code(NOT_LOADED) => Next::GiveUp,
        Exit::Code(code) if code == i32::from(BAD_INPUT) => Next::GiveUp,
        Exit::Code(code) if code == i32::from(DRAINED) => Next::Drained,
        Exit::Code(code) if code == i32::from(LIMIT_REACHED) => Next::LimitReached,
        Exit::Code(_) | Exit::Signal(_) => Next::Restart,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_coordinator_that_never_served_is_not_tried_again() {
        for exit in [Exit::Code(0), Exit::Code(1), Exit::Code(2), Exit::Signal(9)] {
            assert_eq!(after_coordinator(exit, false), Next::GiveUp);
        }
    }

    #[test]
    fn killed_and_crashed_children_are_started_again() {
        for exit in
            [Exit::Signal(9), Exit::Signal(15), Exit::Code(1), Exit::Code(101), Exit::Code(0)]
        {
            assert_eq!(after_coordinator(exit, true), Next::Restart);
            assert_eq!(after_agent(exit), Next::Restart);
        }
    }

    #[test]
    fn bad_input_is_never_tried_again() {
        assert_eq!(after_coordinator(Exit::Code(2), true), Next::GiveUp);
        assert_eq!(after_agent(Exit::Code(2)), Next::GiveUp);
        assert_eq!(after_agent(Exit::Code(127)), Next::GiveUp, "libtorch is missing");
    }

    #[test]
    fn an_end_that_nobody_heard_of_counts() {
        assert_eq!(after_coordinator(Exit::Code(75), true), Next::Drained);
        assert_eq!(after_agent(Exit::Code(75)), Next::Drained);
        assert_eq!(after_coordinator(Exit::Code(4), true), Next::LimitReached);
        assert_eq!(after_agent(Exit::Code(4)), Next::LimitReached);
    }
}
