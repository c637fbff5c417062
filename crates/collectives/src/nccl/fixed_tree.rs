//! Sums in the fixed tree, added on the device: the algorithm of [`tcp`](crate::tcp) with NCCL's messages.
//!
//! Rank *r* owns the *r*-th of W slices. Every rank sends the others the slices that they own, of all its
//! partial sums; the owner completes the tree over them and sends the finished slice to everybody.
#![allow(unsafe_code)]

use baton_gpu::{Adder, Device, DeviceMemory, Stream, copy};
use baton_job::Rank;

use super::ffi::{Communicator, Values};
use crate::Error;
use crate::tree::{self, Fold, TreeNode, slice_of};

/// Values that what is received begins at a multiple of: 256 bytes, as messages and kernels like it.
const ALIGNMENT: usize = 64;

/// What a rank keeps from one sum to the next.
#[derive(Debug)]
pub(super) struct FixedTree {
    device: Device,
    rank: Rank,
    world_size: u32,
    adder: Adder,
    /// For the slices that others send.
    received: Option<DeviceMemory>,
}

impl FixedTree {
    pub(super) fn new(device: Device, rank: Rank, world_size: u32) -> Result<Self, Error> {
        let adder = Adder::new(device)?;
        Ok(Self { device, rank, world_size, adder, received: None })
    }

    /// What is to be done with `sums`, which are this rank's and equally long.
    pub(super) fn plan(&mut self, virtual_ranks: u32, sums: Vec<Values>) -> Result<Plan, Error> {
        let (me, world_size) = (self.rank, self.world_size);
        let own = slice_of(me, world_size, sums[0].len);
        let stride = own.len().next_multiple_of(ALIGNMENT);
        let subtrees = |rank| tree::subtrees_of(rank, world_size, virtual_ranks);
        let nodes: Vec<Vec<TreeNode>> = (0..world_size).map(|rank| subtrees(Rank(rank))).collect();
        let foreign = nodes.iter().map(Vec::len).sum::<usize>() - sums.len();

        let mut unused = self.room_for(foreign * stride)?;
        let mut place = || {
            let values = Values { address: unused, len: own.len() };
            unused += (stride * size_of::<f32>()) as u64;
            values
        };
        let mut leaves = Vec::new();
        for (rank, nodes) in (0..).map(Rank).zip(nodes) {
            let mut mine = sums.iter().map(|sum| sum.narrow(own.clone()));
            let mut values = || if rank == me { mine.next() } else { Some(place()) };
            leaves.push(nodes.into_iter().filter_map(|node| Some((node, values()?))).collect());
        }
        Ok(Plan { rank: me, world_size, adder: self.adder, sums, leaves })
    }

    /// The address of so many values, which have been received before or will be.
    fn room_for(&mut self, values: usize) -> Result<u64, Error> {
        let bytes = values * size_of::<f32>();
        let memory = match self.received.take() {
            Some(memory) if memory.len() >= bytes => memory,
            // Freeing the old one waits for the device, but lengths do not change as a rule.
            _ => DeviceMemory::new(self.device, bytes)?,
        };
        Ok(self.received.insert(memory).address())
    }
}

/// A communicator and the stream on which it works.
type Channel<'a> = (&'a Communicator, &'a Stream);

/// One sum.
#[derive(Debug)]
pub(super) struct Plan {
    rank: Rank,
    world_size: u32,
    adder: Adder,
    sums: Vec<Values>,
    /// Of each rank, its subtrees and where this rank has its own slice of them.
    leaves: Vec<Vec<(TreeNode, Values)>>,
}

impl Plan {
    /// Queues all of it on the stream; `settle` waits until what NCCL was asked for is there.
    ///
    /// # Safety
    /// Until that stream has come past it, nobody else uses the sums, and no other plan is queued.
    pub(super) unsafe fn queue(
        &self,
        channel: Channel<'_>,
        settle: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise for the sums. What is received lies in memory of ours, which stays:
        // it is replaced only when a later sum is planned, after this one.
        unsafe {
            self.exchange_slices(channel)?;
            settle()?;
            self.complete(channel.1)?;
            self.gather_slices(channel)
        }
    }

    /// # Safety
    /// As [`queue`](Self::queue).
    unsafe fn exchange_slices(&self, (nccl, stream): Channel<'_>) -> Result<(), Error> {
        nccl.group(|| {
            for (peer, leaves) in self.peers() {
                for sum in &self.sums {
                    // SAFETY: the caller's promise.
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

    /// Adds up all ranks' subtrees of the own slice.
    ///
    /// # Safety
    /// As [`queue`](Self::queue).
    unsafe fn complete(&self, stream: &Stream) -> Result<(), Error> {
        let own = self.sums[0].narrow(self.slice(self.rank));
        let mut fold = Fold::new(0);
        for (node, values) in self.leaves.iter().flatten() {
            fold.push_node(*node, values.address, |left, right| {
                // SAFETY: the caller's promise; subtrees lie apart.
                unsafe { self.adder.add(stream, *left, *right, own.len) }
            })?;
        }
        // It is where the leftmost subtree was, which is rank 0's.
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
    unsafe fn gather_slices(&self, (nccl, stream): Channel<'_>) -> Result<(), Error> {
        let total = self.sums[0];
        nccl.group(|| {
            for (peer, _) in self.peers() {
                // SAFETY: the caller's promise.
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

    fn peers(&self) -> impl Iterator<Item = (Rank, &Vec<(TreeNode, Values)>)> {
        (0..).map(Rank).zip(&self.leaves).filter(|(rank, _)| *rank != self.rank)
    }
}
