//! Statuses, events and the end of a job as text for people. The text may change at any time; scripts use `--json`.
//!
//! Pure functions.

use std::path::Path;

use baton_job::{engine::SHOWN_NODES, exit::Outcome, first_names, shortened};
use baton_proto::v1::{
    self, Accuracy, EvaluatedStep, EvaluationProgress, Extent, GeneratedText, GetStatusResponse,
    Gpu, Host, Incident, Loader, LocalCheckpoint, Metric, NodeStatus, PauseStatus, RankStatus,
    Recovery, Spending, Step, StreamLogsResponse, WatchEventsResponse, get_status_response::Phase,
    watch_events_response::Kind,
};
use baton_recipe::task;

use crate::{clean::clean, human};

/// Whether to colour text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Paint {
    Plain,
    Colours,
}

impl Paint {
    /// Colours if standard output is a terminal that supports them.
    pub(crate) fn detect() -> Self {
        if crate::output::is_colourful() { Self::Colours } else { Self::Plain }
    }

    fn with(self, code: &str, text: &str) -> String {
        match self {
            Self::Plain => text.to_owned(),
            Self::Colours => format!("\x1b[{code}m{text}\x1b[0m"),
        }
    }

    /// A different colour for neighbouring ranks. The colours, of the 256-colour palette, can be distinguished by the
    /// colour-blind too (Okabe and Ito).
    fn rank(self, rank: u32, text: &str) -> String {
        const COLOURS: [u8; 6] = [74, 214, 36, 175, 32, 166];
        self.with(&format!("38;5;{}", COLOURS[rank as usize % COLOURS.len()]), text)
    }

    /// Text of little importance.
    pub(crate) fn dim(self, text: &str) -> String {
        self.with("2", text)
    }

    fn bold(self, text: &str) -> String {
        self.with("1", text)
    }

    fn phase(self, phase: Phase, text: &str) -> String {
        match phase {
            Phase::Training => self.with("32", text),
            Phase::Ended => self.with("1", text),
            Phase::Backoff | Phase::Detecting | Phase::Draining | Phase::Paused => {
                self.with("33", text)
            }
            _ => self.with("36", text),
        }
    }

    fn kind(self, kind: Kind, text: &str) -> String {
        match kind {
            Kind::NodeLost
            | Kind::SaveFailed
            | Kind::StoreUnavailable
            | Kind::RankFailed
            | Kind::Diverged => self.with("31", text),
            Kind::Draining
            | Kind::GpuWarning
            | Kind::SamplesSkipped
            | Kind::SaveWaits
            | Kind::Straggler
            | Kind::NodeLeaves
            | Kind::CheckpointAdvised
            | Kind::NodeQuarantined
            | Kind::Paused
            | Kind::Budget => self.with("33", text),
            Kind::Evaluated | Kind::EndsEarly | Kind::Recovered | Kind::Resumed => {
                self.with("32", text)
            }
            Kind::Ended => self.with("1", text),
            _ => text.to_owned(),
        }
    }
}

// ---- one line each ----

/// The job's phase and its reason.
pub(crate) fn phase_line(status: &GetStatusResponse, paint: Paint) -> String {
    let phase = status.phase().name();
    // Some reasons already begin with the phase.
    let reason = status.reason.strip_prefix(&format!("{phase}: ")).unwrap_or(&status.reason);
    format!("{}: {}", paint.phase(status.phase(), &phase), clean(reason))
}

/// Position of a step in the job.
pub(crate) struct Position {
    /// Current epoch, counted from 1.
    pub(crate) epoch: u32,
    /// Number of finished batches of this epoch.
    pub(crate) step_of_epoch: u64,
    /// Finished share of the whole job, 0 to 1, by samples: batch sizes differ between phases, samples per epoch do
    /// not.
    pub(crate) share: f64,
}

impl Position {
    pub(crate) fn new(step: &Step, epochs: u32) -> Self {
        let has_ended = step.epoch >= epochs;
        let step_of_epoch = if has_ended { step.steps_per_epoch } else { step.step_of_epoch };
        let epoch_share = step.step_of_epoch as f64 / step.steps_per_epoch.max(1) as f64;
        let share = (f64::from(step.epoch) + epoch_share) / f64::from(epochs.max(1));
        Self {
            epoch: step.epoch.saturating_add(1).min(epochs),
            step_of_epoch,
            share: share.min(1.0),
        }
    }
}

