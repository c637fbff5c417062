//! Where the time went, as the world saw it; what the coordinator makes of it is compared with this.

use baton_job::time::Time;

/// Time in milliseconds, and counts.
#[derive(Default)]
pub(crate) struct Ledger {
    /// Updates that had not been made before, each as long as with all ranks.
    pub(crate) useful: u64,
    /// Updates that had been made before.
    pub(crate) redone: u64,
    /// What updates took longer because ranks were missing.
    pub(crate) slower: u64,
    /// What first updates and those after a checkpoint took longer.
    pub(crate) later: u64,
    /// Updates that were under way when a member left.
    pub(crate) thrown_away: u64,
    /// No group trained, after the first update and before it.
    pub(crate) standing: u64,
    pub(crate) starting: u64,
    /// Updates that were made again.
    pub(crate) lost_steps: u64,
    pub(crate) high_water: u64,
    /// The step of the group that trains, or of the last one that did.
    reached: u64,
    /// Since when a group is at its present update, or none is.
    since: Time,
    pub(crate) noticed: u64,
    pub(crate) unnoticed: u64,
    pub(crate) crashes: u64,
    pub(crate) commits: u64,
    pub(crate) sampled_seconds: u64,
    pub(crate) days: Vec<Day>,
    today: Day,
    counted_at: Time,
    /// Machines that are there since then, and ranks that train.
    machines: u64,
    ranks: u64,
}

/// What there was on one day.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Day {
    /// Machine-milliseconds, and the fewest machines at a time.
    pub(crate) machines: u64,
    pub(crate) fewest_machines: u64,
    /// Rank-milliseconds of ranks in a group that trained.
    pub(crate) ranks: u64,
    /// As they were at its end.
    pub(crate) useful: u64,
    pub(crate) generations: u64,
}

impl Ledger {
    /// A group of so many ranks begins to train after `step` updates.
    pub(crate) fn trains(&mut self, now: Time, step: u64, ranks: u64) {
        assert_eq!(self.ranks, 0, "two groups train at {now}");
        self.close(now);
        self.ranks = ranks;
        if self.high_water == 0 {
            // Until now they came one after the other.
            self.today.fewest_machines = self.machines;
        }
        self.lost_steps += self.reached.saturating_sub(step);
        self.reached = step;
    }

    /// An update is done; `usual` is how long one takes with as many ranks, `nominal` with all.
    pub(crate) fn update(&mut self, now: Time, step: u64, nominal: u64, usual: u64) {
        let took = now.since(self.since).as_millis() as u64;
        self.since = now;
        if step > self.high_water {
            self.high_water = step;
            self.useful += nominal;
        } else {
            self.redone += nominal;
        }
        self.reached = step;
        self.slower += usual - nominal;
        self.later += took - usual;
    }

    /// The group that trains is broken in the middle of an update.
    pub(crate) fn breaks(&mut self, now: Time) {
        self.close(now);
        self.ranks = 0;
    }

    /// Counts the time since the last entry.
    fn close(&mut self, now: Time) {
        self.count(now);
        let took = now.since(self.since).as_millis() as u64;
        self.since = now;
        match self.ranks {
            0 if self.high_water == 0 => self.starting += took,
            0 => self.standing += took,
            _ => self.thrown_away += took,
        }
    }

    /// There are so many machines from now on.
    pub(crate) fn has_machines(&mut self, now: Time, machines: u64) {
        self.count(now);
        self.machines = machines;
        self.today.fewest_machines = self.today.fewest_machines.min(machines);
    }

    fn count(&mut self, now: Time) {
        let took = now.since(self.counted_at).as_millis() as u64;
        self.counted_at = now;
        self.today.machines += self.machines * took;
        self.today.ranks += self.ranks * took;
    }

    pub(crate) fn day_ends(&mut self, now: Time, generations: u64) {
        self.count(now);
        self.days.push(Day { useful: self.useful, generations, ..self.today });
        self.today = Day { fewest_machines: self.machines, ..Day::default() };
    }

    /// The end of what is looked at.
    pub(crate) fn ends(&mut self, now: Time) {
        self.close(now);
    }
}
