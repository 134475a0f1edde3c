// The console in a real browser, before a real cluster: an answer streams, a second one reuses its blocks, a decode worker is
// killed in the middle of an answer, and the answer goes on while the picture shows who went.
//
// TIDEMILL_BIN names the `tidemill` binary. CHROMIUM names a browser other than `chromium`. With SCREENSHOTS=DIR, pictures of
// both panes are left there.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { chromium } from "playwright-core";

/** Random weights: its answers go on until they are long enough to lose a worker in. */
const MODEL = fileURLToPath(new URL("../../model/tests/fixtures/llama3", import.meta.url));
const READY_MS = 60_000;
const WAIT_MS = 20_000;
const TEST_MS = 150_000;
/** The answer that loses its worker should take about this long. */
const LONG_ANSWER_S = 3;
const CONTEXT_SHARE = 0.7;

const alarm = setTimeout(() => {
  console.error(`the test has taken ${TEST_MS / 1000} s: given up`);
  process.exit(1);
}, TEST_MS);

const cluster = await startCluster();
try {
  const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--no-sandbox"] });
  try {
    await run(browser);
  } finally {
    await browser.close();
  }
} finally {
  await cluster.stop();
}
clearTimeout(alarm);
console.log("the console works");

async function run(browser) {
  const { page, complaints } = await open(browser, { viewport: { width: 1440, height: 900 } });
  await step("rendering", () => rendersMarkdownAsText(page));
  await step("counters become rates and events", () => understandsSnapshots(page));
  const tokensPerSecond = await step("an answer streams", () => streams(page));
  await step("the same prompt again is reused", () => reuses(page));
  await step("the cluster", () => showsTheCluster(page));
  await step("conversations are kept, renamed, deleted", () => keepsConversations(page));
  await step("a worker dies in the middle of an answer", () => survives(page, tokensPerSecond));
  await step("light and dark", () => switchesTheme(page));
  await step("a phone", () => fitsAPhone(browser));
  assert.deepEqual(complaints, [], "the browser complained");
}

async function step(name, act) {
  const begun = performance.now();
  const result = await act();
  console.log(`ok  ${name} (${((performance.now() - begun) / 1000).toFixed(1)} s)`);
  return result;
}

/** `tidemill up` with two decode workers, ready. */
async function startCluster() {
  const binary = process.env.TIDEMILL_BIN;
  assert(binary, "TIDEMILL_BIN must name the tidemill binary");
  const flags = ["up", "--http", "127.0.0.1:0", "--model", MODEL, "--decode", "2", "--threads", "1", "--pool-memory", "64MiB", "--kv-memory", "64MiB", "--log", "warn", "--restarts", "0"];
  const child = spawn(binary, flags, { stdio: ["ignore", "pipe", "pipe"] });
  const ended = new Promise((resolve) => child.once("exit", (code) => resolve(code)));
  const printed = [];
  createInterface({ input: child.stderr }).on("line", (line) => printed.push(line));
  const ready = new Promise((resolve) => {
    createInterface({ input: child.stdout }).on("line", (line) => line.startsWith("ready ") && resolve(line.slice("ready ".length)));
  });
  const url = await Promise.race([ready, ended, sleep(READY_MS, undefined, { ref: false })]);
  if (typeof url !== "string") {
    child.kill("SIGKILL");
    throw new Error(`no cluster is ready:\n${printed.join("\n")}`);
  }
  const root = url.replace(/\/v1$/, "");
  assert(printed.some((line) => line.includes(`${root}/console`)), `it says where the console is:\n${printed.join("\n")}`);
  return {
    root,
    members: async () => (await (await fetch(`${root}/cluster`)).json()).members,
    stop: async () => {
      child.kill("SIGTERM");
      const code = await Promise.race([ended, sleep(WAIT_MS, "too slow", { ref: false })]);
      if (code === "too slow") child.kill("SIGKILL");
      // A cluster whose worker was killed by this test still ends well.
      assert.equal(code, 0, `tidemill up ends well:\n${printed.join("\n")}`);
    },
  };
}

/** The console in a browser of its own, and all that this browser complains about. */
async function open(browser, options) {
  const context = await browser.newContext(options);
  context.setDefaultTimeout(WAIT_MS);
  const page = await context.newPage();
  const complaints = [];
  page.on("console", (message) => ["error", "warning"].includes(message.type()) && complaints.push(message.text()));
  page.on("pageerror", (error) => complaints.push(String(error.stack)));
  await page.addInitScript(() => addEventListener("securitypolicyviolation", (event) => console.error(`${event.violatedDirective}: ${event.blockedURI}`)));
  await page.goto(`${cluster.root}/console`);
  await page.waitForSelector("#send:enabled");
  await page.waitForSelector('#status[data-state="live"]');
  return { page, complaints };
}

