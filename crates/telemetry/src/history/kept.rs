//! What is kept in memory. It depends on the series of points alone, so that a file read anew gives the same.

use baton_proto::v1::{StreamMetricsResponse, stream_metrics_response::Metrics};

/// A point, and its place among all that were taken.
#[derive(Debug, Clone)]
struct Placed {
    place: u64,
    step: u64,
    point: StreamMetricsResponse,
}

/// The points that are kept.
#[derive(Debug)]
pub(super) struct Kept {
    /// The most points of each kind.
    most: usize,
    /// Points taken.
    taken: u64,
    /// Of each so many steps the first update is kept, and the newest of all. It is a power of two: thinned out twice
    /// is then the same as thinned out once.
    stride: u64,
    steps: Vec<Placed>,
    evaluations: Vec<Placed>,
    marks: Vec<Placed>,
}

impl Kept {
    pub(super) fn new(most: usize) -> Self {
        let (steps, evaluations, marks) = (Vec::new(), Vec::new(), Vec::new());
        Self { most, taken: 0, stride: 1, steps, evaluations, marks }
    }

    pub(super) fn stride(&self) -> u64 {
        self.stride
    }

    pub(super) fn set_stride(&mut self, stride: u64) {
        self.stride = stride.max(1);
    }

    /// Takes a point; whether it says anything new.
    pub(super) fn take(&mut self, point: StreamMetricsResponse) -> bool {
        self.taken += 1;
        let place = self.taken;
        match &point.metrics {
            Some(Metrics::Step(told)) => self.take_step(Placed { place, step: told.step, point }),
            Some(Metrics::Evaluation(told)) => {
                self.take_evaluation(Placed { place, step: told.step, point });
                true
            }
            Some(Metrics::BeganAt(step)) => {
                let step = *step;
                self.steps.retain(|placed| placed.step <= step);
                self.evaluations.retain(|placed| placed.step <= step);
                self.marks.push(Placed { place, step, point });
                thin_older_half(&mut self.marks, self.most);
                true
            }
            None => false,
        }
    }

    /// All told later than this, in the order in which they were taken.
    pub(super) fn points(&self, after_unix_millis: u64) -> Vec<StreamMetricsResponse> {
        let all = [&self.steps, &self.evaluations, &self.marks].into_iter().flatten();
        let mut told: Vec<_> =
            all.filter(|placed| placed.point.unix_millis > after_unix_millis).collect();
        told.sort_unstable_by_key(|placed| placed.place);
        told.into_iter().map(|placed| placed.point.clone()).collect()
    }

    fn take_step(&mut self, new: Placed) -> bool {
        if self.steps.last().is_some_and(|last| new.step <= last.step) {
            return false;
        }
        // The newest one is kept for as long as it is the newest.
        if let [.., before, last] = &self.steps[..]
            && last.step / self.stride == before.step / self.stride
        {
            self.steps.pop();
        }
        self.steps.push(new);
        if self.steps.len() > self.most {
            self.thin_steps();
        }
        true
    }

    fn thin_steps(&mut self) {
        let Some(newest) = self.steps.last().map(|last| last.step) else { return };
        while self.steps.len() > self.most / 2 {
            self.stride = self.stride.saturating_mul(2);
            let stride = self.stride;
            let mut before = None;
            self.steps.retain(|placed| {
                let bucket = placed.step / stride;
                let first = before.replace(bucket) != Some(bucket);
                first || placed.step == newest
            });
        }
    }

    fn take_evaluation(&mut self, new: Placed) {
        let extent = |placed: &Placed| match &placed.point.metrics {
            Some(Metrics::Evaluation(found)) => Some(found.extent),
            _ => None,
        };
        // The same is evaluated again where a state without its evaluation was restored.
        let of = (new.step, extent(&new));
        self.evaluations.retain(|placed| (placed.step, extent(placed)) != of);
        self.evaluations.push(new);
        thin_older_half(&mut self.evaluations, self.most);
    }
}

/// Drops every second one of the older half if there are too many.
fn thin_older_half(points: &mut Vec<Placed>, most: usize) {
    if points.len() <= most {
        return;
    }
    let half = points.len() / 2;
    let mut index = 0;
    points.retain(|_| {
        index += 1;
        index > half || index % 2 == 1
    });
}
