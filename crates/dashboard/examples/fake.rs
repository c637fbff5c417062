//! Serves the dashboard for a simulated job: it trains, loses a rank after eight seconds, recovers and continues. For
//! viewing the page, and for the tests in `browser/`.
//!
//! | variable | meaning |
//! |---|---|
//! | `BATON_FAKE_PORT` | port on 127.0.0.1, which is printed; default: a free port |
//! | `BATON_FAKE_SINCE` | when the job began, Unix milliseconds; a server restarted with the same value continues the same job |
//! | `BATON_FAKE_RANKS` | number of ranks; default: 8 |
//! | `BATON_FAKE_TOKENS` | if set, requests need the token `viewer` or `operator` |
//! | `BATON_FAKE_HOSTILE` | if set, all names, reasons and log lines contain markup |
//! | `BATON_FAKE_IDLE` | if set, there is no job |
#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::cast_precision_loss)]

use std::{
    env,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use axum::{
    extract::Request,
    http::header::AUTHORIZATION,
    middleware::{Next, from_fn},
    response::{IntoResponse, Response},
};
use baton_access::role::{AccessRole, RequiredAccess, required_access};
use baton_dashboard::{refusal, router, router_without_tokens};
use baton_proto::v1::{
    self, get_status_response::Phase, job_service_server::JobServiceServer, outcome,
    stream_metrics_response::Metrics, watch_events_response::Kind,
};
use tokio::net::TcpListener;
use tonic::{Status, service::Routes, transport::Server};

#[allow(dead_code)]
#[path = "../tests/support/mod.rs"]
mod support;

use support::{Fake, Job};

/// Interval of the job's simulated steps.
const TICK: Duration = Duration::from_millis(250);
const STEPS_PER_TICK: u64 = 5;
const STEPS_PER_EPOCH: u64 = 500;
const EPOCHS: u32 = 16;
/// When a rank fails, and when the phases of the recovery begin, in ticks since the start.
const FAILURE_TICK: u64 = 32;
const FORMING_TICK: u64 = 36;
const MEETING_TICK: u64 = 44;
const RESUME_TICK: u64 = 48;

const MARKUP: &str =
    "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>";

#[tokio::main]
async fn main() {
    let number = |name: &str| env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let is_set = |name: &str| env::var_os(name).is_some();
    let since = number("BATON_FAKE_SINCE").unwrap_or_else(unix_millis);
    let ranks = u32::try_from(number("BATON_FAKE_RANKS").unwrap_or(8)).unwrap();
    let port = u16::try_from(number("BATON_FAKE_PORT").unwrap_or(0)).unwrap();

    let fake = Arc::new(Fake::new());
    match is_set("BATON_FAKE_IDLE") {
        true => fake.job().status.set_phase(Phase::Idle),
        false => {
            let simulation =
                SimulatedJob::begin(&mut fake.job(), since, ranks, is_set("BATON_FAKE_HOSTILE"));
            tokio::spawn(simulation.run(Arc::clone(&fake)));
        }
    }

    let dashboard = match is_set("BATON_FAKE_TOKENS") {
        true => router(Arc::clone(&fake)).layer(from_fn(check)),
        false => router_without_tokens(Arc::clone(&fake)),
    };
    let mut routes = Routes::new(JobServiceServer::from_arc(fake));
    let merged = std::mem::take(routes.axum_router_mut()).merge(dashboard);
    *routes.axum_router_mut() = merged;
    let listener = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
    println!("http://{}", listener.local_addr().unwrap());
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    Server::builder()
        .accept_http1(true)
        .add_routes(routes)
        .serve_with_incoming(incoming)
        .await
        .unwrap();
}

fn unix_millis() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    u64::try_from(now.as_millis()).unwrap()
}

/// Checks the token like the coordinator.
async fn check(request: Request, next: Next) -> Response {
    let needed = required_access(request.uri().path());
    let shown = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let refused = match (needed, shown) {
        (RequiredAccess::Nothing, _) | (_, Some("Bearer operator")) => None,
        (RequiredAccess::Role(AccessRole::Viewer), Some("Bearer viewer")) => None,
        (_, Some("Bearer viewer")) => Some(Status::permission_denied(
            "this needs an operator's token; this one is a viewer's",
        )),
        _ => Some(Status::unauthenticated("this coordinator does not know that token")),
    };
    match refused {
        Some(status) => refusal(status).into_response(),
        None => next.run(request).await,
    }
}

