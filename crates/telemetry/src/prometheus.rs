//! The job's status for Prometheus, in the text exposition format 0.0.4
//! (<https://prometheus.io/docs/instrumenting/exposition_formats/>).
//!
//! Names begin with `baton_` and end with their unit; fractions are `_ratio`, 0..1. A value that does not exist yet or
//! is not finite has no series. Up to 1,024 ranks and up to 1,024 nodes have their own series (`baton_rank_…`,
//! `baton_gpu_…`, `baton_node_…`). The maximum and the mean over all of them always exist (`baton_ranks_…`,
//! `baton_gpus_…`, `baton_nodes_…` with the label `of`).
//!
//! Names and labels are a promise to dashboards and alerts: adding is allowed, renaming is not. Help texts may change at
//! any time.

use std::fmt::Write;

use baton_proto::v1::{self, NodeStatus, RankStatus, get_status_response::Phase, outcome};
use baton_recipe::task;

/// The `Content-Type` of [`text`].
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Most ranks, and most nodes, that have their own series.
const MAX_LABELED: usize = 1_024;

const SECONDS_PER_HOUR: f64 = 3_600.0;

/// The page with all metrics.
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
    page.counter(
        "incidents_total",
        "Number of times training diverged.",
        status.incidents.len() as f64,
    );
    page.counter(
        "skipped_samples_total",
        "Damaged samples that were replaced or skipped, since the coordinator started.",
        status.skipped_samples as f64,
    );
    page.counter(
        "stale_messages_total",
        "Messages refused because they came from an old generation or connection.",
        status.stale_messages as f64,
    );
    if let Some(spending) = &status.spending {
        self::spending(&mut page, spending);
    }
    page.text
}

#[derive(Clone, Copy)]
enum MetricKind {
    Gauge,
    Counter,
}

#[derive(Default)]
struct Page {
    text: String,
}

/// Labels in braces (or an empty text), and the value.
type LabeledValue = (String, Option<f64>);

