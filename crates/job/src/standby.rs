//! An agent's decision when to start a coordinator, because that of its job is gone with its machine.
//!
//! While the coordinator does not answer, the agent reads its lease in the checkpoint store (`baton_checkpoint::Lease`). If
//! that names another address, the agent connects there. If it is not renewed for some seconds, by this agent's clock, the
//! coordinator is gone, and the agent starts one, which takes the next lease; of several agents one succeeds. A
//! coordinator that serves others renews its lease, so an agent that is only cut off from it never takes over. If the lease
//! says that the coordinator has ended together with the job, the agent lets its ranks save and stop.

use std::time::Duration;

use crate::{ids::JobId, time::Time};

/// How often a coordinator renews its lease.
pub const RENEWAL_INTERVAL: Duration = Duration::from_secs(1);
/// How long a coordinator must not answer before its lease is read. It answers a heartbeat each second.
const SILENCE: Duration = Duration::from_secs(2);
/// How long a lease must not be renewed before its holder counts as lost.
const EXPIRY: Duration = Duration::from_secs(4);
/// Pause between two looks at the lease.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// Silence after which the coordinator is looked for less often.
const LONG_SILENCE: Duration = Duration::from_secs(60);
const LATER_LOOK_INTERVAL: Duration = Duration::from_secs(5);
/// How much longer each further node waits, so that mostly only one starts a coordinator.
const STEP: Duration = Duration::from_secs(1);
/// Most steps; the nodes after them wait as long as each other.
const MAX_STEPS: u32 = 5;
/// How long this node does not start a coordinator after its own has ended: until the last of the others would.
const OTHERS_TURN: Duration = Duration::from_secs(6);
/// Shortest time from the first start of a coordinator to the next; it doubles up to 32 times.
const START_INTERVAL: Duration = Duration::from_secs(20);

/// What an agent reads in a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeenLease {
    /// Number of the lease.
    pub number: u64,
    /// URL of the coordinator; `None` if it is that of the agent's flags.
    pub address: Option<String>,
    /// Whether the coordinator renews it.
    pub renews: bool,
    /// How often it was renewed.
    pub renewals: u64,
    /// Whether the coordinator has ended, and another one should take over.
    pub released: bool,
    /// The job.
    pub job: JobId,
    /// Whether the coordinator has ended together with the job.
    pub over: bool,
}

/// What the agent must do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StandbyAction {
    /// Read the lease; [`Standby::seen`] gets the answer.
    Look,
    /// Start a coordinator that takes the lease after this one.
    TakeOver {
        /// Number of the lost coordinator's lease.
        after: u64,
    },
    /// Leave: the job has ended while this agent could not reach it.
    Leave,
}

/// State machine of an agent whose coordinator may be lost.
#[derive(Clone, Debug)]
pub struct Standby {
    /// Whether this node can start a coordinator.
    can_take_over: bool,
    /// The job that this agent takes part in, once it knows it.
    job: Option<JobId>,
    /// When the coordinator last answered.
    answered_at: Time,
    look: Look,
    /// The lease, and when it was first seen like this; `None` while the coordinator answers.
    seen: Option<(SeenLease, Time)>,
    /// URL of the coordinator in the newest lease, once one was seen.
    address: Option<Option<String>>,
    /// Whether this node's coordinator runs.
    serves: bool,
    /// When it may be started, and how often it was.
    start_at: Time,
    starts: u32,
    /// Number of nodes before this one.
    place: u32,
}

/// Reading the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Look {
    /// Under way since then.
    Since(Time),
    /// Not before then.
    NotBefore(Time),
}

impl Standby {
    /// For an agent that the coordinator has just answered.
    #[must_use]
    pub fn new(can_take_over: bool, now: Time) -> Self {
        Self {
            can_take_over,
            job: None,
            answered_at: now,
            look: Look::NotBefore(now),
            seen: None,
            address: None,
            serves: false,
            start_at: now,
            starts: 0,
            place: MAX_STEPS,
        }
    }

    /// URL of the coordinator in the newest lease, where `None` is that of the agent's flags; `None` before one was seen.
    #[must_use]
    pub fn address(&self) -> Option<Option<&str>> {
        self.address.as_ref().map(Option::as_deref)
    }

    /// Sets this node's place among those that may take over: by its first rank, if it has one, of `slots`.
    pub fn set_place(&mut self, first_rank: Option<u32>, slots: u32) {
        let before = first_rank.map_or(MAX_STEPS, |rank| rank / slots.max(1));
        self.place = before.min(MAX_STEPS);
    }

    /// Sets the job that this agent takes part in. Before, the end of a job means nothing to it: it waits for the next one.
    pub fn set_job(&mut self, job: JobId) {
        self.job = Some(job);
    }

