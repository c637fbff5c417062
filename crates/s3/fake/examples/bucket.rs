//! An empty bucket whose requests take some time, until standard input ends: `bucket MILLISECONDS`. Prints one JSON object:
//! the location of a store in it, and the environment variables of processes that use it.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a tool for measurements")]

use std::{collections::BTreeMap, env, io, time::Duration};

use baton_fake_s3::{Fault, Server};

fn main() {
    let milliseconds = env::args().nth(1).unwrap().parse().unwrap();
    let server = Server::start();
    server.faults(Fault::Slow(Duration::from_millis(milliseconds)), 1);
    let environment: BTreeMap<String, String> = server.environment().into_iter().collect();
    println!("{{\"location\": {:?}, \"environment\": {environment:?}}}", server.location());
    io::copy(&mut io::stdin(), &mut io::sink()).unwrap();
}
