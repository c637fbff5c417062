//! Load test: thousands of simulated agents and ranks against a real coordinator (`make bench-control`).
//!
//! Every agent has its own connection and sends the reports of a real one: hello, then that its ranks are ready, have
//! met and train, then one heartbeat per second for each rank. It also sends one agent heartbeat per second for each
//! worker that it offers, more than a real agent, so that every worker has a reply to wait for. A job has at most 4,096
//! ranks; the other workers are spares. Only the training is simulated. Prints one JSON object.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    missing_docs
)]

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use baton_build_info::REVISION;
use baton_job::{
    Generation, NodeId, Rank,
    exit::{Class, Failure},
    message::{
        Activity, AgentHeartbeat, AgentReport, Directive, Hello, RankHeartbeat, RankReport,
        StateSource,
    },
};
use baton_proto::v1::{
    self, Frame, GetStatusRequest, job_service_client::JobServiceClient,
    node_service_client::NodeServiceClient,
};
use baton_recipe::{Step, progress::Progress};
use clap::{Parser, Subcommand};
use futures::future::join_all;
use serde_json::json;
use tokio::{
    sync::{Barrier, mpsc, watch},
    time::{MissedTickBehavior, interval_at, sleep, timeout},
};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{
    client::Grpc,
    codegen::http::uri::PathAndQuery,
    transport::{Channel, Endpoint},
};
use tonic_prost::ProstCodec;

#[derive(Parser)]
struct Args {
    /// URL of the coordinator, or of the lighthouse.
    #[arg(long)]
    url: String,
    /// Number of ranks.
    #[arg(long)]
    workers: u32,
    /// Number of ranks of each agent.
    #[arg(long, default_value_t = 8)]
    per_node: u32,
    #[command(subcommand)]
    test: LoadTest,
}

#[derive(Subcommand)]
enum LoadTest {
    /// All agents attach at once and get ranks; then one rank dies, and all get new ranks.
    Rendezvous,
    /// All agents send heartbeats, for this many seconds.
    Heartbeats {
        #[arg(long, default_value_t = 30)]
        seconds: u64,
    },
    /// The same with torchft's lighthouse: one heartbeat per second of each worker.
    Lighthouse {
        #[arg(long, default_value_t = 30)]
        seconds: u64,
    },
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let args = Args::parse();
    let measured = async {
        match args.test {
            LoadTest::Rendezvous => rendezvous(&args).await,
            LoadTest::Heartbeats { seconds } => {
                heartbeats(&args, Duration::from_secs(seconds)).await
            }
            LoadTest::Lighthouse { seconds } => {
                lighthouse(&args, Duration::from_secs(seconds)).await
            }
        }
    };
    println!("{}", timeout(TEST_TIMEOUT, measured).await.expect("the test ends in time"));
}

/// Most ranks of a job: the limit of `train.virtual_ranks`.
const MAX_RANKS: u32 = 4_096;
/// Time limit of the whole test.
const TEST_TIMEOUT: Duration = Duration::from_secs(180);

/// State shared by all agents.
struct Swarm {
    start: Instant,
    agents: usize,
    /// Number of agents that got their ranks in the current generation.
    launched: AtomicUsize,
    /// Number of agents that were directed to begin the rendezvous.
    begun: AtomicUsize,
    training: watch::Sender<usize>,
    /// The newest generation in which all agents have their ranks.
    generation: watch::Sender<Generation>,
    last_launched: Mutex<Instant>,
    last_begun: Mutex<Instant>,
    sends_heartbeats: AtomicBool,
    /// Time until each heartbeat was answered, seconds.
    replies: Mutex<Vec<f64>>,
}

/// One simulated agent.
struct Agent {
    swarm: Arc<Swarm>,
    name: String,
    slots: u32,
    out: mpsc::UnboundedSender<Frame>,
    ranks: Vec<Rank>,
    generation: Generation,
    /// The number of the last heartbeat, and when it was sent.
    heartbeat: (u64, Instant),
}

impl Agent {
    fn send(&self, report: AgentReport) {
        let _ = self.out.send(Frame::report(&report, REVISION).unwrap());
    }

