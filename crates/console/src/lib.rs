//! What the commands of `baton` share, whichever crate they are in.
//!
//! | module | what it does |
//! |---|---|
//! | [`output`] | the only place that prints |
//! | [`failure`] | errors of a command: one line, and the class behind its exit code |
//! | [`human`] | numbers, durations and dates as text; pure |
//! | [`clean`] | text of others, such that it does not steer a terminal |
//! | [`recipe`] | recipe files, by path or by name |
//! | [`programs`] | the other programs of this build |
//! | [`Samples`] | how many samples a training set has |

#![forbid(unsafe_code)]

pub mod clean;
pub mod failure;
pub mod human;
pub mod output;
pub mod programs;
pub mod recipe;
mod samples;

pub use self::samples::Samples;
