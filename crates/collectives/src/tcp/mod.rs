//! Ranks that are processes, connected by TCP: one connection for each pair.
//!
//! | file | content |
//! |---|---|
//! | `handshake` | connecting the ranks of one generation, and rejecting all other connections |
//! | `proof` | how both ends of a connection prove that they know the generation's secret |
//! | `mesh` | the connections, and message exchange over all of them at the same time |
//! | `wait` | waiting until a socket is ready, the deadline passes or the group is aborted |
//! | `wire` | the format of the bytes |
//!
//! **All-reduce.** Rank *r* owns the *r*-th of W slices. Each rank sends to each other rank that rank's slice of all
//! its partial sums. The owner completes the fixed tree for its slice and sends the result to all ranks. With one
//! partial sum per rank this transfers the minimum, 2(W−1)/W of the buffer, out of and into every rank, and the
//! additions are the same for every owner.
//!
//! **Broadcast.** The root sends each rank its slice; then all ranks exchange their slices as above, so that the root
//! is not the bottleneck.

mod handshake;
mod mesh;
mod proof;
mod wait;
mod wire;

#[cfg(test)]
mod tests;

use std::convert::Infallible;
use std::net::TcpListener;
use std::time::Duration;

use baton_job::{Generation, MeshSecret, Rank};
use bytemuck::{cast_slice, cast_slice_mut};

use crate::buffer::Staged;
use crate::tree::{self, Fold, slice_of};
use crate::{AbortHandle, BufferMut, Collective, Error, Membership, Part, TreeNode, operation};
use mesh::{Mesh, Message};
pub use proof::draw_secret;
use wait::{AbortSignal, OperationContext};
use wire::MessageKind;

/// Number of values added at a time: 32 KiB of each partial sum.
const SUM_BLOCK_LEN: usize = 8 << 10;

/// A socket that accepts connections of the other ranks of one generation.
///
/// Bind a new one for each generation and send its address to the coordinator. A rank that still has the address of an
/// older one then finds a closed port, and a rank that connects early waits in the queue of this one.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    address: String,
}

impl Listener {
    /// Listens on a free port of `host`, which is this machine's name or address for its peers.
    ///
    /// # Errors
    /// The address is not this machine's.
    pub fn bind(host: &str) -> Result<Self, Error> {
        let bind = || {
            let socket = TcpListener::bind((host, 0))?;
            let address = socket.local_addr()?.to_string();
            Ok(Self { socket, address })
        };
        bind().map_err(Error::io("bind"))
    }

    /// `address:port`, for the peers.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }
}

/// Timeouts.
#[derive(Clone, Copy, Debug)]
pub struct TcpOptions {
    /// Timeout for all peers to connect.
    pub connect_timeout: Duration,
    /// Timeout for each operation as a whole, including the wait for the slowest rank to begin.
    pub operation_timeout: Duration,
}

/// The ranks of a generation, as one of them knows them.
#[derive(Clone, Copy, Debug)]
pub struct RankGroup<'a> {
    /// The generation.
    pub generation: Generation,
    /// This rank.
    pub rank: Rank,
    /// Addresses of all ranks, in order.
    pub peers: &'a [String],
    /// The generation's secret, equal on all ranks.
    pub secret: &'a MeshSecret,
}

/// One rank's handle to a group of processes.
#[derive(Debug)]
pub struct TcpCollective {
    mesh: Mesh,
    operation_timeout: Duration,
    broken: bool,
    /// Memory for the partial sums of other ranks, kept for reuse.
    received: Vec<f32>,
    /// Host copies of device buffers, kept for reuse.
    staging: Vec<Vec<f32>>,
}

impl TcpCollective {
    /// Connects to the other ranks of `group`.
    ///
    /// Connections from other generations, from other programs and from anybody who does not know the secret are refused
    /// and do not disturb the handshake. Addresses should be numeric: a name lookup can block beyond the deadline.
    ///
    /// # Errors
    /// A lost or late peer, a peer in another generation or without the secret, no secret for several ranks, `abort`.
    pub fn connect(
        listener: Listener,
        group: RankGroup<'_>,
        options: TcpOptions,
        abort: AbortHandle,
    ) -> Result<Self, Error> {
        let RankGroup { generation, rank, peers, secret } = group;
        let world_size = peers.len() as u32;
        if rank.0 >= world_size {
            let detail = format!("there is no rank {rank} in a group of {world_size}");
            return Err(Error::Protocol { operation: operation::CONNECT, detail });
        }
        if world_size > 1 && !secret.is_drawn() {
            let detail = "the coordinator has sent no secret for the ranks".to_owned();
            return Err(Error::Protocol { operation: operation::CONNECT, detail });
        }
        let me = Membership { protocol: wire::PROTOCOL, generation, rank, world_size };
        let abort_signal = AbortSignal::new(abort)?;
        let context =
            OperationContext::new(operation::CONNECT, options.connect_timeout, &abort_signal)?;
        let streams = handshake::connect_all(listener.socket, me, peers, secret, &context)?;
        Ok(Self {
            mesh: Mesh::new(rank, abort_signal, streams),
            operation_timeout: options.operation_timeout,
            broken: false,
            received: Vec::new(),
            staging: Vec::new(),
        })
    }

