//! Kernels of our own in place of libtorch's: BatchNorm with the sum and the ReLU behind it here, the
//! update in [`optimizer`](super::optimizer). Off unless `precision.fused` says so.
#![allow(unsafe_code)]

use std::{
    collections::BTreeMap,
    ffi::{CStr, c_char, c_void},
    ptr,
    sync::{Mutex, PoisonError},
};

use baton_gpu::{
    Stream,
    kernels::{Element, Kernels, batch_norm},
};
use tch::{Device, TchError, Tensor};
use torch_sys::C_tensor;

use crate::learner::Error;

/// Kernels for one device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fused {
    kernels: &'static Kernels,
    table: &'static Table,
}

/// A BatchNorm layer: parameters, and where the batch's statistics go. All f32, one per channel.
#[derive(Clone, Copy)]
pub(super) struct Layer<'a> {
    pub(super) scale: &'a Tensor,
    pub(super) shift: &'a Tensor,
    /// Becomes the batch's mean.
    pub(super) batch_mean: &'a Tensor,
    /// Becomes the batch's unbiased variance.
    pub(super) batch_variance: &'a Tensor,
    /// Added to the variance.
    pub(super) epsilon: f64,
}

/// What follows the normalisation.
#[derive(Clone, Copy)]
pub(super) enum Then<'a> {
    /// Nothing.
    Nothing,
    /// ReLU.
    Relu,
    /// A sum, then ReLU.
    AddRelu(&'a Tensor),
}

impl Fused {
    /// Those for `device`. They are compiled once per process and device, and kept.
    ///
    /// # Errors
    /// The device's compiler is missing or does not know the device.
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
                // No other try will do.
                baton_gpu::Error::LibraryMissing { .. } | baton_gpu::Error::Nvrtc { .. } => {
                    Error::Recipe(format!("precision.fused: {error}"))
                }
                error => error.into(),
            })?,
        };
        // Graphs hold on to it, and a device keeps its kernels as it keeps its context.
        let kernels: &Kernels = Box::leak(Box::new(kernels));
        let place = ptr::from_ref(kernels) as usize;
        let table = Box::leak(Box::new(Table { place, workspace, forward, backward }));
        let fused = Self { kernels, table };
        known.insert(ordinal, fused);
        Ok(fused)
    }

    /// Where they run.
    pub(super) fn kernels(self) -> &'static Kernels {
        self.kernels
    }

    /// Normalises `x` (samples, channels, height, width) by its own statistics: what `batch_norm` in
    /// training with momentum 1, `add_` and `relu_` do, without rounding in between. `x` and the output
    /// lie channels-last; f32, bf16 or fp16.
    ///
    /// # Errors
    /// Shapes or types do not fit; out of memory.
    pub(super) fn batch_norm(
        self,
        x: &Tensor,
        layer: Layer<'_>,
        then: Then<'_>,
    ) -> tch::Result<Tensor> {
        let residual = match then {
            Then::AddRelu(residual) => residual.as_ptr(),
            Then::Nothing | Then::Relu => ptr::null(),
        };
        let mut text: [c_char; 1024] = [0; 1024];
        // SAFETY: all tensors are alive; the table is for ever. What comes back is a new tensor or null.
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
                !matches!(then, Then::Nothing),
                Message { text: text.as_mut_ptr(), len: text.len() },
            )
        };
        if y.is_null() {
            // SAFETY: zeros at first, of which the last is never written to.
            let text = unsafe { CStr::from_ptr(text.as_ptr()) };
            return Err(TchError::Torch(text.to_string_lossy().into_owned()));
        }
        // SAFETY: it is ours alone.
        Ok(unsafe { Tensor::from_ptr(y) })
    }
}

fn on_gpu(ordinal: usize) -> Result<Kernels, baton_gpu::Error> {
    let device = baton_gpu::Device::open(i32::try_from(ordinal).unwrap_or(i32::MAX))?;
    Kernels::on_stream(Stream::of_torch(device))
}

// --- Declared alike in batch_norm.cpp, where the members are explained -------------------------------

#[repr(C)]
struct Shape {
    rows: i64,
    channels: i64,
    element: i32,
}

#[repr(C)]
struct Forward {
    shape: Shape,
    x: u64,
    residual: u64,
    y: u64,
    scale: u64,
    shift: u64,
    mean: u64,
    inverse_deviation: u64,
    batch_mean: u64,
    batch_variance: u64,
    workspace: u64,
    epsilon: f32,
    relu: i32,
}

