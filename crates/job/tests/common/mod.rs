//! What both simulations are made of.

pub(crate) mod queue;
pub(crate) mod recipe;
pub(crate) mod store;