impl Page {
    /// Writes a metric family; nothing if no sample has a finite value.
    fn family(
        &mut self,
        kind: MetricKind,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = LabeledValue>,
    ) {
        let kind = match kind {
            MetricKind::Gauge => "gauge",
            MetricKind::Counter => "counter",
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
        self.family(MetricKind::Gauge, name, help, [(String::new(), value.into())]);
    }

    fn counter(&mut self, name: &str, help: &str, value: impl Into<Option<f64>>) {
        self.family(MetricKind::Counter, name, help, [(String::new(), value.into())]);
    }

    /// Writes, for each metric in `metrics`, a family with a sample for each item (if there are few enough items) and a
    /// family with maximum and mean.
    fn each<T>(
        &mut self,
        (singular, plural): (&str, &str),
        all: &[T],
        labels: impl Fn(&T) -> String,
        metrics: &[ItemMetric<T>],
    ) {
        for (name, help, read) in metrics {
            if all.len() <= MAX_LABELED {
                let samples = all.iter().map(|item| (labels(item), read(item)));
                self.family(MetricKind::Gauge, &format!("{singular}_{name}"), help, samples);
            }
            let known: Vec<f64> =
                all.iter().filter_map(read).filter(|value| value.is_finite()).collect();
            let max = known.iter().copied().reduce(f64::max);
            let mean = max.map(|_| known.iter().sum::<f64>() / known.len() as f64);
            let samples = [("max", max), ("mean", mean)]
                .map(|(of, value)| (self::labels(&[("of", of)]), value));
            self.family(MetricKind::Gauge, &format!("{plural}_{name}"), help, samples);
        }
    }
}

/// A metric of each rank or node: name without prefix, help text, and function that reads the value.
type ItemMetric<T> = (&'static str, &'static str, fn(&T) -> Option<f64>);

const RANK_METRICS: [ItemMetric<RankStatus>; 6] = [
    ("heartbeat_age_seconds", "Seconds since the rank's last heartbeat.", |rank| {
        rank.heartbeat_age_seconds
    }),
    ("own_step_seconds", "The rank's own time per step, without collective operations.", |rank| {
        rank.heartbeat.map(|heartbeat| heartbeat.own_step_seconds).filter(|seconds| *seconds > 0.0)
    }),
    ("slowdown_ratio", "The rank's own time per step divided by the median.", |rank| rank.slowdown),
    ("loader_wait_ratio", "Fraction of time that the rank waited for its loader.", |rank| {
        rank.loader.as_ref().map(|loader| loader.wait)
    }),
    ("loader_ready_batches", "Finished batches that wait for the rank.", |rank| {
        rank.loader.as_ref().map(|loader| f64::from(loader.ready))
    }),
    ("loader_capacity_batches", "Most finished batches that can wait for the rank.", |rank| {
        rank.loader.as_ref().map(|loader| f64::from(loader.capacity))
    }),
];

const GPU_METRICS: [ItemMetric<RankStatus>; 5] = [
    (
        "utilisation_ratio",
        "Fraction of the last second during which a kernel ran on the GPU.",
        |rank| rank.gpu.as_ref().and_then(|gpu| gpu.utilisation),
    ),
    ("memory_used_bytes", "Memory of the GPU in use by all processes.", |rank| {
        rank.gpu.as_ref().map(|gpu| gpu.memory_used as f64)
    }),
    ("memory_size_bytes", "Total memory of the GPU.", |rank| {
        rank.gpu.as_ref().map(|gpu| gpu.memory_total as f64)
    }),
    ("temperature_celsius", "Temperature of the GPU.", |rank| {
        rank.gpu.as_ref().and_then(|gpu| gpu.celsius)
    }),
    ("power_watts", "Power draw of the GPU.", |rank| rank.gpu.as_ref().and_then(|gpu| gpu.watts)),
];

const NODE_METRICS: [ItemMetric<NodeStatus>; 12] = [
    ("attached", "1 while the node's agent is connected.", |node| {
        Some(f64::from(u8::from(node.attached)))
    }),
    ("slots", "Ranks that the node can run.", |node| Some(f64::from(node.slots))),
    ("heartbeat_age_seconds", "Seconds since the last report of the node's agent.", |node| {
        node.heartbeat_age_seconds
    }),
    ("round_trip_seconds", "Round-trip time between the coordinator and the node.", |node| {
        node.round_trip_seconds
    }),
    ("cpu_ratio", "Utilization of all CPU cores of the node.", |node| {
        node.host.as_ref().map(|host| host.cpu)
    }),
    ("cpus", "CPU cores of the node.", |node| node.host.as_ref().map(|host| f64::from(host.cpus))),
    ("memory_used_bytes", "Memory of the node that is not available.", |node| {
        node.host.as_ref().map(|host| host.memory_used as f64)
    }),
    ("memory_size_bytes", "Total memory of the node.", |node| {
        node.host.as_ref().map(|host| host.memory_total as f64)
    }),
    ("disk_free_bytes", "Free space of the disk with the run folder.", |node| {
        node.host.as_ref().map(|host| host.disk_free as f64)
    }),
    ("disk_size_bytes", "Size of the disk with the run folder.", |node| {
        node.host.as_ref().map(|host| host.disk_total as f64)
    }),
    ("network_receive_bytes_per_second", "Received over the network, without loopback.", |node| {
        node.host.as_ref().map(|host| host.received_per_second)
    }),
    ("network_transmit_bytes_per_second", "Sent over the network, without loopback.", |node| {
        node.host.as_ref().map(|host| host.sent_per_second)
    }),
];

fn job(page: &mut Page, status: &v1::GetStatusResponse) {
    let info = labels(&[
        ("job_id", &status.job_id),
        ("name", &status.name),
        ("version", &status.coordinator_version),
    ]);
    page.family(MetricKind::Gauge, "info", "The job.", [(info, Some(1.0))]);
    let phases = (1..).map_while(|number| Phase::try_from(number).ok());
    let phases = phases.map(|phase| one_of("phase", &phase.name(), phase == status.phase()));
    page.family(MetricKind::Gauge, "phase", "1 for the current phase of the job.", phases);
    page.gauge("phase_seconds", "Time since the current phase began.", status.phase_seconds);
    let kind = status.outcome.as_ref().map(v1::Outcome::kind);
    let outcomes = (1..).map_while(|number| outcome::Kind::try_from(number).ok());
    let outcomes = outcomes.map(|other| one_of("outcome", &other.name(), Some(other) == kind));
    page.family(MetricKind::Gauge, "outcome", "1 for the outcome of the job.", outcomes);
    page.gauge(
        "coordinator_start_time_seconds",
        "When the coordinator started, seconds since 1970-01-01 UTC.",
        Some(status.coordinator_started_unix_seconds as f64).filter(|seconds| *seconds > 0.0),
    );
    page.gauge("generation", "Number of the newest generation.", status.generation as f64);
    page.gauge("planned_epochs", "Number of epochs of the complete job.", f64::from(status.epochs));
    page.gauge("eta_seconds", "Estimated time to the end.", status.eta_seconds);
    page.gauge(
        "drain_seconds_left",
        "Time until the deadline for saving and stopping.",
        status.drain.as_ref().map(|drain| drain.seconds_left),
    );
    page.gauge(
        "pause_seconds",
        "Time since a user paused training.",
        status.pause.as_ref().map(|pause| pause.seconds),
    );
    page.gauge(
        "save_failed",
        "1 if the newest save failed.",
        f64::from(u8::from(status.save_problem.is_some())),
    );
}

fn step(page: &mut Page, step: &v1::Step) {
    page.gauge("step", "Training steps made.", step.step as f64);
    page.gauge("planned_steps", "Training steps of the complete job.", step.total_steps as f64);
    page.gauge("epoch", "Complete epochs.", f64::from(step.epoch));
    page.gauge("epoch_step", "Batches done in the current epoch.", step.step_of_epoch as f64);
    page.gauge("epoch_steps", "Batches of the current epoch.", step.steps_per_epoch as f64);
    page.gauge("train_loss", "Mean loss of the latest batch.", step.loss);
    for metric in step.named() {
        let help = format!("{} of the latest batch.", task::title(&metric.name));
        page.gauge(&format!("train_{}", name_with_unit(&metric)), &help, metric.value);
    }
    page.gauge("learning_rate", "Learning rate of the latest step.", step.lr);
    page.gauge("gradient_norm", "L2 norm of the gradient before clipping.", step.gradient_norm);
    page.gauge("loss_scale", "Factor by which the loss is scaled.", step.loss_scale);
    page.gauge(
        "resolution_pixels",
        "Side length of the training images.",
        Some(f64::from(step.resolution)).filter(|side| *side > 0.0),
    );
    page.gauge("global_batch_samples", "Samples of a full step.", step.global_batch as f64);
    page.gauge("samples_per_second", "Throughput of all ranks together.", step.samples_per_second);
    page.gauge(
        "loader_wait_ratio",
        "Fraction of time that rank 0 waited for its loader.",
        step.loader_wait,
    );
}

/// The metric's name with its unit.
fn name_with_unit(metric: &v1::Metric) -> String {
    let unit = if metric.is_fraction { "_ratio" } else { "" };
    format!("{}{unit}", metric.name)
}

fn evaluations(page: &mut Page, status: &v1::GetStatusResponse) {
    let mut found: Vec<(String, &v1::Accuracy)> = Vec::new();
    let mut steps = Vec::new();
    for (which, evaluated) in [("latest", &status.evaluation), ("best", &status.best)] {
        let Some(evaluated) = evaluated else { continue };
        steps.push((labels(&[("evaluation", which)]), Some(evaluated.step as f64)));
        // The best evaluation has only the better of the results with raw and with averaged weights.
        let raw = if which == "best" { "better" } else { "raw" };
        for (weights, accuracy) in [(raw, &evaluated.accuracy), ("ema", &evaluated.ema)] {
            let labels = labels(&[("evaluation", which), ("weights", weights)]);
            found.extend(accuracy.as_ref().map(|accuracy| (labels, accuracy)));
        }
    }
    page.family(MetricKind::Gauge, "evaluation_step", "Steps made before the evaluation.", steps);
    // One family for each metric of any of them, in the task's order.
    let mut families: Vec<(v1::Metric, Vec<LabeledValue>)> = Vec::new();
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
        page.family(
            MetricKind::Gauge,
            &format!("evaluation_{}", name_with_unit(&metric)),
            &help,
            samples,
        );
    }
}