    /// A group of one rank, with this timeout for operations.
    ///
    /// # Errors
    /// The system has no socket left.
    pub fn alone(timeout: Duration) -> Result<Self, Error> {
        let listener = Listener::bind("127.0.0.1")?;
        let peers = [listener.address().to_owned()];
        let options = TcpOptions { connect_timeout: timeout, operation_timeout: timeout };
        // Nobody can join a group of one.
        let secret = &MeshSecret::default();
        let group = RankGroup { generation: Generation(0), rank: Rank(0), peers: &peers, secret };
        Self::connect(listener, group, options, AbortHandle::new())
    }

    /// Runs one operation. After a failure, connections may be in the middle of a message, so no other operation is
    /// possible.
    fn run<T>(
        &mut self,
        operation: &'static str,
        body: impl FnOnce(&mut Self, &OperationContext<'_>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let abort_signal = self.mesh.abort_signal.clone();
        let context = OperationContext::new(operation, self.operation_timeout, &abort_signal)?;
        if self.broken {
            return Err(Error::Broken { operation });
        }
        self.broken = true;
        let done = body(self, &context)?;
        self.broken = false;
        Ok(done)
    }

    /// Completes the tree for this rank's slice over the partial sums of all ranks; `sums` are this rank's. The result
    /// is written to `sums[0]`.
    fn sum_own_slice(
        &mut self,
        context: &OperationContext<'_>,
        virtual_ranks: u32,
        sums: &mut [&mut [f32]],
    ) -> Result<(), Error> {
        let (me, world_size) = (self.rank(), self.world_size());
        let len = sums[0].len();
        let own = slice_of(me, world_size, len);
        let nodes: Vec<Vec<TreeNode>> = (0..world_size)
            .map(|rank| tree::subtrees_of(Rank(rank), world_size, virtual_ranks))
            .collect();

        let foreign: usize = nodes.iter().map(Vec::len).sum::<usize>() - sums.len();
        self.received.resize(foreign * own.len(), 0.0);
        let mut unused = &mut self.received[..];
        let mut messages = Vec::new();
        for peer in self.mesh.peers() {
            let theirs = slice_of(peer, world_size, len);
            let (receive, rest) = unused.split_at_mut(nodes[peer.0 as usize].len() * own.len());
            unused = rest;
            messages.push(Message {
                peer,
                send: Some(sums.iter().map(|sum| cast_slice(&sum[theirs.clone()])).collect()),
                receive: Some(cast_slice_mut(receive)),
            });
        }
        self.mesh.exchange(context, MessageKind::AllReduce, virtual_ranks, messages)?;
        // In blocks that stay in the cache, because each value is part of several additions.
        for offset in (0..own.len()).step_by(SUM_BLOCK_LEN) {
            let block = offset..own.len().min(offset + SUM_BLOCK_LEN);
            let mut received =
                self.received.chunks_exact_mut(own.len()).map(|sum| &mut sum[block.clone()]);
            let mut mine = sums.iter_mut().map(|sum| &mut sum[own.clone()][block.clone()]);
            let mut fold = Fold::new(0);
            for (rank, nodes) in (0..).map(Rank).zip(&nodes) {
                let from: &mut dyn Iterator<Item = &mut [f32]> =
                    if rank == me { &mut mine } else { &mut received };
                for (&node, sum) in nodes.iter().zip(from) {
                    let Ok(()) = fold.push_node(node, sum, |left, right| {
                        tree::add(left, right);
                        Ok::<_, Infallible>(())
                    });
                }
            }
            drop(fold);
            // The total is where the leftmost sum was, in the memory of rank 0's sums.
            if me != Rank(0) {
                sums[0][own.clone()][block.clone()].copy_from_slice(&self.received[block]);
            }
        }
        Ok(())
    }

    /// Every rank sends its slice of `values` to all others, except to `complete`, which has all slices already.
    fn gather_slices(
        &mut self,
        context: &OperationContext<'_>,
        (kind, argument): (MessageKind, u32),
        values: &mut [f32],
        complete: Option<Rank>,
    ) -> Result<(), Error> {
        let me = self.rank();
        let mut slices = split_slices(values, self.world_size());
        let mine = &*std::mem::take(&mut slices[me.0 as usize]);
        let message = |peer: Rank| Message {
            peer,
            send: (complete != Some(peer)).then(|| vec![cast_slice(mine)]),
            receive: (complete != Some(me))
                .then(|| cast_slice_mut(std::mem::take(&mut slices[peer.0 as usize]))),
        };
        let messages = self.mesh.peers().map(message).collect();
        self.mesh.exchange(context, kind, argument, messages)
    }

    /// Every rank sends `mine` to all others; the entries of `all` must have the right lengths already.
    fn gather(
        &mut self,
        context: &OperationContext<'_>,
        mine: &[u8],
        all: &mut [impl AsMut<[u8]>],
    ) -> Result<(), Error> {
        let mut messages = Vec::new();
        for (rank, bytes) in (0..).map(Rank).zip(all) {
            if rank == self.rank() {
                bytes.as_mut().copy_from_slice(mine);
            } else {
                let (send, receive) = (Some(vec![mine]), Some(bytes.as_mut()));
                messages.push(Message { peer: rank, send, receive });
            }
        }
        self.mesh.exchange(context, MessageKind::AllGatherBytes, 0, messages)
    }

    /// The root sends every rank its slice.
    fn scatter_slices(
        &mut self,
        context: &OperationContext<'_>,
        root: Rank,
        values: &mut [f32],
    ) -> Result<(), Error> {
        let me = self.rank();
        let mut slices = split_slices(values, self.world_size());
        let messages = if me == root {
            let message = |peer: Rank| Message {
                peer,
                send: Some(vec![cast_slice(&*slices[peer.0 as usize])]),
                receive: None,
            };
            self.mesh.peers().map(message).collect()
        } else {
            let mine = cast_slice_mut(std::mem::take(&mut slices[me.0 as usize]));
            vec![Message { peer: root, send: None, receive: Some(mine) }]
        };
        self.mesh.exchange(context, MessageKind::Broadcast, root.0, messages)
    }
}

impl Collective for TcpCollective {
    fn rank(&self) -> Rank {
        self.mesh.rank
    }

