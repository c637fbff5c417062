// The dashboard: receives the job's status and events, draws them, and sends control requests.

import { addCharts } from "./curves.js";
import { Feed, ask, problemOf, token } from "./feed.js";
import { clock, duration } from "./format.js";
import { History } from "./history.js";
import { byId, element, setText, show } from "./page.js";
import {
  drawCheckpoints, drawDivergences, drawEvaluations, drawEvents, drawFigures, drawHead, drawHosts, drawRanks, drawRecoveries,
} from "./panels.js";

const MAX_EVENTS = 1000;
const MAX_LINES = 500;
/** Shortest time between two listings of checkpoints, ms: listing a bucket is slow and costs money. */
const LIST_INTERVAL_MS = 10_000;

const history = new History();
let status = null;
let statusAt = 0;
let events = [];
let checkpoints = [];
let areCurvesStale = true;
let isConnected = false;

// --- curves

const drawCharts = addCharts(byId("charts"));

// --- drawing, once a second and whenever data arrives

let isDrawScheduled = false;

const scheduleDraw = () => {
  if (isDrawScheduled) return;
  isDrawScheduled = true;
  requestAnimationFrame(() => {
    isDrawScheduled = false;
    draw();
  });
};

const draw = () => {
  drawConnection();
  if (areCurvesStale) {
    areCurvesStale = false;
    drawCharts(history);
    drawEvaluations(history.evaluations);
  }
  if (!status) return;
  const elapsed = isConnected ? (performance.now() - statusAt) / 1000 : 0;
  drawHead(status, elapsed);
  drawFigures(status, elapsed);
  drawRanks(status, elapsed, byId("worst").checked);
  drawHosts(status, elapsed);
  drawRecoveries(status, elapsed);
  drawDivergences(status);
  drawCheckpoints(status, checkpoints);
  drawEvents(events);
  drawControls();
};

const drawConnection = () => {
  const lost = byId("lost");
  show(lost, !isConnected && (status !== null || feed.problem !== null));
  announce();
  if (isConnected) return;
  const hint = status?.phase === "ended" ? " The job had ended, so the coordinator may have exited." : "";
  const problem = feed.problem ? `The coordinator answers: ${feed.problem}`
    : `No answer for ${duration(Math.round(feed.secondsSinceData()))}`;
  setText(lost, `${problem}; retrying.${hint}`);
};

/** Sets the text for screen readers: changes of phase and connection, but no running times. */
const announce = () => {
  const phase = status ? `The job is ${status.phase}.` : "";
  setText(byId("live-status"), isConnected || !status ? phase : "The coordinator does not answer; retrying.");
};

const drawControls = () => {
  const isOver = status.phase === "ended" || status.phase === "idle" || !isConnected;
  const isPaused = status.phase === "paused" || Boolean(status.pause);
  const isDraining = status.phase === "draining";
  const disabled = {
    checkpoint: isOver || isDraining || status.phase !== "training",
    pause: isOver || isDraining,
    resume: isOver || isDraining,
    drain: isOver || isDraining,
    stop: isOver,
  };
  for (const button of byId("controls").children) {
    const { action } = button.dataset;
    if (action === "pause") show(button, !isPaused);
    if (action === "resume") show(button, isPaused);
    if (button.disabled !== disabled[action]) button.disabled = disabled[action];
  }
};

// --- data from the coordinator

const feed = new Feed({
  status: (next) => {
    const isOtherJob = status?.job_id && next.job_id !== status.job_id;
    if (isOtherJob) feed.reset();
    status = next;
    statusAt = performance.now();
    scheduleDraw();
  },
  event: (event) => {
    events.push(event);
    if (events.length > MAX_EVENTS) events = events.slice(-MAX_EVENTS / 2);
    if (event.kind === "saved") listCheckpoints();
    scheduleDraw();
  },
  point: (point) => {
    history.add(point);
    areCurvesStale = true;
    scheduleDraw();
  },
  log: (line) => log.add(line),
  connected: () => {
    isConnected = true;
    log.reconnected();
    listCheckpoints();
    readRecipe();
    scheduleDraw();
  },
  lost: () => {
    isConnected = false;
    scheduleDraw();
  },
  refused: (problem) => logIn(problem),
  reset: () => {
    status = null;
    checkpoints = [];
    history.clear();
    events = [];
    areCurvesStale = true;
    scheduleDraw();
  },
});

const fetchJson = async (path) => {
  const response = await ask(path);
  if (!response.ok) throw new Error(await problemOf(response));
  return response.json();
};

let listedAt = -Infinity;
let listTimer = null;

const listCheckpoints = () => {
  if (listTimer !== null) return;
  const wait = Math.max(0, listedAt + LIST_INTERVAL_MS - performance.now());
  listTimer = setTimeout(async () => {
    listTimer = null;
    listedAt = performance.now();
    try {
      checkpoints = await fetchJson("/api/checkpoints");
      scheduleDraw();
    } catch {
      // Best effort: the next save or connection lists again.
    }
  }, wait);
};

const readRecipe = async () => {
  if (!byId("recipe").open) return;
  const text = byId("recipe").querySelector("pre");
  try {
    setText(text, (await fetchJson("/api/recipe")).toml);
  } catch (error) {
    setText(text, error.message);
  }
};

// --- the log