    /// The coordinator has answered.
    pub fn answered(&mut self, now: Time) {
        self.answered_at = now;
        self.seen = None;
    }

    /// The coordinator that this node has started could not be started, or has ended. The other nodes try next: they may
    /// have what it lacked.
    pub fn ended(&mut self, now: Time) {
        self.serves = false;
        self.seen = None;
        self.start_at = self.start_at.max(now.after(OTHERS_TURN));
    }

    /// When [`tick`](Self::tick) has something to do.
    #[must_use]
    pub fn deadline(&self) -> Option<Time> {
        match self.look {
            Look::NotBefore(at) => Some(at.max(self.answered_at.after(SILENCE))),
            Look::Since(_) => None,
        }
    }

    /// What must be done now.
    pub fn tick(&mut self, now: Time) -> Option<StandbyAction> {
        if self.deadline().is_none_or(|at| now < at) {
            return None;
        }
        self.look = Look::Since(now);
        Some(StandbyAction::Look)
    }

    /// The lease as it was read; `None` if there is none, or the store cannot be read.
    pub fn seen(&mut self, now: Time, lease: Option<SeenLease>) -> Option<StandbyAction> {
        let Look::Since(began) = self.look else { return None };
        let is_new = now.since(self.answered_at) < LONG_SILENCE;
        let interval = if is_new { LOOK_INTERVAL } else { LATER_LOOK_INTERVAL };
        self.look = Look::NotBefore(now.after(interval));
        if now < self.answered_at.after(SILENCE) {
            return None;
        }
        // It was not seen to be renewed, and not to be not renewed either.
        let lease = lease?;
        self.address = Some(lease.address.clone());
        let since = match self.seen.take() {
            Some((known, since)) if known == lease => since,
            _ => now,
        };
        // An answer may be late: it says how the lease was when it was asked for.
        let unchanged = began.since(since);
        let expiry = if lease.released { Duration::ZERO } else { EXPIRY };
        let is_lost = lease.renews && unchanged >= expiry + STEP * self.place;
        // Whoever starts the job again at once finds its ranks.
        let is_over = lease.over && Some(lease.job) == self.job && unchanged >= EXPIRY;
        let after = lease.number;
        self.seen = Some((lease, since));
        if is_over {
            return Some(StandbyAction::Leave);
        }
        if !is_lost || !self.can_take_over || self.serves || now < self.start_at {
            return None;
        }
        self.serves = true;
        self.start_at = now.after(START_INTERVAL * (1 << self.starts.min(5)));
        self.starts += 1;
        Some(StandbyAction::TakeOver { after })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: f64) -> Time {
        Time(0).after(Duration::from_secs_f64(seconds))
    }

    fn lease(renewals: u64) -> SeenLease {
        let job = JobId::default();
        let (renews, released, over) = (true, false, false);
        SeenLease { number: 3, address: None, renews, renewals, released, job, over }
    }

    /// One that the coordinator answered at 0 s, with this many nodes before it.
    fn standby(place: u32) -> Standby {
        let mut standby = Standby::new(true, at(0.0));
        standby.set_place(Some(8 * place + 3), 8);
        standby
    }

    #[test]
    fn who_learns_that_the_job_has_ended_leaves_unless_it_is_started_again_at_once() {
        let over = |renewals| SeenLease { renews: false, over: true, ..lease(renewals) };
        for can_take_over in [true, false] {
            let mut standby = Standby::new(can_take_over, at(0.0));
            standby.set_job(JobId::default());
            assert_eq!(standby.tick(at(2.0)), Some(StandbyAction::Look));
            assert_eq!(standby.seen(at(2.0), Some(over(7))), None);
            assert_eq!(standby.tick(at(5.9)), Some(StandbyAction::Look));
            assert_eq!(standby.seen(at(5.9), Some(over(7))), None);
            assert_eq!(standby.tick(at(6.5)), Some(StandbyAction::Look));
            let next = Some(SeenLease { number: 4, ..lease(0) });
            assert_eq!(standby.clone().seen(at(6.5), next), None);
            let mut without_job = Standby { job: None, ..standby.clone() };
            assert_eq!(without_job.seen(at(6.5), Some(over(7))), None);
            let other = JobId("00000000-0000-0000-0000-000000000001".parse().unwrap());
            let mut of_other_job = Standby { job: Some(other), ..standby.clone() };
            assert_eq!(of_other_job.seen(at(6.5), Some(over(7))), None);
            assert_eq!(standby.seen(at(6.5), Some(over(7))), Some(StandbyAction::Leave));
        }
    }

