//! Groups of communicators, and matching the calls of their ranks.

use std::collections::{BTreeMap, BTreeSet};

use crate::machine::StreamId;
use crate::work::{floats, floats_mut};

/// NCCL's `ncclUniqueId`.
pub(crate) type UniqueId = [u8; 128];

/// A request of a rank, for `values` f32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) kind: CallKind,
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) values: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum CallKind {
    AllReduce,
    Broadcast { root: usize },
    Send { peer: usize },
    Receive { peer: usize },
}

/// The calls of one rank between `ncclGroupStart` and `ncclGroupEnd`, or a single call: they progress together, and the
/// stream continues when all are done.
pub(crate) struct Exchange {
    communicator: usize,
    calls: Vec<(CallId, Call)>,
    started: bool,
}

/// Identifies calls that belong together: the n-th collective of every rank, the n-th message of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum CallId {
    Collective(u64),
    Message { from: usize, to: usize, number: u64 },
}

/// The ranks that join with one unique id.
#[derive(Default)]
struct Group {
    world_size: usize,
    joined: BTreeSet<usize>,
    /// Calls that wait for other ranks, by rank.
    waiting: BTreeMap<CallId, BTreeMap<usize, Call>>,
}

/// One rank's communicator.
pub(crate) struct RankCommunicator {
    id: UniqueId,
    rank: usize,
    pub(crate) device: i32,
    aborted: bool,
    /// Number of collectives so far, and of messages by sender and receiver.
    collectives: u64,
    messages: BTreeMap<(usize, usize), u64>,
    /// A call that is not in its stream yet: a non-blocking communicator may queue it later.
    pub(crate) held_back: Option<(StreamId, Exchange)>,
}

#[derive(Default)]
pub(crate) struct Groups {
    groups: BTreeMap<UniqueId, Group>,
    communicators: BTreeMap<usize, RankCommunicator>,
}

impl Groups {
    pub(crate) fn join(
        &mut self,
        (handle, device): (usize, i32),
        id: UniqueId,
        rank: usize,
        world_size: usize,
    ) {
        let group = self.groups.entry(id).or_default();
        group.world_size = world_size;
        group.joined.insert(rank);
        let communicator = RankCommunicator {
            id,
            rank,
            device,
            aborted: false,
            collectives: 0,
            messages: BTreeMap::new(),
            held_back: None,
        };
        self.communicators.insert(handle, communicator);
    }

    /// The communicator, unless it was aborted.
    pub(crate) fn communicator(&mut self, handle: usize) -> Option<&mut RankCommunicator> {
        self.communicators.get_mut(&handle).filter(|communicator| !communicator.aborted)
    }

    /// Whether all ranks have joined.
    pub(crate) fn is_complete(&self, handle: usize) -> bool {
        let group = self.communicators.get(&handle).and_then(|c| self.groups.get(&c.id));
        group.is_some_and(|group| group.joined.len() == group.world_size)
    }

    /// Numbers `calls` as the next ones of the communicator.
    pub(crate) fn exchange(&mut self, handle: usize, calls: Vec<Call>) -> Option<Exchange> {
        let communicator = self.communicator(handle)?;
        let calls = calls.into_iter().map(|call| (communicator.next_id(call.kind), call)).collect();
        Some(Exchange { communicator: handle, calls, started: false })
    }

    pub(crate) fn is_ready(&self, exchange: &Exchange) -> bool {
        let Some((communicator, group)) = self.communicator_and_group(exchange) else {
            return true;
        };
        let waits = |(id, _): &(CallId, Call)| {
            group.waiting.get(id).is_some_and(|calls| calls.contains_key(&communicator.rank))
        };
        !exchange.started || communicator.aborted || !exchange.calls.iter().any(waits)
    }