/// Metrics of the latest step.
pub(crate) fn numbers(step: &Step) -> String {
    let norm = step.gradient_norm.map(|norm| format!("  grad {norm:.3}"));
    let scale = step.loss_scale.map(|scale| format!("  scale {scale:.0}"));
    let has_images = step.resolution > 0;
    let pixels = has_images.then(|| format!("  {} px", step.resolution));
    let metrics: String = step.named().iter().map(|named| format!("  {}", metric(named))).collect();
    format!(
        "loss {:.4}{metrics}  lr {}{}{}{}  batch {}  {:.0} {}/s  loader wait {}",
        step.loss,
        human::rate(step.lr),
        norm.unwrap_or_default(),
        scale.unwrap_or_default(),
        pixels.unwrap_or_default(),
        step.global_batch,
        step.samples_per_second,
        if has_images { "images" } else { "samples" },
        human::percent(step.loader_wait)
    )
}

/// The job's progress in one line; `None` before its first step.
pub(crate) fn progress_line(status: &GetStatusResponse) -> Option<String> {
    let step = status.latest.as_ref()?;
    let position = Position::new(step, status.epochs);
    let eta = match status.eta_seconds {
        Some(seconds) => format!("  eta {}", human::duration(seconds)),
        None => String::new(),
    };
    Some(format!(
        "epoch {}/{}  step {}/{}  {}  {}{eta}",
        position.epoch,
        status.epochs,
        step.step,
        step.total_steps,
        human::percent(position.share),
        numbers(step)
    ))
}

/// `evaluating 1,200 of 5,000 samples, 410/s, 9 s left`
pub(crate) fn evaluating(progress: &EvaluationProgress) -> String {
    let (samples, total) = (human::grouped(progress.samples), human::grouped(progress.total));
    let rate = progress.samples_per_second.map(|rate| format!(", {rate:.0}/s"));
    let left = progress.seconds_left.map(|left| format!(", {} left", human::duration(left)));
    let texts = match progress.total_texts {
        0 => String::new(),
        all => format!(", {} of {} texts written", progress.texts, human::grouped(all)),
    };
    format!(
        "evaluating {samples} of {total} samples{}{texts}{}",
        rate.unwrap_or_default(),
        left.unwrap_or_default()
    )
}

/// An evaluation and its step.
pub(crate) fn evaluation(evaluated: &EvaluatedStep) -> String {
    let quick = if evaluated.extent() == Extent::Subset { "  (quick)" } else { "" };
    format!("{}  at step {}{quick}", evaluation_metrics(evaluated), evaluated.step)
}

/// The beginning of a text that a language model wrote.
fn generated(GeneratedText { sample, text, .. }: &GeneratedText) -> String {
    const MAX_CHARS: usize = 100;
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    format!("for sample {sample}: {}", shortened(&line, MAX_CHARS))
}

/// Metrics of an evaluation.
pub(crate) fn evaluation_metrics(evaluated: &EvaluatedStep) -> String {
    let accuracy = evaluated.accuracy.as_ref().map(Accuracy::named).unwrap_or_default();
    let mut metrics: Vec<String> = accuracy.iter().map(metric).collect();
    if let (Some(first), Some(ema)) = (metrics.first_mut(), &evaluated.ema) {
        *first += &format!("  EMA {}", score(ema));
    }
    metrics.join("  ")
}

/// `top-1 91.2 %`
pub(crate) fn metric(metric: &Metric) -> String {
    format!("{} {}", task::title(&clean(&metric.name)), value(metric))
}

/// `91.2 %`
pub(crate) fn value(metric: &Metric) -> String {
    match metric.is_fraction && metric.value.is_finite() {
        true => human::percent(metric.value),
        false => task::display_value(&metric.name, metric.value),
    }
}

/// The best evaluation, unless it is the latest one, which is always shown.
fn best(status: &GetStatusResponse) -> Option<&EvaluatedStep> {
    let latest = status.evaluation.as_ref().map(|latest| latest.step);
    status.best.as_ref().filter(|best| Some(best.step) != latest)
}

