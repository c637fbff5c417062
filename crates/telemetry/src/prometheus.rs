//! The job's status as Prometheus reads it: the text exposition format 0.0.4
//! (<https://prometheus.io/docs/instrumenting/exposition_formats/>).
//!
//! Names begin with `baton_` and end with their unit; shares are `_ratio`, 0..1. What does not exist yet, or is no
//! finite number, has no series. Up to 1,024 ranks and up to 1,024 nodes have series of their own (`baton_rank_…`,
//! `baton_gpu_…`, `baton_node_…`); if there are more, only the largest and the mean over all of them are told, which
//! are always there (`baton_ranks_…`, `baton_gpus_…`, `baton_nodes_…` with the label `of`).

use std::fmt::Write;

use baton_proto::v1::{self, NodeStatus, RankStatus, get_status_response::Phase, outcome};
use baton_recipe::task;

/// The `Content-Type` of [`text`].
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The most ranks, and the most nodes, that have series of their own.
const MOST_LABELLED: usize = 1_024;

const SECONDS_PER_HOUR: f64 = 3_600.0;

/// The page.
#[must_use]
pub fn text(status: &v1::GetStatusResponse) -> String {
    let mut page = Page::default();
    job(&mut page, status);
    if let Some(latest) = &status.latest {
        step(&mut page, latest);
    }
    evaluations(&mut page, status);
    if let Some(checkpoint) = &status.checkpoint {
        self::checkpoint(&mut page, checkpoint, status.checkpoint_age_seconds);
    }
    ranks_and_nodes(&mut page, status);
    recoveries(&mut page, status);
    page.counter("incidents_total", "Times training went wrong.", status.incidents.len() as f64);
    page.counter(
        "skipped_samples_total",
        "Samples that could not be used, since the coordinator started.",
        status.skipped_samples as f64,
    );
    page.counter(
        "stale_messages_total",
        "Messages refused because they came from an older generation or connection.",
        status.stale_messages as f64,
    );
    if let Some(spending) = &status.spending {
        self::spending(&mut page, spending);
    }
    page.text
}

#[derive(Clone, Copy)]
enum Kind {
    Gauge,
    Counter,
}

#[derive(Default)]
struct Page {
    text: String,
}

/// Labels in braces, or nothing, and the value.
type Sample = (String, Option<f64>);

impl Page {
    /// One family; nothing at all if it has no samples.
    fn family(
        &mut self,
        kind: Kind,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = Sample>,
    ) {
        let kind = match kind {
            Kind::Gauge => "gauge",
            Kind::Counter => "counter",
        };
        let mut header = Some(format!("# HELP baton_{name} {help}\n# TYPE baton_{name} {kind}\n"));
        for (labels, value) in samples {
            let Some(value) = value.filter(|value| value.is_finite()) else { continue };
            self.text.push_str(&header.take().unwrap_or_default());
            // Writing to a string cannot fail.
            let _ = writeln!(self.text, "baton_{name}{labels} {}", number(value));
        }
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl Into<Option<f64>>) {
        self.family(Kind::Gauge, name, help, [(String::new(), value.into())]);
    }

    fn counter(&mut self, name: &str, help: &str, value: impl Into<Option<f64>>) {
        self.family(Kind::Counter, name, help, [(String::new(), value.into())]);
    }

    /// One family for each number that each of `all` may have, if they are few enough, and two aggregates.
    fn each<T>(
        &mut self,
        (one, many): (&str, &str),
        all: &[T],
        labels: impl Fn(&T) -> String,
        numbers: &[Number<T>],
    ) {
        for (name, help, read) in numbers {
            if all.len() <= MOST_LABELLED {
                let samples = all.iter().map(|item| (labels(item), read(item)));
                self.family(Kind::Gauge, &format!("{one}_{name}"), help, samples);
            }
            let known: Vec<f64> =
                all.iter().filter_map(read).filter(|value| value.is_finite()).collect();
            let most = known.iter().copied().reduce(f64::max);
            let mean = most.map(|_| known.iter().sum::<f64>() / known.len() as f64);
            let samples = [("max", most), ("mean", mean)]
                .map(|(of, value)| (self::labels(&[("of", of)]), value));
            self.family(Kind::Gauge, &format!("{many}_{name}"), help, samples);
        }
    }
}

/// Its name without what it is of, what it means, and where it is found.
type Number<T> = (&'static str, &'static str, fn(&T) -> Option<f64>);

