//! Integration tests: complete files, valid and damaged, and running loaders.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod allocations;
mod area;
mod damage;
mod digits;
mod fixtures;
#[path = "../../../recipe/tests/kit/mod.rs"]
mod kit;
mod loader;
mod regression;
mod sketch;
mod statistics;
mod summary;
mod table;
mod text;
mod window;
mod write;
mod write_images;
