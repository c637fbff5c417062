//! Notices that AWS will take this instance away.

use std::time::SystemTime;

/// A notice from AWS about the end of this instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterruptionNotice {
    /// The document it was read from, which says how certain the end is.
    pub source: NoticeSource,
    /// One line for people: the source, the action and the time.
    pub reason: String,
    /// Time when the instance ends, by AWS's clock; never earlier than the time when the notice was read. `None` if AWS
    /// gives no time.
    pub end: Option<SystemTime>,
}

/// The source of a notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoticeSource {
    /// A spot interruption: the instance terminates, stops or hibernates, usually two minutes after the
    /// notice (hibernation begins at once).
    Interruption,
    /// A rebalance recommendation: the risk of an interruption is elevated. It has no end time.
    Rebalance,
    /// The Auto Scaling group takes the instance away; the time depends on the group's lifecycle hooks.
    Lifecycle,
}
