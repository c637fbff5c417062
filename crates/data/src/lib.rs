//! Reading FFCV data.

mod batch;

pub use batch::Batch;
