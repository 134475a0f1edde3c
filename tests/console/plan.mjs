// The planner's page in a real browser: its arithmetic agrees with the program's, sliders and fields move the numbers, nothing is
// fetched, and a phone can show it.
//
// TIDEMILL_BENCH names the `tidemill-bench` binary. CHROMIUM names a browser other than `chromium`. With SCREENSHOTS=DIR, a picture is
// left there.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import { chromium } from "playwright-core";

const TEST_MS = 90_000;
const PICTURE = { width: 1120, height: 720 };
const PHONE = { width: 390, height: 844 };

const alarm = setTimeout(() => {
  console.error(`the test has taken ${TEST_MS / 1000} s: given up`);
  process.exit(1);
}, TEST_MS);

const binary = process.env.TIDEMILL_BENCH;
assert(binary, "TIDEMILL_BENCH must name the tidemill-bench binary");
const directory = mkdtempSync(join(tmpdir(), "plan-"));
try {
  const path = join(directory, "plan.html");
  execFileSync(binary, ["plan", "--html", path], { stdio: ["ignore", "ignore", "inherit"] });
  const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--no-sandbox"] });
  try {
    await run(browser, pathToFileURL(path).href);
  } finally {
    await browser.close();
  }
} finally {
  rmSync(directory, { recursive: true });
}
clearTimeout(alarm);
console.log("the planner's page works");

async function run(browser, url) {
  const page = await browser.newPage({ viewport: { width: 1280, height: 900 } });
  const complaints = [];
  const asked = [];
  page.on("console", (message) => ["error", "warning"].includes(message.type()) && complaints.push(message.text()));
  page.on("pageerror", (error) => complaints.push(String(error.stack)));
  page.on("request", (request) => asked.push(request.url()));
  await page.goto(url);

  assert.equal(await page.getAttribute("#check", "data-state"), "ok", await page.textContent("#check"));
  const month = () => page.textContent("#figure-dollars_per_month");
  const gpus = async () => Number((await page.textContent("#figure-gpus")).replaceAll(",", ""));
  const before = { month: await month(), gpus: await gpus() };

  // A slider, moved as a hand or a keyboard moves it.
  await page.locator("#slider-users").press("End");
  assert.equal(await page.inputValue("#field-users"), "100000000");
  const many = await gpus();
  assert(Number.isNaN(many) || many > 50 * before.gpus, `a hundred times as many users: ${many} after ${before.gpus}`);
  await page.fill("#field-users", "1000000");
  assert.equal(await month(), before.month, "back again");

  // Every slider can be moved to both ends, and no figure breaks.
  for (const slider of await page.locator("input[type=range]").all()) {
    for (const key of ["Home", "End"]) {
      await slider.press(key);
      const figures = await page.locator("#figures b").allTextContents();
      assert(figures.every((figure) => !/NaN|undefined/.test(figure)), `${await slider.getAttribute("id")} ${key}: ${figures}`);
    }
  }
  await page.reload();

  // What is not a number, or below nothing, changes nothing.
  await page.fill("#field-peak", "-3");
  assert.equal(await month(), before.month);
  assert(await page.locator("#field-peak.wrong").count());
  await page.fill("#field-peak", "4");

  await page.selectOption("#hardware", "h200");
  assert.equal(await page.inputValue("#field-memory_gb"), "141");
  await page.selectOption("#model", "llama-3.1-8b");
  assert.equal(await page.textContent("#figure-kv_bytes_per_token"), "128 KiB");
  assert(await gpus() < before.gpus, "an 8B takes fewer GPUs");
  assert((await page.locator("#levers tr").count()) >= 8 && (await page.locator("#sensitivity tr").count()) >= 10);

  await page.setViewportSize(PICTURE);
  await page.goto(url);
  await page.evaluate(() => scrollTo(0, 0));
  if (process.env.SCREENSHOTS) await page.screenshot({ path: join(process.env.SCREENSHOTS, "plan.png") });
  await page.setViewportSize(PHONE);
  const width = await page.evaluate(() => document.documentElement.scrollWidth);
  assert(width <= PHONE.width, `${width} pixels do not fit a phone`);
  assert(asked.every((asked) => asked === url), `the page asks for nothing else: ${asked}`);
  assert.deepEqual(complaints, [], "the browser complained");
}
