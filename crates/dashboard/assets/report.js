// The report of a job: the dashboard's page, drawn from data in the page itself.

import { addCharts } from "./curves.js";
import { History } from "./history.js";
import { byId, setText } from "./page.js";
import {
  drawDivergences, drawEvaluations, drawEvents, drawFigures, drawHead, drawHosts, drawRanks, drawRecoveries,
} from "./panels.js";

const { status, points, events, recipe_toml: recipe } = JSON.parse(byId("report").textContent);
for (const live of document.querySelectorAll("[data-live]")) live.remove();

const history = new History();
points.forEach((point) => history.add(point));
// Hide the uptime of the coordinator: it is only meaningful while it runs.
drawHead({ ...status, coordinator_started_unix_seconds: 0 }, 0);
drawFigures(status, 0);
addCharts(byId("charts"))(history);
drawEvaluations(history.evaluations);
drawRanks(status, 0, false);
drawHosts(status, 0);
drawRecoveries(status, 0);
drawDivergences(status);
drawEvents(events);
setText(byId("recipe").querySelector("pre"), recipe);
byId("recipe").open = true;
