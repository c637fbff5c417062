//! Simulates hundreds of histories in which coordinators are lost, suspended and replaced, on virtual time.
//!
//! The agents' rules (`baton_job::standby`), the lease and the claims of generations are the real ones. Each coordinator is a
//! thread, and one thread runs at a time: a request to the store waits until its time has come. So a coordinator can be
//! suspended or killed between any two requests. One seed determines a history. After some time the faults stop, and then
//! one coordinator must serve all agents.
//!
//! ```text
//! BATON_SIM_SEED=17 cargo test -p baton-coordinator takeovers    only that history
//! ```
//!
//! The simulation was tested with planted bugs. It found: a claim without a look at the lease, or of a generation that
//! another one has opened; a coordinator that never learns that it was replaced; one that dismisses its agents when it was,
//! or when it comes back after it was.

#[path = "../../crates/checkpoint/tests/suite/kit/hook.rs"]
#[allow(dead_code, reason = "every test uses a part")]
mod hook;

use std::{
    collections::BTreeMap,
    ops::RangeInclusive,
    sync::{
        Arc,
        mpsc::{self, Receiver, Sender},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use baton_checkpoint::{Claimant, CoordinatorLease, Store};
use baton_job::{
    Generation,
    engine::Event,
    standby::{SeenLease, Standby, StandbyAction},
    time::Time,
};
use fastrand::Rng;
use hook::{Hook, Hooked, InjectedResult};
use object_store::{ObjectStore, memory::InMemory};
use parking_lot::Mutex;

use crate::{
    claim::claim,
    job::JobInput,
    journal_copy::kit::{JOB, claimant},
    lease::HeldLease,
};

const HISTORIES: u64 = 300;
/// How often things must happen in all histories, so that none is left out silently.
const EXPECTED: &[(usize, &str)] = &[
    (600, "takeovers"),
    (1_500, "generations"),
    (15, "claims refused"),
    (300, "replaced"),
    (40, "restarts"),
    (300, "killed"),
];

/// Address of the first coordinator, where agents look too if the newest one does not answer.
const FIRST: &str = "0";

/// Which coordinator.
type Number = usize;

/// What a coordinator is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CoordinatorOrder {
    /// Send the request that waits.
    Proceed,
    Renew,
    Open(Generation),
    Quit,
}

/// What a coordinator reports when it stops running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Report {
    /// It is about to send a request to the store.
    Requests,
    /// It waits for an order. A generation is one that it may open next.
    Idle {
        fence: Option<Generation>,
    },
    /// It has opened the generation, with the lease of this number.
    Opened(Generation, u64),
    /// The store could not be reached.
    Failed,
    Ended(End),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// Another one has taken over, and the agents follow that one.
    Replaced,
    /// It has dismissed its agents.
    Dismissed,
    /// It could not take the lease.
    NotStarted,
    Quit,
}

/// How a coordinator starts.
#[derive(Clone, Copy, Debug)]
enum Start {
    First,
    /// Again in its run folder.
    Again,
    /// By an agent, with the lease after this one.
    TakeOver {
        after: u64,
    },
}

/// A coordinator's side of its thread.
struct CoordinatorLink {
    reports: Sender<Report>,
    orders: Mutex<Receiver<CoordinatorOrder>>,
}

impl CoordinatorLink {
    /// Reports, and waits for the next order; `None` once it is killed.
    fn report(&self, report: Report) -> Option<CoordinatorOrder> {
        self.reports.send(report).ok()?;
        self.orders.lock().recv().ok()
    }
}

