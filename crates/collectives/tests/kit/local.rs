//! Ranks that are threads of one process, for the tests of any crate: it needs `baton_collectives` and `baton_job`.
//!
//! The members share a board. In every operation each member posts its contribution and reads those of all others; then
//! every member makes all additions itself. It is simple, so it is also the independent check of `tcp`, which divides
//! the work.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_collectives::tree::{self, Fold};
use baton_collectives::{
    AbortHandle, BufferMut, Collective, Error, Part, TreeNode, check_gathered, check_root,
};
use baton_job::Rank;

/// Names of operations in errors.
mod operation {
    pub(crate) const ALL_REDUCE: &str = "all_reduce";
    pub(crate) const BROADCAST: &str = "broadcast";
    pub(crate) const ALL_GATHER_BYTES: &str = "all_gather_bytes";
}

/// A group of `world_size` members, in rank order, with this timeout for operations.
pub(crate) fn group(world_size: u32, timeout: Duration) -> Vec<LocalCollective> {
    let board = Arc::new(Board::default());
    let member = |rank| {
        let abort = AbortHandle::new();
        let shared_board = Arc::downgrade(&board);
        abort.on_abort(move || {
            if let Some(board) = shared_board.upgrade() {
                board.wake_all();
            }
        });
        LocalCollective {
            board: Arc::clone(&board),
            rank: Rank(rank),
            world_size,
            timeout,
            round: 0,
            broken: false,
            abort,
        }
    };
    (0..world_size).map(member).collect()
}

/// One rank's member of a group made by [`group`].
#[derive(Debug)]
pub(crate) struct LocalCollective {
    board: Arc<Board>,
    rank: Rank,
    world_size: u32,
    timeout: Duration,
    round: u64,
    broken: bool,
    abort: AbortHandle,
}

/// A member's contribution to an operation.
#[derive(Clone, Debug)]
enum Contribution {
    Sums { virtual_ranks: u32, len: usize, sums: Vec<(TreeNode, Vec<f32>)> },
    Values { root: Rank, len: usize, values: Option<Vec<f32>> },
    Bytes(Vec<u8>),
}

impl Contribution {
    /// `None` if the other member does the same operation in the same way; else a description of the difference.
    fn differs_from(&self, other: &Self) -> Option<String> {
        match (self, other) {
            (
                Self::Sums { virtual_ranks: v, len: n, .. },
                Self::Sums { virtual_ranks, len, .. },
            ) if v == virtual_ranks && n == len => None,
            (Self::Values { root: r, len: n, .. }, Self::Values { root, len, .. })
                if r == root && n == len =>
            {
                None
            }
            (Self::Bytes(_), Self::Bytes(_)) => None,
            _ => Some(format!("{} instead of {}", other.title(), self.title())),
        }
    }

    fn title(&self) -> String {
        match self {
            Self::Sums { virtual_ranks, len, .. } => {
                format!("all_reduce of {len} values over {virtual_ranks} virtual ranks")
            }
            Self::Values { root, len, .. } => {
                format!("broadcast of {len} values from rank {root}")
            }
            Self::Bytes(_) => "all_gather_bytes".to_owned(),
        }
    }
}

#[derive(Debug, Default)]
struct Board {
    state: Mutex<BoardState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct BoardState {
    /// Contributions of rounds that not all members have read: at most two rounds, because no member enters a round
    /// before all have posted in the previous one.
    rounds: BTreeMap<u64, Round>,
    left: Vec<Rank>,
}

#[derive(Debug, Default)]
struct Round {
    contributions: BTreeMap<Rank, Arc<Contribution>>,
    readers: u32,
}

impl Board {
    fn lock(&self) -> MutexGuard<'_, BoardState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes all waiting members. It takes the lock first, so that no member misses it between its check and its wait.
    fn wake_all(&self) {
        let _state = self.lock();
        self.changed.notify_all();
    }
}

impl LocalCollective {
    /// Posts `contribution` and waits for the contributions of all members, indexed by rank.
    fn exchange(
        &mut self,
        operation: &'static str,
        contribution: Contribution,
    ) -> Result<Vec<Arc<Contribution>>, Error> {
        self.abort.check(operation)?;
        if self.broken {
            return Err(Error::Broken { operation });
        }
        self.broken = true; // Reset at the end.
        let contribution = Arc::new(contribution);
        let contributions = self.wait_for_all(operation, Arc::clone(&contribution))?;
        for (rank, other) in contributions.iter().enumerate() {
            if let Some(difference) = contribution.differs_from(other) {
                let detail = format!("rank {rank} does {difference}");
                return Err(Error::Protocol { operation, detail });
            }
        }
        self.broken = false;
        self.round += 1;
        Ok(contributions)
    }

