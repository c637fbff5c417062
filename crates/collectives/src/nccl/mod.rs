//! Ranks that are processes with one GPU each, connected by NCCL.
//!
//! | file | is about |
//! |---|---|
//! | `link` | a communicator, the stream it works on, and how that is ordered with libtorch's |
//! | `fixed_tree` | sums in the fixed tree |
//! | `ffi` | the calls to NCCL |
//!
//! NCCL is opened when first needed: the same program runs on machines without it. Operations run on a
//! stream of their own, behind what libtorch has queued on its, which waits for them in turn. The host
//! waits for each, too, but never stands still in the driver: it asks whether the operation is over, so
//! that it keeps its deadline and can be aborted. Nothing overlaps with an all-reduce yet.
//!
//! [`Order`] says how values are added: in the fixed tree, on the device, or in an order of NCCL's own,
//! the same in every step but another one for every number of ranks.
//!
//! The communicator never blocks (`blocking = 0`). `ncclCommAbort` alone may hang, and is given its own
//! thread and deadline; it is also how a group that is no longer needed is left, as it is the one call
//! that never waits for peers, and no operation is under way then.
//!
//! What NCCL and its network plugins read from the environment (`NCCL_*`, and `FI_*` for libfabric on EFA)
//! is the agent's business ([`baton_job::gpu::fabric`]).

mod ffi;
mod fixed_tree;
mod link;

use std::fmt;
use std::time::{Duration, Instant};

use baton_gpu::Device;
use baton_job::Rank;

use crate::{AbortHandle, BufferMut, Collective, DeviceSliceMut, Error, Part, operation, tree};
use ffi::UniqueId;
pub use ffi::{Version, is_present, version};
use fixed_tree::FixedTree;
use link::{Limit, Link};

/// The first with communicators that do not block.
const OLDEST: Version = Version { major: 2, minor: 14, patch: 0 };

/// The order in which [`Collective::all_reduce`] adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The fixed tree: the same bits for every number of ranks.
    FixedTree,
    /// NCCL's own: one partial sum per rank, in a way that is the fastest for so many of them.
    Library,
}

/// How to add, and how long to wait.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The order of additions.
    pub order: Order,
    /// For all ranks to set up their communicators.
    pub connect_timeout: Duration,
    /// For each operation as a whole; it includes the work queued before it and waiting for the
    /// slowest rank to begin.
    pub operation_timeout: Duration,
    /// For `ncclCommAbort`.
    pub abort_timeout: Duration,
}

/// One rank's end of a group of GPUs.
pub struct NcclCollective {
    bootstrap: Box<dyn Collective>,
    device: i32,
    options: Options,
    abort: AbortHandle,
    /// None after a failure.
    link: Option<Link>,
}

impl NcclCollective {
    /// Sets up NCCL between the ranks of `bootstrap`; this one uses the CUDA device `device`. Later
    /// `bootstrap` carries what is not on a GPU, and its abort handle is this group's.
    ///
    /// # Errors
    /// NCCL or CUDA is missing or fails, a late peer, an abort.
    pub fn connect(
        mut bootstrap: Box<dyn Collective>,
        device: i32,
        options: Options,
    ) -> Result<Self, Error> {
        let version = version()?;
        if version < OLDEST {
            return Err(Error::Unsupported {
                operation: operation::CONNECT,
                what: "this libnccl.so is older than 2.14 and would block for ever on a lost peer",
                remedy: "install the NCCL of the libtorch wheel, see `make setup`",
            });
        }
        let gpu = Device::open(device)?;
        let (rank, world_size) = (bootstrap.rank(), bootstrap.world_size());
        let tree = match options.order {
            Order::FixedTree if world_size > 1 => Some(FixedTree::new(gpu, rank, world_size)?),
            Order::FixedTree | Order::Library => None,
        };
        let mine = if rank == Rank(0) { ffi::unique_id()?.to_vec() } else { Vec::new() };
        let gathered = bootstrap.all_gather_bytes(&mine)?;
        let id: UniqueId = gathered[0].as_slice().try_into().map_err(|_| Error::Protocol {
            operation: operation::CONNECT,
            detail: format!("rank 0 sends {} bytes as NCCL's unique id", gathered[0].len()),
        })?;
        let link = Some(Link::begin((gpu, tree), id, (rank, world_size))?);
        let abort = bootstrap.abort_handle();
        let mut group = Self { bootstrap, device, options, abort, link };
        let timeout = options.connect_timeout;
        group.run(operation::CONNECT, timeout, |link, limit| link.settle(limit))?;
        Ok(group)
    }