/// What the thread of a coordinator does.
fn serve(
    link: &CoordinatorLink,
    [store, of_lease]: [Store; 2],
    lease: CoordinatorLease,
    start: Start,
) -> Option<()> {
    let end = |end: End| link.report(Report::Ended(end)).map(drop);
    let claimant = Claimant { owner: lease.owner.clone(), ..claimant() };
    let mut fence = None;
    let held = match start {
        Start::First => HeldLease::free(of_lease, lease, Some(0)),
        Start::Again => HeldLease::free(of_lease, lease, None),
        Start::TakeOver { after } => {
            fence = store.fence().ok();
            let taken = CoordinatorLease { number: after + 1, renews: true, ..lease };
            if fence.is_none() || store.take_lease(&taken).is_err() {
                return end(End::NotStarted);
            }
            HeldLease::taken(of_lease, taken)
        }
    };
    held.start_renewals();
    let mut report = Report::Idle { fence };
    loop {
        report = match link.report(report)? {
            CoordinatorOrder::Renew => match held.renew_once() {
                Err(baton_checkpoint::Error::Replaced { .. }) => return end(End::Replaced),
                _ => Report::Idle { fence: None },
            },
            CoordinatorOrder::Open(generation) => {
                match claim(&store, generation, &claimant, Some(&held)) {
                    JobInput::Event(event) => match *event {
                        Event::Fenced => {
                            Report::Opened(generation, held.number().unwrap_or_default())
                        }
                        Event::TakenOver { .. } => return end(End::Dismissed),
                        _ => Report::Failed,
                    },
                    _ => return end(End::Replaced),
                }
            }
            CoordinatorOrder::Quit => {
                held.end(false);
                return end(End::Quit);
            }
            CoordinatorOrder::Proceed => return None,
        }
    }
}

/// A coordinator, as the history sees it.
struct SimCoordinator {
    /// Its run folder, which is also its address.
    folder: String,
    /// The agent that has started it.
    agent: Option<usize>,
    /// `None` once the process has ended.
    ends: Option<(Sender<CoordinatorOrder>, Receiver<Report>)>,
    thread: Option<JoinHandle<()>>,
    is_busy: bool,
    /// Whether its last order was to open a generation.
    opens: bool,
    suspended_until: Time,
}

struct SimAgent {
    standby: Standby,
    /// Where it looks for the coordinator.
    address: String,
    answered_at: Time,
    /// Until when it does not reach any coordinator, or the store.
    cut_off_until: Time,
    storeless_until: Time,
}

#[derive(Debug)]
enum Happens {
    Proceeds(Number),
    Renews(Number),
    Opens(Number),
    Restarts(String),
    Looks(usize),
    Sees(usize, Option<SeenLease>),
    Fault,
    Calm,
}

struct TakeoverHistory {
    now: Time,
    rng: Rng,
    queue: BTreeMap<(Time, u64), Happens>,
    scheduled: u64,
    objects: Arc<dyn ObjectStore>,
    /// The same store, for whatever is no coordinator.
    store: Store,
    coordinators: Vec<SimCoordinator>,
    agents: Vec<SimAgent>,
    /// The newest generation that each run folder has tried to open.
    tried: BTreeMap<String, Generation>,
    /// The opened generations, with who opened them and the number of their lease.
    opened: Vec<(Generation, Number, u64)>,
    is_calm: bool,
    has_faults: bool,
    tally: BTreeMap<&'static str, usize>,
    log: Vec<String>,
}

impl TakeoverHistory {
    fn new(seed: u64, has_faults: bool) -> Self {
        let mut rng = Rng::with_seed(seed);
        let objects: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let agent = |_| {
            let mut standby = Standby::new(true, Time(0));
            standby.set_job(JOB);
            SimAgent {
                standby,
                address: FIRST.to_owned(),
                answered_at: Time(0),
                cut_off_until: Time(0),
                storeless_until: Time(0),
            }
        };
        let agents: Vec<SimAgent> = (0..rng.usize(2..=4)).map(agent).collect();
        let mut history = Self {
            now: Time(0),
            store: Store::from_object_store("history", objects.clone()).unwrap(),
            rng,
            queue: BTreeMap::new(),
            scheduled: 0,
            objects,
            coordinators: Vec::new(),
            agents,
            tried: BTreeMap::new(),
            opened: Vec::new(),
            is_calm: false,
            has_faults,
            tally: BTreeMap::new(),
            log: Vec::new(),
        };
        history.start(FIRST.to_owned(), None, Start::First);
        for agent in 0..history.agents.len() {
            history.agents[agent].standby.set_place(Some(agent as u32), 1);
            history.schedule(0..=100, Happens::Looks(agent));
        }
        history.schedule(5_000..=20_000, Happens::Fault);
        history.schedule(60_000..=90_000, Happens::Calm);
        history
    }

    fn schedule(&mut self, wait_ms: RangeInclusive<u64>, happens: Happens) {
        self.scheduled += 1;
        let at = self.now.after(Duration::from_millis(self.rng.u64(wait_ms)));
        self.queue.insert((at, self.scheduled), happens);
    }