    /// The first time, adds the calls to those that wait for other ranks; the second time, when all of them are done,
    /// ends the exchange.
    pub(crate) fn advance(&mut self, exchange: Exchange) -> Option<Exchange> {
        let (communicator, _) = self.communicator_and_group(&exchange)?;
        if communicator.aborted || exchange.started {
            return None;
        }
        let (id, rank) = (communicator.id, communicator.rank);
        let group = self.groups.entry(id).or_default();
        for (id, call) in &exchange.calls {
            group.add(*id, rank, *call);
        }
        Some(Exchange { started: true, ..exchange })
    }

    /// Removes the waiting calls of the rank: its peers then wait forever.
    pub(crate) fn abort(&mut self, handle: usize) {
        let Some(communicator) = self.communicators.get_mut(&handle) else { return };
        communicator.aborted = true;
        communicator.held_back = None;
        if let Some(group) = self.groups.get_mut(&communicator.id) {
            for calls in group.waiting.values_mut() {
                calls.remove(&communicator.rank);
            }
        }
    }

    fn communicator_and_group(&self, exchange: &Exchange) -> Option<(&RankCommunicator, &Group)> {
        let communicator = self.communicators.get(&exchange.communicator)?;
        Some((communicator, self.groups.get(&communicator.id)?))
    }
}

impl RankCommunicator {
    fn next_id(&mut self, kind: CallKind) -> CallId {
        let (from, to) = match kind {
            CallKind::Send { peer } => (self.rank, peer),
            CallKind::Receive { peer } => (peer, self.rank),
            _ => {
                self.collectives += 1;
                return CallId::Collective(self.collectives);
            }
        };
        let number = self.messages.entry((from, to)).or_default();
        *number += 1;
        CallId::Message { from, to, number: *number }
    }
}

impl Group {
    /// Adds a call. With the last one of those that belong together, all are done immediately, while their streams
    /// wait.
    fn add(&mut self, id: CallId, rank: usize, call: Call) {
        let waiting = self.waiting.entry(id).or_default();
        waiting.insert(rank, call);
        let expected = match id {
            CallId::Collective(_) => self.world_size,
            CallId::Message { .. } => 2,
        };
        if waiting.len() < expected {
            return;
        }
        let calls: Vec<Call> = waiting.values().copied().collect();
        self.waiting.remove(&id);
        match id {
            CallId::Collective(_) => collective(&calls),
            CallId::Message { from, to, .. } => {
                // The calls are in ascending order of ranks.
                let (sent, received) =
                    if from < to { (calls[0], calls[1]) } else { (calls[1], calls[0]) };
                assert_eq!(sent.values, received.values, "ranks {from} and {to} differ");
                write(received.to, &read(sent.from, sent.values));
            }
        }
    }
}

/// Performs the calls of all ranks.
fn collective(calls: &[Call]) {
    let Call { kind, values, .. } = calls[0];
    let alike = |call: &Call| call.kind == kind && call.values == values;
    assert!(calls.iter().all(alike), "ranks do different things: {calls:?}");
    match kind {
        CallKind::Broadcast { root } => {
            let sent = read(calls[root].from, values);
            calls.iter().for_each(|call| write(call.to, &sent));
        }
        CallKind::AllReduce => {
            let sum = sum(calls, values);
            calls.iter().for_each(|call| write(call.to, &sum));
        }
        CallKind::Send { .. } | CallKind::Receive { .. } => {}
    }
}

/// Adds from the last rank to the first, so that the result differs from the fixed tree's.
fn sum(calls: &[Call], values: usize) -> Vec<f32> {
    let add = |sum: Vec<f32>, other: Vec<f32>| sum.iter().zip(other).map(|(a, b)| a + b).collect();
    calls.iter().rev().map(|call| read(call.from, values)).reduce(add).unwrap_or_default()
}

fn read(address: u64, values: usize) -> Vec<f32> {
    // SAFETY: checked when the call was made; its stream waits.
    unsafe { floats(address, values) }.to_vec()
}

fn write(address: u64, values: &[f32]) {
    // SAFETY: as above.
    unsafe { floats_mut(address, values.len()) }.copy_from_slice(values);
}
