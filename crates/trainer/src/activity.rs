//! The current activity of a rank and the time of its own work, for the rank's heartbeat.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use baton_collectives::{AbortHandle, BufferMut, Collective, Error, Part};
use baton_job::{
    Rank,
    message::{Activity, EvaluationProgress, RankHeartbeat},
};
use baton_recipe::Step;

use crate::evaluation::EvaluationAmount;

/// The current activity: the step loop writes it, another thread reads it.
#[derive(Debug)]
pub struct SharedActivity(Mutex<ActivityState>);

#[derive(Debug)]
struct ActivityState {
    activity: Activity,
    since: Instant,
    step: Step,
    /// When the last update ended.
    last_step_end: Option<Instant>,
    /// Time spent in collective operations since then.
    exchange_time: Duration,
    /// Moving average of the time of one update without collective operations, seconds.
    own_step_seconds: f64,
    /// The evaluation in progress: what all ranks have done, all of it, and its start.
    evaluation: Option<(EvaluationAmount, EvaluationAmount, Instant)>,
}

/// Weight of the newest update in the moving average of step times.
const NEWEST_WEIGHT: f64 = 0.2;

impl ActivityState {
    fn new(now: Instant) -> Self {
        Self {
            activity: Activity::default(),
            since: now,
            step: Step(0),
            last_step_end: None,
            exchange_time: Duration::ZERO,
            own_step_seconds: 0.0,
            evaluation: None,
        }
    }

    /// Begins `activity`; returns the previous one.
    fn begin(&mut self, activity: Activity, now: Instant) -> Activity {
        if self.activity == Activity::Exchanging {
            self.exchange_time += now - self.since;
        }
        self.since = now;
        std::mem::replace(&mut self.activity, activity)
    }

    fn stepped(&mut self, step: Step, now: Instant) {
        if let Some(before) = self.last_step_end {
            let own = (now - before).saturating_sub(self.exchange_time).as_secs_f64();
            let mean = self.own_step_seconds;
            self.own_step_seconds =
                if mean == 0.0 { own } else { mean + NEWEST_WEIGHT * (own - mean) };
        }
        self.step = step;
        self.measure_from(now);
    }

    fn measure_from(&mut self, now: Instant) {
        (self.last_step_end, self.exchange_time) = (Some(now), Duration::ZERO);
    }
}

impl Default for SharedActivity {
    fn default() -> Self {
        Self(Mutex::new(ActivityState::new(Instant::now())))
    }
}

impl SharedActivity {
    /// The heartbeat to send now.
    #[must_use]
    pub fn heartbeat(&self) -> RankHeartbeat {
        let ActivityState { activity, since, step, own_step_seconds, evaluation, .. } =
            *self.lock();
        let seconds = |since: Instant| since.elapsed().as_secs_f64();
        let evaluation = evaluation.map(|(done, all, began)| EvaluationProgress {
            samples: done.samples,
            total: all.samples,
            texts: done.texts,
            total_texts: all.texts,
            seconds: seconds(began),
        });
        RankHeartbeat { activity, seconds: seconds(since), step, own_step_seconds, evaluation }
    }

    /// Sets the progress of an evaluation: what is done, all of it, and when it began. `None` ends it.
    pub(crate) fn evaluating(
        &self,
        progress: Option<(EvaluationAmount, EvaluationAmount, Instant)>,
    ) {
        self.lock().evaluation = progress;
    }

    /// Sets the current activity; its time counts from now.
    pub(crate) fn set(&self, activity: Activity) {
        self.lock().begin(activity, Instant::now());
    }

    /// Sets the current activity; if it is the current one already, its time goes on.
    pub(crate) fn enter(&self, activity: Activity) {
        let mut state = self.lock();
        if state.activity != activity {
            state.begin(activity, Instant::now());
        }
    }

    /// Records that update `step` has ended, or that training starts after it.
    pub(crate) fn stepped(&self, step: Step) {
        self.lock().stepped(step, Instant::now());
    }

    /// Restarts the timer of the next update, after work that is not part of an update.
    pub(crate) fn restart_step_timer(&self) {
        self.lock().measure_from(Instant::now());
    }

    /// Runs `operation` as [`Activity::Exchanging`], then restores the previous activity.
    pub(crate) fn exchange<T>(&self, operation: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let (before, since) = {
            let mut state = self.lock();
            let since = state.since;
            (state.begin(Activity::Exchanging, began), since)
        };
        let result = operation();
        let now = Instant::now();
        let mut state = self.lock();
        state.begin(before, now);
        // After an operation with others, an activity begins again. Not so a load: votes during an evaluation must not
        // hide that it has stalled.
        if before == Activity::Loading {
            state.since = now - (began - since);
        }
        result
    }

    fn lock(&self) -> MutexGuard<'_, ActivityState> {
        // A panic cannot leave this plain data half-changed in a way that matters.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A collective that marks the time inside its operations, except all-reduces, as [`Activity::Exchanging`].
pub(crate) struct MonitoredCollective<'a> {
    pub(crate) inner: &'a mut dyn Collective,
    pub(crate) activity: &'a SharedActivity,
}

impl Collective for MonitoredCollective<'_> {
    fn rank(&self) -> Rank {
        self.inner.rank()
    }

    fn world_size(&self) -> u32 {
        self.inner.world_size()
    }

    fn all_reduce(&mut self, virtual_ranks: u32, parts: &mut [Part<'_>]) -> Result<(), Error> {
        // It runs beside the computation: `GradientExchange` knows when a rank only waits for it.
        self.inner.all_reduce(virtual_ranks, parts)
    }

    fn broadcast(&mut self, root: Rank, buffer: BufferMut<'_>) -> Result<(), Error> {
        self.activity.exchange(|| self.inner.broadcast(root, buffer))
    }

    fn all_gather_bytes(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        self.activity.exchange(|| self.inner.all_gather_bytes(mine))
    }

    fn abort_handle(&self) -> AbortHandle {
        self.inner.abort_handle()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn collectives_and_evaluations_do_not_count_as_own_step_time() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut state = ActivityState::new(start);
        state.stepped(Step(1), at(10));
        assert_eq!(state.own_step_seconds, 0.0, "the start of the first update is unknown");
        state.begin(Activity::Computing, at(10));
        let before = state.begin(Activity::Exchanging, at(12));
        state.begin(before, at(15));
        assert_eq!((state.activity, state.since), (Activity::Computing, at(15)));
        state.stepped(Step(2), at(16));
        assert_eq!((state.step, state.own_step_seconds), (Step(2), 3.0));
        // An evaluation.
        state.measure_from(at(100));
        state.stepped(Step(3), at(108));
        assert_eq!(state.own_step_seconds, 4.0, "3 and a fifth of the way to 8");
    }
}