async function rendersMarkdownAsText(page) {
  const rendered = await page.evaluate(async () => {
    const { markdown } = await import("./console/markdown.js");
    const host = document.createElement("div");
    host.append(markdown("A **bold** `x < y` line\n- one\n- two\n\n3. three\n\n```js\n<b>\n```\n<img src=x onerror=alert(1)> and <script>alert(2)</script>"));
    return host.innerHTML;
  });
  assert.equal(
    rendered,
    "<p>A <strong>bold</strong> <code>x &lt; y</code> line</p><ul><li>one</li><li>two</li></ul>" +
      '<ol start="3"><li>three</li></ol><pre tabindex="0"><code>&lt;b&gt;</code></pre>' +
      "<p>&lt;img src=x onerror=alert(1)&gt; and &lt;script&gt;alert(2)&lt;/script&gt;</p>",
  );
}

async function understandsSnapshots(page) {
  const found = await page.evaluate(async () => {
    const { History, GHOST_MS } = await import("./console/history.js");
    const moved = (bytes) => ({ bytes, transfers: 0, seconds: 0 });
    const member = (epoch, bytes, draining = false) => ({
      name: "decode-0",
      epoch,
      pid: 7,
      draining,
      report: {
        counters: {
          tokens_generated: bytes / 10,
          prefill_computed_tokens: 0,
          preemptions: 0,
          transfer: { shm_put: moved(0), shm_get: moved(bytes), quic_put: moved(0), quic_get: moved(0) },
          misses: { corrupt: 0 },
          disk: { stored: moved(0), loaded: moved(0), corrupt: 0, given_up: 0 },
        },
      },
    });
    const snapshot = (members, rescues = 0) => ({ cluster: { members, rescues, sequences_running: 0, sequences_waiting: 0 }, goodput: null });
    const history = new History();
    const rates = [];
    // Workers report once a second, snapshots come twice; after a rest, the first report is still about one second.
    for (const [at, bytes] of [[0, 0], [1000, 500], [1500, 500], [2000, 1000], [60_000, 1000], [61_000, 3000]]) {
      history.update(snapshot([member("a", bytes)]), at);
      rates.push(history.seen.get("a").rates.get_near);
    }
    history.update(snapshot([], 1), 62_000);
    history.update(snapshot([member("b", 0)], 1), 63_000);
    history.update(snapshot([member("b", 0, true)], 1), 64_000);
    history.update(snapshot([], 1), 65_000);
    const ghosts = [...history.seen.keys()];
    history.update(snapshot([], 1), 65_001 + GHOST_MS);
    return { rates, log: history.log.map(({ kind }) => kind).reverse(), ghosts, left: history.seen.size };
  });
  assert.deepEqual(found, {
    rates: [0, 500, 500, 500, 0, 2000],
    log: ["note", "lost", "rescue", "join", "drain", "leave"],
    ghosts: ["a", "b"],
    left: 0,
  });
}

/** Asks, and returns the tokens per second of the answer. */
async function streams(page) {
  await page.evaluate(() => {
    window.lengths = new Set();
    const look = () => window.lengths.add(document.querySelector(".message.assistant .text")?.textContent.length ?? 0);
    new MutationObserver(look).observe(document.querySelector("#messages"), { childList: true, subtree: true, characterData: true });
  });
  // Whatever the model would say, it says enough for several frames.
  await page.route("**/v1/chat/completions", (route) => change(route, { ignore_eos: true, max_tokens: 999 }));
  await page.fill("#input", "What is a KV block? Tell me all about it, from its name to the moment it is forgotten.");
  await page.keyboard.press("Enter");
  await page.waitForSelector(".receipt");
  const lengths = await page.evaluate(() => [...window.lengths]);
  assert(lengths.length >= 3, `text comes in pieces: ${lengths}`);
  const facts = await page.textContent(".receipt .facts");
  assert.match(facts, /first token.*999 tokens.*decode-\d/);
  assert.match(await page.textContent(".receipt .verdict"), /prompt tokens/);
  assert.equal(await page.locator(".waterfall .row").count(), 6);
  return Number(/([\d.,]+) tokens\/s/.exec(facts)?.[1].replaceAll(",", "") ?? 1000);
}

async function reuses(page) {
  await page.click('[aria-label="Answer again"]');
  await page.waitForFunction(() => /^[1-9]\d* % of/.test(document.querySelector(".receipt .verdict")?.textContent ?? ""));
  assert.equal(await page.locator(".message.assistant").count(), 1, "the new answer is in the old one's place");
}

