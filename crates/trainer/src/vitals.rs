//! What a rank does at this moment, for those who watch over it.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use baton_collectives::{AbortHandle, BufferMut, Collective, Error, Part};
use baton_job::{
    Rank,
    message::{Activity, Pulse},
};
use baton_recipe::Step;

/// Set by the step loop, read by another thread.
#[derive(Debug)]
pub struct Vitals(Mutex<State>);

#[derive(Debug)]
struct State {
    activity: Activity,
    since: Instant,
    step: Step,
    /// When the last update ended, and how much of the time since then went by in exchanges.
    stepped_at: Option<Instant>,
    exchanged: Duration,
    own_step_seconds: f64,
}

/// How much the newest update counts in the mean over the last ones.
const NEWEST: f64 = 0.2;

impl State {
    fn new(now: Instant) -> Self {
        Self {
            activity: Activity::default(),
            since: now,
            step: Step(0),
            stepped_at: None,
            exchanged: Duration::ZERO,
            own_step_seconds: 0.0,
        }
    }

    /// Begins something; what was done before.
    fn begin(&mut self, activity: Activity, now: Instant) -> Activity {
        if self.activity == Activity::Exchanging {
            self.exchanged += now - self.since;
        }
        self.since = now;
        std::mem::replace(&mut self.activity, activity)
    }

    fn stepped(&mut self, step: Step, now: Instant) {
        if let Some(before) = self.stepped_at {
            let own = (now - before).saturating_sub(self.exchanged).as_secs_f64();
            let mean = self.own_step_seconds;
            self.own_step_seconds = if mean == 0.0 { own } else { mean + NEWEST * (own - mean) };
        }
        self.step = step;
        self.measure_from(now);
    }

    fn measure_from(&mut self, now: Instant) {
        (self.stepped_at, self.exchanged) = (Some(now), Duration::ZERO);
    }
}

impl Default for Vitals {
    fn default() -> Self {
        Self(Mutex::new(State::new(Instant::now())))
    }
}

impl Vitals {
    /// What there is to tell now.
    #[must_use]
    pub fn pulse(&self) -> Pulse {
        let State { activity, since, step, own_step_seconds, .. } = *self.lock();
        Pulse { activity, seconds: since.elapsed().as_secs_f64(), step, own_step_seconds }
    }

    /// This begins, or begins again.
    pub(crate) fn at(&self, activity: Activity) {
        self.lock().begin(activity, Instant::now());
    }

    /// An update was made, or training begins after it.
    pub(crate) fn stepped(&self, step: Step) {
        self.lock().stepped(step, Instant::now());
    }

    /// What is no part of an update has passed: the next one is measured from here.
    pub(crate) fn resume(&self) {
        self.lock().measure_from(Instant::now());
    }

    /// Goes through an exchange and back to what was done before.
    fn exchange<T>(&self, operation: impl FnOnce() -> T) -> T {
        let before = self.lock().begin(Activity::Exchanging, Instant::now());
        let done = operation();
        self.at(before);
        done
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic cannot leave this plain data half-changed in a way that matters.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A collective that says when it is being waited in.
pub(crate) struct Watched<'a> {
    pub(crate) inner: &'a mut dyn Collective,
    pub(crate) vitals: &'a Vitals,
}

impl Collective for Watched<'_> {
    fn rank(&self) -> Rank {
        self.inner.rank()
    }

    fn world_size(&self) -> u32 {
        self.inner.world_size()
    }

    fn all_reduce(&mut self, virtual_ranks: u32, parts: &mut [Part<'_>]) -> Result<(), Error> {
        self.vitals.exchange(|| self.inner.all_reduce(virtual_ranks, parts))
    }

    fn broadcast(&mut self, root: Rank, buffer: BufferMut<'_>) -> Result<(), Error> {
        self.vitals.exchange(|| self.inner.broadcast(root, buffer))
    }

    fn all_gather_bytes(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        self.vitals.exchange(|| self.inner.all_gather_bytes(mine))
    }

    fn abort_handle(&self) -> AbortHandle {
        self.inner.abort_handle()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exchanges_and_what_is_no_update_are_no_part_of_a_ranks_own_time() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut state = State::new(start);
        state.stepped(Step(1), at(10));
        assert_eq!(state.own_step_seconds, 0.0, "nobody knows when the first began");
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
