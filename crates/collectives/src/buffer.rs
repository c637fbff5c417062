//! Memory that collectives work on: host or CUDA.

/// A run of f32 values, in host memory or on a GPU.
#[derive(Debug)]
pub enum BufferMut<'a> {
    /// Host memory.
    Host(&'a mut [f32]),
}
