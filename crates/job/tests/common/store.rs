//! A model of the checkpoint store: commits in the order in which they became visible, and the fence.

use baton_job::{
    Generation,
    message::{Commit, Restore},
};
use baton_recipe::Step;

/// A store that refuses commits of generations below its fence.
#[derive(Default)]
pub(crate) struct Store {
    pub(crate) fence: Generation,
    /// Commits, each with whether its state has corrupted.
    commits: Vec<(Commit, bool)>,
}

/// The generation of a commit is below the fence.
pub(crate) struct Fenced;

impl Store {
    pub(crate) fn raise_fence(&mut self, generation: Generation) {
        self.fence = self.fence.max(generation);
    }

    pub(crate) fn commit(
        &mut self,
        generation: Generation,
        step: u64,
        corrupted: bool,
    ) -> Result<Commit, Fenced> {
        if generation < self.fence {
            Err(Fenced)
        } else {
            Ok(self.put(generation, step, corrupted))
        }
    }

    pub(crate) fn put(&mut self, generation: Generation, step: u64, corrupted: bool) -> Commit {
        let name = format!("generation-{generation}-step-{step}");
        let commit = Commit {
            name,
            generation,
            step: Step(step),
            accuracy: None,
            bytes: 0,
            took: None,
            fence_lost: false,
        };
        self.commits.push((commit.clone(), corrupted));
        commit
    }

    /// The commit from which a generation without survivors must start, and whether its state has corrupted.
    pub(crate) fn newest(&self, restore: &Restore) -> Option<&(Commit, bool)> {
        let valid = |(commit, _): &&(Commit, bool)| {
            let invalidated = restore.invalidated_by(commit.generation, commit.step).is_some();
            commit.generation >= restore.not_before && !invalidated
        };
        let valid: Vec<_> = self.commits.iter().rev().filter(valid).collect();
        let is_good = |(commit, _): &&(Commit, bool)| {
            restore.suspected_by(commit.generation, commit.step).is_none()
        };
        let good = valid.iter().copied().find(is_good);
        let key = |(commit, _): &&(Commit, bool)| {
            Restore::last_resort_key(commit.generation, commit.step)
        };
        good.or_else(|| valid.into_iter().min_by_key(key))
    }
}
