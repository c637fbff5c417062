//! What can go wrong with a file.

use std::{io, path::PathBuf};

/// A file cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[error("cannot {operation} {}: {source}", path.display())]
pub struct Error {
    /// What was being done.
    operation: &'static str,
    /// With which file.
    path: PathBuf,
    /// What the system said.
    source: io::Error,
}

impl Error {
    /// Takes what the system says of this operation with this file.
    pub(crate) fn of(
        operation: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self { operation, path, source }
    }
}
