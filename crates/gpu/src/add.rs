//! Sums of values in device memory.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use cudarc::driver::{result, sys};

use crate::error::failed;
use crate::{Device, Error, Stream};

/// `left[i] += right[i]` for `i < len`; each thread adds every `threads`-th value. `add.rn.f32` rounds to nearest and
/// keeps subnormal values, as the host's addition does, so that both compute the same bits. Every driver that this
/// crate supports compiles it for its device, from Volta on.
const PTX: &CStr = c"
.version 7.0
.target sm_70
.address_size 64

.visible .entry baton_add(
    .param .u64 left,
    .param .u64 right,
    .param .u64 len
)
{
    .reg .pred %at_end;
    .reg .f32 %a, %b, %sum;
    .reg .b32 %thread, %block, %block_threads, %blocks;
    .reg .b64 %at, %threads, %n, %offset, %left, %right, %to, %from;

    ld.param.u64 %left, [left];
    ld.param.u64 %right, [right];
    ld.param.u64 %n, [len];
    cvta.to.global.u64 %left, %left;
    cvta.to.global.u64 %right, %right;

    mov.u32 %thread, %tid.x;
    mov.u32 %block, %ctaid.x;
    mov.u32 %block_threads, %ntid.x;
    mov.u32 %blocks, %nctaid.x;
    cvt.u64.u32 %at, %thread;
    mad.wide.u32 %at, %block, %block_threads, %at;
    mul.wide.u32 %threads, %blocks, %block_threads;

again:
    setp.ge.u64 %at_end, %at, %n;
    @%at_end bra end;
    shl.b64 %offset, %at, 2;
    add.s64 %to, %left, %offset;
    add.s64 %from, %right, %offset;
    ld.global.f32 %a, [%to];
    ld.global.f32 %b, [%from];
    add.rn.f32 %sum, %a, %b;
    st.global.f32 [%to], %sum;
    add.s64 %at, %at, %threads;
    bra again;

end:
    ret;
}
";

const NAME: &CStr = c"baton_add";
const BLOCK_THREADS: u32 = 256;
/// Enough to fill any GPU; for longer sums each thread adds several values.
const MAX_BLOCKS: u64 = 2048;

/// Adds values on a device.
#[derive(Clone, Copy, Debug)]
pub struct Adder {
    device: Device,
    /// A `CUfunction`.
    function: usize,
}

impl Adder {
    /// An adder for `device`. The first one compiles its kernel, which takes milliseconds.
    ///
    /// # Errors
    /// The driver cannot compile it.
    pub fn new(device: Device) -> Result<Self, Error> {
        Ok(Self { device, function: function(device)? })
    }

    /// Queues `left[i] += right[i]` for `len` f32 at the device addresses `left` and `right`, bit-identical to the
    /// host's addition.
    ///
    /// # Errors
    /// The device failed.
    ///
    /// # Panics
    /// `stream` belongs to another device.
    ///
    /// # Safety
    /// Until `stream` has completed this work, `len` values of the stream's device must be valid at both addresses, and
    /// the ranges must not overlap; no other code may use the values at `left` or change those at `right`.
    pub unsafe fn add(
        &self,
        stream: &Stream,
        left: u64,
        right: u64,
        len: usize,
    ) -> Result<(), Error> {
        assert_eq!(stream.device(), self.device, "the stream must be on the adder's device");
        if len == 0 {
            return Ok(());
        }
        // SAFETY: guaranteed by the caller.
        unsafe { launch(self.device, self.function, stream, (left, right, len as u64)) }
    }
}

/// The kernel. It is loaded once for each device and never unloaded, like the device's context.
fn function(device: Device) -> Result<usize, Error> {
    static LOADED: Mutex<BTreeMap<i32, usize>> = Mutex::new(BTreeMap::new());

    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(&function) = loaded.get(&device.ordinal()) {
        return Ok(function);
    }
    device.make_current()?;
    // SAFETY: the text ends with a zero.
    let module = unsafe { result::module::load_data(PTX.as_ptr().cast()) }
        .map_err(failed("cuModuleLoadData"))?;
    // SAFETY: the module was just loaded.
    let function = unsafe { result::module::get_function(module, NAME.to_owned()) }
        .map_err(failed("cuModuleGetFunction"))? as usize;
    // A driver with lazy loading loads the kernel at its first launch, and may then wait for all work of the device:
    // forever, behind an NCCL kernel that waits for a peer. So the first launch is here, with no values.
    // SAFETY: with no values the kernel uses no memory.
    unsafe { launch(device, function, &Stream::of_torch(device), (0, 0, 0)) }?;
    loaded.insert(device.ordinal(), function);
    Ok(function)
}

/// # Safety
/// As [`Adder::add`].
unsafe fn launch(
    device: Device,
    function: usize,
    stream: &Stream,
    (mut left, mut right, mut len): (u64, u64, u64),
) -> Result<(), Error> {
    device.make_current()?;
    let mut parameters =
        [&mut left, &mut right, &mut len].map(|p| ptr::from_mut(p).cast::<c_void>());
    let blocks = len.div_ceil(u64::from(BLOCK_THREADS)).clamp(1, MAX_BLOCKS) as u32;
    // SAFETY: guaranteed by the caller for the memory; the function has these three parameters, which the driver copies
    // before it returns.
    unsafe {
        result::launch_kernel(
            function as sys::CUfunction,
            (blocks, 1, 1),
            (BLOCK_THREADS, 1, 1),
            0,
            stream.raw().cast(),
            &mut parameters,
        )
    }
    .map_err(failed("cuLaunchKernel"))
}
