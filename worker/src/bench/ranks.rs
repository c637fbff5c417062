//! The bench on several ranks: one process each, and how they find each other.
//!
//! A rank prints its address, reads those of all from its standard input and prints what it measured.

use std::{
    env,
    io::{BufRead, BufReader, Read, Write, stdin},
    process::{Child, ChildStdout, Command, Stdio},
    time::Duration,
};

use baton_collectives::{
    AbortHandle,
    tcp::{self, TcpCollective},
};
use baton_job::{
    Generation, Rank,
    exit::{Failure, crash},
};
use baton_recipe::JobSpec;

use super::{Args, Measured, measure};

/// Longest wait for the other ranks.
pub(super) const PATIENCE: Duration = Duration::from_secs(300);

/// Starts all ranks, introduces them to each other and collects what they measured.
pub(super) fn start_all(args: &Args) -> Result<Vec<Measured>, Failure> {
    let mut ranks = Vec::new();
    for rank in 0..args.ranks {
        ranks.push(Running::start(rank)?);
    }
    let addresses: Vec<String> = ranks.iter_mut().map(Running::line).collect::<Result<_, _>>()?;
    let peers = format!("{}\n", addresses.join(" "));
    for rank in &mut ranks {
        let mut input = rank.child.stdin.take().ok_or_else(|| crash("a rank has no input"))?;
        input.write_all(peers.as_bytes()).map_err(crash)?;
    }
    ranks.into_iter().map(Running::finish).collect()
}

/// One rank of several: meets the others, measures, prints.
#[allow(clippy::print_stdout, reason = "the process that started this one reads it")]
pub(super) fn be_one(args: &Args, spec: &JobSpec, rank: u32) -> Result<(), Failure> {
    let listener = tcp::Listener::bind("127.0.0.1").map_err(crash)?;
    println!("{}", listener.address());
    let mut peers = String::new();
    stdin().read_line(&mut peers).map_err(crash)?;
    let peers: Vec<String> = peers.split_whitespace().map(str::to_owned).collect();
    let options = tcp::Options { connect_timeout: PATIENCE, operation_timeout: PATIENCE };
    let abort = AbortHandle::default();
    let (generation, rank) = (Generation(1), Rank(rank));
    let mut collective = TcpCollective::connect(listener, generation, rank, &peers, options, abort)
        .map_err(crash)?;
    let measured = measure(args, spec, &mut collective)?;
    println!("{}", serde_json::to_string(&measured).map_err(crash)?);
    Ok(())
}

/// A rank's process.
struct Running {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Running {
    /// This same program with this same command line, as one rank.
    fn start(rank: u32) -> Result<Self, Failure> {
        let start = || {
            let mut child = Command::new(env::current_exe()?)
                .args(env::args_os().skip(1))
                .args(["--rank", &rank.to_string()])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()?;
            let output = child.stdout.take().ok_or_else(|| std::io::Error::other("no output"))?;
            Ok(Self { child, output: BufReader::new(output) })
        };
        start().map_err(|error: std::io::Error| crash(format!("cannot start a rank: {error}")))
    }

    fn line(&mut self) -> Result<String, Failure> {
        let mut line = String::new();
        self.output.read_line(&mut line).map_err(crash)?;
        match line.trim() {
            "" => Err(crash("a rank ended before it had an address; its error is above")),
            address => Ok(address.to_owned()),
        }
    }

    fn finish(mut self) -> Result<Measured, Failure> {
        let mut text = String::new();
        self.output.read_to_string(&mut text).map_err(crash)?;
        self.child.wait().map_err(crash)?;
        serde_json::from_str(&text)
            .map_err(|_| crash("a rank ended before it was done; its error is above"))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Of no use if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