    fn count(&mut self, what: &'static str) {
        *self.tally.entry(what).or_default() += 1;
    }

    fn log(&mut self, line: String) {
        self.log.push(format!("{:?} {line}", self.now));
    }

    // ---- coordinators ----

    fn start(&mut self, folder: String, agent: Option<usize>, start: Start) {
        let number = self.coordinators.len();
        self.log(format!("coordinator {number} starts in {folder}: {start:?}"));
        let (orders, received) = mpsc::channel();
        let (reports, reported) = mpsc::channel();
        let link = Arc::new(CoordinatorLink { reports, orders: Mutex::new(received) });
        let at_requests = link.clone();
        let hook = Hook::new(move |_| match at_requests.report(Report::Requests) {
            Some(_) => InjectedResult::Succeeds,
            None => InjectedResult::FailsBefore,
        });
        let objects = Arc::new(Hooked::new(self.objects.clone(), hook));
        let stores =
            [(); 2].map(|()| Store::from_object_store("history", objects.clone()).unwrap());
        let lease = CoordinatorLease {
            owner: number.to_string(),
            job: JOB,
            folder: folder.clone(),
            host: folder.clone(),
            address: Some(folder.clone()),
            ..CoordinatorLease::default()
        };
        let thread = thread::spawn(move || {
            let _ = serve(&link, stores, lease, start);
        });
        self.coordinators.push(SimCoordinator {
            folder,
            agent,
            ends: Some((orders, reported)),
            thread: Some(thread),
            is_busy: true,
            opens: false,
            suspended_until: Time(0),
        });
        self.listen(number);
        self.schedule(1_000..=1_000, Happens::Renews(number));
        self.schedule(500..=3_000, Happens::Opens(number));
    }

    fn order(&mut self, number: Number, order: CoordinatorOrder) {
        let Some((orders, _)) = &self.coordinators[number].ends else { return };
        orders.send(order).unwrap();
        self.coordinators[number].is_busy = true;
        if order != CoordinatorOrder::Proceed {
            self.coordinators[number].opens = matches!(order, CoordinatorOrder::Open(_));
        }
        self.listen(number);
    }

    /// Waits until a coordinator that runs, as the only one, stops running.
    fn listen(&mut self, number: Number) {
        let Some((_, reports)) = &self.coordinators[number].ends else { return };
        let report = reports.recv().unwrap();
        if !matches!(report, Report::Requests | Report::Idle { fence: None }) {
            self.log(format!("coordinator {number}: {report:?}"));
        }
        match report {
            Report::Requests => {
                // A store may take long to answer.
                let slow = !self.is_calm && self.has_faults && self.rng.u8(0..200) == 0;
                let wait = if slow { 0..=6_000 } else { 1..=20 };
                return self.schedule(wait, Happens::Proceeds(number));
            }
            Report::Idle { fence } => {
                if let Some(fence) = fence {
                    self.tried.insert(self.coordinators[number].folder.clone(), fence);
                }
            }
            Report::Opened(generation, lease) => self.opened(number, generation, lease),
            Report::Failed => {}
            Report::Ended(end) => self.ended(number, end),
        }
        self.coordinators[number].is_busy = false;
    }

    fn opened(&mut self, number: Number, generation: Generation, lease: u64) {
        self.count("generations");
        // One that was suspended after its last look learns of the newer one later, and its ranks can commit nothing.
        let is_newest = generation == self.store.fence().unwrap();
        for (other, by, theirs) in &self.opened {
            assert!(*other != generation, "{generation} is opened by {by} and by {number}");
            assert!(
                *theirs <= lease || !is_newest,
                "{number} opens {generation} with lease {lease} after {by} with {theirs}"
            );
        }
        if !is_newest {
            self.count("opened too late");
        }
        self.opened.push((generation, number, lease));
    }

    fn ended(&mut self, number: Number, end: End) {
        self.count(match end {
            End::Replaced => "replaced",
            End::NotStarted => "not started",
            End::Quit => "quit",
            End::Dismissed => panic!("{number} dismisses agents of a job that goes on"),
        });
        if self.coordinators[number].opens {
            self.count("claims refused");
        }
        self.gone(number);
    }

    /// The process has ended. What its thread still sends fails.
    fn gone(&mut self, number: Number) {
        self.coordinators[number].ends = None;
        if let Some(agent) = self.coordinators[number].agent.take() {
            self.agents[agent].standby.ended(self.now);
        }
    }