/// The metric by which evaluations are compared.
pub(crate) fn score(accuracy: &Accuracy) -> String {
    accuracy.score().as_ref().map(value).unwrap_or_default()
}

/// The problem of the newest save, and what follows from it.
pub(crate) fn save_problem(status: &GetStatusResponse) -> Option<String> {
    let problem = status.save_problem.as_ref()?;
    let has_steps_left = |step: &Step| step.step < step.total_steps;
    let is_last = status.drain.is_some() || !status.latest.as_ref().is_some_and(has_steps_left);
    let what = match (status.phase(), is_last) {
        (Phase::Training, false) => "FAILS, training continues",
        (Phase::Training | Phase::Draining, true) => {
            "FAILS, the ranks keep the state and try again"
        }
        _ => "FAILED",
    };
    Some(format!("{what}: {problem}"))
}

/// The last checkpoint, if there is one.
pub(crate) fn checkpoint(status: &GetStatusResponse) -> Option<String> {
    let checkpoint = status.checkpoint.as_ref()?;
    let age = match status.checkpoint_age_seconds {
        Some(seconds) => format!("  {} ago", human::duration(seconds)),
        None => String::new(),
    };
    let size = human::bytes(checkpoint.bytes);
    let took = checkpoint.took.map_or(String::new(), |took| {
        let stall = 1000.0 * took.stall_seconds;
        format!("  written in {:.1} s, training stalled for {stall:.0} ms", took.seconds)
    });
    let name = clean(&checkpoint.name);
    Some(format!("{name}  step {}  {size}{age}{took}", checkpoint.step))
}

/// The newest local checkpoint, and the nodes that have it, the first few by name.
pub(crate) fn local_checkpoint(local: &LocalCheckpoint) -> String {
    let nodes = local.nodes.iter().map(|node| clean(node).into_owned());
    let nodes = first_names(nodes, SHOWN_NODES);
    format!("step {}  on {}  written in {:.1} s", local.step, nodes, local.seconds)
}

/// An event with its time; `day` decides whether the date is shown.
pub(crate) fn event(event: &WatchEventsResponse, day: Day, paint: Paint) -> String {
    let seconds = event.unix_millis / 1_000;
    let when = match day {
        Day::Shown => human::utc(seconds),
        Day::Hidden => human::utc_time_of_day(seconds),
    };
    format!("{when}  {}", paint.kind(event.kind(), &clean(&event.message)))
}

/// A log line with its writer, and before it the number of lines left out.
pub(crate) fn log_line(line: &StreamLogsResponse, paint: Paint) -> String {
    let writer = writer(line);
    let prefix = match line.rank {
        Some(rank) => paint.rank(rank, &writer),
        None => paint.bold(&writer),
    };
    let text = format!("{prefix} │ {}", clean(&line.line));
    match line.left_out {
        0 => text,
        lines => format!("{prefix} │ … {} left out\n{text}", human::count(lines, "line")),
    }
}

/// The writer of a line: `rank 3`, `a/1` for a process of node a that is no longer a rank, `agent a` or `coordinator`.
pub(crate) fn writer(line: &StreamLogsResponse) -> String {
    let node = clean(&line.node_id);
    match (line.rank, line.local_rank) {
        (Some(rank), _) => format!("rank {rank}"),
        (None, Some(local_rank)) => format!("{node}/{local_rank}"),
        (None, None) if node.is_empty() => "coordinator".to_owned(),
        (None, None) => format!("agent {node}"),
    }
}

/// Whether a time is shown with its date.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Day {
    Shown,
    Hidden,
}

// ---- several lines ----

/// Maximum number of recoveries in a status.
const MAX_RECOVERIES: usize = 5;