    fn world_size(&self) -> u32 {
        self.mesh.world_size()
    }

    fn all_reduce(&mut self, virtual_ranks: u32, parts: &mut [Part<'_>]) -> Result<(), Error> {
        self.run(operation::ALL_REDUCE, |group, context| {
            let world_size = group.world_size();
            tree::check_parts(group.rank(), world_size, virtual_ranks, parts)?;
            if world_size == 1 {
                return Ok(()); // The only part is the total.
            }
            let mut staged = parts
                .iter_mut()
                .map(|part| Staged::new(part.buffer.reborrow(), &mut group.staging))
                .collect::<Result<Vec<_>, Error>>()?;
            let mut sums: Vec<&mut [f32]> = staged.iter_mut().map(Staged::values).collect();
            group.sum_own_slice(context, virtual_ranks, &mut sums)?;
            group.gather_slices(context, (MessageKind::AllReduce, virtual_ranks), sums[0], None)?;
            staged.into_iter().try_for_each(|sum| sum.write_back(&mut group.staging))
        })
    }

    fn broadcast(&mut self, root: Rank, buffer: BufferMut<'_>) -> Result<(), Error> {
        self.run(operation::BROADCAST, |group, context| {
            crate::check_root(root, group.world_size())?;
            let mut staged = Staged::new(buffer, &mut group.staging)?;
            group.scatter_slices(context, root, staged.values())?;
            let kind = (MessageKind::Broadcast, root.0);
            group.gather_slices(context, kind, staged.values(), Some(root))?;
            staged.write_back(&mut group.staging)
        })
    }

    fn all_gather_bytes(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        self.run(operation::ALL_GATHER_BYTES, |group, context| {
            crate::check_gathered(group.rank(), mine.len() as u64)?;
            let mut lengths = vec![[0; 8]; group.world_size() as usize];
            group.gather(context, &(mine.len() as u64).to_le_bytes(), &mut lengths)?;

            let mut all = Vec::new();
            for (rank, length) in (0..).map(Rank).zip(lengths) {
                let length = u64::from_le_bytes(length);
                crate::check_gathered(rank, length)?;
                all.push(vec![0; length as usize]);
            }
            group.gather(context, mine, &mut all)?;
            Ok(all)
        })
    }

    fn abort_handle(&self) -> AbortHandle {
        self.mesh.abort_signal.handle().clone()
    }
}

/// The slices of all ranks, in rank order.
fn split_slices(mut values: &mut [f32], world_size: u32) -> Vec<&mut [f32]> {
    let len = values.len();
    let mut slices = Vec::new();
    for rank in 0..world_size {
        let (slice, rest) = values.split_at_mut(slice_of(Rank(rank), world_size, len).len());
        slices.push(slice);
        values = rest;
    }
    slices
}
