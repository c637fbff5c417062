//! Queue of future events, in order of time.

use std::{cmp::Reverse, collections::BinaryHeap};

use baton_job::time::Time;

struct Scheduled<T> {
    at: Time,
    /// Events with the same time are handled in the order in which they were scheduled.
    sequence: u64,
    event: T,
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

/// The future events of a simulation.
pub(crate) struct Queue<T> {
    scheduled: BinaryHeap<Reverse<Scheduled<T>>>,
    sequence: u64,
}

impl<T> Queue<T> {
    pub(crate) fn new() -> Self {
        Self { scheduled: BinaryHeap::new(), sequence: 0 }
    }

    pub(crate) fn schedule(&mut self, at: Time, event: T) {
        self.sequence += 1;
        self.scheduled.push(Reverse(Scheduled { at, sequence: self.sequence, event }));
    }

    /// Time of the next event.
    pub(crate) fn next_at(&self) -> Option<Time> {
        self.scheduled.peek().map(|Reverse(next)| next.at)
    }

    /// Removes the next event; returns it and its time.
    pub(crate) fn pop(&mut self) -> Option<(Time, T)> {
        self.scheduled.pop().map(|Reverse(next)| (next.at, next.event))
    }
}
