//! Reports that an EC2 instance will be taken away, before it happens.
//!
//! Without credentials, the instance metadata service is the only way for an instance to learn that AWS will take it
//! away. Three documents announce this; each is a [`NoticeSource`] of an [`InterruptionNotice`]. [`watch`] polls them
//! and reports each notice once. Outside EC2 it reports nothing.
//!
//! Start with [`watch`]. `document` parses the documents and `filter` drops repeated notices (both without IO);
//! `client` sends the requests (IMDSv2).
//!
//! Sources: the EC2 User Guide on Spot Instance interruption notices, rebalance recommendations and instance metadata;
//! the EC2 Auto Scaling User Guide on the target lifecycle state.

#![forbid(unsafe_code)]

mod availability;
mod client;
mod document;
mod filter;
mod notice;
mod settings;
mod watch;

pub use notice::{InterruptionNotice, NoticeSource};
pub use settings::{Error, Settings};
pub use watch::watch;
