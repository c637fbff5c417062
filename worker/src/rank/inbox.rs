//! What the agent has said, for the main thread to pick up.
//!
//! Only the newest generation counts. When one is announced, whatever the main thread waits for in an
//! older one is aborted.

use std::{
    os::unix::net::UnixStream,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
};

use baton_collectives::AbortHandle;
use baton_job::{
    Generation, Rank,
    message::{Pulse, RankCommand, Restore},
};
use baton_trainer::Controls;
use tracing::warn;

use crate::link::{self, ToRank};

/// A place in a generation.
#[derive(Clone)]
pub(super) struct Orders {
    pub(super) generation: Generation,
    pub(super) rank: Rank,
    pub(super) world_size: u32,
    pub(super) restore: Restore,
    /// Breaks this generation's collectives.
    pub(super) abort: AbortHandle,
    /// What the agent wants of this generation's step loop.
    pub(super) controls: Arc<Controls>,
}

#[derive(Default)]
struct State {
    orders: Option<Orders>,
    /// Whether the main thread has picked up `orders`.
    taken: bool,
    peers: Option<Vec<String>>,
}

/// Shared by the reading thread and the main thread.
#[derive(Clone, Default)]
pub(super) struct Inbox(Arc<(Mutex<State>, Condvar)>);

impl Inbox {
    /// Starts the thread that reads `link`.
    pub(super) fn start(link: UnixStream) -> std::io::Result<Self> {
        let inbox = Self::default();
        let writer = inbox.clone();
        thread::Builder::new().name("inbox".to_owned()).spawn(move || writer.read(&link))?;
        Ok(inbox)
    }

    /// Waits for a generation newer than the last one returned.
    pub(super) fn next_orders(&self) -> Orders {
        let mut state = self.lock();
        loop {
            if let Some(orders) = state.orders.clone().filter(|_| !state.taken) {
                state.taken = true;
                return orders;
            }
            state = self.wait(state);
        }
    }

    /// Waits until all ranks of `generation` are ready; `None` if a newer one came first.
    pub(super) fn wait_for_begin(&self, generation: Generation) -> Option<Vec<String>> {
        let mut state = self.lock();
        loop {
            let current = state.orders.as_ref().is_some_and(|o| o.generation == generation);
            if !current {
                return None;
            }
            if let Some(peers) = &state.peers {
                return Some(peers.clone());
            }
            state = self.wait(state);
        }
    }

    /// The present generation and what its step loop does, if the main thread is at it.
    pub(super) fn pulse(&self) -> Option<(Generation, Pulse)> {
        let state = self.lock();
        let orders = state.orders.as_ref().filter(|_| state.taken)?;
        Some((orders.generation, orders.controls.vitals().pulse()))
    }

    fn read(&self, link: &UnixStream) {
        loop {
            match link::read::<ToRank>(link) {
                Ok(Some(ToRank::Command(command))) => self.take(command),
                Ok(Some(other)) => warn!(?other, "not expected any more, and ignored"),
                Ok(None) | Err(_) => {
                    // The agent is gone. Another one will start other ranks; two sets of them must
                    // never train at the same time.
                    tracing::error!("the agent is gone");
                    std::process::exit(i32::from(baton_job::exit::FAILED));
                }
            }
        }
    }

    fn take(&self, command: RankCommand) {
        let mut state = self.lock();
        let current = state.orders.as_ref().map(|orders| orders.generation);
        match command {
            RankCommand::Join { generation, rank, world_size, restore, paused } => {
                if let Some(old) = &state.orders {
                    old.abort.abort();
                }
                let (abort, controls) = (AbortHandle::new(), Arc::new(Controls::default()));
                controls.set_paused(paused);
                let orders = Orders { generation, rank, world_size, restore, abort, controls };
                *state = State { orders: Some(orders), taken: false, peers: None };
            }
            RankCommand::Begin { generation, peers } if current == Some(generation) => {
                state.peers = Some(peers);
            }
            RankCommand::Hold { generation, paused } if current == Some(generation) => {
                if let Some(orders) = &state.orders {
                    orders.controls.set_paused(paused);
                }
            }
            RankCommand::Checkpoint { generation } if current == Some(generation) => {
                if let Some(orders) = &state.orders {
                    orders.controls.request_save();
                }
            }
            RankCommand::Drain { generation, reason } if current == Some(generation) => {
                if let Some(orders) = &state.orders {
                    orders.controls.request_stop(reason);
                }
            }
            stale => warn!(?stale, "a command for another generation was ignored"),
        }
        self.0.1.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic cannot leave this plain data half-changed in a way that matters.
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.0.1.wait(state).unwrap_or_else(PoisonError::into_inner)
    }
}