fn checkpoint(page: &mut Page, checkpoint: &v1::Checkpoint, age_seconds: Option<f64>) {
    let took = checkpoint.took;
    page.gauge("checkpoint_step", "Steps made before the last checkpoint.", checkpoint.step as f64);
    page.gauge("checkpoint_age_seconds", "Age of the last checkpoint.", age_seconds);
    page.gauge("checkpoint_bytes", "Size of the last checkpoint.", checkpoint.bytes as f64);
    page.gauge(
        "checkpoint_stall_seconds",
        "Time that training stalled for the last checkpoint.",
        took.map(|took| took.stall_seconds),
    );
    page.gauge(
        "checkpoint_save_seconds",
        "Time from the stall until the last checkpoint was committed.",
        took.map(|took| took.seconds),
    );
}

fn ranks_and_nodes(page: &mut Page, status: &v1::GetStatusResponse) {
    page.gauge("ranks", "Ranks of the newest generation.", status.ranks.len() as f64);
    page.gauge("nodes", "All nodes.", status.nodes.len() as f64);
    let attached = status.nodes.iter().filter(|node| node.attached).count();
    page.gauge("nodes_connected", "Nodes whose agents are connected.", attached as f64);
    let rank = |rank: &RankStatus| labels(&rank_labels(rank));
    page.each(("rank", "ranks"), &status.ranks, rank, &RANK_METRICS);
    let gpu = |rank: &RankStatus| {
        let index = rank.gpu.as_ref().map(|gpu| ("gpu", gpu.index.to_string()));
        labels(&[&rank_labels(rank)[..], index.as_slice()].concat())
    };
    page.each(("gpu", "gpus"), &status.ranks, gpu, &GPU_METRICS);
    let node = |node: &NodeStatus| labels(&[("node", &node.node_id)]);
    page.each(("node", "nodes"), &status.nodes, node, &NODE_METRICS);
}