/// The simulated job.
struct SimulatedJob {
    since: u64,
    tick: u64,
    step: u64,
    requests_handled: usize,
    paused: u64,
    drained_at: Option<u64>,
    is_hostile: bool,
}

impl SimulatedJob {
    fn begin(job: &mut Job, since: u64, ranks: u32, is_hostile: bool) -> Self {
        let simulation = Self {
            since,
            tick: 0,
            step: 0,
            requests_handled: 0,
            paused: 0,
            drained_at: None,
            is_hostile,
        };
        job.status = v1::GetStatusResponse {
            job_id: format!("00000000-0000-4000-8000-{since:012}"),
            name: simulation.text("resnet50_l4"),
            epochs: EPOCHS,
            generation: 1,
            checkpoint_location: simulation.text("s3://bucket/run"),
            coordinator_started_unix_seconds: unix_millis() / 1000,
            coordinator_version: "0.1.0".into(),
            ranks: (0..ranks).map(|rank| simulation.rank(rank)).collect(),
            nodes: (0..ranks.div_ceil(8)).map(|node| simulation.node(node)).collect(),
            ..Default::default()
        };
        simulation.enter(job, Phase::Training, "training");
        simulation.event(job, Kind::GenerationOpened, "generation 1: all ranks are offered");
        simulation.event(job, Kind::TrainingStarted, "from fresh weights");
        simulation.point(job, Metrics::BeganAt(0));
        simulation.line(job, None, "serving");
        simulation
    }

    async fn run(mut self, fake: Arc<Fake>) {
        let mut ticks = tokio::time::interval(TICK);
        loop {
            // A restarted server catches up at once.
            while self.now() < unix_millis() {
                self.tick += 1;
                self.advance(&mut fake.job());
            }
            ticks.tick().await;
        }
    }

    fn now(&self) -> u64 {
        self.since + self.tick * 250
    }

    fn advance(&mut self, job: &mut Job) {
        job.status.phase_seconds += TICK.as_secs_f64();
        for recovery in &mut job.status.recoveries {
            recovery.age_seconds += TICK.as_secs_f64();
        }
        let hours = (self.now() - self.since) as f64 / 3.6e6;
        job.status.spending = Some(v1::Spending {
            hours,
            most_hours: Some(24.0),
            dollars: Some(hours * 12.0),
            projected_dollars: Some(31.4),
            dollars_per_hour: Some(12.0),
            dollars_per_epoch: Some(1.96),
            interruption_hours: 0.02,
            interruption_dollars: Some(0.24),
            paused_hours: 0.0,
            used: Some(0.37),
        });
        self.handle_requests(job);
        match job.status.phase() {
            Phase::Ended => return,
            Phase::Paused => {
                job.status.pause.as_mut().unwrap().seconds += TICK.as_secs_f64();
                self.paused += 1;
                return;
            }
            Phase::Draining => {
                if self.drained_at.is_some_and(|at| self.tick >= at + 8) {
                    self.end(job, outcome::Kind::Drained, "requested by a user");
                }
                return;
            }
            _ => {}
        }
        match self.tick - self.paused {
            FAILURE_TICK => self.fail(job),
            FORMING_TICK => {
                job.status.generation = 2;
                self.enter(job, Phase::Forming, "ranks start: 1 of all is not ready");
                self.event(job, Kind::GenerationOpened, "generation 2: rank 1 is replaced");
                job.status.recoveries[0].generation = 2;
                job.status.recoveries[0].detect_seconds = Some(1.0);
            }
            MEETING_TICK => {
                self.enter(job, Phase::Meeting, "ranks load their state");
                let recovery = &mut job.status.recoveries[0];
                (recovery.tear_down_seconds, recovery.respawn_seconds) = (Some(0.2), Some(1.8));
            }
            RESUME_TICK => self.recover(job),
            tick if !(FAILURE_TICK..=RESUME_TICK).contains(&tick) => self.train(job),
            _ => {}
        }
    }

    /// Handles new requests of users.
    fn handle_requests(&mut self, job: &mut Job) {
        let requests = job.requests[self.requests_handled..].to_vec();
        self.requests_handled = job.requests.len();
        for request in &requests {
            match request.split_once(' ').unwrap_or((request, "")) {
                ("pause", reason) => {
                    self.enter(job, Phase::Paused, reason);
                    job.status.pause =
                        Some(v1::PauseStatus { reason: reason.into(), seconds: 0.0 });
                    self.event(job, Kind::Paused, reason);
                }
                ("resume", _) => {
                    job.status.pause = None;
                    self.enter(job, Phase::Training, "training");
                    self.event(job, Kind::Resumed, "a user resumed training");
                }
                ("drain", reason) => {
                    self.drained_at = Some(self.tick);
                    self.enter(job, Phase::Draining, reason);
                    self.event(job, Kind::Draining, reason);
                }
                ("checkpoint", _) => self.save(job),
                _ => self.end(job, outcome::Kind::Stopped, ""),
            }
        }
    }

