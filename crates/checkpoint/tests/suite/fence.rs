//! Every interleaving of the store operations of an old generation's commit and of raising the fence.

use std::{
    sync::{Arc, Condvar, Mutex},
    thread,
};

use baton_checkpoint::{Claimant, EntryState, Error, Store};
use baton_job::{Generation, JobId, Rank};
use object_store::{ObjectStoreExt, memory::InMemory};

use crate::kit::{
    self,
    hook::{Hook, Hooked, Operation},
    id, keep, newest, saved, written,
};

const COMMITTER: usize = 0;
const RAISER: usize = 1;

/// Lets two threads run one operation at a time, in the order of a plan.
#[derive(Clone, Default)]
struct Turns(Arc<(Mutex<State>, Condvar)>);

#[derive(Default)]
struct State {
    waiting: [bool; 2],
    ended: [bool; 2],
    /// The thread that may run; `None` while it has to be chosen.
    turn: Option<usize>,
    /// The chosen thread for each choice between both threads.
    plan: Vec<usize>,
    chosen: usize,
    /// The operations in order, and the end of each thread's work.
    log: Vec<(usize, String)>,
}

impl State {
    /// Chooses the next thread once each thread waits at an operation or has ended.
    fn choose(&mut self) {
        let is_ready = (0..2).all(|thread| self.waiting[thread] || self.ended[thread]);
        if self.turn.is_some() || !is_ready {
            return;
        }
        self.turn = match self.waiting {
            [true, true] => {
                if self.chosen == self.plan.len() {
                    self.plan.push(COMMITTER);
                }
                self.chosen += 1;
                Some(self.plan[self.chosen - 1])
            }
            [true, false] => Some(COMMITTER),
            [false, true] => Some(RAISER),
            [false, false] => None,
        };
    }
}

impl Turns {
    fn hook(&self, thread: usize) -> Hook {
        let turns = self.clone();
        Hook::before(move |operation: &Operation| {
            let (state, changed) = &*turns.0;
            let mut state = state.lock().unwrap();
            // A turn ends where the thread's next operation begins.
            state.turn.take_if(|turn| *turn == thread);
            state.waiting[thread] = true;
            state.choose();
            changed.notify_all();
            let mut state = changed.wait_while(state, |state| state.turn != Some(thread)).unwrap();
            state.waiting[thread] = false;
            state.log.push((thread, operation.to_string()));
        })
    }

    fn end(&self, thread: usize) {
        let (state, changed) = &*self.0;
        let mut state = state.lock().unwrap();
        state.turn.take_if(|turn| *turn == thread);
        state.ended[thread] = true;
        state.log.push((thread, "end".into()));
        state.choose();
        changed.notify_all();
    }
}

/// Runs every interleaving. Returns how many ended with a commit and how many without.
fn every_interleaving(run: impl Fn(&Turns) -> bool) -> (usize, usize) {
    let mut plan = Vec::new();
    let (mut committed, mut refused) = (0, 0);
    loop {
        let turns = Turns::default();
        turns.0.0.lock().unwrap().plan = plan;
        *if run(&turns) { &mut committed } else { &mut refused } += 1;
        plan = std::mem::take(&mut turns.0.0.lock().unwrap().plan);
        // The next plan in order: change the last choice of the committer to the raiser.
        while plan.last() == Some(&RAISER) {
            plan.pop();
        }
        match plan.last_mut() {
            Some(last) => *last = RAISER,
            None => return (committed, refused),
        }
    }
}

