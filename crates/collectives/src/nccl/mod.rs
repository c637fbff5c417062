//! Ranks that are processes with one GPU each, connected by NCCL.
//!
//! | file | content |
//! |---|---|
//! | `link` | a communicator, its stream, and the order relative to libtorch's stream |
//! | `fixed_tree` | sums in the fixed tree |
//! | `ffi` | the calls to NCCL |
//!
//! NCCL is loaded when it is first needed: the same program runs on machines without it. Operations run on a separate
//! stream, after the work that libtorch has queued on its stream; libtorch's later work waits for them. The host waits
//! for each operation too, but never blocks in the driver: it polls whether the operation is done, so that it can keep
//! its deadline and be aborted. No other work overlaps with an all-reduce.
//!
//! [`SummationOrder`] selects how values are added: in the fixed tree, on the device, or in NCCL's own order, which is
//! the same in every step but different for every number of ranks.
//!
//! The communicator never blocks (`blocking = 0`). Only `ncclCommAbort` may hang, so it runs in a separate thread with
//! a deadline. It is also called to leave a group that is no longer needed: it is the only call that never waits for
//! peers, and no operation is running then.
//!
//! The agent sets the environment of NCCL and its network plugins (`NCCL_*`, and `FI_*` for libfabric on EFA); see
//! [`baton_job::gpu::fabric`].

mod ffi;
mod fixed_tree;
mod link;

use std::fmt;
use std::time::{Duration, Instant};

use baton_gpu::Device;
use baton_job::Rank;

use crate::{
    AbortHandle, BufferMut, Collective, DeviceSliceMut, Error, Machines, Part, operation, tree,
};
use ffi::NcclUniqueId;
pub use ffi::{Version, is_present, version};
use fixed_tree::FixedTree;
use link::{Link, OperationContext};

/// The first version with non-blocking communicators.
const MIN_VERSION: Version = Version { major: 2, minor: 14, patch: 0 };

/// The order in which [`Collective::all_reduce`] adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SummationOrder {
    /// The fixed tree: the same bits for every number of ranks.
    FixedTree,
    /// NCCL's own: one partial sum per rank, in the order that is fastest for this number of ranks.
    Library,
}

/// Summation order and timeouts.
#[derive(Clone, Copy, Debug)]
pub struct NcclOptions {
    /// The order of additions.
    pub order: SummationOrder,
    /// Timeout for all ranks to set up their communicators.
    pub connect_timeout: Duration,
    /// Timeout for each operation as a whole, including work queued before it and the wait for the slowest rank to
    /// begin.
    pub operation_timeout: Duration,
    /// Timeout for `ncclCommAbort`.
    pub abort_timeout: Duration,
}

/// One rank's handle to a group of GPUs.
pub struct NcclCollective {
    bootstrap: Box<dyn Collective>,
    device: i32,
    options: NcclOptions,
    abort: AbortHandle,
    /// `None` after a failure.
    link: Option<Link>,
}

impl NcclCollective {
    /// Sets up NCCL between the ranks of `bootstrap`, which are on `machines`; this rank uses the CUDA device `device`.
    /// Later, `bootstrap` is used for data that is not on a GPU, and its abort handle becomes that of this group.
    ///
    /// # Errors
    /// NCCL or CUDA is missing or fails; a late peer; an abort; other machines than those of the group.
    pub fn connect(
        mut bootstrap: Box<dyn Collective>,
        machines: Machines,
        device: i32,
        options: NcclOptions,
    ) -> Result<Self, Error> {
        let version = version()?;
        if version < MIN_VERSION {
            return Err(Error::Unsupported {
                operation: operation::CONNECT,
                what: "this libnccl.so is older than 2.14 and would block for ever on a lost peer",
                remedy: "install the NCCL of PyTorch's wheel: `pip install torch==2.11.0`; in a checkout, `make setup`",
            });
        }
        let gpu = Device::open(device)?;
        let (rank, world_size) = (bootstrap.rank(), bootstrap.world_size());
        if machines.world_size() != world_size {
            return Err(Error::Protocol {
                operation: operation::CONNECT,
                detail: format!(
                    "the machines have {} ranks, the group has {world_size}",
                    machines.world_size()
                ),
            });
        }
        let tree = match options.order {
            SummationOrder::FixedTree if world_size > 1 => {
                Some(FixedTree::new(gpu, rank, machines)?)
            }
            SummationOrder::FixedTree | SummationOrder::Library => None,
        };
        let mine = if rank == Rank(0) { ffi::unique_id()?.to_vec() } else { Vec::new() };
        let gathered = bootstrap.all_gather_bytes(&mine)?;
        let id: NcclUniqueId = gathered[0].as_slice().try_into().map_err(|_| Error::Protocol {
            operation: operation::CONNECT,
            detail: format!("rank 0 sends {} bytes as NCCL's unique id", gathered[0].len()),
        })?;
        let link = Some(Link::begin((gpu, tree), id, (rank, world_size))?);
        let abort = bootstrap.abort_handle();
        let mut group = Self { bootstrap, device, options, abort, link };
        let timeout = options.connect_timeout;
        group.run(operation::CONNECT, timeout, |link, context| link.wait_until_ready(context))?;
        Ok(group)
    }