    /// Looks at every time when it wants to, for so many seconds; returns when it takes over.
    fn takes_over(
        standby: &mut Standby,
        seconds: f64,
        lease_at: impl Fn(Time) -> Option<SeenLease>,
    ) -> Option<Time> {
        let mut now = at(0.0);
        while now < at(seconds) {
            now = now.after(Duration::from_millis(100));
            if standby.tick(now) == Some(StandbyAction::Look)
                && let Some(action) = standby.seen(now, lease_at(now))
            {
                assert_eq!(action, StandbyAction::TakeOver { after: 3 });
                return Some(now);
            }
        }
        None
    }

    #[test]
    fn a_coordinator_that_answers_is_not_looked_for() {
        let mut standby = standby(0);
        for second in 0..100 {
            standby.answered(at(f64::from(second)));
            assert_eq!(standby.tick(at(f64::from(second) + 1.5)), None);
        }
        assert_eq!(standby.tick(at(101.0)), Some(StandbyAction::Look));
    }

    #[test]
    fn a_lease_that_is_not_renewed_is_taken_over_by_one_node_after_another() {
        let lost = |_| Some(lease(7));
        assert_eq!(takes_over(&mut standby(0), 60.0, lost), Some(at(6.0)));
        assert_eq!(takes_over(&mut standby(1), 60.0, lost), Some(at(7.0)));
        assert_eq!(takes_over(&mut standby(1_000), 60.0, lost), Some(at(11.0)));
        let mut without_ranks = standby(0);
        without_ranks.set_place(None, 8);
        assert_eq!(takes_over(&mut without_ranks, 60.0, lost), Some(at(11.0)));
    }

    #[test]
    fn who_is_only_cut_off_from_the_coordinator_does_not_take_over() {
        let renewed = |now: Time| Some(lease(now.since(at(0.0)).as_secs() / 3));
        assert_eq!(takes_over(&mut standby(0), 600.0, renewed), None);
    }

    #[test]
    fn without_a_lease_that_is_renewed_nobody_takes_over() {
        assert_eq!(takes_over(&mut standby(0), 600.0, |_| None), None);
        let single = |_| Some(SeenLease { renews: false, ..lease(7) });
        assert_eq!(takes_over(&mut standby(0), 600.0, single), None);
    }

    #[test]
    fn a_released_lease_is_taken_over_at_once() {
        let released = |_| Some(SeenLease { released: true, ..lease(7) });
        assert_eq!(takes_over(&mut standby(0), 60.0, released), Some(at(2.0)));
    }

    #[test]
    fn an_answer_that_comes_late_says_how_the_lease_was_before() {
        let mut standby = standby(0);
        assert_eq!(standby.tick(at(2.0)), Some(StandbyAction::Look));
        assert_eq!(standby.seen(at(2.0), Some(lease(7))), None);
        assert_eq!(standby.tick(at(3.0)), Some(StandbyAction::Look));
        assert_eq!(standby.tick(at(20.0)), None, "one look at a time");
        assert_eq!(standby.seen(at(30.0), Some(lease(7))), None);
        assert_eq!(standby.tick(at(31.0)), Some(StandbyAction::Look));
        let action = standby.seen(at(31.0), Some(lease(7)));
        assert_eq!(action, Some(StandbyAction::TakeOver { after: 3 }));
    }

    #[test]
    fn a_node_that_cannot_take_over_finds_the_coordinator_that_has() {
        let mut standby = Standby::new(false, at(0.0));
        let address = Some("http://b:29600".to_owned());
        let taken = |now: Time| match now < at(30.0) {
            true => Some(lease(7)),
            false => Some(SeenLease { number: 4, address: address.clone(), ..lease(0) }),
        };
        assert_eq!(takes_over(&mut standby, 29.0, taken), None);
        assert_eq!(standby.address(), Some(None));
        assert_eq!(takes_over(&mut standby, 40.0, taken), None);
        assert_eq!(standby.address(), Some(address.as_deref()));
        standby.answered(at(41.0));
        assert_eq!(standby.address(), Some(address.as_deref()), "it stays there");
    }

    #[test]
    fn a_coordinator_that_could_not_be_started_is_started_again_later() {
        let mut standby = standby(0);
        let lost = |_| Some(lease(7));
        assert_eq!(takes_over(&mut standby, 60.0, lost), Some(at(6.0)));
        standby.ended(at(7.0));
        assert_eq!(takes_over(&mut standby, 60.0, lost), Some(at(26.0)));
        assert_eq!(takes_over(&mut standby, 600.0, lost), None, "while it runs");

        // One that nobody could join has given its lease back: the others try before this node does again.
        standby.ended(at(700.0));
        let released = |_| Some(SeenLease { released: true, ..lease(8) });
        assert_eq!(takes_over(&mut standby, 800.0, released), Some(at(710.0)));
    }
}
