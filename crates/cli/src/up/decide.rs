//! Decides what to do when a child ends while the job has not ended. Pure functions.

use std::time::Duration;

use baton_job::exit::{BAD_INPUT, DRAINED, LIMIT_REACHED};

use super::feed::ChildKind;
use crate::supervise::Exit;

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NextAction {
    /// Start the child again.
    Restart,
    /// Fail with the child's error: a restart would not help.
    Fail,
    /// The job is saved and stopped; no status has reported this.
    Drained,
    /// The job is saved and stopped because a budget is used up.
    LimitReached,
}

/// How long a coordinator may be silent while the job should save and stop; then the agent saves without it.
pub(super) const DRAIN_ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Whether to end a coordinator that has been silent for this time while the job should save and stop. One that does
/// not run is being restarted, and has twice the time: on a full disk it ends again and again.
pub(super) fn ends_silent_coordinator(silence: Duration, is_running: bool) -> bool {
    silence >= DRAIN_ANSWER_TIMEOUT * if is_running { 1 } else { 2 }
}

/// Exit code of the dynamic loader if it cannot find a library; it has printed which one.
pub(crate) const LIBRARY_MISSING: i32 = 127;

/// The action after the end of the coordinator, which had served, or of the agent.
///
/// A coordinator is restarted even after exit code 0, which means that someone ended this process alone, and after bad
/// input: it had served with the same input before, and the ranks, which train on without it, may hold state that is
/// nowhere else. An agent's
/// exit code 75 means that its machine will be interrupted, or that a user asked the agent to leave. The coordinator is
/// on the same machine, so the whole job saves and stops.
pub(super) fn after(child: ChildKind, exit: Exit) -> NextAction {
    match exit {
        Exit::Code(LIBRARY_MISSING) if child == ChildKind::Agent => NextAction::Fail,
        Exit::Code(code) if code == i32::from(BAD_INPUT) && child == ChildKind::Agent => {
            NextAction::Fail
        }
        Exit::Code(code) if code == i32::from(DRAINED) => NextAction::Drained,
        Exit::Code(code) if code == i32::from(LIMIT_REACHED) => NextAction::LimitReached,
        Exit::Code(_) | Exit::Signal(_) => NextAction::Restart,
    }
}

/// Silence of a coordinator after which another one may have taken over, at the earliest.
const REPLACEMENT_SILENCE: Duration = Duration::from_secs(4);

/// Whether another coordinator may have taken over, as the store then says: from one that says so, or that was silent for
/// this time, such as one whose disk is full and which ends again and again.
pub(super) fn may_be_replaced(child: ChildKind, exit: Exit, silence: Duration) -> bool {
    let says_so = exit == Exit::Code(i32::from(BAD_INPUT));
    child == ChildKind::Coordinator && (says_so || silence >= REPLACEMENT_SILENCE)
}

/// Whether the job goes on with the coordinator that has taken over: whether it has answered that the job has ended, or
/// not answered, and whether another one takes over from it in turn.
pub(super) fn goes_on_elsewhere(has_ended: Option<bool>, is_replaced: bool) -> bool {
    has_ended.map_or(is_replaced, |has_ended| !has_ended)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: [ChildKind; 2] = [ChildKind::Coordinator, ChildKind::Agent];

    #[test]
    fn killed_and_crashed_children_are_restarted() {
        for exit in
            [Exit::Signal(9), Exit::Signal(15), Exit::Code(1), Exit::Code(101), Exit::Code(0)]
        {
            assert_eq!(BOTH.map(|child| after(child, exit)), [NextAction::Restart; 2]);
        }
    }

    #[test]
    fn bad_input_of_the_agent_is_never_retried() {
        assert_eq!(after(ChildKind::Agent, Exit::Code(2)), NextAction::Fail);
        assert_eq!(
            after(ChildKind::Agent, Exit::Code(127)),
            NextAction::Fail,
            "libtorch is missing"
        );
    }

    #[test]
    fn a_silent_coordinator_is_ended_later_if_it_is_being_restarted() {
        let almost = DRAIN_ANSWER_TIMEOUT - Duration::from_millis(1);
        assert!(!ends_silent_coordinator(almost, true));
        assert!(ends_silent_coordinator(DRAIN_ANSWER_TIMEOUT, true));
        assert!(!ends_silent_coordinator(DRAIN_ANSWER_TIMEOUT, false));
        assert!(ends_silent_coordinator(2 * DRAIN_ANSWER_TIMEOUT, false));
    }

    #[test]
    fn a_coordinator_that_had_served_is_restarted_after_bad_input() {
        assert_eq!(after(ChildKind::Coordinator, Exit::Code(2)), NextAction::Restart);
    }

    #[test]
    fn a_coordinator_that_has_ended_or_will_never_answer_is_not_followed() {
        let may_be =
            |child, exit, seconds| may_be_replaced(child, exit, Duration::from_secs(seconds));
        assert!(may_be(ChildKind::Coordinator, Exit::Code(2), 0));
        assert!(!may_be(ChildKind::Agent, Exit::Code(2), 9));
        assert!(!may_be(ChildKind::Coordinator, Exit::Signal(9), 3));
        assert!(may_be(ChildKind::Coordinator, Exit::Code(1), 4), "its disk may be full");
        for is_replaced in [true, false] {
            assert!(goes_on_elsewhere(Some(false), is_replaced));
            assert!(!goes_on_elsewhere(Some(true), is_replaced));
            assert_eq!(goes_on_elsewhere(None, is_replaced), is_replaced);
        }
    }

    #[test]
    fn an_end_that_no_status_reported_counts() {
        assert_eq!(BOTH.map(|child| after(child, Exit::Code(75))), [NextAction::Drained; 2]);
        assert_eq!(BOTH.map(|child| after(child, Exit::Code(4))), [NextAction::LimitReached; 2]);
    }
}