/// `baton status`.
pub(crate) fn status(status: &GetStatusResponse, paint: Paint) -> String {
    let name = if status.name.is_empty() { "no job".into() } else { clean(&status.name) };
    let mut lines = vec![format!(
        "{}  {}  (for {}, generation {})",
        paint.bold(&name),
        phase_line(status, paint),
        human::duration(status.phase_seconds),
        status.generation
    )];
    let mut add = |name: &str, text: Option<String>| {
        if let Some(text) = text {
            lines.push(format!("  {:<12}{}", clean(name), clean(&text)));
        }
    };
    add("paused", status.pause.as_ref().map(pause));
    let idle = status.phase() == Phase::Idle;
    add("start", idle.then(|| "`baton submit RECIPE` starts a job".to_owned()));
    add("deadline", status.drain.as_ref().map(drain));
    add("progress", status.latest.as_ref().map(|step| progress(step, status)));
    add("step", status.latest.as_ref().map(numbers));
    add("now", status.evaluating.as_ref().map(evaluating));
    add("evaluation", status.evaluation.as_ref().map(evaluation));
    for text in status.evaluation.iter().flat_map(|evaluated| &evaluated.texts) {
        add("wrote", Some(generated(text)));
    }
    add("best", best(status).map(evaluation));
    add("started", status.began_with.clone());
    add("checkpoint", checkpoint(status));
    add("local", status.local_checkpoint.as_ref().map(local_checkpoint));
    add("saving", save_problem(status));
    let location = &status.checkpoint_location;
    add("stored in", Some(location.clone()).filter(|location| !location.is_empty()));
    add("ranks", ranks(&status.ranks));
    for rank in &status.ranks {
        add(&format!("rank {}", rank.rank), rank_line(rank));
    }
    add("skipped", skipped(status));
    add("nodes", nodes(&status.nodes));
    for node in &status.nodes {
        add(&format!("node {}", node.node_id), node_line(node));
    }
    add("spent", status.spending.as_ref().and_then(spending));
    add("cost", status.spending.as_ref().and_then(rates));
    add("lost", status.spending.as_ref().and_then(lost));
    for incident in &status.incidents {
        add("diverged", Some(self::incident(incident)));
    }
    let earlier = status.recoveries.len().saturating_sub(MAX_RECOVERIES);
    let all = human::grouped(status.recoveries_total);
    add("recoveries", (earlier > 0).then(|| format!("{all}; `baton recoveries` shows all")));
    for recovery in &status.recoveries[earlier..] {
        let is_current = current_recovery(status) == Some(recovery);
        add("recovery", Some(self::recovery(recovery, is_current)));
    }
    let stale = status.stale_messages;
    add("rejected", (stale > 0).then(|| human::count(stale, "stale message")));
    lines.join("\n")
}

/// `97 s left to save and stop; stops after step 441 (0.4 s), copied (0.5 s), durable (…)`
pub(crate) fn drain(drain: &v1::DrainStatus) -> String {
    let mut text = format!("{} left to save and stop", human::duration(drain.seconds_left));
    if let Some(step) = drain.stop_step {
        let stages = [
            (format!("stops after step {step}"), drain.agreed_after_seconds),
            ("copied".to_owned(), drain.copied_after_seconds),
            ("durable".to_owned(), drain.durable_after_seconds),
        ];
        let stages = stages.map(|(stage, after)| match after {
            Some(seconds) => format!("{stage} ({seconds:.1} s)"),
            None => format!("{stage} (…)"),
        });
        text += &format!("; {}", stages.join(", "));
    }
    text
}

fn progress(step: &Step, status: &GetStatusResponse) -> String {
    let position = Position::new(step, status.epochs);
    let eta = match status.eta_seconds {
        Some(seconds) => format!("  {} left", human::duration(seconds)),
        None => String::new(),
    };
    format!(
        "epoch {}/{}, step {}/{}  {} {}{eta}",
        position.epoch,
        status.epochs,
        step.step,
        step.total_steps,
        bar(position.share, 24),
        human::percent(position.share)
    )
}

/// `for 2 min 00 s: the GPUs are needed; `baton resume` continues`
fn pause(pause: &PauseStatus) -> String {
    let PauseStatus { reason, seconds } = pause;
    format!("for {}: {reason}; `baton resume` continues", human::duration(*seconds))
}

pub(crate) fn bar(share: f64, width: usize) -> String {
    // NaN is cast to 0.
    let full = ((share * width as f64) as usize).min(width);
    format!("{}{}", "█".repeat(full), "░".repeat(width - full))
}

/// Ranks by state: `training 0-6; starting 7`.
fn ranks(ranks: &[RankStatus]) -> Option<String> {
    let mut states: Vec<&str> = Vec::new();
    for rank in ranks {
        if !states.contains(&rank.state.as_str()) {
            states.push(&rank.state);
        }
    }
    let numbers = |state: &str| {
        let of_state = ranks.iter().filter(|rank| rank.state == state).map(|rank| rank.rank);
        spans(of_state.collect())
    };
    let parts: Vec<String> =
        states.iter().map(|state| format!("{state} {}", numbers(state))).collect();
    (!parts.is_empty()).then(|| parts.join("; "))
}