    fn send_rank_report(&self, rank: Rank, report: RankReport) {
        self.send(AgentReport::Rank { generation: self.generation, rank, report });
    }

    fn handle(&mut self, directive: Directive) {
        match directive {
            Directive::Launch(launch) => {
                self.generation = launch.generation;
                self.ranks = launch.ranks.iter().map(|(rank, _)| *rank).collect();
                *self.swarm.last_launched.lock().unwrap() = Instant::now();
                if self.swarm.launched.fetch_add(1, SeqCst) + 1 == self.swarm.agents {
                    self.swarm.generation.send_replace(launch.generation);
                }
                for rank in self.ranks.clone() {
                    let address = format!("10.{}.{}.7:40000", rank.0 / 256, rank.0 % 256);
                    let step = (launch.generation.0 > 1).then_some(Step(1));
                    self.send_rank_report(rank, RankReport::Ready { address, step });
                }
            }
            Directive::Begin { generation, .. }
                if generation == self.generation && !self.ranks.is_empty() =>
            {
                self.swarm.begun.fetch_add(1, SeqCst);
                *self.swarm.last_begun.lock().unwrap() = Instant::now();
                for rank in self.ranks.clone() {
                    self.send_rank_report(rank, RankReport::Met);
                    let progress = Progress { step: Step(1), ..Progress::default() };
                    self.send_rank_report(
                        rank,
                        RankReport::Started { source: StateSource::fresh(), progress },
                    );
                }
                self.swarm.training.send_modify(|count| *count += 1);
            }
            Directive::HeartbeatAck { number } if number == self.heartbeat.0 => {
                let took = self.heartbeat.1.elapsed().as_secs_f64();
                self.swarm.replies.lock().unwrap().push(took);
            }
            _ => {}
        }
    }

    /// Sends an agent heartbeat, and the heartbeat of one of its ranks.
    fn send_heartbeats(&mut self) {
        self.heartbeat = (self.heartbeat.0 + 1, Instant::now());
        self.send(AgentReport::Heartbeat(AgentHeartbeat {
            number: self.heartbeat.0,
            ..AgentHeartbeat::default()
        }));
        if let Some(rank) = self.ranks.get((self.heartbeat.0 % u64::from(self.slots)) as usize) {
            let activity = Activity::Computing;
            let heartbeat = RankHeartbeat {
                step: Step(1),
                own_step_seconds: 0.1,
                seconds: 0.01,
                activity,
                evaluation: None,
            };
            self.send_rank_report(*rank, RankReport::Heartbeat(heartbeat));
        }
    }

    /// Runs until the connection ends. Agents send heartbeats at different moments of a second.
    async fn run(mut self, channel: Channel, index: usize, messages: Messages) {
        let mut client = NodeServiceClient::new(channel);
        let node = NodeId(self.name.clone());
        self.send(AgentReport::Hello(Hello::new(node, self.slots, None)));
        let mut down = client.attach(messages).await.expect("attached").into_inner();
        let _welcome = down.message().await.expect("a welcome");
        let offset = Duration::from_secs_f64(index as f64 / self.swarm.agents as f64);
        let first = tokio::time::Instant::now() + offset;
        let mut second = interval_at(first, Duration::from_secs(1) / self.slots);
        second.set_missed_tick_behavior(MissedTickBehavior::Skip);
        loop {
            tokio::select! {
                message = down.message() => match message {
                    Ok(Some(frame)) => self.handle(frame.read().unwrap()),
                    _ => return,
                },
                _ = second.tick() => if self.swarm.sends_heartbeats.load(SeqCst) { self.send_heartbeats() },
            }
        }
    }
}

type Messages = UnboundedReceiverStream<Frame>;

async fn connect(url: &str) -> Channel {
    // The same settings as in `baton` and its agents.
    let endpoint = Endpoint::from_shared(url.to_owned())
        .unwrap()
        .tcp_nodelay(true)
        .initial_stream_window_size(4 << 20)
        .initial_connection_window_size(4 << 20);
    loop {
        match endpoint.connect().await {
            Ok(channel) => return channel,
            // Retry: the queue of a listener is short.
            Err(_) => sleep(Duration::from_millis(20)).await,
        }
    }
}