/// An old generation writes its last shard and commits, while a new generation takes over and, if `prunes`,
/// prunes. Returns whether the commit succeeded.
fn race(turns: &Turns, prunes: bool) -> bool {
    let objects = Arc::new(InMemory::new());
    let plain = Store::from_object_store("plain", objects.clone()).unwrap();
    saved(&plain, id(1, 10), 2);
    let first = plain.write_shard(&id(1, 20), Rank(0), 2, &kit::snapshot(20, 0, 2)).unwrap();

    let over = |thread| {
        Store::from_object_store(
            "hooked",
            Arc::new(Hooked::new(objects.clone(), turns.hook(thread))),
        )
    };
    let (committing, raising) = (over(COMMITTER).unwrap(), over(RAISER).unwrap());
    let outcome = thread::scope(|scope| {
        let commit = scope.spawn(|| {
            let save = || {
                let last = kit::snapshot(20, 1, 2);
                let last = committing.write_shard(&id(1, 20), Rank(1), 2, &last)?;
                let manifest = kit::draft(id(1, 20), 2, vec![first, last]);
                committing.commit(&manifest)?;
                Ok(manifest)
            };
            let outcome = save();
            turns.end(COMMITTER);
            outcome
        });
        scope.spawn(|| {
            raising.raise_fence(Generation(2)).unwrap();
            turns.0.0.lock().unwrap().log.push((RAISER, "raised".into()));
            if prunes {
                let pruned = raising.prune(&keep(1, false, 0, 2));
                assert!(pruned.warnings.is_empty(), "{:?}", pruned.warnings);
            }
            turns.end(RAISER);
        });
        commit.join().unwrap()
    });

    let log = std::mem::take(&mut turns.0.0.lock().unwrap().log);
    let position = |entry: (usize, &str)| {
        log.iter().position(|(thread, operation)| (*thread, operation.as_str()) == entry)
    };
    match &outcome {
        Ok(manifest) => {
            let created = format!("create {}/manifest.json", id(1, 20).name());
            let committed = position((COMMITTER, &created)).unwrap();
            assert!(committed < position((RAISER, "raised")).unwrap(), "too late: {log:#?}");
            assert_eq!(&newest(&plain).manifest, manifest, "{log:#?}");
        }
        Err(Error::Fenced { .. }) => {
            assert_eq!(newest(&plain).manifest.id(), id(1, 10), "{log:#?}");
        }
        Err(error) => panic!("{error}: {log:#?}"),
    }
    let states = plain.list().unwrap();
    let damaged = |state: &EntryState| matches!(state, EntryState::Damaged(_));
    assert!(!states.iter().any(|entry| damaged(&entry.state)), "{states:?} {log:#?}");
    outcome.is_ok()
}

#[test]
fn nothing_is_committed_after_the_fence_was_raised() {
    let (committed, refused) = every_interleaving(|turns| race(turns, false));
    assert!(committed >= 5 && refused >= 20, "only {committed} commits and {refused} refusals");
}

#[test]
fn nothing_is_committed_after_the_fence_was_raised_and_abandoned_saves_were_pruned() {
    let (committed, refused) = every_interleaving(|turns| race(turns, true));
    assert!(committed >= 20 && refused >= 500, "only {committed} commits and {refused} refusals");
}

#[test]
fn an_abandoned_save_is_refused_and_pruned_and_its_tombstone_is_kept() {
    let store = Store::memory().unwrap();
    saved(&store, id(1, 10), 1);
    let late = written(&store, id(1, 20), 1);
    store.raise_fence(Generation(2)).unwrap();
    store.raise_fence(Generation(2)).expect("may be repeated");
    assert!(matches!(store.commit(&late), Err(Error::Fenced { .. })));
    let states: Vec<_> = store.list().unwrap().into_iter().map(|entry| entry.state).collect();
    assert!(matches!(states.as_slice(), [EntryState::Unfinished, EntryState::Complete(_)]));

    assert_eq!(store.prune(&keep(1, false, 0, 2)).removed, [id(1, 20).name()]);
    assert_eq!(store.list().unwrap().len(), 1);
    assert!(store.prune(&keep(1, false, 0, 2)).removed.is_empty());
    let late = store.write_shard(&id(1, 20), Rank(0), 1, &kit::snapshot(20, 0, 1));
    assert!(matches!(late, Err(Error::Fenced { .. })));
}

fn claimant(owner: &str) -> Claimant {
    Claimant {
        owner: owner.to_owned(),
        job: JobId::default(),
        name: format!("job of {owner}"),
        recipe: "{}".to_owned(),
        host: "node1".to_owned(),
        run_dir: "runs/n6".to_owned(),
        not_before: None,
    }
}