    fn train(&mut self, job: &mut Job) {
        self.step += STEPS_PER_TICK;
        let steps = self.step as f64;
        let wave = (steps * 0.7).sin();
        let top1 = 0.75 - 0.74 * (-steps / 350.0).exp() + 0.01 * wave;
        let step = v1::Step {
            step: self.step,
            epoch: u32::try_from(self.step / STEPS_PER_EPOCH).unwrap(),
            total_steps: u64::from(EPOCHS) * STEPS_PER_EPOCH,
            steps_per_epoch: STEPS_PER_EPOCH,
            step_of_epoch: self.step % STEPS_PER_EPOCH,
            // NaN once, which JSON cannot represent.
            loss: if self.tick == 20 {
                f64::NAN
            } else {
                6.0 * (-steps / 300.0).exp() + 0.9 + 0.1 * wave
            },
            top1,
            metrics: vec![("top1".to_owned(), top1).into()],
            lr: 0.5 * (steps / 100.0).min(1.0),
            samples_per_second: 3120.0 + 40.0 * wave,
            loader_wait: 0.02,
            gradient_norm: Some(1.5 + wave),
            resolution: 192,
            global_batch: 1024,
            ..Default::default()
        };
        job.status.latest = Some(step.clone());
        job.status.eta_seconds = Some(5400.0 - steps / 20.0);
        for rank in &mut job.status.ranks {
            if let Some(heartbeat) = &mut rank.heartbeat {
                heartbeat.step = self.step;
            }
        }
        self.point(job, Metrics::Step(step.clone()));
        let rank = u32::try_from(self.tick).unwrap() % 8;
        self.line(job, Some(rank), &format!("step {} loss {:.3}", self.step, step.loss));
        if self.step.is_multiple_of(100) {
            let accuracy = v1::Accuracy {
                loss: step.loss,
                top1: step.top1 - 0.02,
                top5: 0.9,
                samples: 50_000,
                ..Default::default()
            };
            let message = format!("top-1 {:.2} %", accuracy.top1 * 100.0);
            let evaluated = v1::EvaluatedStep {
                step: self.step,
                accuracy: Some(accuracy),
                ..Default::default()
            };
            job.status.evaluation = Some(evaluated.clone());
            job.status.best = Some(evaluated.clone());
            self.point(job, Metrics::Evaluation(evaluated));
            self.event(job, Kind::Evaluated, &message);
        }
        if self.step.is_multiple_of(150) {
            self.save(job);
        }
    }

    fn save(&self, job: &mut Job) {
        let checkpoint = v1::Checkpoint {
            name: self.text(&format!("step-{:010}-gen-{:06}", self.step, job.status.generation)),
            generation: job.status.generation,
            step: self.step,
            accuracy: None,
            bytes: 307_000_000,
            took: Some(v1::SaveTimes { stall_seconds: 0.04, seconds: 1.6 }),
        };
        self.event(job, Kind::Saved, &checkpoint.name);
        job.checkpoints.insert(
            0,
            v1::CheckpointEntry {
                name: checkpoint.name.clone(),
                complete: true,
                damage: String::new(),
                checkpoint: Some(checkpoint.clone()),
                epoch: 0,
                created_unix_seconds: self.now() / 1000,
            },
        );
        job.status.checkpoint = Some(checkpoint);
        job.status.checkpoint_age_seconds = Some(0.0);
    }

    fn fail(&self, job: &mut Job) {
        let cause = self.text("rank 1 ended with signal 9");
        self.enter(
            job,
            Phase::Detecting,
            &format!("{cause}; waiting for reports of the other ranks"),
        );
        self.event(job, Kind::RankFailed, &cause);
        self.line(job, Some(1), "killed");
        job.status.recoveries.push(v1::Recovery { generation: 1, cause, ..Default::default() });
        job.status.recoveries_total = 1;
        job.status.eta_seconds = None;
        if let Some(rank) = job.status.ranks.get_mut(1) {
            rank.state = "gone".into();
            rank.heartbeat = None;
        }
    }

