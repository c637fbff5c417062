//! What is going to happen, in order of time.

use std::{cmp::Reverse, collections::BinaryHeap};

use baton_job::time::Time;

struct Scheduled<T> {
    at: Time,
    /// Events of one time happen in the order in which they were scheduled.
    sequence: u64,
    happening: T,
}

impl<T> PartialEq for Scheduled<T> {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.sequence) == (other.at, other.sequence)
    }
}

impl<T> Eq for Scheduled<T> {}

impl<T> PartialOrd for Scheduled<T> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Scheduled<T> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.sequence).cmp(&(other.at, other.sequence))
    }
}

/// The future of a simulation.
pub(crate) struct Queue<T> {
    scheduled: BinaryHeap<Reverse<Scheduled<T>>>,
    sequence: u64,
}

impl<T> Queue<T> {
    pub(crate) fn new() -> Self {
        Self { scheduled: BinaryHeap::new(), sequence: 0 }
    }

    pub(crate) fn schedule(&mut self, at: Time, happening: T) {
        self.sequence += 1;
        self.scheduled.push(Reverse(Scheduled { at, sequence: self.sequence, happening }));
    }

    /// When the next one happens.
    pub(crate) fn next_at(&self) -> Option<Time> {
        self.scheduled.peek().map(|Reverse(next)| next.at)
    }

    /// The next one, and when it happens.
    pub(crate) fn pop(&mut self) -> Option<(Time, T)> {
        self.scheduled.pop().map(|Reverse(next)| (next.at, next.happening))
    }
}
