// The dashboard: follows the job, draws what it tells, and steers it.

import { addCharts } from "./curves.js";
import { Feed, ask, problemOf, token } from "./feed.js";
import { clock, duration } from "./format.js";
import { History } from "./history.js";
import { byId, element, setText, show } from "./page.js";
import {
  drawCheckpoints, drawDivergences, drawEvaluations, drawEvents, drawFigures, drawHead, drawHosts, drawRanks, drawRecoveries,
} from "./panels.js";

const MOST_EVENTS = 1000;
const MOST_LINES = 500;
/** Listing a bucket takes long and costs money. */
const LIST_EVERY_MS = 10_000;

const history = new History();
let status = null;
let statusAt = 0;
let events = [];
let checkpoints = [];
let areCurvesNew = true;
let isConnected = false;

// --- curves

const drawCharts = addCharts(byId("charts"));

// --- drawing, at most once a second and whenever something came

let isDrawAsked = false;

const askDraw = () => {
  if (isDrawAsked) return;
  isDrawAsked = true;
  requestAnimationFrame(() => {
    isDrawAsked = false;
    draw();
  });
};

const draw = () => {
  drawConnection();
  if (areCurvesNew) {
    areCurvesNew = false;
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
  speak();
  if (isConnected) return;
  const why = status?.phase === "ended" ? " The job had ended, so the coordinator may be gone for good." : "";
  const what = feed.problem ? `The coordinator answers: ${feed.problem}`
    : `No answer for ${duration(Math.round(feed.silence()))}`;
  setText(lost, `${what}; trying again.${why}`);
};

/** Reads out what changed, and no seconds that pass. */
const speak = () => {
  const phase = status ? `The job is ${status.phase}.` : "";
  setText(byId("spoken"), isConnected || !status ? phase : "The coordinator does not answer; trying again.");
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

// --- what the coordinator tells

const feed = new Feed({
  status: (told) => {
    const isOtherJob = status?.job_id && told.job_id !== status.job_id;
    if (isOtherJob) feed.anew();
    status = told;
    statusAt = performance.now();
    askDraw();
  },
  event: (event) => {
    events.push(event);
    if (events.length > MOST_EVENTS) events = events.slice(-MOST_EVENTS / 2);
    if (event.kind === "saved") listCheckpoints();
    askDraw();
  },
  point: (point) => {
    history.add(point);
    areCurvesNew = true;
    askDraw();
  },
  log: (line) => log.add(line),
  connected: () => {
    isConnected = true;
    log.anew();
    listCheckpoints();
    readRecipe();
    askDraw();
  },
  lost: () => {
    isConnected = false;
    askDraw();
  },
  refused: (why) => logIn(why),
  anew: () => {
    status = null;
    checkpoints = [];
    history.clear();
    events = [];
    areCurvesNew = true;
    askDraw();
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
  const wait = Math.max(0, listedAt + LIST_EVERY_MS - performance.now());
  listTimer = setTimeout(async () => {
    listTimer = null;
    listedAt = performance.now();
    try {
      checkpoints = await fetchJson("/api/checkpoints");
      askDraw();
    } catch {
      // The next save or connection asks again.
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
  /** What the connection brought before; replaced by the first lines of the next. */
  isStale: false,
  waiting: [],

  add(line) {
    if (this.isStale) {
      this.isStale = false;
      this.box.replaceChildren();
      this.waiting = [];
    }
    const wanted = byId("log-rank").value.trim();
    if (wanted !== "" && String(line.rank) !== wanted) return;
    this.waiting.push(line);
    if (this.waiting.length > MOST_LINES) this.waiting.shift();
    if (byId("log-pause").getAttribute("aria-pressed") === "false") this.draw();
  },

  /** Another connection begins with the newest lines again. */
  anew() {
    if (byId("log-rank").value.trim() === "") this.isStale = true;
  },

  draw() {
    const isAtEnd = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 40;
    const lines = this.waiting.flatMap((line) => [
      ...(line.left_out ? [element("div", { class: "quiet" }, `… ${line.left_out} lines left out`)] : []),
      element("div", {}, element("span", { class: "quiet" }, `${clock(line.unix_millis)} ${this.source(line)} `), line.line),
    ]);
    this.waiting = [];
    this.box.append(...lines);
    while (this.box.children.length > MOST_LINES) this.box.firstChild.remove();
    if (isAtEnd) this.box.scrollTop = this.box.scrollHeight;
  },

  source({ node, rank, local_rank: local }) {
    if (node === null) return "coordinator";
    if (rank !== null) return `rank ${rank}`;
    return local === null ? node : `${node}:${local}`;
  },

  /** Shows the newest lines of another choice. */
  async choose() {
    const wanted = byId("log-rank").value.trim();
    if (!/^\d*$/.test(wanted)) return;
    try {
      const lines = await fetchJson(`/api/logs?tail=200${wanted === "" ? "" : `&rank=${wanted}`}`);
      if (byId("log-rank").value.trim() !== wanted) return;
      this.isStale = false;
      this.box.replaceChildren();
      this.waiting = lines;
      this.draw();
    } catch (error) {
      say(error.message, true);
    }
  },
};

byId("log-rank").addEventListener("change", () => log.choose());
byId("log-pause").addEventListener("click", ({ currentTarget: button }) => {
  const isHeld = button.getAttribute("aria-pressed") === "true";
  button.setAttribute("aria-pressed", String(!isHeld));
  if (isHeld) log.draw();
});

// --- tokens

const logIn = (why) => new Promise((done) => {
  const dialog = byId("login");
  const field = byId("login-token");
  setText(byId("login-text"), token.get() ? why : "Without one it shows nothing.");
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

// There is nothing to see without a token.
byId("login").addEventListener("cancel", (event) => event.preventDefault());

show(byId("forget"), Boolean(token.get()));
byId("forget").addEventListener("click", () => {
  token.forget();
  location.reload();
});

// --- steering

const ACTIONS = {
  checkpoint: { done: "A checkpoint is taken after the current update." },
  resume: { done: "Training goes on." },
  pause: {
    title: "Pause training?",
    text: "Training stands still after the current update, with its state in memory. The machines stay, and are paid for.",
    yes: "Pause",
    takesReason: true,
    done: "Training pauses after the current update.",
  },
  drain: {
    title: "Drain the job?",
    text: "The state is saved after the current update, and the job ends. The same command goes on from there.",
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

let sayTimer = null;

const say = (text, isBad = false) => {
  const said = byId("said");
  said.classList.toggle("bad", isBad);
  // Shown first: a live region that was hidden when its text changed is not read out.
  show(said, true);
  requestAnimationFrame(() => setText(said, text));
  clearTimeout(sayTimer);
  sayTimer = setTimeout(() => show(said, false), 15_000);
};

const post = async (name, reason) => {
  try {
    const response = await ask(`/api/control/${name}`, {
      method: "POST",
      headers: { "content-type": "application/json", "x-baton-request": "1" },
      body: JSON.stringify(reason ? { reason } : {}),
    });
    if (response.ok) return say(ACTIONS[name].done);
    const problem = await problemOf(response);
    const remedy = response.status === 403 ? "This needs an operator’s token: " : "Refused: ";
    say(remedy + problem, true);
  } catch {
    say("The coordinator did not answer; nothing may have happened.", true);
  }
};

const confirm = byId("confirm");
let asked = null;

const askFor = (name) => {
  const action = ACTIONS[name];
  if (!action.title) return post(name);
  asked = name;
  setText(byId("confirm-title"), action.title);
  setText(byId("confirm-text"), action.text);
  setText(byId("confirm-yes"), action.yes);
  byId("confirm-yes").classList.toggle("danger", name === "stop");
  byId("confirm-reason").value = "";
  show(byId("confirm-why"), Boolean(action.takesReason));
  confirm.showModal();
  // What does least comes first.
  byId("confirm-no").focus();
};

byId("controls").addEventListener("click", ({ target }) => {
  const name = target.closest("button")?.dataset.action;
  if (name) askFor(name);
});
byId("confirm-no").addEventListener("click", () => confirm.close());
confirm.querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  confirm.close();
  post(asked, byId("confirm-reason").value.trim());
});

// --- begin

byId("worst").addEventListener("change", askDraw);
byId("recipe").addEventListener("toggle", readRecipe);
document.addEventListener("visibilitychange", askDraw);
setInterval(askDraw, 1000);
feed.run();
