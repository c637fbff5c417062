//! Parts shared by both simulations.

pub(crate) mod queue;
pub(crate) mod recipe;
pub(crate) mod store;

/// Signal with which an agent asks a rank to exit; its number on Linux.
pub(crate) const SIGUSR2: i32 = 12;