/// Opens `count` connections, at most 256 at a time.
async fn connections(url: &str, count: usize) -> Vec<Channel> {
    let mut channels = Vec::with_capacity(count);
    while channels.len() < count {
        let batch = (count - channels.len()).min(256);
        channels.extend(join_all((0..batch).map(|_| connect(url))).await);
    }
    channels
}

/// Connects all agents, then attaches them at the same moment. They stay attached while the returned senders exist.
async fn swarm(args: &Args) -> (Arc<Swarm>, Vec<mpsc::UnboundedSender<Frame>>) {
    let agents = args.workers.div_ceil(args.per_node) as usize;
    let channels = connections(&args.url, agents).await;
    let swarm = Arc::new(Swarm {
        start: Instant::now(),
        agents,
        launched: AtomicUsize::new(0),
        begun: AtomicUsize::new(0),
        training: watch::Sender::new(0),
        generation: watch::Sender::new(Generation(0)),
        last_launched: Mutex::new(Instant::now()),
        last_begun: Mutex::new(Instant::now()),
        sends_heartbeats: AtomicBool::new(false),
        replies: Mutex::default(),
    });
    let barrier = Arc::new(Barrier::new(agents));
    let mut senders = Vec::new();
    for (index, channel) in channels.into_iter().enumerate() {
        let (out, messages) = mpsc::unbounded_channel();
        senders.push(out.clone());
        let slots = args.per_node.min(args.workers - index as u32 * args.per_node);
        let agent = Agent {
            swarm: swarm.clone(),
            name: format!("node-{index:05}"),
            slots,
            out,
            ranks: Vec::new(),
            generation: Generation(0),
            heartbeat: (0, Instant::now()),
        };
        let barrier = barrier.clone();
        tokio::spawn(async move {
            barrier.wait().await;
            agent.run(channel, index, UnboundedReceiverStream::new(messages)).await;
        });
    }
    (swarm, senders)
}

async fn all_train(swarm: &Swarm, args: &Args) {
    let agents = args.workers.min(MAX_RANKS).div_ceil(args.per_node) as usize;
    swarm.training.subscribe().wait_for(|count| *count >= agents).await.unwrap();
}

async fn rendezvous(args: &Args) -> serde_json::Value {
    let (swarm, senders) = swarm(args).await;
    let agents = swarm.agents;
    swarm.generation.subscribe().wait_for(|generation| generation.0 > 0).await.unwrap();
    let assigned = swarm.last_launched.lock().unwrap().duration_since(swarm.start);
    all_train(&swarm, args).await;
    let met = swarm.last_begun.lock().unwrap().duration_since(swarm.start);

    // The coordinator must have received that all ranks train before one dies.
    let mut client = JobServiceClient::new(connect(&args.url).await);
    loop {
        let status = client.get_status(GetStatusRequest {}).await.unwrap().into_inner();
        if status.phase() == v1::get_status_response::Phase::Training {
            break;
        }
        sleep(Duration::from_millis(50)).await;
    }
    swarm.launched.store(0, SeqCst);
    let first = *swarm.generation.borrow();
    let report = RankReport::Exited(Failure { class: Class::Crash, message: "killed".to_owned() });
    let report = AgentReport::Rank { generation: first, rank: Rank(args.workers - 1), report };
    let frame = Frame::report(&report, REVISION).unwrap();
    let died = Instant::now();
    senders[agents - 1].send(frame).unwrap();
    swarm.generation.subscribe().wait_for(|generation| *generation > first).await.unwrap();
    let pushed = swarm.last_launched.lock().unwrap().duration_since(died);
    json!({
        "agents": agents,
        "assigned_seconds": assigned.as_secs_f64(),
        "met_seconds": met.as_secs_f64(),
        "push_ms": pushed.as_secs_f64() * 1_000.0,
    })
}

