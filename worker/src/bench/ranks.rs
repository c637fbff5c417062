//! The bench on several ranks: one process each.
//!
//! A rank prints its address, reads the secret and the addresses of all ranks from its standard input, and prints its
//! results.

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
    Generation, MeshSecret, Rank,
    exit::{Failure, crash},
};
use baton_recipe::JobSpec;

use super::{Args, BenchResult, measure};

/// Longest wait for the other ranks.
pub(super) const MEETING_TIMEOUT: Duration = Duration::from_secs(300);

/// Starts all ranks, sends each the secret and the addresses of all, and collects their results.
pub(super) fn start_all(args: &Args) -> Result<Vec<BenchResult>, Failure> {
    let mut ranks = Vec::new();
    for rank in 0..args.ranks {
        ranks.push(BenchRank::start(args, rank)?);
    }
    let addresses: Vec<String> =
        ranks.iter_mut().map(BenchRank::address).collect::<Result<_, _>>()?;
    let meeting = (tcp::draw_secret().map_err(crash)?, addresses);
    let meeting = format!("{}\n", serde_json::to_string(&meeting).map_err(crash)?);
    for rank in &mut ranks {
        let mut input = rank.child.stdin.take().ok_or_else(|| crash("a rank has no input"))?;
        input.write_all(meeting.as_bytes()).map_err(crash)?;
    }
    ranks.into_iter().map(BenchRank::finish).collect()
}

/// Runs one rank of several: connects to the others, measures and prints.
#[allow(clippy::print_stdout, reason = "the process that started this one reads it")]
pub(super) fn run_rank(args: &Args, spec: &JobSpec, rank: u32) -> Result<(), Failure> {
    let address = env::var("BATON_BENCH_ADDRESS").unwrap_or_else(|_| "127.0.0.1".to_owned());
    let listener = tcp::Listener::bind(&address).map_err(crash)?;
    println!("{}", listener.address());
    let mut meeting = String::new();
    stdin().read_line(&mut meeting).map_err(crash)?;
    let (secret, peers): (MeshSecret, Vec<String>) =
        serde_json::from_str(&meeting).map_err(crash)?;
    let options =
        tcp::TcpOptions { connect_timeout: MEETING_TIMEOUT, operation_timeout: MEETING_TIMEOUT };
    let abort = AbortHandle::default();
    let (generation, rank) = (Generation(1), Rank(rank));
    let group = tcp::RankGroup { generation, rank, peers: &peers, secret: &secret };
    let mut collective = TcpCollective::connect(listener, group, options, abort).map_err(crash)?;
    collective.share_memory().map_err(crash)?;
    let measured = measure(args, spec, &mut collective)?;
    println!("{}", serde_json::to_string(&measured).map_err(crash)?);
    Ok(())
}

/// A rank's process, killed when dropped.
struct BenchRank {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl BenchRank {
    /// Starts this program with the same command line, as one rank.
    fn start(args: &Args, rank: u32) -> Result<Self, Failure> {
        let start = || {
            let program = env::current_exe()?;
            let mut command = match &args.launcher {
                None => Command::new(program),
                Some(launcher) => {
                    let mut command = Command::new(launcher);
                    command.args([rank, args.ranks].map(|number| number.to_string())).arg(program);
                    command
                }
            };
            let mut child = command
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

    /// Reads the rank's address.
    fn address(&mut self) -> Result<String, Failure> {
        let mut line = String::new();
        self.output.read_line(&mut line).map_err(crash)?;
        match line.trim() {
            "" => Err(crash("a rank ended before it had an address; see its error above")),
            address => Ok(address.to_owned()),
        }
    }

    /// Waits for the rank's results.
    fn finish(mut self) -> Result<BenchResult, Failure> {
        let mut text = String::new();
        self.output.read_to_string(&mut text).map_err(crash)?;
        self.child.wait().map_err(crash)?;
        serde_json::from_str(&text)
            .map_err(|_| crash("a rank ended before it was done; see its error above"))
    }
}

impl Drop for BenchRank {
    fn drop(&mut self) {
        // Fails if the process has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
