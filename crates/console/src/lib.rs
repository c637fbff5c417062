//! Code shared by the commands of `baton`, which are in several crates.
//!
//! | module | what it does |
//! |---|---|
//! | [`output`] | the only module that prints |
//! | [`failure`] | errors of a command: one line, and the class behind its exit code |
//! | [`human`] | numbers, durations and dates as text; pure |
//! | [`json`] | results of `--json` |
//! | [`clock`] | the time of day |
//! | [`clean`] | untrusted text, made safe for a terminal |
//! | [`recipe`] | recipe files, by path or by name |
//! | [`machine`] | what libtorch and the driver offer on a machine |
//! | [`parent`] | the process that started this one |
//! | [`programs`] | finds the other programs of Baton |
//! | [`signals`] | signals that this process was started to ignore |
//! | [`Samples`], [`mean_tokens`] | how many samples a training set has, and how long its texts are |

#![forbid(unsafe_code)]

pub mod clean;
pub mod clock;
pub mod failure;
pub mod human;
pub mod json;
pub mod machine;
pub mod output;
pub mod parent;
pub mod programs;
pub mod recipe;
mod samples;
pub mod signals;

pub use self::samples::{Samples, mean_tokens};