/// `0-3, 7` for 0, 1, 2, 3, 7.
fn spans(mut numbers: Vec<u32>) -> String {
    numbers.sort_unstable();
    let mut spans: Vec<(u32, u32)> = Vec::new();
    for number in numbers {
        match spans.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
            _ => spans.push((number, number)),
        }
    }
    let parts: Vec<String> = spans
        .iter()
        .map(|(first, last)| match first == last {
            true => first.to_string(),
            false => format!("{first}-{last}"),
        })
        .collect();
    parts.join(", ")
}

/// Age of a rank's last heartbeat from which it is shown, seconds.
const STALE_HEARTBEAT_SECONDS: f64 = 5.0;

/// `step 440  own time 0.512 s/step  loader wait 3.1 %, queue 6/8`, followed by anything unusual.
fn rank_line(rank: &RankStatus) -> Option<String> {
    let mut parts = Vec::new();
    if let Some(heartbeat) = &rank.heartbeat {
        parts.push(format!("step {}", heartbeat.step));
        if heartbeat.own_step_seconds > 0.0 {
            parts.push(format!("own time {:.3} s/step", heartbeat.own_step_seconds));
        }
    }
    if let Some(Loader { wait, ready, capacity, .. }) = &rank.loader {
        parts.push(format!("loader wait {}, queue {ready}/{capacity}", human::percent(*wait)));
    }
    if let Some(slowdown) = rank.slowdown.filter(|slowdown| *slowdown >= 1.5) {
        parts.push(format!("SLOW: {slowdown:.1} times the median"));
    }
    if let Some(heartbeat) =
        rank.heartbeat.as_ref().filter(|heartbeat| heartbeat.seconds >= STALE_HEARTBEAT_SECONDS)
    {
        parts.push(format!("{} for {:.0} s", heartbeat.activity().name(), heartbeat.seconds));
    }
    if let Some(age) = rank.heartbeat_age_seconds.filter(|age| *age >= STALE_HEARTBEAT_SECONDS) {
        parts.push(format!("NO HEARTBEAT for {age:.0} s"));
    }
    parts.extend(rank.gpu.as_ref().map(|gpu| format!("GPU {}: {}", gpu.index, self::gpu(gpu))));
    (!parts.is_empty()).then(|| parts.join("  "))
}

/// `87.0 % busy, 31.2 GB of 80.0 GB, 61 °C, 320 W`
fn gpu(gpu: &Gpu) -> String {
    let memory = used_of(gpu.memory_used, gpu.memory_total);
    let mut parts = vec![memory];
    parts.splice(..0, gpu.utilisation.map(|share| format!("{} busy", human::percent(share))));
    parts.extend(gpu.celsius.map(|celsius| format!("{celsius:.0} °C")));
    parts.extend(gpu.watts.map(|watts| format!("{watts:.0} W")));
    parts.join(", ")
}

fn used_of(used: u64, total: u64) -> String {
    format!("{} of {}", human::bytes(used), human::bytes(total))
}

/// An agent's report about its machine, and about the connection to it.
fn node_line(node: &NodeStatus) -> Option<String> {
    let mut parts = Vec::new();
    parts.extend(node.host.as_ref().map(host));
    parts.extend(
        node.heartbeat_age_seconds.map(|age| format!("last heartbeat {}", human::ago(age))),
    );
    let millis = |seconds: f64| format!("round trip {:.1} ms", 1_000.0 * seconds);
    parts.extend(node.round_trip_seconds.map(millis));
    (!parts.is_empty()).then(|| parts.join("  "))
}

/// `31.0 % of 16 cores, memory 12.3 GB of 64.0 GB, disk 100.0 GB of 500.0 GB free, net 1.2 MB/s in, 3.4 MB/s out`
fn host(host: &Host) -> String {
    let per_second = |bytes: f64| human::bytes(bytes as u64);
    format!(
        "{} of {}, memory {}, disk {} free, net {}/s in, {}/s out",
        human::percent(host.cpu),
        human::count(u64::from(host.cpus), "core"),
        used_of(host.memory_used, host.memory_total),
        used_of(host.disk_free, host.disk_total),
        per_second(host.received_per_second),
        per_second(host.sent_per_second)
    )
}