    fn recover(&mut self, job: &mut Job) {
        let recovery = &mut job.status.recoveries[0];
        recovery.rendezvous_seconds = Some(0.3);
        recovery.restore_seconds = Some(0.5);
        recovery.first_step_seconds = Some(0.2);
        recovery.total_seconds = Some(4.0);
        recovery.lost_steps = 10;
        self.step -= 10;
        self.enter(job, Phase::Training, "training");
        self.event(
            job,
            Kind::Recovered,
            "the first step is done after 4.0 s; 10 steps were repeated",
        );
        self.point(job, Metrics::BeganAt(self.step));
        if job.status.ranks.len() > 1 {
            job.status.ranks[1] = self.rank(1);
        }
    }

    fn end(&self, job: &mut Job, kind: outcome::Kind, reason: &str) {
        self.enter(job, Phase::Ended, "ended");
        job.status.eta_seconds = None;
        job.status.outcome =
            Some(v1::Outcome { kind: kind.into(), reason: reason.into(), failure: None });
        self.event(job, Kind::Ended, "the job ended");
    }

    fn enter(&self, job: &mut Job, phase: Phase, reason: &str) {
        job.status.set_phase(phase);
        job.status.reason = self.text(reason);
        job.status.phase_seconds = 0.0;
    }

    fn event(&self, job: &mut Job, kind: Kind, message: &str) {
        // Ids continue after a restart, because the simulation repeats the same events.
        let id = job.events.count() + 1;
        job.events.add(v1::WatchEventsResponse {
            id,
            unix_millis: self.now(),
            kind: kind.into(),
            generation: job.status.generation,
            step: Some(self.step),
            message: self.text(message),
        });
    }

    fn point(&self, job: &mut Job, metrics: Metrics) {
        let generation = job.status.generation;
        let point = v1::StreamMetricsResponse {
            unix_millis: self.now(),
            generation,
            metrics: Some(metrics),
            ..Default::default()
        };
        job.points.add(point);
    }

    fn line(&self, job: &mut Job, rank: Option<u32>, line: &str) {
        job.lines.add(v1::StreamLogsResponse {
            unix_millis: self.now(),
            node_id: rank.map_or(String::new(), |_| self.text("node-0")),
            local_rank: rank,
            rank,
            line: self.text(line),
            left_out: 0,
        });
    }

    fn rank(&self, rank: u32) -> v1::RankStatus {
        let share = f64::from(rank % 7) / 7.0;
        v1::RankStatus {
            rank,
            node_id: self.text(&format!("node-{}", rank / 8)),
            local_rank: rank % 8,
            state: "training".into(),
            loader: Some(v1::Loader {
                wait: share / 10.0,
                ready: 3,
                capacity: 4,
                skipped: 0,
                last_skipped: None,
            }),
            heartbeat: Some(v1::RankHeartbeat {
                activity: v1::Activity::Computing.into(),
                seconds: 0.1,
                step: self.step,
                own_step_seconds: 0.31 + share / 20.0,
            }),
            heartbeat_age_seconds: Some(share),
            slowdown: Some(if rank == 5 { 1.43 } else { 1.0 + share / 20.0 }),
            gpu: Some(v1::Gpu {
                index: rank % 8,
                name: self.text("NVIDIA L4"),
                uuid: format!("GPU-{rank}"),
                utilisation: Some(0.9 + share / 10.0),
                memory_used: 19_300_000_000,
                memory_total: 24_000_000_000,
                celsius: Some(61.0 + 4.0 * share),
                watts: (rank != 3).then_some(71.0),
            }),
        }
    }

    fn node(&self, node: u32) -> v1::NodeStatus {
        v1::NodeStatus {
            node_id: self.text(&format!("node-{node}")),
            slots: 8,
            attached: true,
            host: Some(v1::Host {
                name: self.text(&format!("ip-10-0-0-{node}")),
                cpu: 0.62,
                cpus: 96,
                memory_used: 210_000_000_000,
                memory_total: 384_000_000_000,
                disk_free: 512_000_000_000,
                disk_total: 1_000_000_000_000,
                received_per_second: 1.2e9,
                sent_per_second: 1.1e9,
            }),
            heartbeat_age_seconds: Some(0.4),
            round_trip_seconds: Some(0.0007),
        }
    }

    /// An untrusted text: with markup if the job is hostile.
    fn text(&self, text: &str) -> String {
        if self.is_hostile { format!("{text} {MARKUP}") } else { text.to_owned() }
    }
}