    fn wait_for_all(
        &self,
        operation: &'static str,
        contribution: Arc<Contribution>,
    ) -> Result<Vec<Arc<Contribution>>, Error> {
        let deadline = Instant::now() + self.timeout;
        let mut state = self.board.lock();
        state.rounds.entry(self.round).or_default().contributions.insert(self.rank, contribution);
        self.board.changed.notify_all();
        loop {
            self.abort.check(operation)?;
            let BoardState { rounds, left } = &mut *state;
            let round = rounds.entry(self.round).or_default();
            let mut missing = (0..self.world_size)
                .map(Rank)
                .filter(|rank| !round.contributions.contains_key(rank));
            let Some(first_missing) = missing.clone().next() else {
                let contributions = round.contributions.values().cloned().collect();
                round.readers += 1;
                if round.readers == self.world_size {
                    rounds.remove(&self.round);
                }
                return Ok(contributions);
            };
            if let Some(rank) = missing.find(|rank| left.contains(rank)) {
                let source = io::Error::new(io::ErrorKind::UnexpectedEof, "it left the group");
                return Err(Error::LostPeer { rank, operation, source });
            }
            let remaining = deadline.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                let waiting_for = vec![first_missing];
                return Err(Error::TimedOut { operation, waiting_for, after: self.timeout });
            }
            state = self
                .board
                .changed
                .wait_timeout(state, remaining)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

impl Collective for LocalCollective {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world_size(&self) -> u32 {
        self.world_size
    }

    fn all_reduce(&mut self, virtual_ranks: u32, parts: &mut [Part<'_>]) -> Result<(), Error> {
        let len = tree::check_parts(self.rank, self.world_size, virtual_ranks, parts)?;
        if self.world_size == 1 {
            return self.abort.check(operation::ALL_REDUCE); // The only part is the total.
        }
        let sums = parts
            .iter()
            .map(|part| Ok((part.node, part.buffer.to_host()?)))
            .collect::<Result<Vec<_>, Error>>()?;
        let contributions =
            self.exchange(operation::ALL_REDUCE, Contribution::Sums { virtual_ranks, len, sums })?;

        let mut fold = Fold::new(0);
        for contribution in &contributions {
            let Contribution::Sums { sums, .. } = &**contribution else { continue };
            for (node, sum) in sums {
                let Ok(()) = fold.push_node(*node, sum.clone(), |left, right| {
                    left.iter_mut().zip(right).for_each(|(left, right)| *left += right);
                    Ok::<_, Infallible>(())
                });
            }
        }
        for (part, (_root, total)) in parts.iter_mut().zip(fold.finish()) {
            part.buffer.copy_from_host(&total)?;
        }
        Ok(())
    }

    fn broadcast(&mut self, root: Rank, mut buffer: BufferMut<'_>) -> Result<(), Error> {
        check_root(root, self.world_size)?;
        let values = if self.rank == root { Some(buffer.to_host()?) } else { None };
        let contribution = Contribution::Values { root, len: buffer.len(), values };
        let contributions = self.exchange(operation::BROADCAST, contribution)?;
        match &*contributions[root.0 as usize] {
            Contribution::Values { values: Some(values), .. } if self.rank != root => {
                buffer.copy_from_host(values)
            }
            _ => Ok(()),
        }
    }

    fn all_gather_bytes(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        check_gathered(self.rank, mine.len() as u64)?;
        let contributions =
            self.exchange(operation::ALL_GATHER_BYTES, Contribution::Bytes(mine.to_vec()))?;
        let bytes = contributions.iter().map(|contribution| match &**contribution {
            Contribution::Bytes(bytes) => bytes.clone(),
            _ => Vec::new(),
        });
        Ok(bytes.collect())
    }

    fn abort_handle(&self) -> AbortHandle {
        self.abort.clone()
    }
}

impl Drop for LocalCollective {
    fn drop(&mut self) {
        self.board.lock().left.push(self.rank);
        self.board.changed.notify_all();
    }
}
