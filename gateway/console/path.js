// @ts-check
// A request's path through the cluster: where its prompt's KV came from, as a bar, and where its time went, as a waterfall.

import { h } from "./dom.js";
import { count, duration } from "./format.js";

/** @typedef {import("./types.js").Path} Path */
/** @typedef {import("./types.js").TokensBySource} TokensBySource */

/** @type {[keyof TokensBySource, string, string][]} */
const SOURCES = [
  ["hbm", "HBM", "blocks that the decode worker still had in its own memory"],
  ["dram", "DRAM", "blocks from a pool node's memory on the same host"],
  ["nvme", "NVMe", "blocks from a pool node's disk"],
  ["object", "object", "blocks from object storage"],
  ["remote", "remote", "blocks from a pool node on another host"],
  ["prefill", "prefill", "computed for this request by a prefill worker, handed over through the pool"],
  ["local", "computed", "computed by the decode worker itself"],
];

/** @param {TokensBySource} tokens */
export function reused(tokens) {
  return tokens.hbm + tokens.dram + tokens.nvme + tokens.object + tokens.remote;
}

/** @param {TokensBySource} tokens */
function total(tokens) {
  return reused(tokens) + tokens.prefill + tokens.local;
}

/** @param {TokensBySource} tokens */
export function provenanceBar(tokens) {
  const all = total(tokens);
  const bar = h("div", { class: "provenance", role: "img", "aria-label": describe(tokens) });
  for (const [source, name, meaning] of SOURCES) {
    if (!tokens[source]) continue;
    const part = h("span", { class: `source-${source}`, title: `${count(tokens[source])} tokens · ${name}: ${meaning}` });
    part.style.flexGrow = String(tokens[source] / all);
    bar.append(part);
  }
  return bar;
}

/** @param {TokensBySource} tokens */
export function provenanceLegend(tokens) {
  const shown = SOURCES.filter(([source]) => tokens[source] > 0);
  const item = (/** @type {[keyof TokensBySource, string, string]} */ [source, name, meaning]) =>
    h("li", { title: meaning }, h("i", { class: `source-${source}` }), `${name} `, h("b", {}, count(tokens[source])));
  return h("ul", { class: "legend" }, ...shown.map(item));
}

/** @param {TokensBySource} tokens */
function describe(tokens) {
  const shown = SOURCES.filter(([source]) => tokens[source] > 0);
  return `Prompt tokens by source: ${shown.map(([source, name]) => `${count(tokens[source])} ${name}`).join(", ")}`;
}

/** @param {Path} path */
export function route(path) {
  return path.prefill_worker ? `${path.prefill_worker} → ${path.decode_worker}` : path.decode_worker;
}

/**
 * What overlaps is drawn so: fetching from the pool and the prefill worker's computation start together.
 * @param {Path} path
 */
function phases(path) {
  const ready = path.queue_ms + Math.max(path.fetch_ms, path.transfer_ms);
  return /** @type {[string, number, number, string][]} */ ([
    ["queue", 0, path.queue_ms, "waiting for a place"],
    ["fetch", path.queue_ms, path.fetch_ms, "cached blocks coming from the pool"],
    ["prefill", path.queue_ms, path.prefill_ms, "the prefill worker's queue and computation"],
    ["transfer", path.queue_ms, path.transfer_ms, "from asking the pool to the last block that was computed for this request"],
    ["tail", ready, path.tail_ms, "what the decode worker computes before the first token"],
  ]);
}

/** @param {Path} path */
function firstToken(path) {
  return phases(path).reduce((latest, [, from, ms]) => Math.max(latest, from + ms), 0.001);
}

/**
 * Up to the first token in scale; decode, which is often a hundred times longer, in a lane of its own behind it.
 * @param {Path} path
 */
export function waterfall(path) {
  const scale = firstToken(path);
  const rows = phases(path).map(([name, from, ms, meaning]) => row(name, from / scale, ms / scale, ms, meaning));
  const decode = row("decode", 0, path.decode_ms > 0 ? 1 : 0, path.decode_ms, "from the first token to the last; not in scale");
  decode.classList.add("after");
  return h("div", { class: "waterfall" }, ...rows, decode);
}

/**
 * @param {string} name
 * @param {number} from share of the lane
 * @param {number} width share of the lane
 * @param {number} ms
 * @param {string} meaning
 */
function row(name, from, width, ms, meaning) {
  const bar = h("i", { class: `phase-${name}` });
  bar.style.left = `${from * 100}%`;
  bar.style.width = `${width * 100}%`;
  return h("div", { class: ms > 0 ? "row" : "row none", title: meaning }, h("span", {}, name), h("div", { class: "lane" }, bar), h("b", {}, duration(ms)));
}

/**
 * The same on one line, up to the first token.
 * @param {Path} path
 */
export function timeline(path) {
  const scale = firstToken(path);
  const line = h("div", { class: "timeline" });
  for (const [name, from, ms, meaning] of phases(path)) {
    if (ms <= 0) continue;
    const bar = h("i", { class: `phase-${name}`, title: `${name} ${duration(ms)}: ${meaning}` });
    bar.style.left = `${(from / scale) * 100}%`;
    bar.style.width = `${(ms / scale) * 100}%`;
    line.append(bar);
  }
  return line;
}
