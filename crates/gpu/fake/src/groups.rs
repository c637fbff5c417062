//! Where ranks meet.

use std::collections::{BTreeMap, BTreeSet};

use crate::work::{floats, floats_mut};
use crate::world::StreamId;

/// NCCL's `ncclUniqueId`.
pub(crate) type UniqueId = [u8; 128];

/// What a rank asks for, of `values` f32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) kind: Kind,
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) values: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    AllReduce,
    Broadcast { root: usize },
    Send { peer: usize },
    Receive { peer: usize },
}

/// The calls that one rank made as a group: they go on together, and the stream when all are done.
pub(crate) struct Exchange {
    communicator: usize,
    calls: Vec<(Place, Call)>,
    begun: bool,
}

/// Which calls belong together: the n-th collective of every rank, the n-th message of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Collective(u64),
    Message { from: usize, to: usize, number: u64 },
}

#[derive(Default)]
struct Group {
    world_size: usize,
    joined: BTreeSet<usize>,
    /// Who has come where not everybody has; by rank.
    meetings: BTreeMap<Place, BTreeMap<usize, Call>>,
}

/// One rank's end.
pub(crate) struct Communicator {
    id: UniqueId,
    rank: usize,
    pub(crate) device: i32,
    aborted: bool,
    /// How many of each there were so far, messages by peer and direction.
    collectives: u64,
    messages: BTreeMap<(usize, usize), u64>,
    /// Asked for, but not in its stream yet: a communicator that does not block may do that later.
    pub(crate) held_back: Option<(StreamId, Exchange)>,
}

#[derive(Default)]
pub(crate) struct Groups {
    groups: BTreeMap<UniqueId, Group>,
    communicators: BTreeMap<usize, Communicator>,
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
        let communicator = Communicator {
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

    /// One that nobody has aborted.
    pub(crate) fn communicator(&mut self, handle: usize) -> Option<&mut Communicator> {
        self.communicators.get_mut(&handle).filter(|communicator| !communicator.aborted)
    }

    /// Whether all ranks have come.
    pub(crate) fn is_complete(&self, handle: usize) -> bool {
        let group = self.communicators.get(&handle).and_then(|c| self.groups.get(&c.id));
        group.is_some_and(|group| group.joined.len() == group.world_size)
    }

    /// Numbers `calls` as the communicator's next ones.
    pub(crate) fn exchange(&mut self, handle: usize, calls: Vec<Call>) -> Option<Exchange> {
        let communicator = self.communicator(handle)?;
        let calls = calls.into_iter().map(|call| (communicator.place(call.kind), call)).collect();
        Some(Exchange { communicator: handle, calls, begun: false })
    }

    pub(crate) fn can_go_on(&self, exchange: &Exchange) -> bool {
        let Some((communicator, group)) = self.sides(exchange) else { return true };
        let waits = |(place, _): &(Place, Call)| {
            group.meetings.get(place).is_some_and(|met| met.contains_key(&communicator.rank))
        };
        !exchange.begun || communicator.aborted || !exchange.calls.iter().any(waits)
    }

    /// Comes to where the others come too; once more, when they have.
    pub(crate) fn go_on(&mut self, exchange: Exchange) -> Option<Exchange> {
        let (communicator, _) = self.sides(&exchange)?;
        if communicator.aborted || exchange.begun {
            return None;
        }
        let (id, rank) = (communicator.id, communicator.rank);
        let group = self.groups.entry(id).or_default();
        for (place, call) in &exchange.calls {
            group.meet(*place, rank, *call);
        }
        Some(Exchange { begun: true, ..exchange })
    }

    /// Takes back what the rank brought: its peers wait for ever.
    pub(crate) fn abort(&mut self, handle: usize) {
        let Some(communicator) = self.communicators.get_mut(&handle) else { return };
        communicator.aborted = true;
        communicator.held_back = None;
        if let Some(group) = self.groups.get_mut(&communicator.id) {
            for met in group.meetings.values_mut() {
                met.remove(&communicator.rank);
            }
        }
    }

    fn sides(&self, exchange: &Exchange) -> Option<(&Communicator, &Group)> {
        let communicator = self.communicators.get(&exchange.communicator)?;
        Some((communicator, self.groups.get(&communicator.id)?))
    }
}

impl Communicator {
    fn place(&mut self, kind: Kind) -> Place {
        let (from, to) = match kind {
            Kind::Send { peer } => (self.rank, peer),
            Kind::Receive { peer } => (peer, self.rank),
            _ => {
                self.collectives += 1;
                return Place::Collective(self.collectives);
            }
        };
        let number = self.messages.entry((from, to)).or_default();
        *number += 1;
        Place::Message { from, to, number: *number }
    }
}

impl Group {
    /// Whoever comes last does it for all of them: they stand still meanwhile.
    fn meet(&mut self, place: Place, rank: usize, call: Call) {
        let met = self.meetings.entry(place).or_default();
        met.insert(rank, call);
        let expected = match place {
            Place::Collective(_) => self.world_size,
            Place::Message { .. } => 2,
        };
        if met.len() < expected {
            return;
        }
        let calls: Vec<Call> = met.values().copied().collect();
        self.meetings.remove(&place);
        match place {
            Place::Collective(_) => collective(&calls),
            Place::Message { from, to, .. } => {
                // Ascending ranks.
                let (sent, received) =
                    if from < to { (calls[0], calls[1]) } else { (calls[1], calls[0]) };
                assert_eq!(sent.values, received.values, "ranks {from} and {to} differ");
                give(received.to, &take(sent.from, sent.values));
            }
        }
    }
}

/// Does the calls of all ranks.
fn collective(calls: &[Call]) {
    let Call { kind, values, .. } = calls[0];
    let alike = |call: &Call| call.kind == kind && call.values == values;
    assert!(calls.iter().all(alike), "ranks do different things: {calls:?}");
    match kind {
        Kind::Broadcast { root } => {
            let news = take(calls[root].from, values);
            calls.iter().for_each(|call| give(call.to, &news));
        }
        Kind::AllReduce => {
            let sum = sum(calls, values);
            calls.iter().for_each(|call| give(call.to, &sum));
        }
        Kind::Send { .. } | Kind::Receive { .. } => {}
    }
}

/// From the last rank to the first, so that nobody takes it for the fixed tree.
fn sum(calls: &[Call], values: usize) -> Vec<f32> {
    let add = |sum: Vec<f32>, other: Vec<f32>| sum.iter().zip(other).map(|(a, b)| a + b).collect();
    calls.iter().rev().map(|call| take(call.from, values)).reduce(add).unwrap_or_default()
}

fn take(address: u64, values: usize) -> Vec<f32> {
    // SAFETY: checked when the call was made; its stream stands still.
    unsafe { floats(address, values) }.to_vec()
}

fn give(address: u64, values: &[f32]) {
    // SAFETY: as above.
    unsafe { floats_mut(address, values.len()) }.copy_from_slice(values);
}
