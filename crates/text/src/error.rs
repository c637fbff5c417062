//! Errors: what is wrong, where, and the remedy, in one line.

use std::{io, path::PathBuf};

/// Why text cannot be tokenized, or tokens cannot be shown.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An I/O error.
    #[error("cannot {operation} {}: {source}", path.display())]
    Io {
        /// The operation that failed, e.g. `read`.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A file of a model folder, or a file with text, cannot be used.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong, and the remedy.
        reason: String,
    },
    /// A chat template cannot be compiled or rendered.
    #[error("chat template {name}{}: {reason}", line.map(|line| format!(", line {line}")).unwrap_or_default())]
    Template {
        /// The file of the template.
        name: String,
        /// Line of the template, counted from 1.
        line: Option<usize>,
        /// What is wrong, and the remedy.
        reason: String,
    },
    /// A line of a file cannot be used.
    #[error("{}, line {line}{}: {reason}", path.display(), column.map(|column| format!(", column {column}")).unwrap_or_default())]
    Line {
        /// The file.
        path: PathBuf,
        /// Number of the line, counted from 1.
        line: usize,
        /// Character of the line at which reading stopped, counted from 1; `None` if the line can be read, but its sample
        /// cannot be used.
        column: Option<usize>,
        /// What is wrong, and the remedy.
        reason: String,
    },
    /// The tokenizer cannot encode or decode something.
    #[error("the tokenizer fails: {0}")]
    Tokenizer(String),
    /// A sample cannot be used.
    #[error("{0}")]
    Sample(String),
    /// An invalid option.
    #[error("{0}")]
    Option(String),
    /// A file cannot be written.
    #[error(transparent)]
    Write(#[from] baton_data::write::Error),
    /// A file of tokens cannot be read.
    #[error(transparent)]
    Read(#[from] baton_data::Error),
    /// A thread could not be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[source] io::Error),
}

impl Error {
    pub(crate) fn io(
        operation: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { operation, path, source }
    }

    pub(crate) fn file(path: impl Into<PathBuf>, reason: impl Into<String>) -> Self {
        Self::File { path: path.into(), reason: reason.into() }
    }
}
