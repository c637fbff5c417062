//! Told of the end of an EC2 instance before it comes.
//!
//! An instance learns from its metadata service, and from nowhere else without credentials, that AWS takes
//! it away. Three documents say so, and each has its own [`Kind`] of [`Notice`]. [`watch`] polls them and
//! tells each notice once; off EC2 it is quiet.
//!
//! Start with [`watch`]. `document` reads what the service says, `seen` decides what is new (both without
//! IO), `client` asks over IMDSv2.
//!
//! Sources: the EC2 User Guide on Spot Instance interruption notices, rebalance recommendations and
//! instance metadata; the EC2 Auto Scaling User Guide on the target lifecycle state.

#![forbid(unsafe_code)]

mod client;
mod contact;
mod document;
mod notice;
mod seen;
mod settings;
mod watch;

pub use notice::{Kind, Notice};
pub use settings::{Error, Settings};
pub use watch::watch;
