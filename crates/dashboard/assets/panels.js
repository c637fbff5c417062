// The parts of the page that show the status. `elapsed` is the time since it was sent, seconds; it is added to ages.

import { NONE, bytes, clock, decimal, dollars, duration, metricNumber, metricValue, percent, whole } from "./format.js";
import { byId, element, fillTable, setText, show } from "./page.js";

/** Most rows of a table; longer tables are slow and not useful. */
const MAX_ROWS = 200;

/** Phases in which training is stalled. */
const STALLED = new Set(["gathering", "backoff", "forming", "meeting", "detecting", "reattaching"]);

/** The parts of a recovery, in order. */
const PARTS = [
  ["detect_seconds", "detect"],
  ["tear_down_seconds", "tear down"],
  ["respawn_seconds", "respawn"],
  ["rendezvous_seconds", "rendezvous"],
  ["restore_seconds", "restore"],
  ["first_step_seconds", "first step"],
];

/** Time for which the banner shows an ended recovery, seconds. */
const SHOW_RECOVERY_SECONDS = 60;

const OUTCOMES = {
  completed: "Completed: all epochs are done",
  drained: "Drained: the state is saved; the same command continues",
  limit_reached: "A limit is reached: the state is saved",
  stopped: "Stopped without a save",
  failed: "Failed",
};

const plus = (seconds, elapsed) => (typeof seconds === "number" ? seconds + elapsed : null);
const minus = (seconds, elapsed) => (typeof seconds === "number" ? Math.max(0, seconds - elapsed) : null);
const hours = (value) => duration(value * 3600);
const plural = (count, one, many = `${one}s`) => `${whole(count)} ${count === 1 ? one : many}`;

export const drawHead = (status, elapsed) => {
  const name = status.name || (status.phase === "idle" ? "No job yet" : "Baton");
  setText(byId("name"), name);
  const title = `${name}: ${status.phase}`;
  if (document.title !== title) document.title = title;
  const phase = byId("phase");
  setText(phase, status.phase);
  phase.dataset.phase = STALLED.has(status.phase) ? "stalled" : status.phase;
  const since = duration(plus(status.phase_seconds, elapsed));
  const outcome = status.outcome
    ? [OUTCOMES[status.outcome.kind] ?? status.outcome.kind, status.outcome.reason].filter(Boolean).join(": ")
    : null;
  setText(byId("reason"), outcome ?? `${status.reason || status.phase} (for ${since})`);
  drawBanner(status, elapsed);
  drawProgress(status, elapsed);
  setText(byId("about"), [
    `baton ${status.coordinator_version}`.trim(),
    status.coordinator_started_unix_seconds
      ? `coordinator up for ${duration(Date.now() / 1000 - status.coordinator_started_unix_seconds)}`
      : "",
    status.job_id ? `job ${status.job_id}` : "",
  ].filter(Boolean).join(" · "));
};

/** The recovery in progress: the last one, unless it has ended, or a later generation or the job's end cut it short. */
const currentRecovery = ({ phase, generation, recoveries }) => {
  const last = recoveries.at(-1);
  return phase !== "ended" && last?.total_seconds === null && last.generation === generation ? last : null;
};

/** The banner: an interruption, the resume after it, a drain, a pause, a failed save. */
const drawBanner = (status, elapsed) => {
  const lines = [];
  let isGood = false;
  const latest = status.recoveries[status.recoveries.length - 1];
  const isOver = status.phase === "ended";
  if (currentRecovery(status)) {
    const parts = PARTS.filter(([field]) => latest[field] !== null);
    const next = PARTS[parts.length]?.[1] ?? "first step";
    lines.push(`${latest.planned ? "Nodes changed" : "Interrupted"}: ${latest.cause}. Recovering for ` +
      `${duration(plus(latest.age_seconds, elapsed))}, now: ${next} (${status.reason || status.phase}).`);
  } else if (STALLED.has(status.phase) && status.latest) {
    lines.push(`Training is stalled: ${status.reason || status.phase}.`);
  } else if (latest && latest.total_seconds !== null && status.phase === "training") {
    const ago = plus(latest.age_seconds, elapsed) - latest.total_seconds;
    if (ago < SHOW_RECOVERY_SECONDS) {
      isGood = true;
      lines.push(`Resumed ${duration(ago)} ago, after ${duration(latest.total_seconds)}: ${latest.cause}. ` +
        `${plural(latest.lost_steps, "step")} repeated.`);
    }
  }
  if (status.drain && !isOver) {
    const { reason, seconds_left: left, stop_step: step } = status.drain;
    lines.push(`Saving and stopping${step === null ? "" : ` after step ${whole(step)}`}: ${reason}; ` +
      `${duration(minus(left, elapsed))} left.`);
  }
  if (status.pause && !isOver) {
    lines.push(`Paused for ${duration(plus(status.pause.seconds, elapsed))}: ${status.pause.reason || "requested by a user"}. ` +
      "The machines still cost money.");
  }
  if (status.save_problem) lines.push(`The newest save failed: ${status.save_problem}`);
  const banner = byId("trouble");
  setText(banner, lines.join("\n"));
  banner.className = isGood && lines.length === 1 ? "banner good" : "banner warn";
  show(banner, lines.length > 0);
};

