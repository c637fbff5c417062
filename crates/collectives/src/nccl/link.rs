//! A communicator, the stream it works on, and how that is ordered with libtorch's.
#![allow(unsafe_code)]

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use baton_gpu::{Device, Event, Stream};
use baton_job::Rank;

use super::ffi::{Communicator, UniqueId, Values};
use super::fixed_tree::FixedTree;
use crate::{AbortHandle, DeviceSliceMut, Error};

/// How long an operation may take.
pub(super) struct Limit<'a> {
    pub(super) operation: &'static str,
    pub(super) timeout: Duration,
    pub(super) started: Instant,
    pub(super) abort: &'a AbortHandle,
}

impl Limit<'_> {
    /// Asks again and again, as a host that slept could not be woken by an abort.
    fn wait_until(&self, is_done: impl Fn() -> Result<bool, Error>) -> Result<(), Error> {
        while !is_done()? {
            self.abort.check(self.operation)?;
            let elapsed = self.started.elapsed();
            if elapsed >= self.timeout {
                let (operation, after) = (self.operation, self.timeout);
                return Err(Error::TimedOut { operation, waiting_for: None, after });
            }
            pause(elapsed);
        }
        Ok(())
    }
}

/// Lets other threads run; the longer it has taken, the longer a pause cannot matter.
fn pause(elapsed: Duration) {
    if elapsed < Duration::from_micros(200) {
        thread::yield_now();
    } else {
        thread::sleep(Duration::from_micros(50));
    }
}

/// One rank's end of a group, ready for use.
///
/// Its operations return when the device is done with them or they have failed. In the latter case the
/// device may still be at it, so that the link must be ended before the memory is used again.
#[derive(Debug)]
pub(super) struct Link {
    communicator: Communicator,
    streams: Streams,
    /// None where nothing is added in the fixed tree.
    tree: Option<FixedTree>,
}

/// libtorch's stream and our own, which does not wait for that one by itself.
#[derive(Debug)]
struct Streams {
    torch: Stream,
    ours: Stream,
    /// On libtorch's stream, behind the work that an operation comes after.
    ready: Event,
    /// On ours, behind the operation.
    over: Event,
}

impl Link {
    /// Begins to set up this rank's end; it can be used when it has [settled](Self::settle).
    pub(super) fn begin(
        (device, tree): (Device, Option<FixedTree>),
        id: UniqueId,
        (rank, world_size): (Rank, u32),
    ) -> Result<Self, Error> {
        let streams = Streams {
            torch: Stream::of_torch(device),
            ours: Stream::new(device)?,
            ready: Event::new(device)?,
            over: Event::new(device)?,
        };
        // Last, as it is not freed when it is dropped.
        let communicator = Communicator::begin(id, rank, world_size)?;
        Ok(Self { communicator, streams, tree })
    }

    fn stream(&self) -> &Stream {
        &self.streams.ours
    }

    /// Waits until what NCCL was asked for is in its stream.
    pub(super) fn settle(&self, limit: &Limit<'_>) -> Result<(), Error> {
        limit.wait_until(|| self.communicator.is_settled())
    }

    pub(super) fn all_reduce(
        &self,
        limit: &Limit<'_>,
        values: &mut DeviceSliceMut<'_>,
    ) -> Result<(), Error> {
        let values = Values::from(values);
        // SAFETY: the slice is lent to us and on our device; see `run`.
        self.run(limit, || unsafe { self.communicator.all_reduce(self.stream(), values) })
    }

    pub(super) fn broadcast(
        &self,
        limit: &Limit<'_>,
        root: Rank,
        values: &mut DeviceSliceMut<'_>,
    ) -> Result<(), Error> {
        let values = Values::from(values);
        // SAFETY: as above.
        self.run(limit, || unsafe { self.communicator.broadcast(self.stream(), root, values) })
    }

    /// Adds up all ranks' `sums` in the fixed tree, which are this rank's subtrees. The total is in the
    /// first.
    pub(super) fn sum_in_tree(
        &mut self,
        limit: &Limit<'_>,
        virtual_ranks: u32,
        sums: &mut [&mut DeviceSliceMut<'_>],
    ) -> Result<(), Error> {
        let Some(tree) = &mut self.tree else { return Ok(()) };
        let sums = sums.iter_mut().map(|sum| Values::from(&mut **sum)).collect();
        let plan = tree.plan(virtual_ranks, sums)?;
        let channel = (&self.communicator, self.stream());
        // SAFETY: as above, and this for all sums.
        self.run(limit, || unsafe { plan.queue(channel, || self.settle(limit)) })
    }

    /// Has `queue` queue work on our stream, between what libtorch has queued and what it will, and waits
    /// until it is over.
    fn run(
        &self,
        limit: &Limit<'_>,
        queue: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let Streams { torch, ours, ready, over } = &self.streams;
        torch.mark(ready)?;
        ours.wait_for(ready)?;
        queue()?;
        // A communicator that does not block may put its work there later, and marks must be behind it.
        self.settle(limit)?;
        ours.mark(over)?;
        torch.wait_for(over)?;
        // NCCL is asked too, for what goes wrong meanwhile.
        limit.wait_until(|| Ok(self.communicator.is_settled()? && over.is_reached()?))
    }

    /// Frees the communicator and whatever still runs on it. After the deadline its thread, its memory
    /// and its kernels are abandoned.
    pub(super) fn end(self, after: Duration) -> Result<(), Error> {
        let Self { communicator, streams, tree } = self;
        let (done, is_done) = mpsc::channel();
        let helper = thread::Builder::new().name("nccl-abort".to_owned()).spawn(move || {
            communicator.abort();
            // Nobody listens after the deadline.
            let _ = done.send(());
        });
        let aborted = helper
            .map_err(Error::io("nccl-abort"))
            .and_then(|_| is_done.recv_timeout(after).map_err(|_| Error::Stuck { after }));
        if aborted.is_err() {
            // To free memory waits for all that the device does, so that this would hang, too.
            std::mem::forget(tree);
            return aborted;
        }
        // What was queued behind the aborted kernels is still to be done, in the caller's memory. Where even
        // a mark fails the device does nothing any more, and why was told before.
        let Streams { torch, ours, over, .. } = &streams;
        let _ = ours.mark(over).and_then(|()| torch.wait_for(over));
        Ok(())
    }
}