/// `12 bad samples; the last of rank 3: …` with the rank that skipped most; `None` without skipped samples.
fn skipped(status: &GetStatusResponse) -> Option<String> {
    let count = Some(status.skipped_samples).filter(|count| *count > 0)?;
    let count = human::count(count, "bad sample");
    let example = |rank: &RankStatus| {
        let loader = rank.loader.as_ref()?;
        Some((loader.skipped, rank.rank, loader.last_skipped.clone()?))
    };
    Some(match status.ranks.iter().filter_map(example).max_by_key(|(skipped, ..)| *skipped) {
        Some((_, rank, last)) => format!("{count}; the last of rank {rank}: {last}"),
        None => count,
    })
}

fn nodes(nodes: &[v1::NodeStatus]) -> Option<String> {
    let describe = |node: &v1::NodeStatus| {
        let down = if node.attached { "" } else { ", down" };
        format!("{} ({}{down})", node.node_id, human::count(u64::from(node.slots), "rank"))
    };
    let parts: Vec<String> = nodes.iter().map(describe).collect();
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// `rank 1: killed: recovered in 0.52 s (detect 0.01 s, …), 1 step lost`, or the parts finished so far.
pub(crate) fn recovery(recovery: &Recovery, is_current: bool) -> String {
    let part = |(name, seconds): (&str, Option<f64>)| {
        seconds.map(|seconds| format!("{name} {seconds:.2} s"))
    };
    let parts: Vec<String> = recovery_parts(recovery).into_iter().filter_map(part).collect();
    let parts = if parts.is_empty() { String::new() } else { format!(" ({})", parts.join(", ")) };
    let cause = &recovery.cause;
    let lost = human::count(recovery.lost_steps, "step");
    match recovery.total_seconds {
        Some(total) if recovery.planned => format!("{cause}: resumed after {total:.2} s{parts}"),
        Some(total) => format!("{cause}: recovered in {total:.2} s{parts}, {lost} lost"),
        None if is_current => format!("{cause}: recovering{parts}"),
        None => format!("{cause}: ended before the first step{parts}"),
    }
}

/// The parts of a recovery with their names, in order.
pub(crate) fn recovery_parts(recovery: &Recovery) -> [(&'static str, Option<f64>); 6] {
    [
        ("detect", recovery.detect_seconds),
        ("tear down", recovery.tear_down_seconds),
        ("respawn", recovery.respawn_seconds),
        ("rendezvous", recovery.rendezvous_seconds),
        ("restore", recovery.restore_seconds),
        ("first step", recovery.first_step_seconds),
    ]
}

/// The recovery in progress: the last one, unless it has ended or its generation has failed too.
pub(crate) fn current_recovery(status: &GetStatusResponse) -> Option<&Recovery> {
    let is_current =
        |last: &&Recovery| last.total_seconds.is_none() && last.generation == status.generation;
    status.recoveries.last().filter(is_current).filter(|_| status.outcome.is_none())
}

/// The cause of an incident and the action taken, with the generation that took over, if one did.
pub(crate) fn incident(incident: &Incident) -> String {
    let Incident { cause, remedy, .. } = incident;
    match &incident.rollback {
        Some(rollback) => format!("{cause}: {remedy}, generation {}", rollback.generation),
        None => format!("{cause}: {remedy}"),
    }
}

fn hours(hours: f64) -> String {
    human::duration(hours * 3_600.0)
}

/// `1 h 15 min of 2 h 00 min  $5.00, $8.00 at end  62.5 % of the budget`; `None` before the first node joined.
pub(crate) fn spending(spending: &Spending) -> Option<String> {
    let limit = spending.most_hours.map(|limit| format!(" of {}", hours(limit)));
    let dollars = spending.dollars.map(|dollars| format!("  ${dollars:.2}"));
    let projected = spending.projected_dollars.map(|dollars| format!(", ${dollars:.2} at end"));
    let used = spending.used.map(|used| format!("  {} of the budget", human::percent(used)));
    (spending.hours > 0.0 || limit.is_some()).then(|| {
        let parts = [limit, dollars, projected, used].map(Option::unwrap_or_default);
        hours(spending.hours) + &parts.concat()
    })
}

/// `$4.00 per hour, $0.31 per epoch`; `None` without a price.
pub(crate) fn rates(spending: &Spending) -> Option<String> {
    let per_hour = spending.dollars_per_hour.map(|dollars| format!("${dollars:.2} per hour"));
    let per_epoch = spending.dollars_per_epoch.map(|dollars| format!("${dollars:.2} per epoch"));
    let parts: Vec<String> = per_hour.into_iter().chain(per_epoch).collect();
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// `3 min 00 s ($0.20) by interruptions, 12 min 00 s paused`; `None` if no time was lost.
pub(crate) fn lost(spending: &Spending) -> Option<String> {
    let mut parts = Vec::new();
    if spending.interruption_hours > 0.0 {
        let dollars = spending.interruption_dollars.map(|dollars| format!(" (${dollars:.2})"));
        let time = hours(spending.interruption_hours);
        parts.push(format!("{time}{} by interruptions", dollars.unwrap_or_default()));
    }
    if spending.paused_hours > 0.0 {
        parts.push(format!("{} paused", hours(spending.paused_hours)));
    }
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// The run's files and settings that the text about its end mentions.
pub(crate) struct RunInfo<'a> {
    /// The recipe file, as the user typed it.
    pub(crate) recipe: &'a Path,
    /// The changes to the recipe, as the user typed them.
    pub(crate) overrides: &'a [String],
    /// The run folder.
    pub(crate) run_dir: &'a Path,
    /// Whether the run folder gets the job's report, which says where its checkpoints are.
    pub(crate) is_reported: bool,
    /// The recipe's validation set.
    pub(crate) validation_set: &'a str,
    /// Whether `baton-worker eval` can evaluate the model.
    pub(crate) evaluates: bool,
}

/// How the job ended, its results, and the next commands.
pub(crate) fn ending(status: &GetStatusResponse, outcome: &Outcome, run: &RunInfo<'_>) -> String {
    let mut lines = vec![format!("{}: {outcome}", status.name)];
    lines.extend(
        status.evaluation.as_ref().map(|latest| format!("  accuracy    {}", evaluation(latest))),
    );
    lines.extend(best(status).map(|best| format!("  best        {}", evaluation(best))));
    lines.extend(skipped(status).map(|count| format!("  skipped     {count}")));
    if let Some(checkpoint) = &status.checkpoint {
        let location = status.checkpoint_location.trim_end_matches('/');
        lines.push(format!("  checkpoint  {location}/{}", checkpoint.name));
    }
    if status.checkpoint.is_some() {
        let (name, place) = match run.is_reported {
            true => (&status.name, format!("--run-dir {}", run.run_dir())),
            false => (&status.name, format!("--dir {}", shell_quoted(&status.checkpoint_location))),
        };
        lines.push("next commands:".to_owned());
        lines.push(format!("  baton checkpoint ls {place}"));
        lines.push(format!("  baton checkpoint export {place} --out {name}.safetensors"));
        if run.evaluates {
            lines.push(format!(
                "  baton-worker eval --weights {name}.safetensors --data {} --recipe {}",
                shell_quoted(run.validation_set),
                run.recipe()
            ));
        }
    }
    if let Outcome::Failed { .. } = outcome {
        lines.push(format!("logs: {}", run.run_dir.join("logs").display()));
    }
    lines.join("\n")
}

/// The command that trains the same job from fresh weights.
pub(crate) fn fresh_start_command(run: &RunInfo<'_>) -> String {
    format!("baton up {} --run-dir {} --no-auto-resume", run.recipe(), run.run_dir())
}

impl RunInfo<'_> {
    fn run_dir(&self) -> String {
        shell_quoted(&self.run_dir.display().to_string())
    }

    /// The recipe with its changes, as arguments of a command.
    fn recipe(&self) -> String {
        let file = shell_quoted(&self.recipe.display().to_string());
        let set = |entry: &String| format!(" --set {}", shell_quoted(entry));
        file + &self.overrides.iter().map(set).collect::<String>()
    }
}

/// `text` quoted as one word for a shell.
fn shell_quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,@%+".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests;
