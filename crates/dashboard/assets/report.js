// The report of a job: the dashboard's page and drawing, from data in the page itself.

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
// How long it is up is not known later.
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
