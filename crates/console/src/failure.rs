//! Errors of a command: one line, and a class that decides the exit code.
//!
//! `bad_input`: a retry without a change would fail in the same way. `failed`: a retry may help.

pub use baton_job::exit::{bad_input, crash as failed};