const OF_RANKS: [Number<RankStatus>; 6] = [
    ("heartbeat_age_seconds", "Seconds since the rank was last heard of.", |rank| {
        rank.heartbeat_age_seconds
    }),
    ("own_step_seconds", "The rank's own time per update, exchanges left out.", |rank| {
        rank.pulse.map(|pulse| pulse.own_step_seconds).filter(|seconds| *seconds > 0.0)
    }),
    ("slowness_ratio", "The rank's own time per update divided by the median.", |rank| {
        rank.slowness
    }),
    ("loader_wait_ratio", "Share of time that the rank waited for its loader.", |rank| {
        rank.loader.as_ref().map(|loader| loader.wait)
    }),
    ("loader_ready_batches", "Finished batches that wait for the rank.", |rank| {
        rank.loader.as_ref().map(|loader| f64::from(loader.ready))
    }),
    ("loader_room_batches", "The most finished batches that can wait for the rank.", |rank| {
        rank.loader.as_ref().map(|loader| f64::from(loader.room))
    }),
];

const OF_GPUS: [Number<RankStatus>; 5] = [
    ("utilisation_ratio", "Share of the last second that a kernel ran on the GPU.", |rank| {
        rank.gpu.as_ref().and_then(|gpu| gpu.utilisation)
    }),
    ("memory_used_bytes", "Memory of the GPU in use, by whomever.", |rank| {
        rank.gpu.as_ref().map(|gpu| gpu.memory_used as f64)
    }),
    ("memory_size_bytes", "Memory of the GPU in all.", |rank| {
        rank.gpu.as_ref().map(|gpu| gpu.memory_total as f64)
    }),
    ("temperature_celsius", "Temperature of the GPU.", |rank| {
        rank.gpu.as_ref().and_then(|gpu| gpu.celsius)
    }),
    ("power_watts", "Power that the GPU draws.", |rank| {
        rank.gpu.as_ref().and_then(|gpu| gpu.watts)
    }),
];

const OF_NODES: [Number<NodeStatus>; 12] = [
    ("attached", "1 while the node's agent is connected.", |node| {
        Some(f64::from(u8::from(node.attached)))
    }),
    ("slots", "Ranks that the node can run.", |node| Some(f64::from(node.slots))),
    ("heartbeat_age_seconds", "Seconds since the node's agent was last heard of.", |node| {
        node.heartbeat_age_seconds
    }),
    ("round_trip_seconds", "From the coordinator to the node and back.", |node| {
        node.round_trip_seconds
    }),
    ("cpu_ratio", "Share of all the node's cores that is busy.", |node| {
        node.host.as_ref().map(|host| host.cpu)
    }),
    ("cpus", "The node's cores.", |node| node.host.as_ref().map(|host| f64::from(host.cpus))),
    ("memory_used_bytes", "Memory of the node that cannot be had.", |node| {
        node.host.as_ref().map(|host| host.memory_used as f64)
    }),
    ("memory_size_bytes", "Memory of the node in all.", |node| {
        node.host.as_ref().map(|host| host.memory_total as f64)
    }),
    ("disk_free_bytes", "Free on the disk that holds the run folder.", |node| {
        node.host.as_ref().map(|host| host.disk_free as f64)
    }),
    ("disk_size_bytes", "Size of the disk that holds the run folder.", |node| {
        node.host.as_ref().map(|host| host.disk_total as f64)
    }),
    ("network_receive_bytes_per_second", "Received over the network, loopback left out.", |node| {
        node.host.as_ref().map(|host| host.received_per_second)
    }),
    ("network_transmit_bytes_per_second", "Sent over the network, loopback left out.", |node| {
        node.host.as_ref().map(|host| host.sent_per_second)
    }),
];

fn job(page: &mut Page, status: &v1::GetStatusResponse) {
    let info = labels(&[
        ("job_id", &status.job_id),
        ("name", &status.name),
        ("version", &status.coordinator_version),
    ]);
    page.family(Kind::Gauge, "info", "The job.", [(info, Some(1.0))]);
    let phases = (1..).map_while(|number| Phase::try_from(number).ok());
    let phases = phases.map(|phase| one_of("phase", &phase.name(), phase == status.phase()));
    page.family(Kind::Gauge, "phase", "1 for the phase that the job is in.", phases);
    page.gauge("phase_seconds", "For how long it has been in it.", status.phase_seconds);
    let kind = status.outcome.as_ref().map(v1::Outcome::kind);
    let outcomes = (1..).map_while(|number| outcome::Kind::try_from(number).ok());
    let outcomes = outcomes.map(|other| one_of("outcome", &other.name(), Some(other) == kind));
    page.family(Kind::Gauge, "outcome", "1 for the way in which the job ended.", outcomes);
    page.gauge(
        "coordinator_start_time_seconds",
        "When the coordinator started, since 1970-01-01 UTC.",
        Some(status.coordinator_started_unix_seconds as f64).filter(|seconds| *seconds > 0.0),
    );
    page.gauge("generation", "The newest membership of ranks.", status.generation as f64);
    page.gauge("planned_epochs", "Passes over the data to make.", f64::from(status.epochs));
    page.gauge("eta_seconds", "Estimated time to the end.", status.eta_seconds);
    page.gauge(
        "drain_seconds_left",
        "Until nobody waits any more for saving and stopping.",
        status.drain.as_ref().map(|drain| drain.seconds_left),
    );
    page.gauge(
        "pause_seconds",
        "For how long a user has let training stand still.",
        status.pause.as_ref().map(|pause| pause.seconds),
    );
    page.gauge(
        "save_failed",
        "1 if the newest save failed.",
        f64::from(u8::from(status.save_problem.is_some())),
    );
}

