//! Which address an agent connects to: that of its flag, or that in the coordinator's lease.
//!
//! The lease may be that of a lost coordinator, while a user has started another one at the flag's address; and the flag may
//! be that of a lost coordinator. So the two take turns until one answers.

use std::time::Duration;

use crate::time::Time;

/// How long a coordinator at the flag's address may take to answer while the lease names another one: it may have no job.
const LONGEST_WAIT_AT_FLAG: Duration = Duration::from_secs(5);

/// Chooses the address of each connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    flag: String,
    /// The address in the newest lease, if it is another one.
    lease: Option<String>,
    /// What the next connection leads to, while there are two addresses.
    next: Destination,
    /// Since when a connection to the flag's address waits for an answer, while the lease names another one.
    at_flag_since: Option<Time>,
}

/// One of the two addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// That of the flag.
    Flag,
    /// That in the lease.
    Lease,
}

impl Route {
    /// For this address of the flag; no lease is known yet.
    #[must_use]
    pub fn new(flag: String) -> Self {
        Self { flag, lease: None, next: Destination::Lease, at_flag_since: None }
    }

    /// The address of the flag.
    #[must_use]
    pub fn flag(&self) -> &str {
        &self.flag
    }

    /// A connection begins now: where to.
    pub fn connect(&mut self, now: Time) -> Destination {
        if self.lease.is_none() {
            return Destination::Flag;
        }
        let destination = self.next;
        self.at_flag_since = (destination == Destination::Flag).then_some(now);
        self.next =
            if destination == Destination::Flag { Destination::Lease } else { Destination::Flag };
        destination
    }

    /// The coordinator has answered: the next connection is one to the same address.
    pub fn welcomed(&mut self) {
        let is_at_flag = self.at_flag_since.take().is_some();
        self.next = if is_at_flag { Destination::Flag } else { Destination::Lease };
    }

    /// The newest lease has this address; `None` if there is no lease. Returns whether it is another one: a connection to
    /// the one before must end.
    pub fn learn(&mut self, address: Option<&str>) -> bool {
        let other = address.filter(|address| *address != self.flag);
        if other == self.lease.as_deref() {
            return false;
        }
        self.lease = other.map(str::to_owned);
        (self.next, self.at_flag_since) = (Destination::Lease, None);
        true
    }

    /// Whether a connection to the flag's address has waited for an answer long enough, while the lease names another one.
    #[must_use]
    pub fn waits_too_long(&self, now: Time) -> bool {
        self.at_flag_since.is_some_and(|since| now.since(since) >= LONGEST_WAIT_AT_FLAG)
    }

    /// Gives up a connection to the flag's address that was not answered, or answered by another job: that of the lease is
    /// next. Returns whether there is one.
    pub fn leave_flag(&mut self) -> bool {
        self.at_flag_since.take().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLAG: &str = "http://10.0.0.5:29600";
    const LEASE: &str = "http://10.0.0.7:29601";

    fn at(seconds: u64) -> Time {
        Time(seconds * 1_000)
    }

    fn with_lease() -> Route {
        let mut route = Route::new(FLAG.to_owned());
        assert_eq!(route.connect(at(0)), Destination::Flag);
        assert!(route.learn(Some(LEASE)));
        route
    }

    #[test]
    fn without_another_address_every_connection_leads_to_the_flag() {
        let mut route = Route::new(FLAG.to_owned());
        for address in [None, Some(FLAG)] {
            assert!(!route.learn(address));
            assert_eq!([at(0), at(1)].map(|now| route.connect(now)), [Destination::Flag; 2]);
            assert!(!route.waits_too_long(at(100)) && !route.leave_flag());
        }
    }

    #[test]
    fn lease_and_flag_take_turns_until_one_answers() {
        let mut route = with_lease();
        let turns = [0, 1, 2].map(|second| route.connect(at(second)));
        assert_eq!(turns, [Destination::Lease, Destination::Flag, Destination::Lease]);

        route.welcomed();
        assert_eq!(route.connect(at(3)), Destination::Lease, "it restarts there");
        assert_eq!(route.connect(at(4)), Destination::Flag);
        route.welcomed();
        assert_eq!(route.connect(at(5)), Destination::Flag, "a user has started another one");
        assert_eq!(route.connect(at(6)), Destination::Lease);
    }

    #[test]
    fn who_answers_at_the_flag_may_stay_silent_for_five_seconds() {
        let mut route = with_lease();
        route.connect(at(0));
        assert!(!route.waits_too_long(at(100)), "at the lease it may take its time");
        route.connect(at(100));
        assert!(!route.waits_too_long(at(104)) && route.waits_too_long(at(105)));
        assert!(route.leave_flag() && !route.leave_flag());
        assert_eq!(route.connect(at(106)), Destination::Lease);
        route.connect(at(107));
        route.welcomed();
        assert!(!route.waits_too_long(at(200)), "it has answered");
    }

    #[test]
    fn a_new_lease_comes_first() {
        let mut route = with_lease();
        route.connect(at(0));
        assert!(!route.learn(Some(LEASE)), "known");
        route.connect(at(1));
        assert!(route.learn(Some("http://10.0.0.9:29601")));
        assert!(!route.waits_too_long(at(100)));
        assert_eq!(route.connect(at(2)), Destination::Lease);
        assert!(route.learn(None), "back to the flag");
        assert_eq!([at(3), at(4)].map(|now| route.connect(now)), [Destination::Flag; 2]);
    }
}
