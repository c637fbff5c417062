//! What must hold after every event, one sentence a file.

mod a_budget_ends_the_job;
mod a_drain_reaches_the_ranks;
mod attached_time_adds_up;
mod calm_needs_few_generations;
mod every_wait_has_a_reason;
mod no_node_is_left_behind;
mod no_step_is_lost;
mod nothing_condemned_goes_on;
mod nothing_runs_after_the_end;
mod one_generation_trains;
mod persist_comes_first;
mod ranks_are_a_permutation;
mod readers_see_no_step_back;
mod recoveries_add_up;
mod resume_from_a_commit;
mod rollbacks_are_bounded;
mod skipped_samples_add_up;
mod stale_changes_nothing;
mod the_deadline_is_kept;
mod the_end_is_saved;

use crate::{cluster::Cluster, fact::Fact};

/// A rule about the whole cluster; it may remember what it saw.
pub(crate) trait Invariant {
    /// The rule.
    fn sentence(&self) -> &'static str;

    /// Looks at one thing that happened in the event just past.
    ///
    /// # Errors
    /// How the rule is broken.
    fn check(&mut self, cluster: &Cluster, fact: &Fact) -> Result<(), String>;
}

/// Fresh ones, for a new history.
pub(crate) fn all() -> Vec<Box<dyn Invariant>> {
    vec![
        Box::new(ranks_are_a_permutation::RanksAreAPermutation),
        Box::new(one_generation_trains::OneGenerationTrains::default()),
        Box::new(resume_from_a_commit::ResumeFromACommit),
        Box::new(no_step_is_lost::NoStepIsLost),
        Box::new(nothing_condemned_goes_on::NothingCondemnedGoesOn),
        Box::new(rollbacks_are_bounded::RollbacksAreBounded::default()),
        Box::new(a_budget_ends_the_job::ABudgetEndsTheJob::default()),
        Box::new(attached_time_adds_up::AttachedTimeAddsUp::default()),
        Box::new(no_node_is_left_behind::NoNodeIsLeftBehind::default()),
        Box::new(stale_changes_nothing::StaleChangesNothing::default()),
        Box::new(every_wait_has_a_reason::EveryWaitHasAReason::default()),
        Box::new(persist_comes_first::PersistComesFirst::default()),
        Box::new(the_end_is_saved::TheEndIsSaved::default()),
        Box::new(readers_see_no_step_back::ReadersSeeNoStepBack::default()),
        Box::new(a_drain_reaches_the_ranks::ADrainReachesTheRanks),
        Box::new(calm_needs_few_generations::CalmNeedsFewGenerations::default()),
        Box::new(skipped_samples_add_up::SkippedSamplesAddUp),
        Box::new(recoveries_add_up::RecoveriesAddUp),
        Box::new(the_deadline_is_kept::TheDeadlineIsKept),
        Box::new(nothing_runs_after_the_end::NothingRunsAfterTheEnd),
    ]
}