    /// Runs one operation.
    fn work(
        &mut self,
        operation: &'static str,
        body: impl FnOnce(&mut Link, &Limit<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.run(operation, self.options.operation_timeout, body)
    }

    /// Runs `body`. If it fails, the communicator is aborted, as its kernels would occupy the GPU for ever.
    fn run(
        &mut self,
        operation: &'static str,
        timeout: Duration,
        body: impl FnOnce(&mut Link, &Limit<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.abort.check(operation)?;
        let Some(link) = &mut self.link else {
            return Err(Error::Broken { operation });
        };
        let limit = Limit { operation, timeout, started: Instant::now(), abort: &self.abort };
        let result = body(link, &limit);
        result.or_else(|error| self.leave().and(Err(error)))
    }

    fn leave(&mut self) -> Result<(), Error> {
        self.link.take().map_or(Ok(()), |link| link.end(self.options.abort_timeout))
    }

    /// Adds one sum per rank.
    fn sum_as_nccl_does(&mut self, parts: &mut [Part<'_>]) -> Result<(), Error> {
        let [part] = parts else {
            return Err(Error::Unsupported {
                operation: operation::ALL_REDUCE,
                what: "NCCL adds one partial sum per rank in its own order, not several",
                remedy: "add them up first, or set precision.determinism = \"strict\"",
            });
        };
        let slice = self.on_device(operation::ALL_REDUCE, &mut part.buffer)?;
        self.work(operation::ALL_REDUCE, |link, limit| link.all_reduce(limit, slice))
    }

    fn sum_in_tree(&mut self, virtual_ranks: u32, parts: &mut [Part<'_>]) -> Result<(), Error> {
        tree::check_parts(self.rank(), self.world_size(), virtual_ranks, parts)?;
        let mut sums = parts
            .iter_mut()
            .map(|part| self.on_device(operation::ALL_REDUCE, &mut part.buffer))
            .collect::<Result<Vec<_>, Error>>()?;
        self.work(operation::ALL_REDUCE, |link, limit| {
            link.sum_in_tree(limit, virtual_ranks, &mut sums)
        })
    }

    /// The device memory behind `buffer`, if NCCL can work on it.
    fn on_device<'b, 'a>(
        &self,
        operation: &'static str,
        buffer: &'b mut BufferMut<'a>,
    ) -> Result<&'b mut DeviceSliceMut<'a>, Error> {
        match buffer {
            BufferMut::Host(_) => Err(Error::Unsupported {
                operation,
                what: "NCCL works on GPU memory, but this buffer is in host memory",
                remedy: "train on GPUs or set cluster.collective = \"tcp\"",
            }),
            BufferMut::Device(slice) if slice.device() != self.device => Err(Error::Protocol {
                operation,
                detail: format!(
                    "the buffer is on CUDA device {}, the group on {}",
                    slice.device(),
                    self.device
                ),
            }),
            BufferMut::Device(slice) => Ok(slice),
        }
    }
}

impl Collective for NcclCollective {
    fn rank(&self) -> Rank {
        self.bootstrap.rank()
    }

    fn world_size(&self) -> u32 {
        self.bootstrap.world_size()
    }

    /// In [`Order::Library`], `parts` must be one buffer, whatever its node.
    fn all_reduce(&mut self, virtual_ranks: u32, parts: &mut [Part<'_>]) -> Result<(), Error> {
        match self.options.order {
            Order::FixedTree => self.sum_in_tree(virtual_ranks, parts),
            Order::Library => self.sum_as_nccl_does(parts),
        }
    }

    fn broadcast(&mut self, root: Rank, mut buffer: BufferMut<'_>) -> Result<(), Error> {
        crate::check_root(root, self.world_size())?;
        let slice = self.on_device(operation::BROADCAST, &mut buffer)?;
        self.work(operation::BROADCAST, |link, limit| link.broadcast(limit, root, slice))
    }

    fn all_gather_bytes(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        self.bootstrap.all_gather_bytes(mine)
    }

    fn abort_handle(&self) -> AbortHandle {
        self.abort.clone()
    }
}

impl fmt::Debug for NcclCollective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, options, link, .. } = self;
        f.debug_struct("NcclCollective")
            .field("rank", &self.rank())
            .field("world_size", &self.world_size())
            .field("device", device)
            .field("order", &options.order)
            .field("link", link)
            .finish_non_exhaustive()
    }
}

impl Drop for NcclCollective {
    /// Every operation is over by now, so that there is nothing to finish.
    fn drop(&mut self) {
        let _ = self.leave();
    }
}

#[cfg(test)]
mod tests;
