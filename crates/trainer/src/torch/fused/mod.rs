//! Our own kernels in place of libtorch's: here BatchNorm with the addition and the ReLU after it; the optimizer update
//! is in [`optimizer`](super::optimizer). Used only if the recipe sets `precision.fused`.
#![allow(unsafe_code)]

use std::{
    collections::BTreeMap,
    ffi::c_void,
    ptr,
    sync::{Mutex, PoisonError},
};

use baton_gpu::{
    Stream,
    kernels::{
        Kernels,
        batch_norm::{BatchNorm, Shape},
    },
};
use tch::{Device, Tensor};
use torch_sys::C_tensor;

use super::error_text::ErrorText;
use crate::learner::Error;

/// Kernels for one device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fused {
    kernels: &'static Kernels,
    table: &'static KernelTable,
}

/// A BatchNorm layer: its parameters, and the tensors that receive the batch statistics. All f32, one value per
/// channel.
#[derive(Clone, Copy)]
pub(super) struct NormLayer<'a> {
    pub(super) scale: &'a Tensor,
    pub(super) shift: &'a Tensor,
    /// Receives the batch's mean.
    pub(super) batch_mean: &'a Tensor,
    /// Receives the batch's unbiased variance.
    pub(super) batch_variance: &'a Tensor,
    /// Added to the variance.
    pub(super) epsilon: f64,
}

/// Operations after the normalisation, done by the same kernel.
#[derive(Clone, Copy)]
pub(super) enum Epilogue<'a> {
    /// Nothing.
    None,
    /// ReLU.
    Relu,
    /// Addition of this tensor, then ReLU.
    AddRelu(&'a Tensor),
}

impl Fused {
    /// The kernels for `device`. They are compiled once per process and device, and kept.
    ///
    /// # Errors
    /// NVRTC, the compiler of kernels, is missing or does not support the device.
    pub(super) fn on(device: Device) -> Result<Self, Error> {
        static KNOWN: Mutex<BTreeMap<Option<usize>, Fused>> = Mutex::new(BTreeMap::new());

        let ordinal = match device {
            Device::Cpu => None,
            Device::Cuda(ordinal) => Some(ordinal),
            other => {
                return Err(Error::Recipe(format!(
                    "precision.fused: there are no kernels for {other:?}; set it to false"
                )));
            }
        };
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(fused) = known.get(&ordinal) {
            return Ok(*fused);
        }
        let kernels = match ordinal {
            None => Kernels::on_host(),
            Some(ordinal) => on_gpu(ordinal).map_err(|error| match error {
                // A retry cannot help.
                baton_gpu::Error::LibraryMissing { .. } | baton_gpu::Error::Nvrtc { .. } => {
                    Error::Recipe(format!("precision.fused: {error}"))
                }
                error => error.into(),
            })?,
        };
        // Autograd graphs keep a pointer to it; like the device's context it is never freed.
        let kernels: &Kernels = Box::leak(Box::new(kernels));
        let address = ptr::from_ref(kernels) as usize;
        let table = Box::leak(Box::new(KernelTable { address, workspace, forward, backward }));
        let fused = Self { kernels, table };
        known.insert(ordinal, fused);
        Ok(fused)
    }

    /// The kernels of this device.
    pub(super) fn kernels(self) -> &'static Kernels {
        self.kernels
    }

    /// Normalises `x` (samples, channels, height, width) by its own statistics: the same as `batch_norm` in training
    /// with momentum 1, `add_` and `relu_`, without rounding in between. `x` and the output are in channels-last memory
    /// format; f32, bf16 or fp16.
    ///
    /// # Errors
    /// Shapes or types do not fit; out of memory.
    pub(super) fn batch_norm(
        self,
        x: &Tensor,
        layer: NormLayer<'_>,
        epilogue: Epilogue<'_>,
    ) -> tch::Result<Tensor> {
        let residual = match epilogue {
            Epilogue::AddRelu(residual) => residual.as_ptr(),
            Epilogue::None | Epilogue::Relu => ptr::null(),
        };
        let y = ErrorText::captured(|message| {
            // SAFETY: all tensors are alive; the table is never freed. The result is a new tensor or null.
            let y = unsafe {
                baton_batch_norm(
                    self.table,
                    x.as_ptr(),
                    residual,
                    layer.scale.as_ptr(),
                    layer.shift.as_ptr(),
                    layer.batch_mean.as_ptr(),
                    layer.batch_variance.as_ptr(),
                    layer.epsilon as f32,
                    !matches!(epilogue, Epilogue::None),
                    message,
                )
            };
            (!y.is_null()).then_some(y)
        })?;
        // SAFETY: no other code has this pointer.
        Ok(unsafe { Tensor::from_ptr(y) })
    }
}

fn on_gpu(ordinal: usize) -> Result<Kernels, baton_gpu::Error> {
    let device = baton_gpu::Device::open(i32::try_from(ordinal).unwrap_or(i32::MAX))?;
    Kernels::on_stream(Stream::of_torch(device))
}

// --- The same declarations are in batch_norm.cpp, with comments on the members ------------------------

#[derive(Debug)]
#[repr(C)]
struct KernelTable {
    /// Address of the `&'static Kernels`.
    address: usize,
    workspace: unsafe extern "C" fn(*const Shape) -> i64,
    forward: unsafe extern "C" fn(*const c_void, *const BatchNorm, ErrorText) -> bool,
    backward: unsafe extern "C" fn(*const c_void, *const BatchNorm, ErrorText) -> bool,
}

unsafe extern "C" {
    fn baton_batch_norm(
        kernels: *const KernelTable,
        x: *const C_tensor,
        residual: *const C_tensor,
        scale: *const C_tensor,
        shift: *const C_tensor,
        batch_mean: *const C_tensor,
        batch_variance: *const C_tensor,
        epsilon: f32,
        relu: bool,
        message: ErrorText,
    ) -> *mut C_tensor;
}

/// # Safety
/// `shape` is readable.
unsafe extern "C" fn workspace(shape: *const Shape) -> i64 {
    // SAFETY: guaranteed by the caller.
    unsafe { *shape }.workspace() as i64
}

/// # Safety
/// `kernels` is the address in a table; `arguments` contains addresses of tensors on its device, of the sizes given by
/// the shape, that live until libtorch's stream has finished this work; `message` is writable.
unsafe extern "C" fn forward(
    kernels: *const c_void,
    arguments: *const BatchNorm,
    message: ErrorText,
) -> bool {
    // SAFETY: guaranteed by the caller.
    unsafe { message.write_error((*arguments).forward(&*kernels.cast::<Kernels>())) }
}

/// # Safety
/// As [`forward`].
unsafe extern "C" fn backward(
    kernels: *const c_void,
    arguments: *const BatchNorm,
    message: ErrorText,
) -> bool {
    // SAFETY: guaranteed by the caller.
    unsafe { message.write_error((*arguments).backward(&*kernels.cast::<Kernels>())) }
}
