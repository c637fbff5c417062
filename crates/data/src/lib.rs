//! Training data: from a `.beton` file, FFCV's format, to batches of pixels.
//!
//! ```text
//! file ─▶ Beton ─▶ Dataset ─▶ Loader ─▶ Batch        SampleOrder says which samples,
//!                             (threads, each          augment says which part of each
//!                              with a Decoder)
//! ```
//!
//! Start with [`Dataset`] (a file, checked) and [`Loader`] (threads that decode ahead).
//!
//! | module | what it knows |
//! |---|---|
//! | [`beton`] | the file format, through a memory map; every length and offset is checked |
//! | `dataset` | images with a label each |
//! | [`random`] | random numbers as a function of (seed, epoch, sample, operation) |
//! | `order` | which sample comes at which position of an epoch |
//! | [`augment`] | random and centre crops, flips: arithmetic only |
//! | [`area`] | the resize of FFCV: OpenCV's `INTER_AREA`, bit by bit |
//! | `decode` | JPEG or raw → crop → resize → flip |
//! | `loader` | requests → batches, in order, a few ahead |
//! | [`mod@write`] | images, or values of any kind, → file |
//!
//! What a sample looks like depends on (seed, epoch, sample) alone: not on the number of ranks or
//! threads, nor on where a job was interrupted.

pub mod area;
pub mod augment;
mod batch;
pub mod bench;
pub mod beton;
mod dataset;
mod decode;
mod error;
mod layout;
mod loader;
mod mapping;
mod order;
mod pixels;
pub mod random;
mod resize;
pub mod shards;
pub mod survey;
mod turbojpeg;
pub mod verify;
pub mod write;

pub use batch::{Batch, Inputs};
pub use beton::{Beton, ImageBytes, Mode};
pub use dataset::{Dataset, InputType, Source};
pub use decode::{Decoder, Frame};
pub use error::{Error, FileFault, SampleFault};
pub use layout::Layout;
pub use loader::{CpuShare, Loader, Options, Request, Stats, View};
pub use order::{EpochOrder, SampleOrder};
