//! Metrics of the job as curves over its steps.

use baton_proto::v1::{Accuracy, Metric, StreamMetricsResponse, stream_metrics_response::Metrics};

/// Points of a curve: step and value.
#[derive(Debug, Default)]
pub(super) struct Points {
    kept: Vec<(f64, f64)>,
    /// Binary logarithm of the stride: of every range of so many steps the first point is kept, and also the newest point
    /// of all. With powers of two, thinning out twice gives the same as thinning out once.
    doublings: i32,
}

/// All curves.
#[derive(Debug, Default)]
pub(super) struct Curves {
    pub(super) loss: Points,
    /// First metric of the training batches.
    pub(super) batches: Points,
    /// Evaluations, by the metric by which they are compared.
    pub(super) score: Points,
    pub(super) lr: Points,
    pub(super) throughput: Points,
    /// Steps at which a later generation started.
    pub(super) generations: Vec<f64>,
    /// The newest value of `batches`.
    pub(super) batch: Option<Metric>,
    /// The newest value of `score`.
    pub(super) evaluation: Option<Metric>,
}

/// Maximum number of points of a curve, more than a terminal has columns. With more, it is thinned out evenly.
const MAX_POINTS: usize = 4_096;

/// Maximum absolute value that can be drawn.
const MAX_VALUE: f64 = 1e30;

impl Curves {
    /// Adds the metrics of a step or an evaluation.
    pub(super) fn add(&mut self, point: &StreamMetricsResponse) {
        match &point.metrics {
            Some(Metrics::Step(step)) => {
                let x = step.step as f64;
                self.loss.add(x, step.loss);
                if let Some(first) = step.named().into_iter().next() {
                    self.batches.add(x, first.value);
                    self.batch = Some(first);
                }
                self.lr.add(x, step.lr);
                self.throughput.add(x, step.samples_per_second);
            }
            Some(Metrics::Evaluation(evaluated)) => {
                if let Some(score) = evaluated.accuracy.as_ref().and_then(Accuracy::score) {
                    self.score.add(evaluated.step as f64, score.value);
                    self.evaluation = Some(score);
                }
            }
            Some(Metrics::BeganAt(step)) => self.restart_at(*step as f64),
            None => {}
        }
    }

    /// A new generation starts at `step`; points of later steps are invalid.
    fn restart_at(&mut self, step: f64) {
        for points in
            [&mut self.loss, &mut self.batches, &mut self.score, &mut self.lr, &mut self.throughput]
        {
            points.restart_at(step);
        }
        self.generations.retain(|x| *x < step);
        if step > 0.0 {
            self.generations.push(step);
        }
    }
}

impl Points {
    pub(super) fn as_slice(&self) -> &[(f64, f64)] {
        &self.kept
    }

    fn add(&mut self, x: f64, value: f64) {
        // NaN and values that overflow when the chart is scaled cannot be drawn.
        if !(-MAX_VALUE..=MAX_VALUE).contains(&value) {
            return;
        }
        self.push((x, value));
        while self.kept.len() > MAX_POINTS {
            self.doublings += 1;
            for point in std::mem::take(&mut self.kept) {
                self.push(point);
            }
        }
    }

    fn push(&mut self, point: (f64, f64)) {
        // The previous newest point was kept only because it was the newest.
        if let [.., before, last] = &self.kept[..]
            && self.range(before.0) == self.range(last.0)
        {
            self.kept.pop();
        }
        self.kept.push(point);
    }

    /// Number of the range in which a step is.
    fn range(&self, x: f64) -> f64 {
        (x / 2_f64.powi(self.doublings)).floor()
    }

    fn restart_at(&mut self, step: f64) {
        self.kept.retain(|(x, _)| *x <= step);
        if self.kept.is_empty() {
            self.doublings = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use baton_proto::v1::Step;

    use super::*;
    use crate::testing;

    fn point(metrics: Metrics) -> StreamMetricsResponse {
        StreamMetricsResponse { metrics: Some(metrics), ..StreamMetricsResponse::default() }
    }

    fn train(curves: &mut Curves, steps: Range<u64>) {
        for step in steps {
            let loss = if step == 5 { f64::NAN } else { 1.0 };
            curves.add(&point(Metrics::Step(Step { step, loss, ..Step::default() })));
        }
    }

    fn steps(points: &Points) -> Vec<f64> {
        points.kept.iter().map(|(at, _)| *at).collect()
    }

    #[test]
    fn undone_steps_are_not_drawn() {
        let mut curves = Curves::default();
        testing::points().iter().for_each(|point| curves.add(point));
        assert_eq!(
            steps(&curves.loss),
            [10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 100.0]
        );
        assert_eq!(curves.generations, [66.0]);
        curves.add(&point(Metrics::BeganAt(30)));
        assert_eq!((curves.loss.kept.len(), curves.score.kept.len()), (3, 1));
        assert_eq!(curves.generations, [30.0]);
    }

    #[test]
    fn nan_is_left_out_and_too_many_points_are_thinned() {
        let mut curves = Curves::default();
        train(&mut curves, 0..20_000);
        assert!((MAX_POINTS / 2..=MAX_POINTS).contains(&curves.loss.kept.len()));
        assert!(curves.loss.kept.is_sorted_by_key(|(at, _)| *at));
    }

    #[test]
    fn a_long_job_is_thinned_evenly_also_after_a_rollback() {
        let mut curves = Curves::default();
        train(&mut curves, 0..60_000);
        curves.add(&point(Metrics::BeganAt(49_999)));
        let newest = steps(&curves.loss).last().copied();
        assert!(newest.is_some_and(|at| (49_900.0..50_000.0).contains(&at)), "{newest:?}");
        train(&mut curves, 50_000..100_000);

        let kept = steps(&curves.loss);
        assert_eq!((kept.first(), kept.last()), (Some(&0.0), Some(&99_999.0)));
        let quarters = [0.0, 25_000.0, 50_000.0, 75_000.0]
            .map(|first| kept.iter().filter(|at| (first..first + 25_000.0).contains(*at)).count());
        let (least, most) = (quarters.iter().min().unwrap(), quarters.iter().max().unwrap());
        assert!(most - least <= 2, "{quarters:?}");
    }

    #[test]
    fn another_job_in_the_same_folder_is_not_thinned_like_the_first() {
        let mut curves = Curves::default();
        train(&mut curves, 1..20_000);
        curves.add(&point(Metrics::BeganAt(0)));
        train(&mut curves, 1..1_001);
        assert_eq!(curves.loss.kept.len(), 999);
    }
}