/** `evaluating: 1,200 of 5,000 samples, 9 s to go`; empty if there is no evaluation in progress. */
const evaluating = (progress, elapsed) => {
  if (!progress) return "";
  const left = minus(progress.seconds_left ?? null, elapsed);
  const { texts, total_texts: all } = progress;
  return `evaluating: ${whole(progress.samples)} of ${whole(progress.total)} samples` +
    (all > 0 ? `, ${whole(texts)} of ${whole(all)} texts written` : "") +
    (left === null ? "" : `, ${duration(left)} to go`);
};

const drawProgress = (status, elapsed) => {
  const { latest } = status;
  show(byId("progress"), Boolean(latest));
  if (!latest) return;
  const share = latest.total_steps > 0 ? Math.min(1, latest.step / latest.total_steps) : 0;
  byId("bar").value = share;
  const eta = minus(status.eta_seconds, elapsed);
  setText(byId("progress-text"), [
    percent(share),
    `epoch ${whole(Math.min(latest.epoch + 1, status.epochs || latest.epoch + 1))} of ${whole(status.epochs)}`,
    `step ${whole(latest.step)} of ${whole(latest.total_steps)}`,
    latest.resolution > 0 ? `${latest.resolution} px` : "",
    `batch ${whole(latest.global_batch)}`,
    eta === null ? "" : `${duration(eta)} to go`,
    evaluating(status.evaluating, elapsed),
  ].filter(Boolean).join(" · "));
};

export const drawFigures = (status, elapsed) => {
  const { latest, evaluation, best, spending, checkpoint, local_checkpoint: local } = status;
  const score = (found) => metricValue(found?.metrics[0]);
  const of = (found, text) => (found ? `${text} step ${whole(found.step)}` : "");
  const interruptions = status.recoveries_total;
  const figures = [
    ["Loss", decimal(latest?.loss, 4), latest?.gradient_norm == null ? "" : `gradient ${decimal(latest.gradient_norm)}`],
    ["Best validation", score(best), of(best, "at")],
    ["Last validation", score(evaluation),
      [of(evaluation, "at"), evaluation?.extent === "subset" ? "part of the set" : "",
        evaluation?.ema ? `averaged ${score(evaluation.ema)}` : ""].filter(Boolean).join(", ")],
    ["Learning rate", decimal(latest?.lr, 4), latest?.loss_scale == null ? "" : `loss scale ${whole(latest.loss_scale)}`],
    ["Samples per second", decimal(latest?.samples_per_second, 1), ""],
    ["Loader wait", percent(latest?.loader_wait), status.skipped_samples ? `${whole(status.skipped_samples)} samples skipped` : ""],
    ["Machine time", hours(spending.hours), spending.paused_hours > 0 ? `paused ${hours(spending.paused_hours)}` : ""],
    ["Cost so far", dollars(spending.dollars),
      spending.dollars_per_hour === null ? "no price set" : `at ${dollars(spending.dollars_per_hour)}/h`],
    ["Cost per epoch", dollars(spending.dollars_per_epoch), ""],
    ["Projected cost", dollars(spending.projected_dollars), ""],
    ["Interruptions", whole(interruptions),
      `${hours(spending.interruption_hours)}${spending.interruption_dollars === null ? "" : `, ${dollars(spending.interruption_dollars)}`}`],
    ["Median recovery", duration(medianRecovery(status.recoveries)), ""],
    ["Goodput", percent(goodput(spending)), "share of the machine time without interruptions and pauses"],
    ["Budget used", percent(spending.used),
      spending.most_hours === null ? (spending.used === null ? "no limit" : "") : `of ${decimal(spending.most_hours, 1)} h`],
    ["Last checkpoint", checkpoint ? `step ${whole(checkpoint.step)}` : NONE,
      status.checkpoint_age_seconds === null ? "" : `${duration(plus(status.checkpoint_age_seconds, elapsed))} ago`],
    ...(local ? [["Local checkpoint", `step ${whole(local.step)}`, `on ${local.nodes.join(", ")}`]] : []),
  ];
  const list = byId("figures");
  if (list.children.length !== figures.length) {
    list.replaceChildren(...figures.map(() =>
      element("div", {}, element("dt"), element("dd"), element("dd", { class: "quiet" }))));
  }
  figures.forEach((texts, index) => texts.forEach((text, at) => setText(list.children[index].children[at], text)));
};

