//! Who may do what at a coordinator, and how nobody listens in: tokens, roles and TLS, for both sides.
//!
//! | module | what |
//! |---|---|
//! | [`role`] | which role each call needs |
//! | [`tokens`] | the tokens that a coordinator knows, and the one that a client has |
//! | [`guard`] | refuses calls without the right token, before any handler sees them |
//! | [`tls`] | certificates and keys, from files |
//! | [`client`] | what a client shows and whom it trusts |
//!
//! A token is never an argument, since everybody on a machine sees those; never in the environment of a process that
//! does not need it; and never in a log: [`Token`] does not show itself.

pub mod client;
pub mod guard;
pub mod role;
pub mod tls;
pub mod tokens;

pub use client::{Bearer, Credentials};
pub use guard::GuardLayer;
pub use role::Role;
pub use tls::{ClientFiles, ServerFiles, TOKEN_VARIABLE, TlsFiles};
pub use tokens::{Token, Tokens};

/// What a user gave is no use: one line with file and remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Error(String);

impl Error {
    fn of_file(path: &std::path::Path, problem: impl std::fmt::Display) -> Self {
        Self(format!("{}: {problem}", path.display()))
    }
}
