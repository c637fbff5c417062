//! What the watch tells.

use std::time::SystemTime;

/// AWS has said something about the end of this instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// How binding it is.
    pub kind: Kind,
    /// One line for people: the source, the action and the time.
    pub reason: String,
    /// When the instance ends by AWS's clock, never earlier than when the notice was read; `None` if AWS
    /// did not say.
    pub end: Option<SystemTime>,
}

/// The source of a notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A spot interruption: the instance terminates, stops or hibernates, mostly two minutes after the
    /// notice (hibernation begins at once).
    Interruption,
    /// The risk of an interruption is elevated: advice, without an end.
    Rebalance,
    /// The Auto Scaling group ends the instance; when depends on the group's lifecycle hooks.
    Lifecycle,
}