/** Share of the machine time without interruptions and pauses, 0..1; null without machine time. */
const goodput = ({ hours: all, interruption_hours: interrupted, paused_hours: paused }) =>
  (all > 0 ? Math.min(1, Math.max(0, 1 - (interrupted + paused) / all)) : null);

/** Median duration of the recoveries that have ended, seconds. */
const medianRecovery = (recoveries) => {
  const seconds = recoveries.map((it) => it.total_seconds).filter((it) => it !== null).sort((a, b) => a - b);
  const at = (seconds.length - 1) / 2;
  return seconds.length ? (seconds[Math.floor(at)] + seconds[Math.ceil(at)]) / 2 : null;
};

/** Sort key of a rank, larger is worse: lost ranks first, then those that delay the others. */
const badness = (rank) => {
  if (rank.state === "gone" || rank.state === "unknown") return 1e9;
  return (rank.slowdown ?? 0) + (rank.heartbeat_age_seconds ?? 0) / 10 + (rank.loader?.wait ?? 0);
};

export const drawRanks = (status, elapsed, isWorstFirst) => {
  const { ranks } = status;
  const sorted = isWorstFirst ? [...ranks].sort((a, b) => badness(b) - badness(a) || a.rank - b.rank) : ranks;
  const shown = sorted.slice(0, MAX_ROWS);
  const hasGpu = ranks.some((rank) => rank.gpu);
  const gpu = [
    { head: "GPU", cell: ({ gpu: it }) => it?.name ?? NONE },
    { head: "GPU use", number: true, cell: ({ gpu: it }) => percent(it?.utilisation, 0) },
    { head: "GPU memory", number: true, cell: ({ gpu: it }) => (it ? `${bytes(it.memory_used)} / ${bytes(it.memory_total)}` : NONE) },
    { head: "°C", number: true, cell: ({ gpu: it }) => decimal(it?.celsius, 0), mark: ({ gpu: it }) => (it?.celsius >= 85 ? "warn" : "") },
    { head: "W", number: true, cell: ({ gpu: it }) => decimal(it?.watts, 0) },
  ];
  const age = (rank) => plus(rank.heartbeat_age_seconds, elapsed);
  const columns = [
    { head: "Rank", number: true, cell: (rank) => String(rank.rank) },
    { head: "Node", cell: (rank) => `${rank.node}:${rank.local_rank}` },
    { head: "State", cell: (rank) => rank.state, mark: (rank) => (/^(gone|unknown)$/.test(rank.state) ? "bad" : "") },
    { head: "Activity", cell: ({ heartbeat }) => (heartbeat ? `${heartbeat.activity}${heartbeat.seconds >= 2 ? ` for ${duration(heartbeat.seconds)}` : ""}` : NONE) },
    { head: "Step", number: true, cell: ({ heartbeat }) => whole(heartbeat?.step) },
    { head: "Own time", number: true, cell: ({ heartbeat }) => (heartbeat?.own_step_seconds ? duration(heartbeat.own_step_seconds) : NONE) },
    { head: "Slowdown", number: true, cell: (rank) => (rank.slowdown === null ? NONE : `${decimal(rank.slowdown, 2)} ×`), mark: (rank) => (rank.slowdown > 1.2 ? "warn" : "") },
    { head: "Loader wait", number: true, cell: ({ loader }) => percent(loader?.wait, 0), mark: ({ loader }) => (loader?.wait > 0.2 ? "warn" : "") },
    { head: "Skipped", number: true, cell: ({ loader }) => whole(loader?.skipped) },
    ...(hasGpu ? gpu : []),
    { head: "Last report", number: true, cell: (rank) => (age(rank) === null ? NONE : `${duration(age(rank))} ago`), mark: (rank) => (age(rank) > 10 ? "bad" : "") },
  ];
  const more = ranks.length - shown.length;
  const caption = ranks.length === 0 ? "No ranks yet."
    : `${plural(ranks.length, "rank")} of generation ${whole(status.generation)}${more > 0 ? `; ${MAX_ROWS} shown, and ${whole(more)} more` : ""}`;
  fillTable(byId("ranks"), caption, columns, shown);
};

