//! The numbers of a job's life, as curves over its updates.

use baton_proto::v1::{Accuracy, Metric, StreamMetricsResponse, stream_metrics_response::Metrics};

/// Points of a curve: update and value.
pub(super) type Points = Vec<(f64, f64)>;

/// What is drawn.
#[derive(Debug, Default)]
pub(super) struct Curves {
    pub(super) loss: Points,
    /// Of the batches, by their first metric.
    pub(super) batches: Points,
    /// Of evaluations, by what they are compared by.
    pub(super) score: Points,
    pub(super) lr: Points,
    pub(super) throughput: Points,
    /// Updates after which a later generation went on.
    pub(super) generations: Vec<f64>,
    /// The newest value of `batches`.
    pub(super) batch: Option<Metric>,
    /// The newest value of `score`.
    pub(super) evaluation: Option<Metric>,
}

/// More points than a terminal has columns; beyond, every second one goes.
const MOST: usize = 4_096;

/// What can be drawn is smaller.
const GREATEST: f64 = 1e30;

impl Curves {
    /// Takes in what was told.
    pub(super) fn add(&mut self, point: &StreamMetricsResponse) {
        match &point.metrics {
            Some(Metrics::Step(step)) => {
                let at = step.step as f64;
                add(&mut self.loss, at, step.loss);
                if let Some(first) = step.named().into_iter().next() {
                    add(&mut self.batches, at, first.value);
                    self.batch = Some(first);
                }
                add(&mut self.lr, at, step.lr);
                add(&mut self.throughput, at, step.samples_per_second);
            }
            Some(Metrics::Evaluation(found)) => {
                if let Some(score) = found.accuracy.as_ref().and_then(Accuracy::score) {
                    add(&mut self.score, found.step as f64, score.value);
                    self.evaluation = Some(score);
                }
            }
            Some(Metrics::BeganAt(step)) => self.go_back(*step as f64),
            None => {}
        }
    }

    /// What was told of later updates counts no more.
    fn go_back(&mut self, step: f64) {
        for points in
            [&mut self.loss, &mut self.batches, &mut self.score, &mut self.lr, &mut self.throughput]
        {
            points.retain(|(at, _)| *at <= step);
        }
        self.generations.retain(|at| *at < step);
        if step > 0.0 {
            self.generations.push(step);
        }
    }
}

fn add(points: &mut Points, at: f64, value: f64) {
    // What is no number has no place in a drawing, nor has what leaves no number of it once scaled.
    if !(-GREATEST..=GREATEST).contains(&value) {
        return;
    }
    if points.len() == MOST {
        let mut number = 0;
        points.retain(|_| {
            number += 1;
            number % 2 == 0
        });
    }
    points.push((at, value));
}

#[cfg(test)]
mod tests {
    use baton_proto::v1::Step;

    use super::*;
    use crate::testing;

    fn told(metrics: Metrics) -> StreamMetricsResponse {
        StreamMetricsResponse { metrics: Some(metrics), ..StreamMetricsResponse::default() }
    }

    #[test]
    fn what_was_undone_is_not_drawn() {
        let mut curves = Curves::default();
        testing::points().iter().for_each(|point| curves.add(point));
        let steps: Vec<f64> = curves.loss.iter().map(|(at, _)| *at).collect();
        assert_eq!(steps, [10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 100.0]);
        assert_eq!(curves.generations, [66.0]);
        curves.add(&told(Metrics::BeganAt(30)));
        assert_eq!((curves.loss.len(), curves.score.len()), (3, 1));
        assert_eq!(curves.generations, [30.0]);
    }

    #[test]
    fn what_is_no_number_is_left_out_and_what_is_too_much_thinned() {
        let mut curves = Curves::default();
        for step in 0..20_000 {
            let loss = if step == 5 { f64::NAN } else { 1.0 };
            curves.add(&told(Metrics::Step(Step { step, loss, ..Step::default() })));
        }
        assert!((MOST / 2..=MOST).contains(&curves.loss.len()));
        assert!(curves.loss.is_sorted_by_key(|(at, _)| *at));
    }
}