fn step(page: &mut Page, step: &v1::Step) {
    page.gauge("step", "Updates made.", step.step as f64);
    page.gauge("planned_steps", "Updates in all.", step.total_steps as f64);
    page.gauge("epoch", "Whole passes made.", f64::from(step.epoch));
    page.gauge("epoch_step", "Batches of the present pass behind.", step.step_of_epoch as f64);
    page.gauge("epoch_steps", "Batches of the present pass.", step.steps_per_epoch as f64);
    page.gauge("train_loss", "Mean loss of the latest batch.", step.loss);
    for metric in step.named() {
        let help = format!("{} of the latest batch.", task::title(&metric.name));
        page.gauge(&format!("train_{}", in_unit(&metric)), &help, metric.value);
    }
    page.gauge("learning_rate", "Learning rate of the latest update.", step.lr);
    page.gauge("gradient_norm", "L2 norm of the gradient before clipping.", step.gradient_norm);
    page.gauge("loss_scale", "Factor on the loss.", step.loss_scale);
    page.gauge(
        "resolution_pixels",
        "Side of the training images.",
        Some(f64::from(step.resolution)).filter(|side| *side > 0.0),
    );
    page.gauge("global_batch_samples", "Samples of a full update.", step.global_batch as f64);
    page.gauge("samples_per_second", "All ranks together.", step.samples_per_second);
    page.gauge(
        "loader_wait_ratio",
        "Share of time that rank 0 waited for its loader.",
        step.loader_wait,
    );
}

/// The name with its unit.
fn in_unit(metric: &v1::Metric) -> String {
    let unit = if metric.is_share { "_ratio" } else { "" };
    format!("{}{unit}", metric.name)
}

fn evaluations(page: &mut Page, status: &v1::GetStatusResponse) {
    let mut found: Vec<(String, &v1::Accuracy)> = Vec::new();
    let mut steps = Vec::new();
    for (which, evaluated) in [("latest", &status.evaluation), ("best", &status.best)] {
        let Some(evaluated) = evaluated else { continue };
        steps.push((labels(&[("evaluation", which)]), Some(evaluated.step as f64)));
        // The best one does not tell which weights it was.
        let raw = if which == "best" { "better" } else { "raw" };
        for (weights, accuracy) in [(raw, &evaluated.accuracy), ("ema", &evaluated.ema)] {
            let labels = labels(&[("evaluation", which), ("weights", weights)]);
            found.extend(accuracy.as_ref().map(|accuracy| (labels, accuracy)));
        }
    }
    page.family(Kind::Gauge, "evaluation_step", "Updates made before it.", steps);
    // Each metric that any of them has, in the task's order.
    let mut families: Vec<(v1::Metric, Vec<Sample>)> = Vec::new();
    for (labels, accuracy) in found {
        for metric in accuracy.named() {
            let sample = (labels.clone(), Some(metric.value));
            match families.iter_mut().find(|(known, _)| known.name == metric.name) {
                Some((_, samples)) => samples.push(sample),
                None => families.push((metric, vec![sample])),
            }
        }
    }
    for (metric, samples) in families {
        let help = format!("{} of an evaluation.", task::title(&metric.name));
        page.family(Kind::Gauge, &format!("evaluation_{}", in_unit(&metric)), &help, samples);
    }
}

fn checkpoint(page: &mut Page, checkpoint: &v1::Checkpoint, age_seconds: Option<f64>) {
    let took = checkpoint.took;
    page.gauge("checkpoint_step", "Updates in the last checkpoint.", checkpoint.step as f64);
    page.gauge("checkpoint_age_seconds", "Age of the last checkpoint.", age_seconds);
    page.gauge("checkpoint_bytes", "Size of the last checkpoint.", checkpoint.bytes as f64);
    page.gauge(
        "checkpoint_stall_seconds",
        "For how long training stood still for the last checkpoint.",
        took.map(|took| took.stall_seconds),
    );
    page.gauge(
        "checkpoint_save_seconds",
        "From there until the last checkpoint was committed.",
        took.map(|took| took.seconds),
    );
}