export const drawHosts = (status, elapsed) => {
  const shown = status.nodes.slice(0, MAX_ROWS);
  const more = status.nodes.length - shown.length;
  const of = (used, total) => `${bytes(used)} / ${bytes(total)}`;
  const columns = [
    { head: "Node", cell: (node) => (node.host?.name && node.host.name !== node.node ? `${node.node} (${node.host.name})` : node.node) },
    { head: "Agent", cell: (node) => (node.attached ? "connected" : "gone"), mark: (node) => (node.attached ? "" : "bad") },
    { head: "Ranks", number: true, cell: (node) => whole(node.slots) },
    { head: "CPU", number: true, cell: ({ host }) => (host ? `${percent(host.cpu, 0)} of ${whole(host.cpus)}` : NONE) },
    { head: "Memory", number: true, cell: ({ host }) => (host ? of(host.memory_used, host.memory_total) : NONE) },
    { head: "Disk free", number: true, cell: ({ host }) => (host ? of(host.disk_free, host.disk_total) : NONE), mark: ({ host }) => (host && host.disk_free < host.disk_total * 0.05 ? "warn" : "") },
    { head: "Received", number: true, cell: ({ host }) => (host ? `${bytes(host.received_per_second)}/s` : NONE) },
    { head: "Sent", number: true, cell: ({ host }) => (host ? `${bytes(host.sent_per_second)}/s` : NONE) },
    { head: "Round trip", number: true, cell: (node) => duration(node.round_trip_seconds) },
    { head: "Last report", number: true, cell: (node) => (node.heartbeat_age_seconds === null ? NONE : `${duration(plus(node.heartbeat_age_seconds, elapsed))} ago`) },
  ];
  const caption = status.nodes.length === 0 ? "No nodes yet."
    : `${plural(status.nodes.length, "node")}${more > 0 ? `; ${MAX_ROWS} shown, and ${whole(more)} more` : ""}`;
  fillTable(byId("hosts"), caption, columns, shown);
};

export const drawEvaluations = (evaluations) => {
  const shown = evaluations.slice(-MAX_ROWS).reverse();
  const metrics = evaluations.at(-1)?.metrics ?? [];
  const scores = metrics.map(({ name }) => [name, (found) => metricNumber(found?.metrics.find((it) => it.name === name))]);
  fillTable(byId("evaluations"), evaluations.length === 0 ? "None yet."
    : `${plural(evaluations.length, "evaluation")}${evaluations.length > shown.length ? `; the newest ${shown.length} are shown` : ", newest first"}`, [
    { head: "Step", number: true, cell: (it) => whole(it.step) },
    { head: "Set", cell: (it) => it.extent ?? NONE },
    ...scores.map(([head, cell]) => ({ head, number: true, cell })),
    ...scores.map(([head, cell]) => ({ head: `Averaged: ${head}`, number: true, cell: ({ ema }) => cell(ema) })),
  ], shown);
  const newest = evaluations.findLast(({ texts }) => texts?.length > 0);
  show(byId("written"), newest !== undefined);
  if (!newest) return;
  fillTable(byId("texts"), `Written by the model at step ${whole(newest.step)}.`, [
    { head: "Sample", number: true, cell: ({ sample }) => whole(sample) },
    { head: "Prompt", cell: ({ prompt }) => prompt },
    { head: "The sample's own text", cell: ({ reference }) => reference },
    { head: "The model's text", cell: ({ text }) => text },
  ], newest.texts);
};

/** A bar of a recovery's parts; the width of a part shows its duration. */
const partBar = (recovery, longest) => {
  const known = PARTS.filter(([field]) => recovery[field] !== null);
  const bar = element("div", { class: "parts", role: "img" });
  bar.setAttribute("aria-label", known.map(([field, name]) => `${name} ${duration(recovery[field])}`).join(", ") || "no part has ended yet");
  for (const [field, name] of known) {
    const part = element("span", { class: `part ${name.replace(" ", "-")}`, title: `${name} ${duration(recovery[field])}` });
    part.style.width = `${(100 * recovery[field]) / longest}%`;
    bar.append(part);
  }
  return bar;
};

const sum = (recovery) => PARTS.reduce((total, [field]) => total + (recovery[field] ?? 0), 0);

