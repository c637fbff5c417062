//! Errors of a command: one line, and a class that decides the exit code.

pub use baton_job::exit::{bad_input, crash as failed};
