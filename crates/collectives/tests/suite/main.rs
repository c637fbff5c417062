//! One set of tests for every implementation of [`Collective`] that runs without a GPU, and one for NCCL on simulated
//! GPUs.
#![allow(clippy::unwrap_used, clippy::panic)] // Test helpers may panic like tests.

mod conformance;
mod faults;
#[path = "../kit/local.rs"]
mod local;
mod nccl;

use std::time::Duration;

use baton_collectives::tcp::{self, TcpCollective};
use baton_collectives::{AbortHandle, Collective};
use baton_job::{Generation, MeshSecret, Rank};

type Member = Box<dyn Collective>;

/// An implementation of groups.
#[derive(Clone, Copy, Debug)]
enum Implementation {
    Local,
    /// Each machine, an address of the loopback, has the next ranks: so many, the last one all that are left.
    Tcp(&'static [u32]),
    /// The same, with memory that the ranks of a machine share.
    SharedMemory(&'static [u32]),
}

const IMPLEMENTATIONS: [Implementation; 8] = [
    Implementation::Local,
    Implementation::Tcp(&[8]),
    Implementation::Tcp(&[1, 1, 1, 1, 1, 1, 1, 1]),
    Implementation::Tcp(&[2, 2, 2, 2]),
    Implementation::Tcp(&[1, 4, 3]),
    Implementation::Tcp(&[1, 2, 1, 4]),
    Implementation::SharedMemory(&[8]),
    Implementation::SharedMemory(&[2, 2, 2, 2]),
];

/// Longer than any test should take: a test that reaches this timeout has lost a wakeup.
const LONG: Duration = Duration::from_secs(60);

impl Implementation {
    /// Whether each rank exchanges values with every other one.
    fn is_flat(self, world_size: u32) -> bool {
        let (Self::Tcp(machines) | Self::SharedMemory(machines)) = self else { return true };
        machines[0] >= world_size || machines.iter().all(|ranks| *ranks == 1)
    }

    fn group(self, world_size: u32, timeout: Duration) -> Vec<Member> {
        match self {
            Self::Local => {
                local::group(world_size, timeout).into_iter().map(|m| Box::new(m) as _).collect()
            }
            Self::Tcp(machines) => tcp_group(world_size, machines, timeout, false),
            Self::SharedMemory(machines) => tcp_group(world_size, machines, timeout, true),
        }
    }
}

fn tcp_group(
    world_size: u32,
    machines: &[u32],
    operation_timeout: Duration,
    shares_memory: bool,
) -> Vec<Member> {
    let hosts = (1..).zip(machines).flat_map(|(host, ranks)| (0..*ranks).map(move |_| host));
    let hosts = hosts.chain(std::iter::repeat(machines.len())).take(world_size as usize);
    let listen = |host| tcp::Listener::bind(&format!("127.0.0.{host}")).unwrap();
    let listeners: Vec<_> = hosts.map(listen).collect();
    let peers: Vec<String> = listeners.iter().map(|l| l.address().to_owned()).collect();
    let options = tcp::TcpOptions { connect_timeout: LONG, operation_timeout };
    on_every_rank(listeners, |rank, listener| {
        let abort = AbortHandle::new();
        let secret = &MeshSecret::new([7; MeshSecret::BYTES]);
        let group = tcp::RankGroup { generation: Generation(1), rank, peers: &peers, secret };
        let mut member = TcpCollective::connect(listener, group, options, abort).unwrap();
        if shares_memory {
            member.share_memory().unwrap();
        }
        // The first operation may take longer, as others may still connect to each other.
        member.all_gather_bytes(&[]).unwrap();
        Box::new(member) as Member
    })
}

/// Runs `body` on one thread for each rank.
fn on_every_rank<T: Send, R: Send>(
    ranks: impl IntoIterator<Item = T>,
    body: impl Fn(Rank, T) -> R + Sync,
) -> Vec<R> {
    std::thread::scope(|scope| {
        let body = &body;
        let spawn = |(rank, value)| scope.spawn(move || body(Rank(rank), value));
        let threads: Vec<_> = (0..).zip(ranks).map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
