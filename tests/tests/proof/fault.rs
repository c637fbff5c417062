//! The faults of a history, and the text from which a history can be repeated.

use std::{fmt, str::FromStr, time::Duration};

/// Hosts of the proof.
pub(crate) const HOSTS: usize = 3;
/// Longest time between the moment when all ranks train and the next fault, milliseconds: some steps.
const MAX_DELAY_MS: u64 = 800;

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A rank gets SIGKILL.
    RankKilled,
    /// A rank gets SIGSTOP.
    RankStopped,
    /// The agent gets SIGKILL, and with it the ranks and the coordinator that it has started.
    AgentKilled,
    /// The agent gets SIGSTOP until the job has noticed.
    AgentStopped,
    /// The coordinator gets SIGKILL.
    CoordinatorKilled,
    /// The coordinator gets SIGSTOP until another one has taken over.
    CoordinatorStopped,
    /// All processes of the host get SIGSTOP until the job goes on without them.
    HostFrozen,
    /// The host is gone without a word, and later a new one has its address.
    HostDestroyed,
    /// The host's link is down until the job has noticed.
    HostCut,
    /// Nothing from this host reaches the next one, until the job has noticed.
    OneWay,
    /// The host sends slowly for some steps.
    LinkSlow,
    /// Packets of the host are lost for some steps.
    LinkLossy,
    /// The host's disk is full while one of its ranks is killed.
    DiskFull,
    /// The host's disk can only be read when its agent starts again.
    DiskReadOnly,
    /// Every second request to the store fails for a while.
    StoreFails,
    /// The store does not answer for a while.
    StoreStalls,
    /// All processes are killed, and the newest checkpoint is damaged.
    StoreDamages,
    /// The agent gets SIGTERM, as when its machine is taken away.
    Notice,
    /// All agents get SIGTERM, one right after the other, beginning with this host.
    AllNoticed,
    /// The clock of the host jumps by minutes.
    ClockJumps,
    /// All processes are killed.
    AllKilled,
    /// The job is drained, and continues with other numbers of ranks.
    WorldChanged,
}

/// All kinds with their names.
pub(crate) const KINDS: [(&str, Kind); 22] = [
    ("rank-killed", Kind::RankKilled),
    ("rank-stopped", Kind::RankStopped),
    ("agent-killed", Kind::AgentKilled),
    ("agent-stopped", Kind::AgentStopped),
    ("coordinator-killed", Kind::CoordinatorKilled),
    ("coordinator-stopped", Kind::CoordinatorStopped),
    ("host-frozen", Kind::HostFrozen),
    ("host-destroyed", Kind::HostDestroyed),
    ("host-cut", Kind::HostCut),
    ("one-way", Kind::OneWay),
    ("link-slow", Kind::LinkSlow),
    ("link-lossy", Kind::LinkLossy),
    ("disk-full", Kind::DiskFull),
    ("disk-read-only", Kind::DiskReadOnly),
    ("store-fails", Kind::StoreFails),
    ("store-stalls", Kind::StoreStalls),
    ("store-damages", Kind::StoreDamages),
    ("notice", Kind::Notice),
    ("all-noticed", Kind::AllNoticed),
    ("clock-jumps", Kind::ClockJumps),
    ("all-killed", Kind::AllKilled),
    ("world-changed", Kind::WorldChanged),
];

/// A fault, written as `KIND:HOST@MILLISECONDS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) kind: Kind,
    /// From 1.
    pub(crate) host: usize,
    /// Time since all ranks train.
    pub(crate) after: Duration,
}

impl fmt::Display for Fault {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = KINDS.iter().find(|(_, kind)| *kind == self.kind).map_or("", |(name, _)| name);
        write!(formatter, "{name}:{}@{}", self.host, self.after.as_millis())
    }
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parse = || {
            let (name, rest) = text.split_once(':')?;
            let (host, after) = rest.split_once('@')?;
            let (_, kind) = *KINDS.iter().find(|(known, _)| *known == name)?;
            let host = host.parse().ok().filter(|host| (1..=HOSTS).contains(host))?;
            Some(Self { kind, host, after: Duration::from_millis(after.parse().ok()?) })
        };
        let names = KINDS.map(|(name, _)| name).join(", ");
        let expected = format!(
            "KIND:HOST@MILLISECONDS with a host from 1 to {HOSTS} and one of the kinds {names}"
        );
        parse().ok_or_else(|| format!("{text:?} is not {expected}"))
    }
}

/// Every kind once, in an order, at hosts and at moments that the seed decides.
pub(crate) fn history(seed: u64) -> Vec<Fault> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut kinds = KINDS;
    rng.shuffle(&mut kinds);
    let fault = |(_, kind)| Fault {
        kind,
        host: rng.usize(1..=HOSTS),
        after: Duration::from_millis(rng.u64(0..MAX_DELAY_MS)),
    };
    kinds.into_iter().map(fault).collect()
}

/// The text of a history.
pub(crate) fn to_text(history: &[Fault]) -> String {
    history.iter().map(Fault::to_string).collect::<Vec<_>>().join(" ")
}

/// The history of a text.
pub(crate) fn from_text(text: &str) -> Result<Vec<Fault>, String> {
    text.split_whitespace().map(str::parse).collect()
}

/// Leaves out one fault after the other for as long as the rest still fails.
pub(crate) fn reduce(mut history: Vec<Fault>, fails: impl Fn(&[Fault]) -> bool) -> Vec<Fault> {
    let mut at = 0;
    while at < history.len() {
        let mut shorter = history.clone();
        shorter.remove(at);
        if fails(&shorter) {
            history = shorter;
        } else {
            at += 1;
        }
    }
    history
}