/// Labels of a rank.
fn rank_labels(rank: &RankStatus) -> [(&'static str, String); 3] {
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
    // The status has only the newest ones, and a counter must not decrease.
    let has_all = status.recoveries.len() as u64 == status.recoveries_total;
    let planned = status.recoveries.iter().filter(|recovery| recovery.planned).count();
    page.counter(
        "recoveries_planned_total",
        "Planned changes of nodes; absent beyond 1000 recoveries.",
        has_all.then_some(planned as f64),
    );
    let Some(last) = status.recoveries.last() else { return };
    let parts = [
        ("detect", last.detect_seconds),
        ("tear_down", last.tear_down_seconds),
        ("respawn", last.respawn_seconds),
        ("rendezvous", last.rendezvous_seconds),
        ("restore", last.restore_seconds),
        ("first_step", last.first_step_seconds),
    ];
    let parts = parts.map(|(part, seconds)| (labels(&[("part", part)]), seconds));
    page.family(MetricKind::Gauge, "recovery_seconds", "Parts of the last recovery.", parts);
    page.gauge("recovery_whole_seconds", "Total time of the last recovery.", last.total_seconds);
    page.gauge("recovery_age_seconds", "Time since the last recovery began.", last.age_seconds);
    page.gauge(
        "recovery_lost_steps",
        "Steps that had to be repeated after the last recovery.",
        last.lost_steps as f64,
    );
}

fn spending(page: &mut Page, spending: &v1::Spending) {
    page.counter(
        "attached_seconds_total",
        "Time during which at least one node was attached.",
        spending.hours * SECONDS_PER_HOUR,
    );
    page.counter(
        "interruption_seconds_total",
        "Part of the attached time lost to failures and changes of nodes.",
        spending.interruption_hours * SECONDS_PER_HOUR,
    );
    page.counter(
        "paused_seconds_total",
        "Part of the attached time during which a user had paused training.",
        spending.paused_hours * SECONDS_PER_HOUR,
    );
    page.gauge(
        "limit_seconds",
        "Attached time at which the job ends.",
        spending.most_hours.map(|hours| hours * SECONDS_PER_HOUR),
    );
    page.gauge("limits_used_ratio", "Used fraction of the limit.", spending.used);
    // Gauges, because a changed price can lower them.
    page.gauge("spent_dollars", "Cost of the job so far.", spending.dollars);
    page.gauge(
        "projected_dollars",
        "Projected cost of the whole job at the current rate.",
        spending.projected_dollars,
    );
    page.gauge("dollars_per_hour", "Price of all nodes together.", spending.dollars_per_hour);
    page.gauge("dollars_per_epoch", "Cost of an epoch.", spending.dollars_per_epoch);
    page.gauge(
        "interruption_dollars",
        "Cost of failures and changes of nodes.",
        spending.interruption_dollars,
    );
}

/// A sample that is 1 for the current state and 0 for the others.
fn one_of(label: &str, name: &str, is_current: bool) -> LabeledValue {
    (labels(&[(label, name)]), Some(f64::from(u8::from(is_current))))
}

fn labels<V: AsRef<str>>(labels: &[(&str, V)]) -> String {
    let pairs = labels.iter().map(|(name, value)| {
        let value = value.as_ref().replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        format!("{name}=\"{value}\"")
    });
    format!("{{{}}}", pairs.collect::<Vec<_>>().join(","))
}

/// The shortest text that parses as the same number.
fn number(value: f64) -> String {
    let plain = value == 0.0 || (1e-6..1e15).contains(&value.abs());
    if plain { value.to_string() } else { format!("{value:e}") }
}
