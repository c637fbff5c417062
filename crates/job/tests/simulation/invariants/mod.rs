//! Invariants that must hold after every event, one in each file.

mod a_budget_ends_the_job;
mod a_drain_reaches_the_ranks;
mod attached_time_adds_up;
mod calm_needs_few_generations;
mod every_wait_has_a_reason;
mod final_state_is_saved;
mod kept_deadline_is_correct;
mod newest_checkpoint_never_goes_back;
mod no_invalidated_state_is_used;
mod no_node_is_left_behind;
mod no_step_is_lost;
mod nothing_runs_after_the_end;
mod only_one_generation_trains;
mod persist_comes_first;
mod ranks_are_a_permutation;
mod recoveries_add_up;
mod resume_from_a_commit;
mod rollbacks_are_bounded;
mod skipped_samples_add_up;
mod stale_changes_nothing;

use crate::{cluster::Cluster, fact::Fact};

/// A rule about the whole cluster; it may keep state from earlier events.
pub(crate) trait Invariant {
    /// The rule.
    fn sentence(&self) -> &'static str;

    /// Checks one fact of the last event.
    ///
    /// # Errors
    /// How the rule was violated.
    fn check(&mut self, cluster: &Cluster, fact: &Fact) -> Result<(), String>;
}

/// All invariants, for a new history.
pub(crate) fn all() -> Vec<Box<dyn Invariant>> {
    vec![
        Box::new(ranks_are_a_permutation::RanksAreAPermutation),
        Box::new(only_one_generation_trains::OnlyOneGenerationTrains::default()),
        Box::new(resume_from_a_commit::ResumeFromACommit),
        Box::new(no_step_is_lost::NoStepIsLost),
        Box::new(no_invalidated_state_is_used::NoInvalidatedStateIsUsed),
        Box::new(rollbacks_are_bounded::RollbacksAreBounded::default()),
        Box::new(a_budget_ends_the_job::ABudgetEndsTheJob::default()),
        Box::new(attached_time_adds_up::AttachedTimeAddsUp::default()),
        Box::new(no_node_is_left_behind::NoNodeIsLeftBehind::default()),
        Box::new(stale_changes_nothing::StaleChangesNothing::default()),
        Box::new(every_wait_has_a_reason::EveryWaitHasAReason::default()),
        Box::new(persist_comes_first::PersistComesFirst::default()),
        Box::new(final_state_is_saved::FinalStateIsSaved::default()),
        Box::new(newest_checkpoint_never_goes_back::NewestCheckpointNeverGoesBack::default()),
        Box::new(a_drain_reaches_the_ranks::ADrainReachesTheRanks),
        Box::new(calm_needs_few_generations::CalmNeedsFewGenerations::default()),
        Box::new(skipped_samples_add_up::SkippedSamplesAddUp),
        Box::new(recoveries_add_up::RecoveriesAddUp),
        Box::new(kept_deadline_is_correct::KeptDeadlineIsCorrect),
        Box::new(nothing_runs_after_the_end::NothingRunsAfterTheEnd),
    ]
}
