// @ts-check
// The cluster pane: the picture, a few numbers over time, what happened, recent requests, and the members as a table.

import { byId, h, say } from "./dom.js";
import { clock, count, duration, percent, plural, rate } from "./format.js";
import { provenanceBar, reused, route, timeline } from "./path.js";
import { Picture } from "./picture.js";
import { Spark, median } from "./spark.js";

/** @typedef {import("./history.js").History} History */
/** @typedef {import("./history.js").Seen} Seen */
/** @typedef {import("./types.js").FinishedRequest} FinishedRequest */

const REQUESTS_SHOWN = 24;
const LOG_SHOWN = 80;

export class ClusterPane {
  constructor() {
    this.picture = new Picture(byId("picture"));
    this.sparks = {
      ttft: new Spark("TTFT", "Time to first token of each request", duration, { dots: true }),
      tpot: new Spark("TPOT", "Mean time per further token of each request", duration, { dots: true }),
      generated: new Spark("Tokens", "Tokens per second that all decode workers draw", (value) => `${rate(value)}/s`),
      running: new Spark("Running", "Sequences at a decode worker; dashed: waiting for a place", count),
      goodput: new Spark("Goodput", "Share of finished requests that met the TTFT and TPOT objectives", percent, { most: 1 }),
    };
    byId("sparks").append(...Object.values(this.sparks).map((spark) => spark.element));
    this.drawn = { log: "", requests: "" };
  }

  /**
   * @param {History} history
   * @param {number} now
   */
  update(history, now) {
    this.picture.update(history);
    this.#summary(history);
    const { series } = history;
    const typical = (/** @type {import("./history.js").Point[]} */ points) => {
      const middle = median(points);
      return middle === undefined ? "" : `median ${duration(middle)}`;
    };
    this.sparks.ttft.update(series.ttft, now, typical(series.ttft));
    this.sparks.tpot.update(series.tpot, now, typical(series.tpot));
    this.sparks.generated.update(series.generated, now, "");
    this.sparks.running.update(series.running, now, `${count(series.waiting.at(-1)?.value ?? 0)} waiting`, series.waiting);
    this.sparks.goodput.update(series.goodput, now, "");
    this.#log(history);
    this.#requests(history);
    byId("members").replaceChildren(...[...history.seen.values()].sort(byName).map(memberRow));
  }

  /** @param {History} history */
  #summary(history) {
    const cluster = history.snapshot?.cluster;
    if (!cluster) return;
    const hosts = new Set(cluster.members.map((member) => member.host)).size;
    const parts = [`${plural(cluster.members.length, "member")} on ${plural(hosts, "host")}`];
    if (cluster.context_tokens) parts.push(`context ${count(cluster.context_tokens)} tokens`);
    if (cluster.rescues) parts.push(plural(cluster.rescues, "rescue"));
    say(byId("summary"), parts.join(" · "));
  }

  /** @param {History} history */
  #log(history) {
    const stamp = `${history.log.length} ${history.log[0]?.unix_ms} ${history.log[0]?.text}`;
    if (stamp === this.drawn.log) return;
    this.drawn.log = stamp;
    const entry = (/** @type {import("./history.js").LogEntry} */ { unix_ms, kind, text }) =>
      h("li", { class: kind }, h("time", {}, clock(unix_ms)), h("span", {}, text));
    byId("log").replaceChildren(...history.log.slice(0, LOG_SHOWN).map(entry));
  }

  /** @param {History} history */
  #requests(history) {
    const stamp = `${history.requests.length} ${history.requests[0]?.unix_ms}`;
    if (stamp === this.drawn.requests) return;
    this.drawn.requests = stamp;
    const rows = history.requests.slice(0, REQUESTS_SHOWN).map(({ request, unix_ms }) => requestRow(request, unix_ms));
    byId("requests").replaceChildren(...rows);
  }
}

/**
 * @param {FinishedRequest} request
 * @param {number} unixMs
 */
function requestRow(request, unixMs) {
  const { path } = request;
  const predicted = request.ttft_predicted_ms === null ? "" : `, ${duration(request.ttft_predicted_ms)} expected`;
  const marks = [];
  if (path.rescues) marks.push(h("em", { class: "badge", title: "moved to another worker while it ran" }, `rescued${path.rescues > 1 ? ` ×${path.rescues}` : ""}`));
  if (path.preemptions) marks.push(h("em", { class: "badge", title: "lost its device blocks for a while" }, `preempted${path.preemptions > 1 ? ` ×${path.preemptions}` : ""}`));
  return h(
    "li",
    {},
    h("time", {}, clock(unixMs)),
    h("div", { class: "route" }, h("b", {}, route(path)), ...marks, h("small", {}, why(request))),
    h("div", { class: "where" }, provenanceBar(path.tokens), timeline(path)),
    h("div", { class: "figures" }, h("b", {}, duration(request.ttft_ms)), h("small", {}, `TTFT${predicted}`)),
  );
}

/** @param {FinishedRequest} request */
function why({ prompt_tokens, completion_tokens, path }) {
  const sizes = `${count(prompt_tokens)} → ${count(completion_tokens)} tokens`;
  const cached = reused(path.tokens);
  if (path.prefill_worker) return `${sizes} · ${count(path.tokens.prefill)} prefilled`;
  if (cached > 0) return `${sizes} · ${percent(cached / prompt_tokens)} reused, rest computed at decode`;
  return `${sizes} · computed at decode`;
}

/** @param {Seen} seen */
function memberRow({ member, gone_ms }) {
  const { report } = member;
  const tier = member.role === "kvpool" ? report.blocks.dram : report.blocks.hbm;
  const fill = tier.total > 0 ? percent(1 - tier.free / tier.total) : "–";
  const { misses } = report.counters;
  const state = gone_ms !== null ? "gone" : member.unhealthy ? "unhealthy" : member.draining ? "draining" : "up";
  return h(
    "tr",
    { class: state },
    h("th", { scope: "row" }, h("i", { class: "dot", title: state }), member.name),
    h("td", { title: member.host }, short(member.host)),
    h("td", { class: "number" }, String(member.pid)),
    h("td", { class: "code" }, member.epoch),
    h("td", { class: "number" }, gone_ms !== null ? "–" : `${member.seconds_since_heartbeat.toFixed(1)} s`),
    h("td", { class: "number" }, `${count(report.running)} / ${count(report.waiting)}`),
    h("td", { class: "number" }, fill),
    h("td", { class: "number" }, count(misses.absent + misses.stale + misses.corrupt + misses.unreachable)),
  );
}

/**
 * By default a host is named after its boot, in 36 characters.
 * @param {string} host
 */
function short(host) {
  return host.length > 16 ? `${host.slice(0, 8)}…` : host;
}

/**
 * @param {Seen} a
 * @param {Seen} b
 */
function byName(a, b) {
  return a.member.name.localeCompare(b.member.name, "en", { numeric: true });
}