#[test]
fn the_error_of_the_loser_names_the_job_that_took_over() {
    let store = Store::memory().unwrap();
    store.claim(Generation(1), &claimant("first")).unwrap();
    let late = written(&store, id(1, 10), 1);
    store.claim(Generation(2), &claimant("second")).unwrap();
    assert_eq!(store.claimant(Generation(2)).unwrap(), Some(claimant("second")));

    let fenced = store.commit(&late).unwrap_err().to_string();
    let taken_over = store.claim(Generation(1), &claimant("first")).unwrap_err().to_string();

    let by = "generation 2 of job `job of second` (run folder runs/n6 on host node1)";
    assert!(fenced.contains(by), "{fenced}");
    assert!(taken_over.contains(by), "{taken_over}");
}

#[test]
fn the_claimant_of_a_fence_of_an_older_version_is_unknown() {
    let objects = Arc::new(InMemory::new());
    let store = Store::from_object_store("old", objects.clone()).unwrap();
    store.raise_fence(Generation(1)).unwrap();
    let owner = "0d6e2f6e-2ad5-4a52-8df5-7a6f5a3a7e1c\n";
    let fence = "fences/000002".into();
    futures::executor::block_on(objects.put(&fence, owner.into())).unwrap();

    assert_eq!(store.fence().unwrap(), Generation(2));
    for generation in 1..=3 {
        assert_eq!(store.claimant(Generation(generation)).unwrap(), None);
    }
    let error = store.claim(Generation(1), &claimant("late")).unwrap_err();
    assert!(matches!(error, Error::TakenOver { by, .. } if by.is_empty()));
}

#[test]
fn only_one_owner_can_claim_a_generation_and_none_an_older_one() {
    let store = Store::memory().unwrap();
    let taken_by = |generation, owner| match store.claim(Generation(generation), &claimant(owner)) {
        Ok(()) => None,
        Err(Error::TakenOver { generation, .. }) => Some(generation.0),
        Err(error) => panic!("{error}"),
    };
    assert_eq!(taken_by(3, "first"), None);
    assert_eq!(taken_by(3, "first"), None, "may be repeated");
    assert_eq!(taken_by(3, "second"), Some(3));
    let late = written(&store, id(3, 10), 1);
    assert_eq!(taken_by(4, "second"), None);
    assert!(matches!(store.commit(&late), Err(Error::Fenced { .. })));
    assert_eq!(taken_by(4, "first"), Some(4));
    assert_eq!(taken_by(2, "first"), Some(4));
    assert_eq!(store.fence().unwrap(), Generation(4));
}

#[test]
fn the_fence_is_never_lowered() {
    let store = Store::memory().unwrap();
    assert_eq!(store.fence().unwrap(), Generation(0));
    for (raised, fence) in [(3, 3), (2, 3), (3, 3), (1_000_000, 1_000_000), (999_999, 1_000_000)] {
        store.raise_fence(Generation(raised)).unwrap();
        assert_eq!(store.fence().unwrap(), Generation(fence));
    }
}

#[test]
fn raising_the_fence_again_does_not_abandon_a_save_of_the_same_generation() {
    let store = Store::memory().unwrap();
    store.raise_fence(Generation(2)).unwrap();
    let manifest = written(&store, id(2, 10), 1);
    store.raise_fence(Generation(2)).unwrap();
    store.raise_fence(Generation(1)).unwrap();
    store.commit(&manifest).unwrap();
    assert_eq!(newest(&store).manifest, manifest);
}

#[test]
fn the_generation_of_a_new_run_is_newer_than_all_saves_without_a_fence_too() {
    let store = Store::memory().unwrap();
    assert_eq!(store.unused_generation().unwrap(), Generation(1));
    // A save of a generation whose fence is gone.
    written(&store, id(3, 10), 1);
    assert_eq!(store.unused_generation().unwrap(), Generation(4));
    store.raise_fence(Generation(5)).unwrap();
    assert_eq!(store.unused_generation().unwrap(), Generation(6));
}
