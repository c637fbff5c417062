//! Decides what each trial of a sweep does next, from what all of them have reached. Pure functions: after any kill, the
//! same results give the same decisions.
//!
//! Successive halving: Jamieson & Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization",
//! AISTATS 2016, algorithm 1, with given comparisons in place of a budget.

/// When trials are compared, and how many go on.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Halving {
    /// Numbers of evaluations after which all are compared, in increasing order.
    pub(super) after: Vec<usize>,
    /// Share of the configurations that go on, above 0 and below 1.
    pub(super) keep: f64,
}

/// What a trial has reached.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Reached {
    /// Number of its configuration: trials that differ in their seeds only have the same one.
    pub(super) configuration: usize,
    /// The score of each evaluation, in order; more is better.
    pub(super) scores: Vec<f64>,
    /// Whether it has ended.
    pub(super) end: Option<TrialEnd>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TrialEnd {
    /// It has a result.
    Finished,
    /// It has none: it diverged, or failed.
    Failed,
}

/// What a trial does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    /// Trains until it has made so many evaluations, or to its end.
    Train { until: Option<usize> },
    /// Waits until others can be compared with it.
    Wait,
    /// Is not continued: others were better after so many evaluations.
    Dropped { after: usize },
    /// Has ended.
    Ended,
}

impl Halving {
    /// What each trial does next.
    pub(super) fn decide(&self, trials: &[Reached]) -> Vec<Decision> {
        let mut dropped: Vec<Option<usize>> = vec![None; trials.len()];
        for &after in &self.after {
            let is_in = |number: usize| dropped[number].is_none();
            let is_there = |trial: &Reached| trial.end.is_some() || trial.scores.len() >= after;
            if (0..trials.len()).any(|number| is_in(number) && !is_there(&trials[number])) {
                return (0..trials.len())
                    .map(|number| match dropped[number] {
                        Some(after) => Decision::Dropped { after },
                        None if trials[number].end.is_some() => Decision::Ended,
                        None if is_there(&trials[number]) => Decision::Wait,
                        None => Decision::Train { until: Some(after) },
                    })
                    .collect();
            }
            let better = self.better_configurations(trials, &dropped, after);
            for (trial, dropped) in trials.iter().zip(&mut dropped) {
                if dropped.is_none() && !better.contains(&trial.configuration) {
                    *dropped = Some(after);
                }
            }
        }
        let decisions = trials.iter().zip(dropped).map(|(trial, dropped)| match dropped {
            Some(after) => Decision::Dropped { after },
            None if trial.end.is_some() => Decision::Ended,
            None => Decision::Train { until: None },
        });
        decisions.collect()
    }

    /// The configurations that go on: those with the best mean score after so many evaluations, the first of equal ones.
    fn better_configurations(
        &self,
        trials: &[Reached],
        dropped: &[Option<usize>],
        after: usize,
    ) -> Vec<usize> {
        let mut configurations: Vec<usize> = trials
            .iter()
            .zip(dropped)
            .filter(|(_, dropped)| dropped.is_none())
            .map(|(trial, _)| trial.configuration)
            .collect();
        configurations.sort_unstable();
        configurations.dedup();
        let score = |configuration: &usize| {
            let of_it = trials.iter().filter(|trial| trial.configuration == *configuration);
            mean_score(of_it.map(|trial| trial.score_after(after)))
        };
        configurations.sort_by(|one, other| score(other).total_cmp(&score(one)));
        let kept = (configurations.len() as f64 * self.keep).ceil() as usize;
        configurations.truncate(kept.max(1));
        configurations
    }
}

impl Reached {
    /// Its score after so many evaluations; that of its last one if it ended with fewer. A trial may train on while it waits
    /// for others: that it failed then must not count, as it might have been stopped before.
    fn score_after(&self, evaluations: usize) -> f64 {
        let last = self.scores.len().min(evaluations);
        match self.end {
            Some(TrialEnd::Failed) if last < evaluations => f64::NEG_INFINITY,
            _ => last.checked_sub(1).map_or(f64::NEG_INFINITY, |last| self.scores[last]),
        }
    }
}

/// The mean; of nothing, or with a value that is not a number, the worst.
pub(super) fn mean_score(values: impl Iterator<Item = f64>) -> f64 {
    let values: Vec<f64> = values.collect();
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    if mean.is_nan() { f64::NEG_INFINITY } else { mean }
}

#[cfg(test)]
mod tests {
    use super::{Decision::*, *};

