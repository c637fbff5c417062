//! Metrics of the job as curves over its steps.

use baton_proto::v1::{Accuracy, Metric, StreamMetricsResponse, stream_metrics_response::Metrics};

/// Points of a curve: step and value.
pub(super) type Points = Vec<(f64, f64)>;

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

/// Maximum number of points of a curve, more than a terminal has columns. A full curve loses every second point.
const MAX_POINTS: usize = 4_096;

/// Maximum absolute value that can be drawn.
const MAX_VALUE: f64 = 1e30;

impl Curves {
    /// Adds the metrics of a step or an evaluation.
    pub(super) fn add(&mut self, point: &StreamMetricsResponse) {
        match &point.metrics {
            Some(Metrics::Step(step)) => {
                let x = step.step as f64;
                add(&mut self.loss, x, step.loss);
                if let Some(first) = step.named().into_iter().next() {
                    add(&mut self.batches, x, first.value);
                    self.batch = Some(first);
                }
                add(&mut self.lr, x, step.lr);
                add(&mut self.throughput, x, step.samples_per_second);
            }
            Some(Metrics::Evaluation(evaluated)) => {
                if let Some(score) = evaluated.accuracy.as_ref().and_then(Accuracy::score) {
                    add(&mut self.score, evaluated.step as f64, score.value);
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
            points.retain(|(x, _)| *x <= step);
        }
        self.generations.retain(|x| *x < step);
        if step > 0.0 {
            self.generations.push(step);
        }
    }
}

fn add(points: &mut Points, x: f64, value: f64) {
    // NaN and values that overflow when the chart is scaled cannot be drawn.
    if !(-MAX_VALUE..=MAX_VALUE).contains(&value) {
        return;
    }
    if points.len() == MAX_POINTS {
        let mut number = 0;
        points.retain(|_| {
            number += 1;
            number % 2 == 0
        });
    }
    points.push((x, value));
}

#[cfg(test)]
mod tests {
    use baton_proto::v1::Step;

    use super::*;
    use crate::testing;

    fn point(metrics: Metrics) -> StreamMetricsResponse {
        StreamMetricsResponse { metrics: Some(metrics), ..StreamMetricsResponse::default() }
    }

    #[test]
    fn undone_steps_are_not_drawn() {
        let mut curves = Curves::default();
        testing::points().iter().for_each(|point| curves.add(point));
        let steps: Vec<f64> = curves.loss.iter().map(|(at, _)| *at).collect();
        assert_eq!(steps, [10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 100.0]);
        assert_eq!(curves.generations, [66.0]);
        curves.add(&point(Metrics::BeganAt(30)));
        assert_eq!((curves.loss.len(), curves.score.len()), (3, 1));
        assert_eq!(curves.generations, [30.0]);
    }

    #[test]
    fn nan_is_left_out_and_too_many_points_are_thinned() {
        let mut curves = Curves::default();
        for step in 0..20_000 {
            let loss = if step == 5 { f64::NAN } else { 1.0 };
            curves.add(&point(Metrics::Step(Step { step, loss, ..Step::default() })));
        }
        assert!((MAX_POINTS / 2..=MAX_POINTS).contains(&curves.loss.len()));
        assert!(curves.loss.is_sorted_by_key(|(at, _)| *at));
    }
}
