//! The signals that say that a node must go.

use std::ffi::c_int;

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};

/// What schedulers and terminals send before they end a job: one that means to end a job may signal all its processes
/// at once. The agent listens to them; its ranks must outlive them, to finish the step and save.
pub(crate) const MUST_GO: [(c_int, &str); 3] =
    [(SIGTERM, "SIGTERM"), (SIGINT, "SIGINT"), (SIGUSR1, "SIGUSR1")];
