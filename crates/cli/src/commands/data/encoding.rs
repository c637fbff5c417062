//! How a command stores images.

use std::num::NonZeroUsize;

use baton_data::write::{Encoding, JpegSelection};

use super::share;
use crate::commands::threads;

/// Options of stored images.
#[derive(Debug, clap::Args)]
pub(super) struct EncodingArgs {
    /// Shrink images whose longer side is above PIXELS [default: keep their size]
    #[arg(long, value_name = "PIXELS", value_parser = clap::value_parser!(u32).range(1..=65_535))]
    max_resolution: Option<u32>,
    /// Share of images stored as JPEG, 0 to 1; the others are stored raw
    #[arg(long, value_name = "SHARE", default_value_t = 1.0, value_parser = share)]
    jpeg_fraction: f64,
    /// Store as JPEG only images of more than BYTES raw bytes (3 per pixel)
    #[arg(long, value_name = "BYTES", conflicts_with = "jpeg_fraction")]
    smart_threshold: Option<u64>,
    /// Quality of JPEGs, with 4:2:0 chroma
    #[arg(long, value_name = "1..100", default_value_t = 90,
        value_parser = clap::value_parser!(u8).range(1..=100))]
    jpeg_quality: u8,
    /// Store source JPEGs unchanged, unless they have to shrink, instead of encoding them again
    #[arg(long)]
    keep_jpeg: bool,
    /// Seed that selects which images become JPEGs
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Number of threads that decode and encode [default: all cores]
    #[arg(long, value_name = "N", value_parser = threads)]
    threads: Option<NonZeroUsize>,
}

impl EncodingArgs {
    pub(super) fn encoding(&self) -> Encoding {
        let choice = match self.smart_threshold {
            Some(bytes) => JpegSelection::LargerThan { bytes },
            None => JpegSelection::Fraction { share: self.jpeg_fraction, seed: self.seed },
        };
        Encoding {
            choice,
            jpeg_quality: self.jpeg_quality,
            max_resolution: self.max_resolution,
            keep_jpeg: self.keep_jpeg,
        }
    }

    pub(super) fn threads(&self) -> NonZeroUsize {
        let cores = || std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        self.threads.unwrap_or_else(cores)
    }
}
