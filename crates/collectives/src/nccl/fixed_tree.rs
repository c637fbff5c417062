//! Sums in the fixed tree, added on the device: a [schedule](crate::schedule) with NCCL messages.
#![allow(unsafe_code)]

use baton_gpu::{Adder, Device, DeviceMemory, Stream, copy};
use baton_job::Rank;

use super::ffi::{Communicator, DeviceValues};
use crate::schedule::{Additions, RankMemory, SumRegion, SumSchedule, SumStage};
use crate::{Error, Machines};

/// Resources that a rank keeps from one sum to the next.
#[derive(Debug)]
pub(super) struct FixedTree {
    device: Device,
    rank: Rank,
    machines: Machines,
    adder: Adder,
    /// Memory for what other ranks send.
    received: Option<DeviceMemory>,
}

impl FixedTree {
    pub(super) fn new(device: Device, rank: Rank, machines: Machines) -> Result<Self, Error> {
        let adder = Adder::new(device)?;
        Ok(Self { device, rank, machines, adder, received: None })
    }

    /// The plan for adding `sums`, this rank's partial sums of equal length.
    pub(super) fn plan(
        &mut self,
        virtual_ranks: u32,
        sums: Vec<DeviceValues>,
    ) -> Result<TreeSumPlan, Error> {
        let len = sums.first().map_or(0, |sum| sum.len);
        let schedule = SumSchedule::new(&self.machines, self.rank, virtual_ranks, len);
        let received = DeviceValues {
            address: self.receive_memory(schedule.received)?,
            len: schedule.received,
        };
        Ok(TreeSumPlan { adder: self.adder, stages: schedule.stages, sums, received })
    }

    /// Address of memory for this many received values; the memory is reused if it is large enough.
    fn receive_memory(&mut self, values: usize) -> Result<u64, Error> {
        let bytes = values * size_of::<f32>();
        let memory = match self.received.take() {
            Some(memory) if memory.len() >= bytes => memory,
            // Freeing the old memory waits for the device, but the length rarely changes.
            _ => DeviceMemory::new(self.device, bytes)?,
        };
        Ok(self.received.insert(memory).address())
    }
}

/// A communicator and the stream on which it works.
type NcclChannel<'a> = (&'a Communicator, &'a Stream);

/// The work for one sum.
#[derive(Debug)]
pub(super) struct TreeSumPlan {
    adder: Adder,
    stages: Vec<SumStage>,
    sums: Vec<DeviceValues>,
    received: DeviceValues,
}

impl TreeSumPlan {
    /// Queues all work on the stream; `wait_until_ready` waits until NCCL has queued its part.
    ///
    /// # Safety
    /// Until the stream has completed this work, no other code may use the sums, and no other plan may be queued.
    pub(super) unsafe fn queue(
        &self,
        channel: NcclChannel<'_>,
        wait_until_ready: impl Fn() -> Result<(), Error>,
    ) -> Result<(), Error> {
        for stage in &self.stages {
            // SAFETY: guaranteed by the caller for the sums. Received data is in this object's own memory, which is
            // replaced only when a later sum is planned, after this one.
            unsafe { self.exchange(stage, channel)? };
            // A non-blocking communicator may queue its messages later; what follows must come after them.
            wait_until_ready()?;
            for additions in &stage.additions {
                // SAFETY: as above.
                unsafe { self.add(additions, channel.1)? };
            }
        }
        Ok(())
    }

    /// # Safety
    /// As [`queue`](Self::queue).
    unsafe fn exchange(
        &self,
        stage: &SumStage,
        (nccl, stream): NcclChannel<'_>,
    ) -> Result<(), Error> {
        nccl.group(|| {
            for (peer, transfer) in &stage.transfers {
                for region in &transfer.send {
                    // SAFETY: guaranteed by the caller.
                    unsafe { nccl.send(stream, *peer, self.values(region)) }?;
                }
                for region in &transfer.receive {
                    // SAFETY: as above.
                    unsafe { nccl.receive(stream, *peer, self.values(region)) }?;
                }
            }
            Ok(())
        })
    }

    /// # Safety
    /// As [`queue`](Self::queue).
    unsafe fn add(&self, additions: &Additions, stream: &Stream) -> Result<(), Error> {
        let term = |index: usize| self.values(&additions.terms[index]);
        for &(left, right) in &additions.pairs {
            let (left, right) = (term(left), term(right));
            // SAFETY: guaranteed by the caller; terms do not overlap.
            unsafe { self.adder.add(stream, left.address, right.address, left.len) }?;
        }
        if let Some(to) = additions.copy_first_to {
            let (to, from) = (term(to), term(0));
            // SAFETY: as above.
            unsafe { copy(stream, to.address, from.address, to.len * size_of::<f32>()) }?;
        }
        Ok(())
    }

    fn values(&self, region: &SumRegion) -> DeviceValues {
        let memory = match region.memory {
            RankMemory::Sum(index) => self.sums[index],
            RankMemory::Received => self.received,
        };
        memory.narrow(region.range.clone())
    }
}
