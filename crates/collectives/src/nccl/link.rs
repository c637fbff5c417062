//! A communicator, its stream, and the order of its work relative to libtorch's stream.
#![allow(unsafe_code)]

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use baton_gpu::{Device, Stream, StreamEvent};
use baton_job::Rank;

use super::ffi::{Communicator, DeviceValues, NcclUniqueId};
use super::fixed_tree::FixedTree;
use crate::{AbortHandle, DeviceSliceMut, Error};

/// Name, timeout and abort of one operation.
pub(super) struct OperationContext<'a> {
    pub(super) operation: &'static str,
    pub(super) timeout: Duration,
    pub(super) started: Instant,
    pub(super) abort: &'a AbortHandle,
}

impl OperationContext<'_> {
    /// Polls `is_done` until it is true. It polls, because an abort could not wake a thread that is blocked in the
    /// driver.
    fn wait_until(&self, is_done: impl Fn() -> Result<bool, Error>) -> Result<(), Error> {
        while !is_done()? {
            self.abort.check(self.operation)?;
            let elapsed = self.started.elapsed();
            if elapsed >= self.timeout {
                let (operation, after) = (self.operation, self.timeout);
                return Err(Error::TimedOut { operation, waiting_for: Vec::new(), after });
            }
            pause(elapsed);
        }
        Ok(())
    }
}

/// Lets other threads run; after some time the polls become less frequent.
fn pause(elapsed: Duration) {
    if elapsed < Duration::from_micros(200) {
        thread::yield_now();
    } else {
        thread::sleep(Duration::from_micros(50));
    }
}

/// One rank's communicator with the streams and memory that it works with.
///
/// Its operations return when the device has completed them or they have failed. After a failure the device may still
/// be working, so the link must be ended before the memory is used again.
#[derive(Debug)]
pub(super) struct Link {
    communicator: Communicator,
    streams: Streams,
    /// `None` if sums are not added in the fixed tree.
    tree: Option<FixedTree>,
}

/// libtorch's stream and our own, which does not wait for libtorch's by itself.
#[derive(Debug)]
struct Streams {
    torch: Stream,
    ours: Stream,
    /// Marks libtorch's stream after the work that must come before an operation.
    ready: StreamEvent,
    /// Marks our stream after the operation.
    finished: StreamEvent,
}

impl Link {
    /// Starts to set up this rank's link; it can be used after [`wait_until_ready`](Self::wait_until_ready).
    pub(super) fn begin(
        (device, tree): (Device, Option<FixedTree>),
        id: NcclUniqueId,
        (rank, world_size): (Rank, u32),
    ) -> Result<Self, Error> {
        let streams = Streams {
            torch: Stream::of_torch(device),
            ours: Stream::new(device)?,
            ready: StreamEvent::new(device)?,
            finished: StreamEvent::new(device)?,
        };
        // Last, because it is not freed when it is dropped.
        let communicator = Communicator::begin(id, rank, world_size)?;
        Ok(Self { communicator, streams, tree })
    }

    fn stream(&self) -> &Stream {
        &self.streams.ours
    }

    /// Waits until NCCL has queued all requested work in its stream.
    pub(super) fn wait_until_ready(&self, context: &OperationContext<'_>) -> Result<(), Error> {
        context.wait_until(|| self.communicator.is_ready())
    }

    pub(super) fn all_reduce(
        &self,
        context: &OperationContext<'_>,
        values: &mut DeviceSliceMut<'_>,
    ) -> Result<(), Error> {
        let values = DeviceValues::from(values);
        // SAFETY: the slice is borrowed for this call and on our device; see `run`.
        self.run(context, || unsafe { self.communicator.all_reduce(self.stream(), values) })
    }

    pub(super) fn broadcast(
        &self,
        context: &OperationContext<'_>,
        root: Rank,
        values: &mut DeviceSliceMut<'_>,
    ) -> Result<(), Error> {
        let values = DeviceValues::from(values);
        // SAFETY: as above.
        self.run(context, || unsafe { self.communicator.broadcast(self.stream(), root, values) })
    }

    /// Adds up all ranks' `sums` in the fixed tree; `sums` are this rank's subtrees. The total is written to the first
    /// one.
    pub(super) fn sum_in_tree(
        &mut self,
        context: &OperationContext<'_>,
        virtual_ranks: u32,
        sums: &mut [&mut DeviceSliceMut<'_>],
    ) -> Result<(), Error> {
        let Some(tree) = &mut self.tree else { return Ok(()) };
        let sums = sums.iter_mut().map(|sum| DeviceValues::from(&mut **sum)).collect();
        let plan = tree.plan(virtual_ranks, sums)?;
        let channel = (&self.communicator, self.stream());
        // SAFETY: as above, for all sums.
        self.run(context, || unsafe { plan.queue(channel, || self.wait_until_ready(context)) })
    }

    /// Calls `queue` to queue work on our stream, ordered after all that libtorch has queued and before all that it
    /// will queue, and waits until the work is done.
    fn run(
        &self,
        context: &OperationContext<'_>,
        queue: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let Streams { torch, ours, ready, finished } = &self.streams;
        torch.mark(ready)?;
        ours.wait_for(ready)?;
        queue()?;
        // A non-blocking communicator may queue its work later, and the event must come after that work.
        self.wait_until_ready(context)?;
        ours.mark(finished)?;
        torch.wait_for(finished)?;
        // Polls NCCL too, to detect its errors.
        context.wait_until(|| Ok(self.communicator.is_ready()? && finished.is_reached()?))
    }

    /// Frees the communicator and ends its running work. After the timeout its thread, memory and kernels are leaked.
    pub(super) fn end(self, after: Duration) -> Result<(), Error> {
        let Self { communicator, streams, tree } = self;
        let (done, is_done) = mpsc::channel();
        let helper = thread::Builder::new().name("nccl-abort".to_owned()).spawn(move || {
            communicator.abort();
            // After the timeout there is no receiver.
            let _ = done.send(());
        });
        let aborted = helper
            .map_err(Error::io("nccl-abort"))
            .and_then(|_| is_done.recv_timeout(after).map_err(|_| Error::Stuck { after }));
        if aborted.is_err() {
            // Freeing memory waits for the device's work, so it would hang too.
            std::mem::forget(tree);
            return aborted;
        }
        // Work that was queued after the aborted kernels still runs in the caller's memory: later work of libtorch must
        // wait for it. If even a mark fails, the device does no more work, and its error was reported before.
        let Streams { torch, ours, finished, .. } = &streams;
        let _ = ours.mark(finished).and_then(|()| torch.wait_for(finished));
        Ok(())
    }
}
