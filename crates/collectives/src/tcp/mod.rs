//! Ranks that are processes, connected by TCP: one connection for each pair.
//!
//! | file | content |
//! |---|---|
//! | `handshake` | connecting the ranks of one generation, and rejecting all other connections |
//! | `connection` | one connection: a socket, with shared memory beside it |
//! | `shared_memory` | bytes between two ranks of one machine without the system's help |
//! | `proof` | how both ends of a connection prove that they know the generation's secret |
//! | `mesh` | the connections, and message exchange over all of them at the same time |
//! | `host_memory` | the values that an all-reduce sends, receives and adds |
//! | `wait` | waiting until a socket is ready, the deadline passes or the group is aborted |
//! | `wire` | the format of the bytes |
//!
//! **All-reduce.** As `schedule` plans it: ranks that share a machine, by their addresses, add up among themselves
//! first.
//!
//! **Broadcast.** The root sends each rank its slice; then all ranks send their slices to each other, so that the root
//! is not the bottleneck.

mod connection;
mod handshake;
mod host_memory;
mod mesh;
mod proof;
mod shared_memory;
mod wait;
mod wire;

#[cfg(test)]
mod tests;

use std::net::TcpListener;
use std::time::Duration;

use baton_job::{Generation, MeshSecret, Rank};
use bytemuck::{cast_slice, cast_slice_mut};

use crate::buffer::Staged;
use crate::schedule::SumSchedule;
use crate::tree::{self, slice_of};
use crate::{AbortHandle, BufferMut, Collective, Error, Machines, Membership, Part, operation};
use host_memory::HostMemory;
use mesh::{Mesh, Message};
pub use proof::draw_secret;
use wait::{AbortSignal, OperationContext};
use wire::MessageKind;

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
    /// Timeout for each operation as a whole, including the wait for the slowest rank to begin. The first one may take
    /// `connect_timeout` more, as other ranks may still connect to each other.
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
    machines: Machines,
    operation_timeout: Duration,
    /// How much longer the first operation may take: others may still connect to each other.
    others_connect: Duration,
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
            machines: Machines::of_addresses(peers),
            operation_timeout: options.operation_timeout,
            others_connect: options.connect_timeout,
            broken: false,
            received: Vec::new(),
            staging: Vec::new(),
        })
    }

    /// From now on, ranks on one machine exchange their bytes through memory that they share, which takes less of their
    /// processors than TCP. Where the system does not allow it (other containers, other users), they stay with TCP and the
    /// log says so once. All ranks of the group must call this as the same operation. Results are the same bits.
    ///
    /// # Errors
    /// A lost or late peer, an abort.
    pub fn share_memory(&mut self) -> Result<(), Error> {
        let others_connect = self.others_connect;
        self.run(operation::SHARE_MEMORY, |group, context| {
            let machine = group.machines.with(group.rank());
            group.mesh.share_memory(context, machine)
        })?;
        // Only ranks of this machine took part.
        self.others_connect = others_connect;
        Ok(())
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
        let timeout = self.operation_timeout.saturating_add(self.others_connect);
        let context = OperationContext::new(operation, timeout, &abort_signal)?;
        if self.broken {
            return Err(Error::Broken { operation });
        }
        self.broken = true;
        let done = body(self, &context);
        if done.is_ok() {
            (self.broken, self.others_connect) = (false, Duration::ZERO);
        } else if !self.machines.are_flat() {
            // A rank that exchanges nothing with the lost one learns of it in this way. Elsewhere each sees it itself,
            // and its error names the right rank.
            self.mesh.close();
        }
        done
    }

    /// Adds up the partial sums of all ranks; `sums` are this rank's. The result is written to `sums[0]`.
    fn add_up(
        &mut self,
        context: &OperationContext<'_>,
        virtual_ranks: u32,
        sums: Vec<&mut [f32]>,
    ) -> Result<(), Error> {
        let len = sums.first().map_or(0, |sum| sum.len());
        let schedule = SumSchedule::new(&self.machines, self.rank(), virtual_ranks, len);
        if self.received.len() < schedule.received {
            self.received.resize(schedule.received, 0.0);
        }
        let mut memory = HostMemory { sums, received: &mut self.received[..schedule.received] };
        for stage in &schedule.stages {
            let messages = memory.messages(stage)?;
            self.mesh.exchange(context, MessageKind::AllReduce, virtual_ranks, messages)?;
            stage.additions.iter().try_for_each(|additions| memory.add(additions))?;
        }
        Ok(())
    }

    /// Every rank sends its slice of `values` to all others, except to `root`, which has all slices already.
    fn gather_slices(
        &mut self,
        context: &OperationContext<'_>,
        root: Rank,
        values: &mut [f32],
    ) -> Result<(), Error> {
        let me = self.rank();
        let mut slices = split_slices(values, self.world_size());
        let mine = &*std::mem::take(&mut slices[me.0 as usize]);
        let message = |peer: Rank| Message {
            peer,
            send: (root != peer).then(|| vec![cast_slice(mine)]),
            receive: (root != me)
                .then(|| vec![cast_slice_mut(std::mem::take(&mut slices[peer.0 as usize]))]),
        };
        let messages = self.mesh.peers().map(message).collect();
        self.mesh.exchange(context, MessageKind::Broadcast, root.0, messages)
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
                let (send, receive) = (Some(vec![mine]), Some(vec![bytes.as_mut()]));
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
            vec![Message { peer: root, send: None, receive: Some(vec![mine]) }]
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
            let sums = staged.iter_mut().map(Staged::values).collect();
            group.add_up(context, virtual_ranks, sums)?;
            staged.into_iter().try_for_each(|sum| sum.write_back(&mut group.staging))
        })
    }

    fn broadcast(&mut self, root: Rank, buffer: BufferMut<'_>) -> Result<(), Error> {
        self.run(operation::BROADCAST, |group, context| {
            crate::check_root(root, group.world_size())?;
            let mut staged = Staged::new(buffer, &mut group.staging)?;
            group.scatter_slices(context, root, staged.values())?;
            group.gather_slices(context, root, staged.values())?;
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
        let (slice, rest) = values.split_at_mut(slice_of(rank, world_size, len).len());
        slices.push(slice);
        values = rest;
    }
    slices
}
