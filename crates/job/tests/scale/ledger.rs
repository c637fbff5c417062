//! How the simulated time was used. The coordinator's own accounting is compared with this.

use baton_job::time::Time;

/// Times in milliseconds, and counts.
#[derive(Default)]
pub(crate) struct Ledger {
    /// Time of new updates, each counted as long as with all ranks.
    pub(crate) useful: u64,
    /// Time of repeated updates.
    pub(crate) redone: u64,
    /// Additional time of updates because ranks were missing.
    pub(crate) slower: u64,
    /// Additional time of first updates and of updates after a checkpoint.
    pub(crate) stalled: u64,
    /// Time of unfinished updates when a member left.
    pub(crate) discarded: u64,
    /// Time without training after the first update.
    pub(crate) idle: u64,
    /// Time before the first update.
    pub(crate) starting: u64,
    /// Number of repeated updates.
    pub(crate) lost_steps: u64,
    /// Number of different updates.
    pub(crate) high_water: u64,
    /// Step of the group that trains, or that trained last.
    reached: u64,
    /// Start of the present update, or of the time without training.
    since: Time,
    /// Number of interruptions with a notice.
    pub(crate) with_notice: u64,
    /// Number of interruptions without one.
    pub(crate) without_notice: u64,
    pub(crate) crashes: u64,
    pub(crate) commits: u64,
    pub(crate) sampled_seconds: u64,
    pub(crate) days: Vec<Day>,
    today: Day,
    counted_at: Time,
    /// Number of machines, and of ranks that train, since `counted_at`.
    machines: u64,
    ranks: u64,
}

/// Statistics of one day.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Day {
    /// Machine-milliseconds.
    pub(crate) machines: u64,
    /// Smallest number of machines.
    pub(crate) fewest_machines: u64,
    /// Rank-milliseconds of ranks in a group that trained.
    pub(crate) ranks: u64,
    /// Totals of the run at the end of the day.
    pub(crate) useful: u64,
    pub(crate) generations: u64,
}

impl Ledger {
    /// A group of `ranks` ranks begins to train after `step` updates.
    pub(crate) fn trains(&mut self, now: Time, step: u64, ranks: u64) {
        assert_eq!(self.ranks, 0, "two groups train at {now}");
        self.close(now);
        self.ranks = ranks;
        if self.high_water == 0 {
            // Before this the machines were still starting.
            self.today.fewest_machines = self.machines;
        }
        self.lost_steps += self.reached.saturating_sub(step);
        self.reached = step;
    }

    /// An update is done; `usual` is its normal time with this number of ranks, `nominal` with all ranks, in
    /// milliseconds.
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
        self.stalled += took - usual;
    }

    /// The group that trains stops in the middle of an update.
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
            0 => self.idle += took,
            _ => self.discarded += took,
        }
    }

    /// The number of machines changes.
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

    /// The end of the simulated time.
    pub(crate) fn ends(&mut self, now: Time) {
        self.close(now);
    }
}