    fn halving(after: &[usize], keep: f64) -> Halving {
        Halving { after: after.to_vec(), keep }
    }

    /// Trials of one configuration each.
    fn reached(scores: &[&[f64]]) -> Vec<Reached> {
        let trial = |(configuration, scores): (usize, &&[f64])| Reached {
            configuration,
            scores: scores.to_vec(),
            end: None,
        };
        scores.iter().enumerate().map(trial).collect()
    }

    #[test]
    fn without_comparisons_every_trial_trains_to_its_end() {
        let mut trials = reached(&[&[], &[0.5]]);
        assert_eq!(Halving::default().decide(&trials), [Train { until: None }; 2]);
        trials[0].end = Some(TrialEnd::Failed);
        assert_eq!(Halving::default().decide(&trials), [Ended, Train { until: None }]);
    }

    #[test]
    fn trials_wait_for_each_other_and_then_the_better_half_goes_on() {
        let rule = halving(&[1, 3], 0.5);
        let trials = reached(&[&[0.1], &[0.4], &[], &[0.2]]);
        assert_eq!(rule.decide(&trials), [Wait, Wait, Train { until: Some(1) }, Wait]);
        let trials = reached(&[&[0.1], &[0.4], &[0.3], &[0.2]]);
        let out = Dropped { after: 1 };
        let next = Train { until: Some(3) };
        assert_eq!(rule.decide(&trials), [out, next, next, out]);
        let trials = reached(&[&[0.1], &[0.4, 0.4, 0.5], &[0.3, 0.5, 0.6, 0.1], &[0.2]]);
        assert_eq!(rule.decide(&trials), [out, Dropped { after: 3 }, Train { until: None }, out]);
    }

    #[test]
    fn evaluations_beyond_a_comparison_do_not_count() {
        let rule = halving(&[1], 0.5);
        let trials = reached(&[&[0.1, 0.9], &[0.4, 0.2]]);
        assert_eq!(rule.decide(&trials), [Dropped { after: 1 }, Train { until: None }]);
    }

    #[test]
    fn seeds_of_a_configuration_go_on_together_by_their_mean() {
        let mut trials = reached(&[&[0.9], &[0.0], &[0.5], &[0.6]]);
        for (trial, configuration) in trials.iter_mut().zip([0, 0, 1, 1]) {
            trial.configuration = configuration;
        }
        let decisions = halving(&[1], 0.5).decide(&trials);
        let (out, next) = (Dropped { after: 1 }, Train { until: None });
        assert_eq!(decisions, [out, out, next, next]);
    }

    #[test]
    fn a_failed_trial_is_the_worst_and_a_finished_one_counts_by_its_last_evaluation() {
        let mut trials = reached(&[&[0.9], &[0.2], &[f64::NAN], &[0.1]]);
        trials[0].end = Some(TrialEnd::Failed);
        trials[3].end = Some(TrialEnd::Finished);
        let decisions = halving(&[2], 0.5).decide(&trials);
        assert_eq!(decisions, [Ended, Train { until: Some(2) }, Train { until: Some(2) }, Ended]);
        trials[1].scores.push(0.05);
        trials[2].scores.push(f64::NAN);
        let out = Dropped { after: 2 };
        assert_eq!(halving(&[2], 0.25).decide(&trials), [out, out, out, Ended]);
    }

    #[test]
    fn a_failure_beyond_a_comparison_does_not_count_in_it() {
        let mut trials = reached(&[&[0.9, 0.8], &[0.2, 0.3], &[0.1, 0.1]]);
        trials[0].end = Some(TrialEnd::Failed);
        let out = Dropped { after: 1 };
        assert_eq!(halving(&[1], 0.3).decide(&trials), [Ended, out, out]);
        let next = Train { until: None };
        assert_eq!(halving(&[1, 2], 0.6).decide(&trials), [Ended, next, out]);
        // It fails before the third evaluation.
        trials[1].scores.push(0.3);
        let out = Dropped { after: 3 };
        assert_eq!(halving(&[3], 0.3).decide(&trials[..2]), [out, next]);
    }

    #[test]
    fn at_least_one_goes_on_and_the_first_of_equal_ones() {
        let trials = reached(&[&[0.5], &[0.5], &[0.5]]);
        let out = Dropped { after: 1 };
        assert_eq!(halving(&[1], 0.01).decide(&trials), [Train { until: None }, out, out]);
    }
}
