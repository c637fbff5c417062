//! The rules of Baton, pure: no clock, socket, file, thread or tensor inside.
//!
//! Start with [`spec::JobSpec`] (what a researcher writes), then [`engine`] (the coordinator's
//! decisions) and [`session`] (an agent's decisions). Both are state machines of one shape:
//! `handle(now, Event) -> Vec<Action>`, `deadline()`, `status()` with a reason in words. The shells
//! in `coordinator/` and `worker/` own sockets, clocks and processes and perform the actions.
//!
//! | module | what it decides or names |
//! |---|---|
//! | [`ids`], [`time`] | the words: rank, node, generation, step, epoch; time as an argument |
//! | [`spec`] | the recipe file, validated |
//! | [`plan`] | which node runs which rank; which rank runs which virtual ranks |
//! | [`progress`] | where training stands, and what is due next |
//! | [`schedule`] | the learning rate at a position |
//! | [`fit`] | how well a regression's outputs fit |
//! | [`dry_run`] | what a recipe comes to, without training |
//! | [`guard`] | training that goes wrong |
//! | [`gpu`] | a node's GPUs: which rank has which, whether they are well and free |
//! | [`message`] | what coordinator, agent and rank say to each other |
//! | [`exit`] | why a process ended, and what follows from it |
//! | [`engine`] | coordinator: generations, recovery, draining |
//! | [`session`] | agent: spawning, watching and stopping the ranks of one node |

#![forbid(unsafe_code)]

pub mod dry_run;
pub mod engine;
pub mod exit;
pub mod fit;
pub mod gpu;
pub mod guard;
pub mod ids;
pub mod message;
pub mod plan;
pub mod progress;
pub mod schedule;
pub mod session;
pub mod spec;
pub mod time;

pub use ids::{Epoch, Generation, JobId, NodeId, Rank, Step};
pub use spec::JobSpec;
pub use time::Time;