fn ranks_and_nodes(page: &mut Page, status: &v1::GetStatusResponse) {
    page.gauge("ranks", "Ranks of the newest generation.", status.ranks.len() as f64);
    page.gauge("nodes", "All nodes.", status.nodes.len() as f64);
    let attached = status.nodes.iter().filter(|node| node.attached).count();
    page.gauge("nodes_connected", "Nodes whose agents are connected.", attached as f64);
    let rank = |rank: &RankStatus| labels(&place(rank));
    page.each(("rank", "ranks"), &status.ranks, rank, &OF_RANKS);
    let gpu = |rank: &RankStatus| {
        let index = rank.gpu.as_ref().map(|gpu| ("gpu", gpu.index.to_string()));
        labels(&[&place(rank)[..], index.as_slice()].concat())
    };
    page.each(("gpu", "gpus"), &status.ranks, gpu, &OF_GPUS);
    let node = |node: &NodeStatus| labels(&[("node", &node.node_id)]);
    page.each(("node", "nodes"), &status.nodes, node, &OF_NODES);
}

/// Where a rank is.
fn place(rank: &RankStatus) -> [(&'static str, String); 3] {
    [
        ("rank", rank.rank.to_string()),
        ("node", rank.node_id.clone()),
        ("local_rank", rank.local_rank.to_string()),
    ]
}

fn recoveries(page: &mut Page, status: &v1::GetStatusResponse) {
    page.counter(
        "recoveries_total",
        "Failures and planned changes of nodes.",
        status.recoveries_total as f64,
    );
    // The status tells the newest ones only; a counter must not fall.
    let all_told = status.recoveries.len() as u64 == status.recoveries_total;
    let planned = status.recoveries.iter().filter(|recovery| recovery.planned).count();
    page.counter(
        "recoveries_planned_total",
        "Planned changes of nodes among them; left out beyond 1000 recoveries.",
        all_told.then_some(planned as f64),
    );
    let Some(last) = status.recoveries.last() else { return };
    let parts = [
        ("settle", last.settle_seconds),
        ("tear_down", last.tear_down_seconds),
        ("respawn", last.respawn_seconds),
        ("rendezvous", last.rendezvous_seconds),
        ("restore", last.restore_seconds),
        ("first_step", last.first_step_seconds),
    ];
    let parts = parts.map(|(part, seconds)| (labels(&[("part", part)]), seconds));
    page.family(Kind::Gauge, "recovery_seconds", "Parts of the last recovery.", parts);
    page.gauge("recovery_whole_seconds", "All of the last recovery.", last.total_seconds);
    page.gauge("recovery_age_seconds", "Since the last recovery began.", last.age_seconds);
    page.gauge(
        "recovery_lost_steps",
        "Updates that had to be made again in the last recovery.",
        last.lost_steps as f64,
    );
}

fn spending(page: &mut Page, spending: &v1::Spending) {
    page.counter(
        "attached_seconds_total",
        "For how long nodes have been attached.",
        spending.hours * SECONDS_PER_HOUR,
    );
    page.counter(
        "interruption_seconds_total",
        "Of it, what brought nothing because of failures and changes of nodes.",
        spending.interruption_hours * SECONDS_PER_HOUR,
    );
    page.counter(
        "paused_seconds_total",
        "Of it, what training stood still because a user asked for that.",
        spending.paused_hours * SECONDS_PER_HOUR,
    );
    page.gauge(
        "limit_seconds",
        "Attached time at which the job ends.",
        spending.most_hours.map(|hours| hours * SECONDS_PER_HOUR),
    );
    page.gauge("limits_used_ratio", "Share of the limits that is used up.", spending.used);
    // Gauges, for a price may be changed.
    page.gauge("spent_dollars", "What the job has cost.", spending.dollars);
    page.gauge(
        "projected_dollars",
        "What the whole job will have cost at the present rate.",
        spending.projected_dollars,
    );
    page.gauge("dollars_per_hour", "Price of all nodes together.", spending.dollars_per_hour);
    page.gauge("dollars_per_epoch", "What a pass costs.", spending.dollars_per_epoch);
    page.gauge(
        "interruption_dollars",
        "What failures and changes of nodes have cost.",
        spending.interruption_dollars,
    );
}

fn one_of(label: &str, name: &str, is: bool) -> Sample {
    (labels(&[(label, name)]), Some(f64::from(u8::from(is))))
}

fn labels<V: AsRef<str>>(labels: &[(&str, V)]) -> String {
    let pairs = labels.iter().map(|(name, value)| {
        let value = value.as_ref().replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        format!("{name}=\"{value}\"")
    });
    format!("{{{}}}", pairs.collect::<Vec<_>>().join(","))
}

/// The shortest text that reads as the same number.
fn number(value: f64) -> String {
    let plain = value == 0.0 || (1e-6..1e15).contains(&value.abs());
    if plain { value.to_string() } else { format!("{value:e}") }
}
