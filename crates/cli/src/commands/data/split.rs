//! The files among which a command divides its samples.

use std::path::PathBuf;

use super::share;

/// The files to write.
#[derive(Debug, clap::Args)]
pub(super) struct SplitFiles {
    /// File to write; an existing file is replaced at the end
    #[arg(long, value_name = "FILE")]
    pub(super) to: PathBuf,
    /// A second file, for a share of the samples, which are then not in the first
    #[arg(long, value_name = "FILE", requires = "val_share")]
    val: Option<PathBuf>,
    /// Share of the samples for the second file, between 0 and 1
    #[arg(long, value_name = "SHARE", requires = "val", value_parser = share)]
    val_share: Option<f64>,
    /// A third file, for a last test
    #[arg(long, value_name = "FILE", requires = "test_share")]
    test: Option<PathBuf>,
    /// Share of the samples for the third file, between 0 and 1
    #[arg(long, value_name = "SHARE", requires = "test", value_parser = share)]
    test_share: Option<f64>,
}

impl SplitFiles {
    /// All files but the first, with their shares.
    pub(super) fn others(&self) -> Vec<(PathBuf, f64)> {
        let others = [(&self.val, self.val_share), (&self.test, self.test_share)];
        others.into_iter().filter_map(|(file, share)| Some((file.clone()?, share?))).collect()
    }
}