    fn is_awake(&self, number: Number) -> bool {
        let coordinator = &self.coordinators[number];
        coordinator.ends.is_some() && coordinator.suspended_until <= self.now
    }

    fn running(&self) -> Vec<Number> {
        let all = 0..self.coordinators.len();
        all.filter(|number| self.coordinators[*number].ends.is_some()).collect()
    }

    // ---- agents ----

    /// The coordinator that answers an agent.
    fn answers(&self, agent: usize) -> Option<Number> {
        let agent = &self.agents[agent];
        let at = |address: &str| {
            let is_there = |number: &Number| {
                self.is_awake(*number) && self.coordinators[*number].folder == address
            };
            self.running().into_iter().find(is_there)
        };
        (agent.cut_off_until <= self.now)
            .then(|| at(&agent.address).or_else(|| at(FIRST)))
            .flatten()
    }

    fn looks(&mut self, agent: usize) {
        self.schedule(100..=100, Happens::Looks(agent));
        let now = self.now;
        let answers = self.answers(agent).is_some();
        let this = &mut self.agents[agent];
        if answers {
            if now.since(this.answered_at) >= Duration::from_secs(1) {
                this.answered_at = now;
                this.standby.answered(now);
            }
        } else if this.standby.tick(now) == Some(StandbyAction::Look) {
            let is_reached = this.storeless_until <= now;
            let lease = self.store.lease().unwrap().filter(|_| is_reached);
            let seen = lease.map(SeenLease::from);
            let slow = !self.is_calm && self.has_faults && self.rng.u8(0..20) == 0;
            self.schedule(if slow { 0..=5_000 } else { 1..=50 }, Happens::Sees(agent, seen));
        }
    }

    fn sees(&mut self, agent: usize, lease: Option<SeenLease>) {
        let action = self.agents[agent].standby.seen(self.now, lease);
        assert_ne!(action, Some(StandbyAction::Leave), "the job goes on");
        if let Some(Some(address)) = self.agents[agent].standby.address() {
            self.agents[agent].address = address.to_owned();
        }
        if let Some(StandbyAction::TakeOver { after }) = action {
            assert!(self.has_faults, "agent {agent} takes over from a coordinator that serves");
            self.count("takeovers");
            let number = self.coordinators.len();
            self.start(
                format!("{agent}-{}-{number}", after + 1),
                Some(agent),
                Start::TakeOver { after },
            );
        }
    }

    // ---- the history ----

    fn fault(&mut self) {
        if self.is_calm {
            return;
        }
        self.schedule(1_000..=15_000, Happens::Fault);
        let agent = self.rng.usize(0..self.agents.len());
        let kind = if self.has_faults { self.rng.u8(0..8) } else { 6 };
        let until = self.now.after(Duration::from_millis(self.rng.u64(500..=20_000)));
        self.log(format!("FAULT {kind}, agent {agent}, until {until:?}"));
        let running = self.running();
        let Some(number) = self.rng.choice(running) else { return };
        match kind {
            0..=2 => self.coordinators[number].suspended_until = until,
            3 => {
                self.count("killed");
                self.gone(number);
            }
            4 => {
                self.count("killed");
                let folder = self.coordinators[number].folder.clone();
                // The one that an agent has started is not started again.
                if self.coordinators[number].agent.is_none() {
                    self.schedule(200..=12_000, Happens::Restarts(folder));
                }
                self.gone(number);
            }
            5 if !self.coordinators[number].is_busy && self.is_awake(number) => {
                self.order(number, CoordinatorOrder::Quit);
            }
            6 => self.agents[agent].cut_off_until = until,
            _ => self.agents[agent].storeless_until = until,
        }
    }

