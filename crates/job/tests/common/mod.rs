//! What both simulations are made of.

pub(crate) mod queue;
pub(crate) mod recipe;
pub(crate) mod store;

/// With which an agent asks a rank to end, as Linux numbers it.
pub(crate) const SIGUSR2: i32 = 12;