#[repr(C)]
struct Backward {
    shape: Shape,
    x: u64,
    y: u64,
    scale: u64,
    shift: u64,
    mean: u64,
    inverse_deviation: u64,
    y_gradient: u64,
    x_gradient: u64,
    residual_gradient: u64,
    scale_gradient: u64,
    shift_gradient: u64,
    workspace: u64,
    relu: i32,
}

#[repr(C)]
struct Message {
    text: *mut c_char,
    len: usize,
}

#[derive(Debug)]
#[repr(C)]
struct Table {
    /// A `&'static Kernels`.
    place: usize,
    workspace: unsafe extern "C" fn(*const Shape) -> i64,
    forward: unsafe extern "C" fn(*const c_void, *const Forward, Message) -> bool,
    backward: unsafe extern "C" fn(*const c_void, *const Backward, Message) -> bool,
}

unsafe extern "C" {
    fn baton_batch_norm(
        kernels: *const Table,
        x: *const C_tensor,
        residual: *const C_tensor,
        scale: *const C_tensor,
        shift: *const C_tensor,
        batch_mean: *const C_tensor,
        batch_variance: *const C_tensor,
        epsilon: f32,
        relu: bool,
        message: Message,
    ) -> *mut C_tensor;
}

impl Shape {
    fn of_kernels(&self) -> batch_norm::Shape {
        let size = |side| usize::try_from(side).unwrap_or_default();
        let element = match self.element {
            0 => Element::F32,
            1 => Element::Bf16,
            _ => Element::F16,
        };
        batch_norm::Shape { rows: size(self.rows), channels: size(self.channels), element }
    }
}

/// # Safety
/// `shape` is readable.
unsafe extern "C" fn workspace(shape: *const Shape) -> i64 {
    // SAFETY: the caller's promise.
    unsafe { &*shape }.of_kernels().workspace() as i64
}

/// # Safety
/// `place` is a table's; `told` has the addresses of tensors on its device, of the sizes that the shape
/// says, that live until libtorch's stream has come past; `message` is writable.
unsafe extern "C" fn forward(place: *const c_void, told: *const Forward, message: Message) -> bool {
    // SAFETY: the caller's promise.
    let (kernels, told) = unsafe { (&*place.cast::<Kernels>(), &*told) };
    let forward = batch_norm::Forward {
        shape: told.shape.of_kernels(),
        x: told.x,
        residual: told.residual,
        y: told.y,
        scale: told.scale,
        shift: told.shift,
        mean: told.mean,
        inverse_deviation: told.inverse_deviation,
        batch_mean: told.batch_mean,
        batch_variance: told.batch_variance,
        workspace: told.workspace,
        epsilon: told.epsilon,
        relu: told.relu != 0,
    };
    // SAFETY: the caller's promise.
    unsafe { message.tell(forward.run(kernels)) }
}

/// # Safety
/// As [`forward`].
unsafe extern "C" fn backward(
    place: *const c_void,
    told: *const Backward,
    message: Message,
) -> bool {
    // SAFETY: the caller's promise.
    let (kernels, told) = unsafe { (&*place.cast::<Kernels>(), &*told) };
    let backward = batch_norm::Backward {
        shape: told.shape.of_kernels(),
        x: told.x,
        y: told.y,
        scale: told.scale,
        shift: told.shift,
        mean: told.mean,
        inverse_deviation: told.inverse_deviation,
        y_gradient: told.y_gradient,
        x_gradient: told.x_gradient,
        residual_gradient: told.residual_gradient,
        scale_gradient: told.scale_gradient,
        shift_gradient: told.shift_gradient,
        workspace: told.workspace,
        relu: told.relu != 0,
    };
    // SAFETY: the caller's promise.
    unsafe { message.tell(backward.run(kernels)) }
}

impl Message {
    /// Whether it went well; writes down what did not.
    ///
    /// # Safety
    /// `text` has `len` writable bytes, which are zeros.
    unsafe fn tell(self, result: Result<(), baton_gpu::Error>) -> bool {
        let Err(error) = result else { return true };
        let text = error.to_string();
        let len = text.len().min(self.len.saturating_sub(1));
        // SAFETY: the caller's promise; one zero stays at the end.
        unsafe { ptr::copy_nonoverlapping(text.as_ptr(), self.text.cast(), len) };
        false
    }
}