    fn happens(&mut self, happens: Happens) {
        match happens {
            Happens::Proceeds(number) => {
                let SimCoordinator { suspended_until, .. } = self.coordinators[number];
                if suspended_until > self.now {
                    let wait = suspended_until.since(self.now).as_millis() as u64;
                    self.schedule(wait..=wait, Happens::Proceeds(number));
                } else {
                    self.order(number, CoordinatorOrder::Proceed);
                }
            }
            Happens::Renews(number) if self.coordinators[number].ends.is_some() => {
                self.schedule(1_000..=1_000, Happens::Renews(number));
                if self.is_awake(number) && !self.coordinators[number].is_busy {
                    self.order(number, CoordinatorOrder::Renew);
                }
            }
            Happens::Opens(number) if self.coordinators[number].ends.is_some() => {
                self.schedule(500..=8_000, Happens::Opens(number));
                let is_attached =
                    (0..self.agents.len()).any(|agent| self.answers(agent) == Some(number));
                if is_attached && self.is_awake(number) && !self.coordinators[number].is_busy {
                    let tried = self.tried.entry(self.coordinators[number].folder.clone());
                    let generation = tried.or_default();
                    *generation = generation.next();
                    let generation = *generation;
                    self.order(number, CoordinatorOrder::Open(generation));
                }
            }
            Happens::Renews(_) | Happens::Opens(_) => {}
            Happens::Restarts(folder) => {
                self.count("restarts");
                self.start(folder, None, Start::Again);
            }
            Happens::Looks(agent) => self.looks(agent),
            Happens::Sees(agent, lease) => self.sees(agent, lease),
            Happens::Fault => self.fault(),
            Happens::Calm => {
                self.log("CALM".to_owned());
                self.is_calm = true;
                for agent in &mut self.agents {
                    (agent.cut_off_until, agent.storeless_until) = (Time(0), Time(0));
                }
                for coordinator in &mut self.coordinators {
                    coordinator.suspended_until = Time(0);
                }
            }
        }
    }

    /// Whether one coordinator alone has the newest lease, and all agents.
    fn is_settled(&self) -> bool {
        let lease = self.store.lease().unwrap().unwrap_or_default();
        match self.running()[..] {
            [only] => {
                self.coordinators[only].folder == lease.folder
                    && (0..self.agents.len()).all(|agent| self.answers(agent) == Some(only))
            }
            _ => false,
        }
    }

    fn run(mut self) -> BTreeMap<&'static str, usize> {
        let mut settled_since = None;
        while let Some(((at, _), happens)) = self.queue.pop_first() {
            self.now = at;
            self.happens(happens);
            if !self.is_calm || !self.is_settled() {
                settled_since = None;
            } else if self.now.since(*settled_since.get_or_insert(self.now)) > SETTLED_TIME {
                break;
            }
            assert!(self.now < Time(0).after(LONGEST_TIME), "no coordinator serves all agents");
        }
        let last = self.opened.last().map(|(_, number, _)| *number);
        assert_eq!(last, self.running().first().copied(), "it opens generations");
        std::mem::take(&mut self.tally)
    }
}

/// How long it must stay so that one coordinator serves all agents.
const SETTLED_TIME: Duration = Duration::from_secs(30);
/// Longest history: agents that could not start a coordinator wait longer and longer.
const LONGEST_TIME: Duration = Duration::from_secs(3_600);

impl Drop for TakeoverHistory {
    fn drop(&mut self) {
        if thread::panicking() {
            let start = self.log.len().saturating_sub(80);
            eprintln!("{}", self.log[start..].join("\n"));
        }
        // Threads that still run fail at their next request.
        for coordinator in &mut self.coordinators {
            coordinator.ends = None;
        }
        for thread in self.coordinators.iter_mut().filter_map(|one| one.thread.take()) {
            let _ = thread.join();
        }
    }
}

#[test]
fn no_two_coordinators_open_a_generation_and_one_serves_all_agents_in_the_end() {
    let seed = std::env::var("BATON_SIM_SEED").ok().map(|seed| seed.parse().unwrap());
    let seeds = seed.map_or(0..HISTORIES, |seed: u64| seed..seed + 1);
    let mut all = BTreeMap::new();
    for seed in seeds {
        println!("BATON_SIM_SEED={seed}");
        for (what, count) in TakeoverHistory::new(seed, true).run() {
            *all.entry(what).or_insert(0) += count;
        }
    }
    println!("{all:?}");
    if seed.is_none() {
        for (least, what) in EXPECTED {
            assert!(all.get(what) >= Some(least), "{what}: {all:?}");
        }
    }
}

#[test]
fn agents_that_are_only_cut_off_take_over_nothing() {
    for seed in 0..HISTORIES / 10 {
        println!("seed {seed}");
        TakeoverHistory::new(seed, false).run();
    }
}
