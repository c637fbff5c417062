//! Training data: reads `.beton` files, FFCV's format, and produces batches of samples.
//!
//! ```text
//! file, pattern, bucket ─▶ Dataset ─▶ Loader ─▶ Batch     SampleOrder selects the samples,
//!                          (Beton,    (threads, each       augment the crop of each sample
//!                           shards)    with a Decoder)
//! ```
//!
//! Start with [`Dataset`] (validated files) and [`Loader`] (threads that decode in advance).
//!
//! | module | content |
//! |---|---|
//! | [`beton`] | the file format; every length and offset is checked |
//! | [`shards`] | many files, on disk or in a bucket with copies in a size-limited folder |
//! | `dataset` | images or arrays, each with a class or target values |
//! | [`random`] | random numbers as a function of (seed, epoch, sample, purpose) |
//! | `order`, `sample_blocks` | order of the samples in an epoch; blocks of samples that are stored together |
//! | `items`, [`packing`] | what an epoch is made of: samples, or sequences that several texts share |
//! | [`mix`] | MixUp and CutMix of a micro-batch: parameters only |
//! | [`augment`] | random and centre crops, flips: parameters only; changes of pixels and signals |
//! | `turbojpeg` | JPEG → the pixels of a crop |
//! | `resize`, [`area`] | a crop → a sample: fast, or bit-identical to FFCV |
//! | `decode` | JPEG or raw → crop → resize → flip |
//! | `loader` | requests → batches, in order, prefetched |
//! | [`mod@write`] | images, or values of any kind, → file |
//! | [`synth`] | synthetic signals with a known target |
//! | [`survey`], [`mod@statistics`], [`verify`], [`mod@bench`] | sizes, values, validation and loading speed of a file |
//!
//! A sample depends on (seed, epoch, sample) only: not on the number of ranks or threads, nor on where a job was
//! interrupted.

pub mod area;
pub mod augment;
mod batch;
pub mod bench;
pub mod beton;
mod dataset;
mod decode;
mod error;
mod file;
mod installed;
mod items;
mod loader;
mod mapping;
pub mod mix;
mod order;
pub mod packing;
mod pixels;
pub mod random;
mod resize;
mod sample_blocks;
pub mod shards;
pub mod statistics;
pub mod survey;
pub mod synth;
mod turbojpeg;
pub mod verify;
pub mod write;

pub use batch::{Batch, Inputs};
pub use beton::{Beton, ImageBytes, Mode};
pub use dataset::{
    Dataset, InputType, LABELS_FIELD, LARGEST_FIELD, Labels, NO_LABEL, PREDICTED_FIELD, Source,
    TOKENS_FIELD, TextColumn, TextSize,
};
pub use decode::{Decoder, ImageTransform};
pub use error::{Error, FileFault, SampleFault};
pub use installed::installed;
pub use items::Items;
pub use loader::{CpuShare, Loader, LoaderStats, Options, PROFILE_TARGET, Preprocessing, Request};
pub use order::{EpochOrder, SampleOrder};
pub use sample_blocks::SampleBlocks;

/// The path with `suffix` appended to the file name.
fn with_suffix(path: &std::path::Path, suffix: &str) -> std::path::PathBuf {
    let mut text = path.as_os_str().to_owned();
    text.push(suffix);
    text.into()
}
