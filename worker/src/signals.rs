//! The signals that ask a node to shut down.

use std::ffi::c_int;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};

/// Signals that schedulers and terminals send before they end a job, often to all its processes at once. The agent
/// handles them; ranks ignore them, so that they can finish the step and save.
pub(crate) const SHUTDOWN_SIGNALS: [(c_int, &str); 4] =
    [(SIGTERM, "SIGTERM"), (SIGINT, "SIGINT"), (SIGUSR1, "SIGUSR1"), (SIGHUP, "SIGHUP")];