export const drawRecoveries = (status, elapsed) => {
  const newest = status.recoveries.slice(-MAX_ROWS).reverse();
  const current = currentRecovery(status);
  const longest = Math.max(1e-3, ...newest.map(sum));
  const legend = byId("parts");
  if (legend.children.length === 0) {
    legend.append(...PARTS.map(([, name]) =>
      element("li", {}, element("span", { class: `key part ${name.replace(" ", "-")}`, "aria-hidden": "true" }), name)));
  }
  show(legend, newest.length > 0);
  fillTable(byId("recoveries"), newest.length === 0 ? "None: nothing has failed, and no node joined or left."
    : `${plural(status.recoveries_total, "failure or planned change", "failures and planned changes")}${status.recoveries_total > newest.length ? `; the newest ${newest.length} are shown` : ", newest first"}`, [
    { head: "Ago", number: true, cell: (it) => duration(plus(it.age_seconds, elapsed)) },
    { head: "Generation", number: true, cell: (it) => whole(it.generation) },
    { head: "Cause", cell: (it) => `${it.cause}${it.planned ? " (planned)" : ""}` },
    { head: "Parts", node: (it) => partBar(it, longest) },
    { head: "Total", number: true, cell: (it) => (it.total_seconds === null ? (it === current ? "recovering" : "ended before the first step") : duration(it.total_seconds)), mark: (it) => (it === current ? "warn" : "") },
    { head: "Repeated", number: true, cell: (it) => whole(it.lost_steps) },
  ], newest);
};

export const drawDivergences = (status) => {
  const { divergences } = status;
  show(byId("divergence-section"), divergences.length > 0);
  fillTable(byId("divergences"), `${plural(divergences.length, "time")}, newest first`, [
    { head: "Generation", number: true, cell: (it) => whole(it.generation) },
    { head: "Step", number: true, cell: (it) => whole(it.step) },
    { head: "Epoch", number: true, cell: (it) => whole(it.epoch + 1) },
    { head: "Cause", cell: (it) => it.cause },
    { head: "Remedy", cell: (it) => it.remedy },
  ], divergences.slice(-MAX_ROWS).reverse());
};

export const drawCheckpoints = (status, listed) => {
  setText(byId("store"), status?.checkpoint_location ?? "");
  const shown = listed.slice(0, 50);
  fillTable(byId("checkpoints"), listed.length === 0 ? "None yet."
    : `${plural(listed.length, "checkpoint")}${listed.length > shown.length ? `; the newest ${shown.length} are shown` : ", newest first"}`, [
    { head: "Name", cell: (it) => it.name },
    { head: "Step", number: true, cell: ({ checkpoint }) => whole(checkpoint?.step) },
    { head: "Epoch", number: true, cell: (it) => (it.checkpoint ? whole(it.epoch) : NONE) },
    { head: "Score", number: true, cell: ({ checkpoint: it }) => metricValue(it?.metrics[0]) },
    { head: "Size", number: true, cell: ({ checkpoint }) => bytes(checkpoint?.bytes) },
    { head: "Stall", number: true, cell: ({ checkpoint }) => duration(checkpoint?.stall_seconds) },
    { head: "Written in", number: true, cell: ({ checkpoint }) => duration(checkpoint?.save_seconds) },
    { head: "Saved", cell: (it) => clock(it.created_unix_seconds * 1000) },
    { head: "State", cell: (it) => (it.complete ? "complete" : it.damage ?? "damaged"), mark: (it) => (it.complete ? "" : "bad") },
  ], shown);
};

/** Kinds of events that are marked as bad or as warnings. */
const BAD_EVENTS = new Set(["rank_failed", "node_lost", "save_failed", "store_unavailable", "diverged"]);
const WARNING_EVENTS = new Set(["draining", "straggler", "node_leaves", "coordinator_moved", "node_quarantined", "paused", "budget", "checkpoint_advised", "samples_skipped", "gpu_warning"]);

export const drawEvents = (events) => {
  const shown = events.slice(-MAX_ROWS).reverse();
  const mark = ({ kind }) => (BAD_EVENTS.has(kind) ? "bad" : WARNING_EVENTS.has(kind) ? "warn" : kind === "recovered" ? "good" : "");
  fillTable(byId("events"), events.length === 0 ? "None yet." : `The newest ${whole(shown.length)}, newest first`, [
    { head: "Time", cell: (it) => clock(it.unix_millis) },
    { head: "Event", cell: (it) => it.kind.replaceAll("_", " "), mark },
    { head: "Generation", number: true, cell: (it) => whole(it.generation) },
    { head: "Step", number: true, cell: (it) => whole(it.step) },
    { head: "Message", cell: (it) => it.message },
  ], shown);
};