async fn heartbeats(args: &Args, time: Duration) -> serde_json::Value {
    let (swarm, _senders) = swarm(args).await;
    all_train(&swarm, args).await;
    swarm.sends_heartbeats.store(true, SeqCst);
    // Leave out the first seconds, until all agents send at a steady rate.
    sleep(Duration::from_secs(5)).await;
    swarm.replies.lock().unwrap().clear();
    println!("{}", json!({ "measuring": true }));
    let (url, ranks) = (args.url.clone(), args.workers.min(MAX_RANKS));
    // A user's machine does not share its CPU with ten thousand workers, so status calls have a thread of their own.
    let statuses = tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.unwrap().block_on(statuses(&url, ranks as usize, time))
    });
    // Lowers the priority of this thread only, which runs the agents.
    rustix::process::nice(10).unwrap();
    let (statuses, bytes) = statuses.await.unwrap();
    let replies = std::mem::take(&mut *swarm.replies.lock().unwrap());
    json!({
        "agents": swarm.agents,
        "replies_per_second": replies.len() as f64 / time.as_secs_f64(),
        "reply_ms": quantiles(replies),
        "status_ms": quantiles(statuses),
        "status_bytes": bytes,
    })
}

/// Requests the status ten times a second; returns the time of each call, seconds, and the bytes of the last status.
async fn statuses(url: &str, ranks: usize, time: Duration) -> (Vec<f64>, usize) {
    let mut client = JobServiceClient::new(connect(url).await).max_decoding_message_size(64 << 20);
    let (mut took, mut bytes) = (Vec::new(), 0);
    let end = Instant::now() + time;
    while Instant::now() < end {
        let asked = Instant::now();
        let status = client.get_status(GetStatusRequest {}).await.unwrap().into_inner();
        took.push(asked.elapsed().as_secs_f64());
        bytes = prost::Message::encoded_len(&status);
        assert_eq!(status.ranks.len(), ranks);
        sleep(Duration::from_millis(100)).await;
    }
    (took, bytes)
}

#[derive(Clone, PartialEq, prost::Message)]
struct Heartbeat {
    #[prost(string, tag = "1")]
    replica_id: String,
}

async fn lighthouse(args: &Args, time: Duration) -> serde_json::Value {
    let channels = connections(&args.url, args.workers as usize).await;
    let replies = Arc::new(Mutex::new(Vec::new()));
    let begin = tokio::time::Instant::now() + Duration::from_secs(1);
    let (measure_from, end) =
        (begin + Duration::from_secs(5), begin + Duration::from_secs(5) + time);
    let tasks = channels.into_iter().enumerate().map(|(index, channel)| {
        let replies = replies.clone();
        let offset = Duration::from_secs_f64(index as f64 / f64::from(args.workers));
        tokio::spawn(async move {
            let mut client = Grpc::new(channel);
            let mut second = interval_at(begin + offset, Duration::from_secs(1));
            second.set_missed_tick_behavior(MissedTickBehavior::Skip);
            let replica_id = format!("replica-{index:05}");
            while tokio::time::Instant::now() < end {
                second.tick().await;
                let sent = Instant::now();
                client.ready().await.unwrap();
                let path = PathAndQuery::from_static("/torchft.LighthouseService/Heartbeat");
                let heartbeat = tonic::Request::new(Heartbeat { replica_id: replica_id.clone() });
                client.unary::<_, (), _>(heartbeat, path, ProstCodec::default()).await.unwrap();
                if tokio::time::Instant::now() > measure_from {
                    replies.lock().unwrap().push(sent.elapsed().as_secs_f64());
                }
            }
        })
    });
    let tasks: Vec<_> = tasks.collect();
    tokio::time::sleep_until(measure_from).await;
    println!("{}", json!({ "measuring": true }));
    join_all(tasks).await;
    let replies = std::mem::take(&mut *replies.lock().unwrap());
    json!({
        "replies_per_second": replies.len() as f64 / time.as_secs_f64(),
        "reply_ms": quantiles(replies),
    })
}

/// Quantiles in milliseconds.
fn quantiles(mut seconds: Vec<f64>) -> serde_json::Value {
    seconds.sort_by(f64::total_cmp);
    let at = |share: f64| {
        let index = (seconds.len() as f64 * share) as usize;
        seconds.get(index.min(seconds.len().saturating_sub(1))).map(|value| value * 1_000.0)
    };
    json!({ "p50": at(0.5), "p99": at(0.99), "max": at(1.0), "count": seconds.len() })
}
