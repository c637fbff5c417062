//! The rules of Baton as pure logic: no clock, socket, file, thread or tensor.
//!
//! Start with [`engine`] (the coordinator's decisions), then [`session`] (an agent's decisions). Both are state
//! machines with the same interface: `handle(now, Event) -> Vec<Action>`, `deadline()`, `status()` with a reason as
//! text. The programs in `coordinator/` and `worker/` own sockets, clocks and processes, and perform the actions.
//!
//! | module | what it decides or defines |
//! |---|---|
//! | [`ids`], [`time`] | types for rank, node, generation; time as an argument |
//! | [`plan`] | which node runs which rank; which rank runs which virtual ranks |
//! | [`gpu`] | a node's GPUs: which rank uses which, whether they are healthy and free |
//! | [`message`] | messages between coordinator, agent and rank |
//! | [`mesh_secret`] | the secret with which the ranks of one generation recognise each other |
//! | [`exit`] | why a process ended, and what follows from it |
//! | [`engine`] | coordinator: generations, recovery, draining |
//! | [`session`] | agent: spawning, watching and stopping the ranks of one node |
//! | [`standby`] | agent: starting another coordinator, if that of the job is lost |

#![forbid(unsafe_code)]

pub mod engine;
pub mod exit;
pub mod gpu;
pub mod ids;
#[cfg(test)]
#[path = "../../recipe/tests/kit/mod.rs"]
mod kit;
pub mod mesh_secret;
pub mod message;
pub mod plan;
pub mod route;
pub mod session;
mod shorten;
pub mod standby;
pub mod time;

pub use ids::{Generation, JobId, NodeId, Rank};
pub use mesh_secret::MeshSecret;
pub use shorten::{first_names, shortened};
pub use time::{Time, parse_seconds};
