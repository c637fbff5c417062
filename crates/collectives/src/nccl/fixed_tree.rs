//! Sums in the fixed tree, added on the device: the algorithm of [`tcp`](crate::tcp) with NCCL messages.
//!
//! Rank *r* owns the *r*-th of W slices. Every rank sends to each other rank that rank's slice of all its partial sums.
//! The owner completes the tree for its slice and sends the result to all ranks.
#![allow(unsafe_code)]

use baton_gpu::{Adder, Device, DeviceMemory, Stream, copy};
use baton_job::Rank;

use super::ffi::{Communicator, DeviceValues};
use crate::Error;
use crate::tree::{self, Fold, TreeNode, slice_of};

/// Alignment of received data, in values: 256 bytes, which is efficient for messages and kernels.
const RECEIVE_ALIGNMENT: usize = 64;

/// Resources that a rank keeps from one sum to the next.
#[derive(Debug)]
pub(super) struct FixedTree {
    device: Device,
    rank: Rank,
    world_size: u32,
    adder: Adder,
    /// Memory for the slices that other ranks send.
    received: Option<DeviceMemory>,
}

impl FixedTree {
    pub(super) fn new(device: Device, rank: Rank, world_size: u32) -> Result<Self, Error> {
        let adder = Adder::new(device)?;
        Ok(Self { device, rank, world_size, adder, received: None })
    }

    /// The plan for adding `sums`, this rank's partial sums of equal length.
    pub(super) fn plan(
        &mut self,
        virtual_ranks: u32,
        sums: Vec<DeviceValues>,
    ) -> Result<TreeSumPlan, Error> {
        let (me, world_size) = (self.rank, self.world_size);
        let own = slice_of(me, world_size, sums[0].len);
        let stride = own.len().next_multiple_of(RECEIVE_ALIGNMENT);
        let subtrees = |rank| tree::subtrees_of(rank, world_size, virtual_ranks);
        let nodes: Vec<Vec<TreeNode>> = (0..world_size).map(|rank| subtrees(Rank(rank))).collect();
        let foreign = nodes.iter().map(Vec::len).sum::<usize>() - sums.len();

        let mut unused = self.receive_memory(foreign * stride)?;
        let mut allocate = || {
            let values = DeviceValues { address: unused, len: own.len() };
            unused += (stride * size_of::<f32>()) as u64;
            values
        };
        let mut leaves = Vec::new();
        for (rank, nodes) in (0..).map(Rank).zip(nodes) {
            let mut mine = sums.iter().map(|sum| sum.narrow(own.clone()));
            let mut values = || if rank == me { mine.next() } else { Some(allocate()) };
            leaves.push(nodes.into_iter().filter_map(|node| Some((node, values()?))).collect());
        }
        Ok(TreeSumPlan { rank: me, world_size, adder: self.adder, sums, leaves })
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
    rank: Rank,
    world_size: u32,
    adder: Adder,
    sums: Vec<DeviceValues>,
    /// For each rank: its subtrees, with the address of this rank's slice of each.
    leaves: Vec<Vec<(TreeNode, DeviceValues)>>,
}

impl TreeSumPlan {
    /// Queues all work on the stream; `wait_until_ready` waits until NCCL has queued its part.
    ///
    /// # Safety
    /// Until the stream has completed this work, no other code may use the sums, and no other plan may be queued.
    pub(super) unsafe fn queue(
        &self,
        channel: NcclChannel<'_>,
        wait_until_ready: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        // SAFETY: guaranteed by the caller for the sums. Received data is in this object's own memory, which is
        // replaced only when a later sum is planned, after this one.
        unsafe {
            self.exchange_slices(channel)?;
            wait_until_ready()?;
            self.complete(channel.1)?;
            self.gather_slices(channel)
        }
    }

    /// # Safety
    /// As [`queue`](Self::queue).
    unsafe fn exchange_slices(&self, (nccl, stream): NcclChannel<'_>) -> Result<(), Error> {
        nccl.group(|| {
            for (peer, leaves) in self.peers() {
                for sum in &self.sums {
                    // SAFETY: guaranteed by the caller.
                    unsafe { nccl.send(stream, peer, sum.narrow(self.slice(peer))) }?;
                }
                for (_, received) in leaves {
                    // SAFETY: as above.
                    unsafe { nccl.receive(stream, peer, *received) }?;
                }
            }
            Ok(())
        })
    }

    /// Adds up all ranks' subtrees of this rank's slice.
    ///
    /// # Safety
    /// As [`queue`](Self::queue).
    unsafe fn complete(&self, stream: &Stream) -> Result<(), Error> {
        let own = self.sums[0].narrow(self.slice(self.rank));
        let mut fold = Fold::new(0);
        for (node, values) in self.leaves.iter().flatten() {
            fold.push_node(*node, values.address, |left, right| {
                // SAFETY: guaranteed by the caller; subtrees do not overlap.
                unsafe { self.adder.add(stream, *left, *right, own.len) }
            })?;
        }
        // The total is where the leftmost subtree was, in rank 0's memory range.
        for (_, total) in fold.finish() {
            if total != own.address {
                // SAFETY: as above.
                unsafe { copy(stream, own.address, total, own.len * size_of::<f32>()) }?;
            }
        }
        Ok(())
    }

    /// Every rank sends its finished slice to all others.
    ///
    /// # Safety
    /// As [`queue`](Self::queue).
    unsafe fn gather_slices(&self, (nccl, stream): NcclChannel<'_>) -> Result<(), Error> {
        let total = self.sums[0];
        nccl.group(|| {
            for (peer, _) in self.peers() {
                // SAFETY: guaranteed by the caller.
                unsafe {
                    nccl.send(stream, peer, total.narrow(self.slice(self.rank)))?;
                    nccl.receive(stream, peer, total.narrow(self.slice(peer)))?;
                }
            }
            Ok(())
        })
    }

    fn slice(&self, rank: Rank) -> std::ops::Range<usize> {
        slice_of(rank, self.world_size, self.sums[0].len)
    }

    fn peers(&self) -> impl Iterator<Item = (Rank, &Vec<(TreeNode, DeviceValues)>)> {
        (0..).map(Rank).zip(&self.leaves).filter(|(rank, _)| *rank != self.rank)
    }
}
