//! The points kept in memory. They depend only on the sequence of added points, so reading the file again gives the
//! same points.

use baton_proto::v1::{StreamMetricsResponse, stream_metrics_response::Metrics};

/// A point and its number among all added points.
#[derive(Debug, Clone)]
struct NumberedPoint {
    number: u64,
    step: u64,
    point: StreamMetricsResponse,
}

/// The kept points.
#[derive(Debug)]
pub(super) struct KeptPoints {
    /// Most points of each kind.
    limit: usize,
    /// Number of points added.
    added: u64,
    /// Of every range of this many steps the first is kept, and also the newest step. A power of two, so that
    /// thinning out twice gives the same as thinning out once.
    stride: u64,
    steps: Vec<NumberedPoint>,
    evaluations: Vec<NumberedPoint>,
    /// Starts of training (`began_at`).
    starts: Vec<NumberedPoint>,
}

impl KeptPoints {
    pub(super) fn new(limit: usize) -> Self {
        let (steps, evaluations, starts) = (Vec::new(), Vec::new(), Vec::new());
        Self { limit, added: 0, stride: 1, steps, evaluations, starts }
    }

    pub(super) fn stride(&self) -> u64 {
        self.stride
    }

    pub(super) fn set_stride(&mut self, stride: u64) {
        self.stride = stride.max(1);
    }

    /// Adds a point; false if it is skipped because it is not new.
    pub(super) fn add(&mut self, point: StreamMetricsResponse) -> bool {
        self.added += 1;
        let number = self.added;
        match &point.metrics {
            Some(Metrics::Step(step)) => {
                self.add_step(NumberedPoint { number, step: step.step, point })
            }
            Some(Metrics::Evaluation(evaluated)) => {
                self.add_evaluation(NumberedPoint { number, step: evaluated.step, point });
                true
            }
            Some(Metrics::BeganAt(step)) => {
                let step = *step;
                let had_steps = !self.steps.is_empty();
                self.steps.retain(|kept| kept.step <= step);
                // For example another job in the same folder. The condition is never true for the lines of a file that was
                // thinned out, because these are only of valid steps; so the stride in its first line stays.
                if had_steps && self.steps.is_empty() {
                    self.stride = 1;
                }
                self.evaluations.retain(|kept| kept.step <= step);
                self.starts.push(NumberedPoint { number, step, point });
                thin_older_half(&mut self.starts, self.limit);
                true
            }
            None => false,
        }
    }

    /// Points later than `after_unix_millis`, in the order in which they were added.
    pub(super) fn points(&self, after_unix_millis: u64) -> Vec<StreamMetricsResponse> {
        let all = [&self.steps, &self.evaluations, &self.starts].into_iter().flatten();
        let mut points: Vec<_> =
            all.filter(|kept| kept.point.unix_millis > after_unix_millis).collect();
        points.sort_unstable_by_key(|point| point.number);
        points.into_iter().map(|kept| kept.point.clone()).collect()
    }

    fn add_step(&mut self, new: NumberedPoint) -> bool {
        if self.steps.last().is_some_and(|last| new.step <= last.step) {
            return false;
        }
        // The previous newest step was kept only because it was the newest.
        if let [.., before, last] = &self.steps[..]
            && last.step / self.stride == before.step / self.stride
        {
            self.steps.pop();
        }
        self.steps.push(new);
        if self.steps.len() > self.limit {
            self.thin_steps();
        }
        true
    }

    fn thin_steps(&mut self) {
        let Some(newest) = self.steps.last().map(|last| last.step) else { return };
        while self.steps.len() > self.limit / 2 {
            self.stride = self.stride.saturating_mul(2);
            let stride = self.stride;
            let mut previous_bucket = None;
            self.steps.retain(|kept| {
                let bucket = kept.step / stride;
                let first = previous_bucket.replace(bucket) != Some(bucket);
                first || kept.step == newest
            });
        }
    }

    fn add_evaluation(&mut self, new: NumberedPoint) {
        let extent = |kept: &NumberedPoint| match &kept.point.metrics {
            Some(Metrics::Evaluation(found)) => Some(found.extent),
            _ => None,
        };
        // After restoring a state without its evaluation, the same step is evaluated again.
        let key = (new.step, extent(&new));
        self.evaluations.retain(|kept| (kept.step, extent(kept)) != key);
        self.evaluations.push(new);
        thin_older_half(&mut self.evaluations, self.limit);
    }
}

/// Drops every second point of the older half if there are more than `limit`.
fn thin_older_half(points: &mut Vec<NumberedPoint>, limit: usize) {
    if points.len() <= limit {
        return;
    }
    let half = points.len() / 2;
    let mut index = 0;
    points.retain(|_| {
        index += 1;
        index > half || index % 2 == 1
    });
}
