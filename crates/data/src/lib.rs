//! Training data: from a `.beton` file, FFCV's format, to batches of pixels.
//!
//! ```text
//! file, pattern, bucket ─▶ Dataset ─▶ Loader ─▶ Batch     SampleOrder says which samples,
//!                          (Beton,    (threads, each       augment says which part of each
//!                           shards)    with a Decoder)
//! ```
//!
//! Start with [`Dataset`] (files, checked) and [`Loader`] (threads that decode ahead).
//!
//! | module | what it knows |
//! |---|---|
//! | [`beton`] | the file format; every length and offset is checked |
//! | [`shards`] | many files, on disk or in a bucket with copies in a bounded folder |
//! | `dataset` | images or arrays with a class or values each |
//! | [`random`] | random numbers as a function of (seed, epoch, sample, operation) |
//! | `order`, `layout` | which sample comes at which position of an epoch; which lie together |
//! | [`mix`] | MixUp and CutMix of a micro-batch: arithmetic only |
//! | [`augment`] | random and centre crops, flips: arithmetic only |
//! | `turbojpeg` | JPEG → the pixels of a crop |
//! | `resize`, [`area`] | a crop → a sample: fast, or as FFCV does it, bit by bit |
//! | `decode` | JPEG or raw → crop → resize → flip |
//! | `loader` | requests → batches, in order, a few ahead |
//! | [`mod@write`] | images, or values of any kind, → file |
//! | [`synth`] | made-up signals with a known answer |
//! | [`survey`], [`verify`], [`mod@bench`] | what is in a file, whether it is sound, how fast it loads |
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
pub mod mix;
mod order;
mod pixels;
pub mod random;
mod resize;
pub mod shards;
pub mod survey;
pub mod synth;
mod turbojpeg;
pub mod verify;
pub mod write;

pub use batch::{Batch, Inputs};
pub use beton::{Beton, ImageBytes, Mode};
pub use dataset::{Dataset, InputType, Labels, Source};
pub use decode::{Decoder, Frame};
pub use error::{Error, FileFault, SampleFault};
pub use layout::Layout;
pub use loader::{CpuShare, Loader, Options, Request, Stats, View};
pub use order::{EpochOrder, SampleOrder};

/// A file beside `path` whose name begins with that one's.
fn with_suffix(path: &std::path::Path, suffix: &str) -> std::path::PathBuf {
    let mut text = path.as_os_str().to_owned();
    text.push(suffix);
    text.into()
}