const log = {
  box: byId("log"),
  /** Whether the shown lines are from an old connection; the first line of the new one replaces them. */
  isStale: false,
  pending: [],

  add(line) {
    if (this.isStale) {
      this.isStale = false;
      this.box.replaceChildren();
      this.pending = [];
    }
    const selected = byId("log-rank").value.trim();
    if (selected !== "" && String(line.rank) !== selected) return;
    this.pending.push(line);
    if (this.pending.length > MAX_LINES) this.pending.shift();
    if (byId("log-pause").getAttribute("aria-pressed") === "false") this.draw();
  },

  /** A new connection starts with the newest lines again. */
  reconnected() {
    if (byId("log-rank").value.trim() === "") this.isStale = true;
  },

  draw() {
    const isAtEnd = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 40;
    const lines = this.pending.flatMap((line) => [
      ...(line.left_out ? [element("div", { class: "quiet" }, `… ${line.left_out} lines left out`)] : []),
      element("div", {}, element("span", { class: "quiet" }, `${clock(line.unix_millis)} ${this.source(line)} `), line.line),
    ]);
    this.pending = [];
    this.box.append(...lines);
    while (this.box.children.length > MAX_LINES) this.box.firstChild.remove();
    if (isAtEnd) this.box.scrollTop = this.box.scrollHeight;
  },

  source({ node, rank, local_rank: local }) {
    if (node === null) return "coordinator";
    if (rank !== null) return `rank ${rank}`;
    return local === null ? node : `${node}:${local}`;
  },

  /** Shows the newest lines of the selected rank. */
  async select() {
    const selected = byId("log-rank").value.trim();
    if (!/^\d*$/.test(selected)) return;
    try {
      const lines = await fetchJson(`/api/logs?tail=200${selected === "" ? "" : `&rank=${selected}`}`);
      if (byId("log-rank").value.trim() !== selected) return;
      this.isStale = false;
      this.box.replaceChildren();
      this.pending = lines;
      this.draw();
    } catch (error) {
      showNotice(error.message, true);
    }
  },
};

byId("log-rank").addEventListener("change", () => log.select());
byId("log-pause").addEventListener("click", ({ currentTarget: button }) => {
  const isPaused = button.getAttribute("aria-pressed") === "true";
  button.setAttribute("aria-pressed", String(!isPaused));
  if (isPaused) log.draw();
});

// --- tokens

const logIn = (problem) => new Promise((done) => {
  const dialog = byId("login");
  const field = byId("login-token");
  setText(byId("login-text"), token.get() ? problem : "Enter a token to see the job.");
  field.value = "";
  const submit = (event) => {
    event.preventDefault();
    token.set(field.value.trim());
    dialog.querySelector("form").removeEventListener("submit", submit);
    dialog.close();
    show(byId("forget"), true);
    done();
  };
  dialog.querySelector("form").addEventListener("submit", submit);
  if (!dialog.open) dialog.showModal();
});

// The dialog cannot be cancelled: without a token, there is nothing to show.
byId("login").addEventListener("cancel", (event) => event.preventDefault());

show(byId("forget"), Boolean(token.get()));
byId("forget").addEventListener("click", () => {
  token.forget();
  location.reload();
});

// --- control

const ACTIONS = {
  checkpoint: { done: "A checkpoint is saved after the current step." },
  resume: { done: "Training continues." },
  pause: {
    title: "Pause training?",
    text: "Training pauses after the current step, with its state in memory. The machines stay allocated and cost money.",
    yes: "Pause",
    takesReason: true,
    done: "Training pauses after the current step.",
  },
  drain: {
    title: "Drain the job?",
    text: "The state is saved after the current step, and the job ends. The same command continues from there.",
    yes: "Drain",
    takesReason: true,
    done: "The job is saved and stopped.",
  },
  stop: {
    title: "Stop without a save?",
    text: "Work since the last checkpoint is lost.",
    yes: "Stop now",
    done: "The job is stopped.",
  },
};

let noticeTimer = null;

const showNotice = (text, isBad = false) => {
  const notice = byId("notice");
  notice.classList.toggle("bad", isBad);
  // Show it first: screen readers do not read a live region that was hidden when its text changed.
  show(notice, true);
  requestAnimationFrame(() => setText(notice, text));
  clearTimeout(noticeTimer);
  noticeTimer = setTimeout(() => show(notice, false), 15_000);
};

const post = async (name, reason) => {
  try {
    const response = await ask(`/api/control/${name}`, {
      method: "POST",
      headers: { "content-type": "application/json", "x-baton-request": "1" },
      body: JSON.stringify(reason ? { reason } : {}),
    });
    if (response.ok) return showNotice(ACTIONS[name].done);
    const problem = await problemOf(response);
    const prefix = response.status === 403 ? "This needs an operator’s token: " : "Refused: ";
    showNotice(prefix + problem, true);
  } catch {
    showNotice("The coordinator did not answer; the request may have had no effect.", true);
  }
};

const confirm = byId("confirm");
let confirmedAction = null;

const request = (name) => {
  const action = ACTIONS[name];
  if (!action.title) return post(name);
  confirmedAction = name;
  setText(byId("confirm-title"), action.title);
  setText(byId("confirm-text"), action.text);
  setText(byId("confirm-yes"), action.yes);
  byId("confirm-yes").classList.toggle("danger", name === "stop");
  byId("confirm-reason").value = "";
  show(byId("confirm-why"), Boolean(action.takesReason));
  confirm.showModal();
  // The default is the button without an effect.
  byId("confirm-no").focus();
};

byId("controls").addEventListener("click", ({ target }) => {
  const name = target.closest("button")?.dataset.action;
  if (name) request(name);
});
byId("confirm-no").addEventListener("click", () => confirm.close());
confirm.querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  confirm.close();
  post(confirmedAction, byId("confirm-reason").value.trim());
});

// --- start

byId("worst").addEventListener("change", scheduleDraw);
byId("recipe").addEventListener("toggle", readRecipe);
document.addEventListener("visibilitychange", scheduleDraw);
setInterval(scheduleDraw, 1000);
feed.run();
