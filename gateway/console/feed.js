// @ts-check
// Live data: one stream of server-sent events, or `/cluster` and `/metrics` once a second while the stream has no room.
// Nothing is asked for while the page is hidden, so that its place in the stream is free for another viewer.

import { ApiError, call, cluster } from "./api.js";
import { serverEvents } from "./sse.js";

/** @typedef {import("./types.js").Snapshot} Snapshot */
/** @typedef {import("./types.js").Latencies} Latencies */
/** @typedef {import("./types.js").FinishedRequest} FinishedRequest */
/** @typedef {import("./types.js").FeedState} FeedState */

/**
 * @typedef {object} Listener
 * @property {(state: FeedState) => void} state
 * @property {(snapshot: Snapshot) => void} snapshot
 * @property {(requests: FinishedRequest[]) => void} recent what ended before the stream began, oldest first
 * @property {(request: FinishedRequest) => void} request
 * @property {(latencies: Latencies) => void} latencies while polling, where there are no requests
 */

const POLL_MS = 1000;
/** Polls before the stream is tried again. */
const POLLS_MAX = 30;
const RETRY_MS = 1500;
const CLOSED_MS = 10_000;

/** @param {Listener} listener */
export function watch(listener) {
  /** @type {AbortController | null} */
  let running = null;
  const follow = () => {
    if (document.hidden) {
      running?.abort();
      running = null;
    } else if (!running) {
      running = new AbortController();
      void run(listener, running.signal);
    }
  };
  document.addEventListener("visibilitychange", follow);
  follow();
}

/**
 * @param {Listener} listener
 * @param {AbortSignal} signal
 */
async function run(listener, signal) {
  listener.state("connecting");
  while (!signal.aborted) {
    try {
      await stream(listener, signal);
    } catch (error) {
      if (signal.aborted) return;
      // Operators have a port of their own, and this is not it.
      if (error instanceof ApiError && error.status === 404) return listener.state("absent");
      // Operators sign in here, and this one has not, or may not look.
      if (error instanceof ApiError && (error.status === 401 || error.status === 403)) {
        listener.state("closed");
        await sleep(CLOSED_MS, signal);
        continue;
      }
      // There are too many viewers already. `/cluster` is there for all.
      if (error instanceof ApiError) await poll(listener, signal);
    }
    if (signal.aborted) return;
    listener.state("lost");
    await sleep(RETRY_MS, signal);
  }
}

/**
 * @param {Listener} listener
 * @param {AbortSignal} signal
 */
async function stream(listener, signal) {
  const response = await call("cluster/events", { signal });
  if (!response.body) return;
  for await (const { event, data } of serverEvents(response.body)) {
    if (event === "snapshot") {
      listener.state("live");
      listener.snapshot(JSON.parse(data));
    } else if (event === "recent") listener.recent(JSON.parse(data));
    else if (event === "request") listener.request(JSON.parse(data));
  }
}

/**
 * @param {Listener} listener
 * @param {AbortSignal} signal
 */
async function poll(listener, signal) {
  /** @type {Totals | null} */
  let before = null;
  for (let polls = 0; polls < POLLS_MAX && !signal.aborted; polls += 1) {
    try {
      const [view, metrics] = await Promise.all([cluster(signal), call("metrics", { signal }).then((response) => response.text())]);
      const totals = read(metrics);
      listener.state("polling");
      listener.snapshot({ cluster: view, goodput: totals.goodput });
      if (before) listener.latencies({ ttft_ms: mean(before.ttft, totals.ttft), tpot_ms: mean(before.tpot, totals.tpot) });
      before = totals;
    } catch {
      return;
    }
    await sleep(POLL_MS, signal);
  }
}

/** @typedef {{ sum: number, count: number }} Total */
/** @typedef {{ ttft: Total, tpot: Total, goodput: number | null }} Totals */

/**
 * @param {string} metrics in Prometheus' text format
 * @returns {Totals}
 */
function read(metrics) {
  /** @type {Map<string, number>} */
  const values = new Map();
  for (const line of metrics.split("\n")) {
    const [name, value] = line.split(" ");
    if (name && value && !name.startsWith("#")) values.set(name, Number(value));
  }
  /** @param {string} name */
  const total = (name) => ({ sum: values.get(`tidemill_${name}_seconds_sum`) ?? 0, count: values.get(`tidemill_${name}_seconds_count`) ?? 0 });
  /** @param {string} outcome */
  const choices = (outcome) => {
    const ended = [...values].filter(([name]) => name.startsWith("tidemill_class_choices_total{") && name.includes(`outcome="${outcome}"`));
    return ended.reduce((sum, [, count]) => sum + count, 0);
  };
  const attained = choices("attained");
  const finished = attained + choices("missed");
  return { ttft: total("ttft"), tpot: total("tpot"), goodput: finished > 0 ? attained / finished : null };
}

/**
 * @param {Total} before
 * @param {Total} after
 */
function mean(before, after) {
  const n = after.count - before.count;
  return n > 0 ? ((after.sum - before.sum) / n) * 1000 : null;
}

/**
 * @param {number} ms
 * @param {AbortSignal} signal
 * @returns {Promise<void>}
 */
function sleep(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    }, { once: true });
  });
}
