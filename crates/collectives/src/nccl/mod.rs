//! Ranks that are processes with one GPU each, connected by NCCL.
//!
//! NCCL is opened when first needed: the same program runs on machines without it. Operations run
//! on the legacy default stream, behind what libtorch has queued there, and are waited for on the
//! host: nothing overlaps with an all-reduce yet.
//!
//! NCCL adds in an order of its own, the same in every step but another one for every number of
//! ranks; [`tcp`](crate::tcp) has the fixed tree.
//!
//! The communicator never blocks (`blocking = 0`), so that this side keeps its deadline and can be
//! aborted. `ncclCommAbort` alone may hang, and is given its own thread and deadline.

mod ffi;

use std::fmt;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use baton_gpu::{Device, Event, Stream};
use baton_job::Rank;

use crate::{AbortHandle, BufferMut, Collective, DeviceSliceMut, Error, Part, operation};
use ffi::{Communicator, UniqueId};
pub use ffi::{Version, is_present, version};

/// The first with communicators that do not block.
const OLDEST: Version = Version { major: 2, minor: 14, patch: 0 };

/// How long to wait.
#[derive(Clone, Copy, Debug)]
pub struct Options {
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
    communicator: Option<Communicator>,
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
        Device::open(device)?;
        let mine =
            if bootstrap.rank() == Rank(0) { ffi::unique_id()?.to_vec() } else { Vec::new() };
        let gathered = bootstrap.all_gather_bytes(&mine)?;
        let id: UniqueId = gathered[0].as_slice().try_into().map_err(|_| Error::Protocol {
            operation: operation::CONNECT,
            detail: format!("rank 0 sends {} bytes as NCCL's unique id", gathered[0].len()),
        })?;
        let communicator = Communicator::begin(id, bootstrap.rank(), bootstrap.world_size())?;
        let abort = bootstrap.abort_handle();
        let communicator = Some(communicator);
        let mut group = Self { bootstrap, device, options, abort, communicator };
        let timeout = options.connect_timeout;
        group.run(operation::CONNECT, timeout, |_| Ok(()), || Ok(true))?;
        Ok(group)
    }

    /// Has `begin` queue an operation and waits until NCCL and then `is_done` say that it is over.
    /// If it fails, the communicator is aborted, as its kernels would occupy the GPU for ever.
    fn run(
        &mut self,
        operation: &'static str,
        timeout: Duration,
        begin: impl FnOnce(&Communicator) -> Result<(), Error>,
        is_done: impl Fn() -> Result<bool, Error>,
    ) -> Result<(), Error> {
        self.abort.check(operation)?;
        let Some(communicator) = &self.communicator else {
            return Err(Error::Broken { operation });
        };
        let started = Instant::now();
        let wait = || loop {
            if communicator.is_settled()? && is_done()? {
                return Ok(());
            }
            self.abort.check(operation)?;
            if started.elapsed() >= timeout {
                return Err(Error::TimedOut { operation, waiting_for: None, after: timeout });
            }
            pause(started.elapsed());
        };
        let result = begin(communicator).and_then(|()| wait());
        result.or_else(|error| self.abort_communicator().and(Err(error)))
    }

    fn run_on_stream(
        &mut self,
        operation: &'static str,
        begin: impl FnOnce(&Communicator) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let device = Device::open(self.device)?;
        let (stream, over) = (Stream::of_torch(device), Event::new(device)?);
        let timeout = self.options.operation_timeout;
        let begin = |communicator: &Communicator| {
            begin(communicator)?;
            Ok(stream.mark(&over)?)
        };
        self.run(operation, timeout, begin, || Ok(over.is_reached()?))
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

    /// Frees the communicator and whatever still runs on it. After the deadline its thread, its
    /// memory and its kernels are abandoned.
    fn abort_communicator(&mut self) -> Result<(), Error> {
        let Some(communicator) = self.communicator.take() else { return Ok(()) };
        let after = self.options.abort_timeout;
        let (done, is_done) = mpsc::channel();
        let helper = thread::Builder::new().name("nccl-abort".to_owned()).spawn(move || {
            communicator.abort();
            // Nobody listens after the deadline.
            let _ = done.send(());
        });
        helper.map_err(Error::io("nccl-abort"))?;
        is_done.recv_timeout(after).map_err(|_| Error::Stuck { after })
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

impl Collective for NcclCollective {
    fn rank(&self) -> Rank {
        self.bootstrap.rank()
    }

    fn world_size(&self) -> u32 {
        self.bootstrap.world_size()
    }

    /// `parts` must be one device buffer, whatever its node: NCCL adds in its own order anyway.
    fn all_reduce(&mut self, _virtual_ranks: u32, parts: &mut [Part<'_>]) -> Result<(), Error> {
        let [part] = parts else {
            return Err(Error::Unsupported {
                operation: operation::ALL_REDUCE,
                what: "NCCL adds one partial sum per rank, so it cannot keep the fixed tree",
                remedy: "set precision.determinism = \"fast\" or cluster.collective = \"tcp\"",
            });
        };
        let slice = self.on_device(operation::ALL_REDUCE, &mut part.buffer)?;
        self.run_on_stream(operation::ALL_REDUCE, |communicator| communicator.all_reduce(slice))
    }

    fn broadcast(&mut self, root: Rank, mut buffer: BufferMut<'_>) -> Result<(), Error> {
        crate::check_root(root, self.world_size())?;
        let slice = self.on_device(operation::BROADCAST, &mut buffer)?;
        self.run_on_stream(operation::BROADCAST, |communicator| communicator.broadcast(root, slice))
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
        let Self { device, communicator, .. } = self;
        f.debug_struct("NcclCollective")
            .field("rank", &self.rank())
            .field("world_size", &self.world_size())
            .field("device", device)
            .field("communicator", communicator)
            .finish_non_exhaustive()
    }
}

impl Drop for NcclCollective {
    /// Every operation is over by now, so that there is nothing to finish and the one call that
    /// never waits for peers will do.
    fn drop(&mut self) {
        let _ = self.abort_communicator();
    }
}

#[cfg(test)]
mod tests;
