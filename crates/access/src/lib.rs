//! Access to a coordinator: tokens, roles and TLS, for server and client.
//!
//! | module | content |
//! |---|---|
//! | [`role`] | the role that each call needs |
//! | [`tokens`] | the valid tokens of a coordinator, and the token of a client |
//! | [`mod@guard`] | refuses calls without a valid token |
//! | [`run`] | the run that a client means |
//! | [`bounded`] | reads small files that a user names |
//! | [`tls`] | certificates and keys, from files |
//! | [`client`] | the credentials of a client |
//!
//! A token is never a command-line argument, because all users of a machine can see those; it is never in the
//! environment of a process that does not need it; and it is never logged: the `Debug` output of [`Token`] hides it.

pub mod bounded;
pub mod client;
pub mod guard;
pub mod role;
pub mod run;
pub mod tls;
pub mod tokens;

pub use client::{Bearer, ClientCredentials};
pub use guard::{AccessGuard, guard};
pub use role::AccessRole;
pub use run::{ForRun, RunFolder};
pub use tls::{ClientFiles, ServerFiles, TOKEN_VARIABLE, TlsFiles};
pub use tokens::{Token, Tokens};

/// A file or value of the user is invalid: one line with the file and the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Error(String);

impl Error {
    fn of_file(path: &std::path::Path, problem: impl std::fmt::Display) -> Self {
        Self(format!("{}: {problem}", path.display()))
    }
}