    /// Runs one operation.
    fn work(
        &mut self,
        operation: &'static str,
        body: impl FnOnce(&mut Link, &OperationContext<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.run(operation, self.options.operation_timeout, body)
    }

    /// Runs `body`. If it fails, the communicator is aborted; otherwise its kernels would occupy the GPU forever.
    fn run(
        &mut self,
        operation: &'static str,
        timeout: Duration,
        body: impl FnOnce(&mut Link, &OperationContext<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.abort.check(operation)?;
        let Some(link) = &mut self.link else {
            return Err(Error::Broken { operation });
        };
        let context =
            OperationContext { operation, timeout, started: Instant::now(), abort: &self.abort };
        let result = body(link, &context);
        result.or_else(|error| self.leave().and(Err(error)))
    }

    fn leave(&mut self) -> Result<(), Error> {
        self.link.take().map_or(Ok(()), |link| link.end(self.options.abort_timeout))
    }

    /// Adds up this rank's partial sums, then those of all ranks in NCCL's order.
    fn sum_in_library_order(&mut self, parts: &mut [Part<'_>]) -> Result<(), Error> {
        let Some((part, others)) = parts.split_first_mut() else {
            let detail = "a rank passed no partial sum".to_owned();
            return Err(Error::Protocol { operation: operation::ALL_REDUCE, detail });
        };
        let slice = self.on_device(operation::ALL_REDUCE, &mut part.buffer)?;
        for other in others {
            slice.add(self.on_device(operation::ALL_REDUCE, &mut other.buffer)?)?;
        }
        self.work(operation::ALL_REDUCE, |link, context| link.all_reduce(context, slice))
    }

    fn sum_in_tree(&mut self, virtual_ranks: u32, parts: &mut [Part<'_>]) -> Result<(), Error> {
        tree::check_parts(self.rank(), self.world_size(), virtual_ranks, parts)?;
        let mut sums = parts
            .iter_mut()
            .map(|part| self.on_device(operation::ALL_REDUCE, &mut part.buffer))
            .collect::<Result<Vec<_>, Error>>()?;
        self.work(operation::ALL_REDUCE, |link, context| {
            link.sum_in_tree(context, virtual_ranks, &mut sums)
        })
    }

    /// The device memory of `buffer`, if NCCL can work on it.
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

    /// With [`SummationOrder::Library`], the nodes of `parts` do not matter.
    fn all_reduce(&mut self, virtual_ranks: u32, parts: &mut [Part<'_>]) -> Result<(), Error> {
        match self.options.order {
            SummationOrder::FixedTree => self.sum_in_tree(virtual_ranks, parts),
            SummationOrder::Library => self.sum_in_library_order(parts),
        }
    }

    fn broadcast(&mut self, root: Rank, mut buffer: BufferMut<'_>) -> Result<(), Error> {
        crate::check_root(root, self.world_size())?;
        let slice = self.on_device(operation::BROADCAST, &mut buffer)?;
        self.work(operation::BROADCAST, |link, context| link.broadcast(context, root, slice))
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
    /// All operations are done by now, so there is nothing to wait for.
    fn drop(&mut self) {
        let _ = self.leave();
    }
}

#[cfg(test)]
mod tests;
