// Tests the page in a real browser against the example server, and prints a line per check. Run by
// scripts/check-dashboard.sh:
//   node check.js PATH/TO/fake PATH/TO/report.html
// Environment: CHROMIUM is the path of the browser, SHOTS a folder for screenshots, ONLY a part of the names of the
// checks to run.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtemp, readFile, rm } from "node:fs/promises";
import { createServer } from "node:http";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

import { chromium } from "playwright-core";

const program = process.argv[2];
const report = pathToFileURL(process.argv[3]).href;
const axe = await readFile(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const shots = process.env.SHOTS;
const PAGE_TIMEOUT_MS = 30_000;

const servers = new Set();

/** Starts the example server and returns its address. */
const serve = async (variables = {}) => {
  const server = spawn(program, { env: { ...process.env, ...variables }, stdio: ["ignore", "pipe", "inherit"] });
  servers.add(server);
  const [address] = await once(createInterface({ input: server.stdout }), "line");
  return {
    address,
    async stop() {
      servers.delete(server);
      server.kill("SIGKILL");
      await once(server, "exit");
    },
  };
};

/** The page shows the resume only for a minute: too short for a server that earlier checks have used. */
const serveAfterRecovery = () => serve({ BATON_FAKE_SINCE: String(Date.now() - 15_000) });

const profile = await mkdtemp(join(tmpdir(), "baton-browser-"));
const browser = await chromium.launchPersistentContext(profile, {
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  headless: true,
  args: [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
  ],
});

/** Opens the page, and records everything that must not happen. */
const open = async (server, { size = { width: 1280, height: 900 }, scheme = "light" } = {}) => {
  const page = await browser.newPage();
  page.setDefaultTimeout(PAGE_TIMEOUT_MS);
  await page.setViewportSize(size);
  await page.emulateMedia({ colorScheme: scheme });
  const faults = [];
  page.on("console", (message) => {
    if (message.type() === "error" || message.type() === "warning") faults.push(`console: ${message.text()}`);
  });
  page.on("pageerror", (error) => faults.push(`script: ${error.message}`));
  page.on("request", (request) => {
    const { origin, protocol } = new URL(request.url());
    if (origin !== server.address && protocol !== "data:") faults.push(`other host: ${request.url()}`);
  });
  await page.addInitScript(() => {
    document.addEventListener("securitypolicyviolation", (event) => {
      console.error(`policy: ${event.violatedDirective} ${event.blockedURI}`);
    });
  });
  await page.goto(server.address);
  return { page, faults };
};

const textOf = (page, selector) => page.locator(selector).innerText();
const untilText = (page, selector, expected) =>
  page.waitForFunction(([target, pattern]) => new RegExp(pattern).test(document.querySelector(target)?.innerText ?? ""), [selector, expected]);
const shoot = (page, name) => (shots ? page.screenshot({ path: join(shots, `${name}.png`), fullPage: true }) : null);

const audit = async (page) => {
  // Evaluated by the debugger, so the page's own content security policy does not change.
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() =>
    globalThis.axe.run({ runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"] }));
  return violations.map(({ id, nodes }) => `${id}: ${nodes.map((node) => `${node.target} ${node.failureSummary}`).join("; ")}`);
};

const hasNoSidewaysScroll = (page) => page.evaluate(() => document.documentElement.scrollWidth <= innerWidth);

/** Serves a page of another origin. */
const serveOtherSite = async () => {
  const server = createServer((_, response) => {
    response.setHeader("content-type", "text/html");
    response.end("<!doctype html><title>elsewhere</title>");
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  return { address: `http://127.0.0.1:${server.address().port}`, stop: () => server.close() };
};

const checks = {
  "the page shows the job": async (server) => {
    const { page, faults } = await open(server);
    await untilText(page, "#name", "resnet50_l4");
    await untilText(page, "#phase", "training");
    await untilText(page, "#figures", "Loss\\n\\d");
    await page.waitForSelector("#charts svg path.curve[d^='M']");
    // This chart appears with the first evaluation.
    await untilText(page, "#charts", "top5");
    assert.equal(await page.locator("#charts figure:visible").count(), 5);
    assert.equal(await page.locator("#ranks tbody tr").count(), 8);
    assert.equal(await page.locator("#hosts tbody tr").count(), 1);
    await untilText(page, "#events", "generation opened");
    await untilText(page, "#log", "rank \\d");
    await untilText(page, "#ranks", "°C");
    await page.locator("#recipe summary").click();
    await untilText(page, "#recipe pre", "epochs = 16");
    assert.deepEqual(faults, []);
    return page;
  },

  "the report is the page without a coordinator": async () => {
    const page = await browser.newPage();
    const faults = [];
    page.on("pageerror", (error) => faults.push(error.message));
    page.on("request", (request) => request.url() === report || faults.push(request.url()));
    await page.goto(report);
    await untilText(page, "#name", "digits");
    await untilText(page, "#figures", "Goodput\\n90.6 %");
    assert.equal(await page.locator("#charts figure:visible").count(), 5);
    assert.equal(await page.locator("button").count(), 0);
    await untilText(page, "#evaluations", "full");
    await untilText(page, "#recipe pre", "epochs = 20");
    assert.deepEqual(await audit(page), []);
    await shoot(page, "report");
    assert.deepEqual(faults, []);
    return page;
  },

  "no spike of a curve is lost": async (server) => {
    const { page } = await open(server);
    const drawn = await page.evaluate(async () => {
      const { Chart } = await import("/assets/chart.js");
      const points = Array.from({ length: 20_000 }, (_, at) => [at, at === 12_345 ? 9 : 1]);
      const chart = new Chart(document.querySelector("#charts"), { title: "t", series: ["s"], format: String });
      chart.draw([points], []);
      return chart.shown[0];
    });
    assert.ok(drawn.length < 2_000, String(drawn.length));
    assert.deepEqual(drawn.find(([, value]) => value === 9), [12_345, 9]);
    assert.deepEqual([drawn[0][0], drawn[drawn.length - 1][0]], [0, 19_999]);
    return page;
  },

  "the curves of a long run are thinned evenly, and keep their spikes": async (server) => {
    const { page } = await open(server);
    const { quarters, kept, shortened, next } = await page.evaluate(async () => {
      const { History } = await import("/assets/history.js");
      const history = new History();
      const train = (first, end) => {
        for (let step = first; step < end; step += 1) history.add({ step: { step, loss: step === 12_345 ? 9 : 1 } });
      };
      const steps = () => history.curve(({ loss }) => loss);
      train(1, 60_000);
      history.add({ began_at: 49_999, generation: 2 });
      const shortened = steps().at(-1)[0];
      train(50_000, 100_001);
      const kept = steps();
      const quarters = [0, 1, 2, 3].map((quarter) => kept.filter(([at]) => Math.ceil(at / 25_000) === quarter + 1).length);
      // Another job in the same folder.
      history.add({ began_at: 0, generation: 3 });
      train(1, 1001);
      return { quarters, kept, shortened, next: steps().length };
    });
    assert.ok(Math.min(...quarters) > 450 && Math.max(...quarters) - Math.min(...quarters) <= 2, String(quarters));
    assert.deepEqual([kept[0][0], kept.at(-1)[0]], [1, 100_000]);
    assert.deepEqual(kept.find(([, loss]) => loss === 9), [12_345, 9]);
    assert.ok(shortened > 49_900 && shortened <= 49_999, String(shortened));
    assert.equal(next, 1000);
    return page;
  },

  "the page follows the job without a reload": async (server) => {
    const { page, faults } = await open(server);
    await untilText(page, "#progress-text", "step \\d");
    const before = await textOf(page, "#progress-text");
    await page.waitForFunction((old) => document.querySelector("#progress-text").innerText !== old, before);
    assert.deepEqual(faults, []);
    return page;
  },

  "an interruption and the resume after it are shown": async () => {
    const server = await serve();
    const { page, faults } = await open(server);
    await untilText(page, "#phase", "detecting");
    await untilText(page, "#trouble", "Interrupted: rank 1 ended with signal 9");
    await untilText(page, "#ranks", "gone");
    await shoot(page, "interrupted");
    await untilText(page, "#phase", "training");
    await untilText(page, "#trouble", "Resumed .* after 4.0 s");
    await page.waitForSelector("#charts .mark >> nth=1", { state: "attached" });
    assert.equal(await page.locator("#recoveries .parts .part").count(), 6);
    assert.match(await textOf(page, "#recoveries"), /10/);
    assert.deepEqual(faults, []);
    await page.close();
    await server.stop();
  },

  "a recovery that the end of the job cut short is not shown as one in progress": async (server) => {
    const { page } = await open(server);
    const [during, after] = await page.evaluate(async () => {
      const { drawHead, drawRecoveries } = await import("/assets/panels.js");
      const status = await (await fetch("/api/status")).json();
      const recovery = {
        generation: 1, cause: "rank 1 was lost", planned: false, age_seconds: 20_000, detect_seconds: 1, tear_down_seconds: null,
        respawn_seconds: null, rendezvous_seconds: null, restore_seconds: null, first_step_seconds: null, total_seconds: null,
        lost_steps: 0,
      };
      const shown = (phase, generation) => {
        const changed = { ...status, phase, generation, recoveries: [recovery], recoveries_total: 1 };
        drawHead(changed, 0);
        drawRecoveries(changed, 0);
        const total = document.querySelector("#recoveries tbody tr").cells[4];
        return [document.querySelector("#trouble").textContent, total.textContent, total.dataset.mark ?? ""];
      };
      return [shown("forming", 1), shown("training", 2)];
    });
    assert.match(during[0], /^Interrupted: rank 1 was lost\. Recovering for /);
    assert.deepEqual(during.slice(1), ["recovering", "warn"]);
    assert.deepEqual(after, ["", "ended before the first step", ""]);
    return page;
  },

  "the page survives a restart of the coordinator, and shows nothing twice": async () => {
    const since = String(Date.now());
    const first = await serve({ BATON_FAKE_SINCE: since });
    const { page, faults } = await open(first);
    await untilText(page, "#events", "evaluated");
    await first.stop();
    await untilText(page, "#lost", "No answer for");
    const second = await serve({ BATON_FAKE_SINCE: since, BATON_FAKE_PORT: new URL(first.address).port });
    await page.waitForSelector("#lost", { state: "hidden" });
    await untilText(page, "#events", "recovered");
    const rows = await page.locator("#events tbody tr").allInnerTexts();
    assert.equal(new Set(rows).size, rows.length, rows.join("\n"));
    assert.equal(rows.filter((row) => row.includes("generation 1:")).length, 1);
    // The browser itself logs the failed connections.
    assert.deepEqual(faults.filter((fault) => !/ERR_(CONNECTION|INCOMPLETE|EMPTY)/.test(fault)), []);
    await page.close();
    await second.stop();
  },

  "another job at the same address replaces the first one on the page": async () => {
    const first = await serve();
    const { page, faults } = await open(first);
    await untilText(page, "#events", "evaluated");
    const job = (await textOf(page, "#about")).match(/job (.*)/)[1];
    await first.stop();
    const second = await serve({ BATON_FAKE_PORT: new URL(first.address).port });
    await page.waitForFunction((old) => {
      const now = document.querySelector("#about").innerText.match(/job (.*)/)?.[1];
      return now && now !== old;
    }, job);
    await page.waitForFunction(() => document.querySelectorAll("#events tbody tr").length === 2);
    const drawn = await page.locator("#charts svg >> nth=0").getAttribute("aria-label");
    assert.match(drawn, /from [\d.]+ at step 5 /);
    assert.deepEqual(faults.filter((fault) => !/ERR_(CONNECTION|INCOMPLETE|EMPTY)|status of 400/.test(fault)), []);
    await page.close();
    await second.stop();
  },

  "pause, resume and drain are confirmed, sent and shown": async () => {
    const server = await serve();
    const { page, faults } = await open(server);
    const posts = [];
    page.on("request", (request) => request.method() === "POST" && posts.push(new URL(request.url()).pathname));
    await untilText(page, "#phase", "training");
    await page.getByRole("button", { name: "Checkpoint now" }).click();
    await untilText(page, "#notice", "A checkpoint is saved");

    await page.getByRole("button", { name: "Drain…" }).click();
    await page.waitForSelector("#confirm[open]");
    await page.getByRole("button", { name: "Cancel" }).click();
    assert.deepEqual(posts, ["/api/control/checkpoint"]);

    await page.getByRole("button", { name: "Pause…" }).click();
    await page.getByLabel("Reason").fill("lunch");
    await shoot(page, "dialog");
    await page.getByRole("button", { name: "Pause", exact: true }).click();
    await untilText(page, "#phase", "paused");
    await untilText(page, "#trouble", "lunch");
    await page.getByRole("button", { name: "Resume" }).click();
    await untilText(page, "#phase", "training|detecting|forming|meeting");

    await page.getByRole("button", { name: "Drain…" }).click();
    await page.getByRole("button", { name: "Drain", exact: true }).click();
    await untilText(page, "#reason", "Drained: the state is saved");
    assert.equal(await page.getByRole("button", { name: "Stop…" }).isDisabled(), true);
    assert.deepEqual(posts.slice(1), ["pause", "resume", "drain"].map((name) => `/api/control/${name}`));
    assert.deepEqual(faults, []);
    await page.close();
    await server.stop();
  },

  "the page can be used with the keyboard only": async (server) => {
    const { page, faults } = await open(server);
    await untilText(page, "#phase", "training|detecting|forming|meeting");
    await page.waitForFunction(() => !document.querySelector("[data-action=stop]").disabled);
    const reach = async (isThere) => {
      for (let presses = 0; presses < 40; presses += 1) {
        await page.keyboard.press("Tab");
        if (await page.evaluate(isThere)) return;
      }
      assert.fail("Tab does not reach the element");
    };
    await reach(() => document.activeElement.dataset.action === "stop");
    const outline = await page.evaluate(() => getComputedStyle(document.activeElement).outlineStyle);
    assert.notEqual(outline, "none");
    await page.keyboard.press("Enter");
    await page.waitForSelector("#confirm[open]");
    assert.equal(await page.evaluate(() => document.activeElement.id), "confirm-no");
    await page.keyboard.press("Escape");
    await page.waitForSelector("#confirm", { state: "hidden" });
    assert.equal(await page.evaluate(() => document.activeElement.dataset.action), "stop");
    await reach(() => document.activeElement.classList.contains("plot"));
    await page.keyboard.press("End");
    await untilText(page, "#charts output", "step [\\d,]+: training");
    assert.deepEqual(faults, []);
    return page;
  },

  "the switches of log, ranks and charts work": async (server) => {
    const { page, faults } = await open(server);
    await untilText(page, "#log", "rank \\d");
    await page.locator("#log-rank").fill("3");
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => {
      const lines = [...document.querySelectorAll("#log div")].map((line) => line.innerText);
      return lines.length > 0 && lines.every((line) => line.includes(" rank 3 "));
    });
    await page.locator("#log-pause").click();
    assert.equal(await page.locator("#log-pause").getAttribute("aria-pressed"), "true");
    await page.locator("#worst").check();
    await page.waitForFunction(() => /^5\b/.test(document.querySelector("#ranks tbody tr").innerText));

    const plot = page.locator("#charts .plot").first();
    const labels = () => plot.locator("text[text-anchor=end]").allTextContents();
    const before = await labels();
    await page.getByLabel("log scale").check();
    await page.waitForFunction((old) => {
      const now = [...document.querySelector("#charts .plot").querySelectorAll("text[text-anchor=end]")];
      return now.map((label) => label.textContent).join() !== old;
    }, before.join());
    await plot.hover({ position: { x: 200, y: 80 } });
    await untilText(page, "#charts output", "step [\\d,]+: training [\\d.]+");
    assert.deepEqual(faults, []);
    return page;
  },

  "another site can neither control the job nor read its status": async (server) => {
    const elsewhere = await serveOtherSite();
    const page = await browser.newPage();
    await page.goto(elsewhere.address);
    const tries = await page.evaluate(async (target) => {
      const attempt = async (path, options) => {
        try {
          const response = await fetch(target + path, options);
          return `${response.type} ${response.status}`;
        } catch {
          return "refused";
        }
      };
      return [
        await attempt("/api/control/stop", { method: "POST", mode: "no-cors", body: "{}" }),
        await attempt("/api/control/stop", {
          method: "POST",
          headers: { "x-baton-request": "1", "content-type": "application/json" },
          body: "{}",
        }),
        await attempt("/api/status", {}),
      ];
    }, server.address);
    assert.deepEqual(tries, ["opaque 0", "refused", "refused"]);
    const framed = await page.evaluate(async (target) => {
      const frame = document.createElement("iframe");
      frame.src = target;
      document.body.append(frame);
      await new Promise((done) => frame.addEventListener("load", done));
      try {
        return frame.contentDocument === null;
      } catch {
        return true;
      }
    }, server.address);
    assert.equal(framed, true);
    const status = await (await fetch(`${server.address}/api/status`)).json();
    assert.notEqual(status.phase, "ended");
    elsewhere.stop();
    return page;
  },

  "the page asks for a token, and stores it in the tab only": async () => {
    const server = await serve({ BATON_FAKE_TOKENS: "1" });
    const { page, faults } = await open(server);
    await page.waitForSelector("#login[open]");
    await shoot(page, "login");
    await page.keyboard.press("Escape");
    await page.waitForSelector("#login[open]");
    await page.locator("#login-token").fill("wrong");
    await page.keyboard.press("Enter");
    await untilText(page, "#login-text", "does not know that token");
    await page.locator("#login-token").fill("viewer");
    await page.keyboard.press("Enter");
    await untilText(page, "#phase", "training|detecting");
    await page.getByRole("button", { name: "Stop…" }).click();
    await page.getByRole("button", { name: "Stop now" }).click();
    await untilText(page, "#notice", "needs an operator’s token");
    const kept = await page.evaluate(() => [localStorage.length, document.cookie, sessionStorage.length]);
    assert.deepEqual(kept, [0, "", 1]);
    assert.equal(page.url().includes("viewer"), false);

    await page.getByRole("button", { name: "Forget token" }).click();
    await page.waitForSelector("#login[open]");
    await page.locator("#login-token").fill("operator");
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => !document.querySelector("[data-action=stop]").disabled);
    await page.getByRole("button", { name: "Stop…" }).click();
    await page.getByRole("button", { name: "Stop now" }).click();
    await untilText(page, "#reason", "Stopped without a save");
    // The browser itself logs each 401 and 403.
    assert.deepEqual(faults.filter((fault) => !/status of 40[13]/.test(fault)), []);
    await page.close();
    await server.stop();
  },

  "without tokens, the page opened by a host name shows how to open it instead of asking for a token": async (server) => {
    // Browsers resolve every name below `localhost` to this machine.
    const { page, faults } = await open({ address: server.address.replace("127.0.0.1", "baton.localhost") });
    await untilText(page, "#lost", "only by IP address or as localhost.*start it with --tokens; retrying");
    assert.equal(await page.locator("#login[open]").count(), 0);
    // The browser itself logs each 403.
    assert.deepEqual(faults.filter((fault) => !/status of 403/.test(fault)), []);
    return page;
  },

  "names, reasons and log lines are shown as text, never as markup": async () => {
    const server = await serve({ BATON_FAKE_HOSTILE: "1" });
    const { page, faults } = await open(server, { size: { width: 360, height: 740 } });
    await untilText(page, "#trouble", "Resumed");
    await untilText(page, "#log", "<img src=x");
    await untilText(page, "#name", "<script>");
    assert.equal(await page.locator("img").count(), 0);
    assert.notEqual(await page.title(), "owned");
    assert.equal(await hasNoSidewaysScroll(page), true);
    assert.deepEqual(faults, []);
    await page.close();
    await server.stop();
  },

  "a thousand ranks are shown in less than a second": async () => {
    const server = await serve({ BATON_FAKE_RANKS: "1000" });
    const { page, faults } = await open(server);
    await page.waitForFunction(() => document.querySelectorAll("#ranks tbody tr").length === 200);
    assert.match(await textOf(page, "#ranks caption"), /200 shown, and 800 more/);
    const took = await page.evaluate(async () => {
      const begin = performance.now();
      document.querySelector("#worst").click();
      await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
      document.body.getBoundingClientRect();
      return performance.now() - begin;
    });
    assert.ok(took < 1000, `sorting and drawing took ${took} ms`);
    const fresh = await page.evaluate(async () => {
      const { drawRanks } = await import("/assets/panels.js");
      const status = await (await fetch("/api/status")).json();
      document.querySelector("#ranks tbody").replaceChildren();
      const begin = performance.now();
      drawRanks(status, 0, true);
      document.body.getBoundingClientRect();
      return performance.now() - begin;
    });
    assert.ok(fresh < 1000, `drawing took ${fresh} ms`);
    assert.match(await textOf(page, "#ranks tbody tr >> nth=0"), /^5\b|^1\b/);
    assert.deepEqual(faults, []);
    await page.close();
    await server.stop();
    return `${Math.round(fresh)} ms`;
  },

  "the page shows that there is no job": async () => {
    const server = await serve({ BATON_FAKE_IDLE: "1" });
    const { page, faults } = await open(server);
    await untilText(page, "#name", "No job yet");
    assert.equal(await page.getByRole("button", { name: "Stop…" }).isDisabled(), true);
    assert.deepEqual(await audit(page), []);
    assert.deepEqual(faults, []);
    await page.close();
    await server.stop();
  },

  "the page fits a phone": async () => {
    const server = await serveAfterRecovery();
    const { page, faults } = await open(server, { size: { width: 360, height: 740 } });
    await untilText(page, "#trouble", "Resumed");
    await page.waitForSelector("#charts svg path.curve[d^='M']");
    assert.equal(await hasNoSidewaysScroll(page), true);
    assert.deepEqual(await audit(page), []);
    await shoot(page, "phone");
    assert.deepEqual(faults, []);
    await page.close();
    await server.stop();
  },

  "the page is accessible in light and dark mode": async () => {
    const server = await serveAfterRecovery();
    for (const scheme of ["light", "dark"]) {
      const { page, faults } = await open(server, { scheme });
      await untilText(page, "#trouble", "Resumed");
      await page.waitForSelector("#charts svg path.curve[d^='M']");
      await untilText(page, "#checkpoints", "complete");
      assert.deepEqual(await audit(page), [], scheme);
      await shoot(page, scheme);
      await page.waitForFunction(() => !document.querySelector("[data-action=drain]").disabled);
      await page.getByRole("button", { name: "Drain…" }).click();
      await page.waitForSelector("#confirm[open]");
      assert.deepEqual(await audit(page), [], `${scheme}, with a dialog`);
      assert.deepEqual(faults, []);
      await page.close();
    }
    await server.stop();
  },
};

let failed = 0;
const shared = await serve();
for (const [name, check] of Object.entries(checks)) {
  if (process.env.ONLY && !name.includes(process.env.ONLY)) continue;
  const begin = performance.now();
  try {
    const left = await check(shared);
    if (left?.close) await left.close();
    const note = typeof left === "string" ? `: ${left}` : "";
    console.log(`ok      ${name}${note} (${((performance.now() - begin) / 1000).toFixed(1)} s)`);
  } catch (error) {
    failed += 1;
    console.log(`FAILED  ${name}\n${error.stack}`);
  }
}
await browser.close();
// Also stops the servers of failed checks.
for (const server of servers) server.kill("SIGKILL");
await rm(profile, { recursive: true, force: true });
process.exit(failed === 0 ? 0 : 1);
