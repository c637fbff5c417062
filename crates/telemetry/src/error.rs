//! The error of file operations.

use std::{io, path::PathBuf};

/// A file cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[error("cannot {operation} {}: {problem}", path.display())]
pub struct Error {
    /// The operation that failed.
    operation: &'static str,
    /// The file.
    path: PathBuf,
    /// The error of the operating system.
    problem: io::Error,
}

impl Error {
    /// A function that turns an error of the operating system into an error of this operation on this file.
    pub(crate) fn of(
        operation: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |problem| Self { operation, path, problem }
    }
}