async function showsTheCluster(page) {
  await page.click("#cluster-tab");
  await page.waitForFunction(() => document.querySelectorAll("#requests li").length === 2);
  assert.equal(await page.locator("#picture .node.decode").count(), 2);
  assert.equal(await page.locator("#picture .node.prefill").count(), 1);
  assert.equal(await page.locator("#picture .node.kvpool").count(), 1);
  const pids = await page.locator("#members td:nth-child(3)").allTextContents();
  assert.deepEqual(pids.sort(), (await cluster.members()).map((member) => String(member.pid)).sort());
  assert.match(await page.textContent(".spark strong"), /m?s$/, "TTFT is known");
  await picture(page, "cluster");
  await page.click("#chat-tab");
  await picture(page, "chat");
}

async function keepsConversations(page) {
  await page.hover("#conversation-list li.current");
  await page.click('#conversation-list li.current [title="Rename"]');
  await page.keyboard.type("Blocks");
  await page.keyboard.press("Enter");
  await page.reload();
  await page.waitForSelector("#send:enabled");
  assert.deepEqual(await page.locator("#conversation-list .open").allTextContents(), ["Blocks"]);
  assert.equal(await page.locator(".receipt").count(), 1, "the answer is there with its path");
  await page.click('#conversation-list li.current [title="Delete"]');
  await page.click("#conversation-list .sure");
  assert.equal(await page.locator(".message").count(), 0);
}

async function survives(page, tokensPerSecond) {
  const room = CONTEXT_SHARE * (await (await fetch(`${cluster.root}/v1/models`)).json()).data[0].max_model_len;
  const max_tokens = Math.round(Math.min(room, Math.max(100, LONG_ANSWER_S * tokensPerSecond)));
  await page.unroute("**/v1/chat/completions");
  await page.route("**/v1/chat/completions", (route) => change(route, { ignore_eos: true, max_tokens }));
  await page.fill("#input", "What happens to my answer when its decode worker dies?");
  await page.keyboard.press("Enter");
  const victim = await busyDecodeWorker();
  await page.waitForFunction(() => (document.querySelector(".message.assistant .text")?.textContent.length ?? 0) > 20);
  process.kill(victim.pid, "SIGKILL");
  await page.click("#cluster-tab");
  await page.waitForFunction((name) => document.querySelector("#picture .node.gone .name")?.textContent === name, victim.name);
  await page.waitForFunction((name) => document.querySelector("#log")?.textContent?.includes(`${name} is gone`), victim.name);
  await picture(page, "gone");
  await page.click("#chat-tab");
  await page.waitForSelector(".receipt");
  const facts = await page.textContent(".receipt .facts");
  assert.match(facts, new RegExp(`${max_tokens.toLocaleString("en-US")} tokens.*rescued`));
  assert.equal(await page.locator(".error").count(), 0);
  assert.deepEqual((await cluster.members()).filter((member) => member.role === "decode").length, 1);
}

async function busyDecodeWorker() {
  for (const deadline = performance.now() + WAIT_MS; performance.now() < deadline; await sleep(5)) {
    const busy = (await cluster.members()).find((member) => member.role === "decode" && member.assigned > 0);
    if (busy) return busy;
  }
  throw new Error("no decode worker has the sequence");
}

async function switchesTheme(page) {
  const paper = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const light = await paper();
  await page.click("#theme");
  const dark = await paper();
  assert.notEqual(dark, light);
  await page.reload();
  assert.equal(await paper(), dark, "the choice is kept");
}

async function fitsAPhone(browser) {
  const { page, complaints } = await open(browser, { viewport: { width: 390, height: 844 }, deviceScaleFactor: 2, isMobile: true, hasTouch: true });
  for (const tab of ["#cluster-tab", "#chat-tab"]) {
    await page.tap(tab);
    await sleep(200);
    assert.deepEqual(await page.evaluate(() => [innerWidth, document.documentElement.scrollWidth]), [390, 390], tab);
  }
  await page.tap("#open-conversations");
  await page.locator("#new").tap();
  await page.tap("#open-rail");
  await page.fill('#settings [name="system"]', "Be brief.");
  assert.deepEqual(complaints, []);
}

/** Sends the request on with other settings than the page has fields for. */
async function change(route, settings) {
  await route.continue({ postData: JSON.stringify({ ...route.request().postDataJSON(), ...settings }) });
}

async function picture(page, name) {
  if (process.env.SCREENSHOTS) await page.screenshot({ path: `${process.env.SCREENSHOTS}/${name}.png` });
}
