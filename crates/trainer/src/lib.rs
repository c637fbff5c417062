//! Training: the step loop, generic over what learns.

pub mod learner;

pub use learner::{Leaf, Learner};
