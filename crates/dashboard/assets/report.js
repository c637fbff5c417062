// The report of a job, drawn from data in the page itself. In a notebook, the Python package shows the report of a
// running job in a frame, and sends it what is new.

import { addCharts } from "./curves.js";
import { History } from "./history.js";
import { byId, setText, show } from "./page.js";
import {
  drawDivergences, drawEvaluations, drawEvents, drawFigures, drawHead, drawHosts, drawRanks, drawRecoveries,
} from "./panels.js";

/** Most events shown; a report that stays open for days would become slow. */
const MAX_REPORT_EVENTS = 1000;

const report = JSON.parse(byId("report").textContent);
const lost = byId("lost");
for (const live of document.querySelectorAll("[data-live]")) if (live !== lost) live.remove();

const history = new History();
const drawCharts = addCharts(byId("charts"));
let { status, events } = report;
/** Draws the points and events of the report itself, without news. */
const drawReport = () => {
  history.clear();
  drawPoints(report.points);
  events = report.events;
};
/** When the newest status was received, ms; null if it is that of the report. */
let receivedAt = null;

const drawStatus = () => {
  const isRunning = receivedAt !== null && lost.hidden && status.phase !== "ended";
  const elapsed = isRunning ? (performance.now() - receivedAt) / 1000 : 0;
  // Hide the uptime of the coordinator: it is only meaningful while it runs.
  drawHead({ ...status, coordinator_started_unix_seconds: 0 }, elapsed);
  drawFigures(status, elapsed);
  drawRanks(status, elapsed, false);
  drawHosts(status, elapsed);
  drawRecoveries(status, elapsed);
  drawDivergences(status);
};

const drawPoints = (points) => {
  points.forEach((point) => history.add(point));
  drawCharts(history);
  drawEvaluations(history.evaluations);
};

drawStatus();
drawReport();
drawEvents(events);
setText(byId("recipe").querySelector("pre"), report.recipe_toml);

// --- news, from the page around the frame

/**
 * Takes a newer status or null, points and events, and why the job cannot be reached, if so. `isAll` if these are all since
 * the report: some may have been taken before.
 */
const take = ({ status: newer, points, events: newEvents, lost: problem, isAll }) => {
  if (isAll) drawReport();
  show(lost, Boolean(problem));
  setText(lost, problem ?? "");
  if (newer) [status, receivedAt] = [newer, performance.now()];
  drawStatus();
  if (points.length > 0) drawPoints(points);
  events = events.concat(newEvents).slice(-MAX_REPORT_EVENTS);
  drawEvents(events);
};

const isFramed = window.parent !== window;
byId("recipe").open = !isFramed;
if (isFramed) {
  window.addEventListener("message", ({ source, data }) => source === window.parent && take(data));
  // A page that hides the frame for a while loads it anew: everything is then sent again.
  window.parent.postMessage("baton-report", "*");
  setInterval(() => receivedAt !== null && drawStatus(), 1000);
}
