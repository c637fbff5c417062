// Tests a job's card in a real JupyterLab, with a headless Chromium: notebook.js ADDRESS NOTEBOOK. The first cell of the
// notebook shows a job that trains; the second drains it.

import assert from "node:assert/strict";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { chromium } from "playwright-core";

const [address, notebook] = process.argv.slice(2);
const TIMEOUT_MS = 60_000;
const profile = await mkdtemp(join(tmpdir(), "baton-notebook-"));
const browser = await chromium.launchPersistentContext(profile, {
  executablePath: process.env.CHROMIUM,
  args: ["--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync"],
  viewport: { width: 1200, height: 1000 },
});
browser.setDefaultTimeout(TIMEOUT_MS);

const shoot = async (page, name) => {
  if (process.env.SHOTS) await page.screenshot({ path: join(process.env.SHOTS, `notebook-${name}.png`) });
};

/** Runs a cell; JupyterLab forgets keys that come too early. */
const runCell = async (page, number) => {
  const cell = page.locator(".jp-Notebook .jp-Cell").nth(number);
  const prompt = cell.locator(".jp-InputPrompt");
  for (const begin = Date.now(); /^\[ *\]:$/.test(await prompt.innerText());) {
    assert.ok(Date.now() - begin < TIMEOUT_MS, "JupyterLab does not run the cell");
    await cell.locator(".cm-content").click();
    await page.keyboard.press("Shift+Enter");
    await new Promise((done) => setTimeout(done, 1000));
  }
};

try {
  const page = await browser.newPage();
  const faults = [];
  page.on("pageerror", (error) => faults.push(String(error)));
  await page.goto(`${address}/lab/tree/${notebook}?reset`);
  const kernel = page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]");
  await kernel.waitFor();
  await runCell(page, 0);

  const frame = page.locator("iframe[title=Baton]");
  await frame.waitFor();
  const card = frame.contentFrame();
  const until = (selector, text) => card.locator(selector).filter({ hasText: text }).first().waitFor();
  await until("#phase", "training");
  await until("#events", /saved|generation 1/);
  await card.locator("#charts svg path.curve[d^='M']").first().waitFor();
  assert.equal(await card.locator("#ranks tbody tr").count(), 1);
  const progress = () => card.locator("#progress-text").innerText();
  const before = await progress();
  await until("#progress-text", /step/);
  for (const begin = Date.now(); (await progress()) === before;) {
    assert.ok(Date.now() - begin < TIMEOUT_MS, `the card stays at ${before}`);
    await new Promise((done) => setTimeout(done, 100));
  }
  assert.equal(await card.locator("button").count(), 0, "the card cannot control the job");
  console.log("ok      the card shows the job while it trains");

  // JupyterLab takes cells out of the page while they are not visible; their frames are then loaded anew.
  const rows = await card.locator("#events tbody tr").count();
  const points = () => card.locator("#progress-text").innerText().then((text) => Number(/step ([\d,]+)/.exec(text)[1].replaceAll(",", "")));
  const reached = await points();
  await frame.evaluate((node) => { const { parentNode, nextSibling } = node; node.remove(); parentNode.insertBefore(node, nextSibling); });
  await until("#phase", "training");
  for (const begin = Date.now(); (await points()) < reached;) {
    assert.ok(Date.now() - begin < TIMEOUT_MS, "the card has lost what it had");
    await new Promise((done) => setTimeout(done, 100));
  }
  assert.ok((await card.locator("#events tbody tr").count()) >= rows, "the card has lost events");
  await shoot(page, "training");
  console.log("ok      a frame that was taken out of the page has everything again");

  await runCell(page, 1);
  await until("#reason", "Drained: the state is saved");
  await until("#events", "drained");
  await shoot(page, "drained");
  console.log("ok      the card shows the end of the job");

  await page.keyboard.press("Control+s");
  await page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").waitFor();
  await page.reload();
  await until("#reason", "Drained: the state is saved");
  console.log("ok      the saved notebook shows the end of the job");
  assert.deepEqual(faults, []);
} catch (error) {
  const [page] = browser.pages().slice(-1);
  console.log(`FAILED  ${error.message}\nThe notebook: ${await page.locator(".jp-Notebook").innerText()}`);
  await shoot(page, "failed");
  process.exitCode = 1;
} finally {
  await browser.close();
  await rm(profile, { recursive: true, force: true });
}
