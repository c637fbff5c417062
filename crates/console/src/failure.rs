//! Errors of a command: one line, and a class that decides the exit code.

use baton_job::exit::{Class, Failure};

/// The user gave something wrong; exit code 2.
pub fn bad_input(message: impl Into<String>) -> Failure {
    Failure { class: Class::BadInput, message: message.into() }
}

/// Anything else; exit code 1.
pub fn failed(message: impl Into<String>) -> Failure {
    Failure { class: Class::Crash, message: message.into() }
}
