// @ts-check
// What a run of snapshots tells: rates out of counters, who came and went, and the last two minutes of a few numbers.
// No DOM and no clock in here: time is an argument.

/** @typedef {import("./types.js").Member} Member */
/** @typedef {import("./types.js").Snapshot} Snapshot */
/** @typedef {import("./types.js").Latencies} Latencies */
/** @typedef {import("./types.js").FinishedRequest} FinishedRequest */

/**
 * Per second.
 * @typedef {object} Rates
 * @property {number} put_near bytes over shared memory into pool nodes of this host
 * @property {number} get_near
 * @property {number} put_far bytes over the network
 * @property {number} get_far
 * @property {number} stored bytes to a pool node's disk
 * @property {number} loaded
 * @property {number} generated tokens
 * @property {number} prefilled prompt tokens that a prefill worker computed
 */

/**
 * @typedef {object} Seen
 * @property {Member} member as last reported
 * @property {Rates} rates
 * @property {Rates} totals
 * @property {number} changed_ms when `totals` last changed
 * @property {number | null} gone_ms since when it is no member any more
 */

/** @typedef {"join" | "drain" | "leave" | "lost" | "rescue" | "preempt" | "fault" | "note"} LogKind */
/** @typedef {{ unix_ms: number, kind: LogKind, text: string }} LogEntry */
/** @typedef {{ at_ms: number, value: number }} Point */
/** @typedef {"ttft" | "tpot" | "running" | "waiting" | "generated" | "goodput"} SeriesName */

export const WINDOW_MS = 120_000;
/** A member that is gone stays in the picture for this long. */
export const GHOST_MS = 8_000;
const LOG_MAX = 200;
const REQUESTS_MAX = 64;
/** Under load, the window of what is told per request becomes shorter. */
const POINTS_MAX = 600;
/** Members report once a second; what has not changed for longer than that stands still. */
const REPORT_MS = 1_000;
const STILL_MS = 1_700;

export class History {
  constructor() {
    /** @type {Map<string, Seen>} by epoch */
    this.seen = new Map();
    /** @type {LogEntry[]} newest first */
    this.log = [];
    /** @type {{ request: FinishedRequest, unix_ms: number }[]} newest first */
    this.requests = [];
    /** @type {Record<SeriesName, Point[]>} */
    this.series = { ttft: [], tpot: [], running: [], waiting: [], generated: [], goodput: [] };
    /** @type {Snapshot | null} */
    this.snapshot = null;
  }

  /**
   * @param {Snapshot} snapshot
   * @param {number} now unix ms
   */
  update(snapshot, now) {
    const first = this.snapshot === null;
    const present = new Set(snapshot.cluster.members.map((member) => member.epoch));
    for (const [epoch, seen] of this.seen) {
      if (!present.has(epoch) && seen.gone_ms === null) this.#leave(seen, now);
      if (seen.gone_ms !== null && now - seen.gone_ms > GHOST_MS) this.seen.delete(epoch);
    }
    for (const member of snapshot.cluster.members) this.#member(member, now, first);
    if (first) this.note(now, "note", `Watching ${snapshot.cluster.members.map((member) => member.name).sort().join(", ") || "a cluster without members"}`);
    const rescues = snapshot.cluster.rescues - (this.snapshot?.cluster.rescues ?? snapshot.cluster.rescues);
    if (rescues > 0) this.note(now, "rescue", `${sequences(rescues)} moved to another worker, streams go on`);
    this.snapshot = snapshot;

    this.#point("running", now, snapshot.cluster.sequences_running);
    this.#point("waiting", now, snapshot.cluster.sequences_waiting);
    this.#point("generated", now, [...this.seen.values()].reduce((sum, seen) => sum + seen.rates.generated, 0));
    if (snapshot.goodput !== null) this.#point("goodput", now, snapshot.goodput);
  }

  /**
   * @param {FinishedRequest} request
   * @param {number} now
   */
  finished(request, now) {
    this.requests.unshift({ request, unix_ms: now - request.age_ms });
    this.requests.length = Math.min(this.requests.length, REQUESTS_MAX);
    this.latencies(request, now - request.age_ms);
  }

  /**
   * The server's own memory of recent requests replaces this one, which may have gaps.
   * @param {FinishedRequest[]} requests oldest first
   * @param {number} now
   */
  replay(requests, now) {
    this.requests = [];
    this.series.ttft = [];
    this.series.tpot = [];
    for (const request of requests) this.finished(request, now);
  }

  /**
   * @param {Latencies} latencies
   * @param {number} now
   */
  latencies(latencies, now) {
    if (latencies.ttft_ms !== null) this.#point("ttft", now, latencies.ttft_ms);
    if (latencies.tpot_ms !== null) this.#point("tpot", now, latencies.tpot_ms);
  }

  /**
   * @param {number} unixMs
   * @param {LogKind} kind
   * @param {string} text
   */
  note(unixMs, kind, text) {
    this.log.unshift({ unix_ms: unixMs, kind, text });
    this.log.length = Math.min(this.log.length, LOG_MAX);
  }

  /**
   * @param {Member} member
   * @param {number} now
   * @param {boolean} first
   */
  #member(member, now, first) {
    const totals = totalsOf(member);
    const seen = this.seen.get(member.epoch);
    if (!seen) {
      this.seen.set(member.epoch, { member, rates: STILL, totals, changed_ms: now, gone_ms: null });
      if (!first) this.note(now, "join", `${member.name} joined (pid ${member.pid}, epoch ${member.epoch})`);
      return;
    }
    const { counters } = member.report;
    const before = seen.member.report.counters;
    if (member.unhealthy && !seen.member.unhealthy) this.note(now, "fault", `${member.name} is unhealthy: it answers probes wrongly and gets no more work`);
    else if (member.draining && !seen.member.draining) this.note(now, "drain", `${member.name} drains: it takes nothing new`);
    const preempted = counters.preemptions - before.preemptions;
    if (preempted > 0) this.note(now, "preempt", `${sequences(preempted)} preempted at ${member.name}`);
    if (counters.disk.given_up > before.disk.given_up) this.note(now, "fault", `${member.name} goes on without its disk`);
    const corrupt = counters.misses.corrupt + counters.disk.corrupt - before.misses.corrupt - before.disk.corrupt;
    if (corrupt > 0) this.note(now, "fault", `${member.name}: ${corrupt} corrupt ${corrupt === 1 ? "block" : "blocks"} found and computed again`);

    const keys = /** @type {(keyof Rates)[]} */ (Object.keys(totals));
    if (keys.some((key) => totals[key] !== seen.totals[key])) {
      const seconds = Math.min(Math.max(now - seen.changed_ms, REPORT_MS / 2), REPORT_MS) / 1000;
      const rates = { ...STILL };
      for (const key of keys) rates[key] = Math.max(0, totals[key] - seen.totals[key]) / seconds;
      Object.assign(seen, { rates, totals, changed_ms: now });
    } else if (now - seen.changed_ms > STILL_MS) seen.rates = STILL;
    seen.member = member;
    seen.gone_ms = null;
  }

  /**
   * @param {Seen} seen
   * @param {number} now
   */
  #leave(seen, now) {
    seen.gone_ms = now;
    seen.rates = STILL;
    const { name, pid, draining } = seen.member;
    if (draining) this.note(now, "leave", `${name} left`);
    else this.note(now, "lost", `${name} is gone (pid ${pid})`);
  }

  /**
   * @param {SeriesName} name
   * @param {number} now
   * @param {number} value
   */
  #point(name, now, value) {
    const points = this.series[name];
    points.push({ at_ms: now, value });
    while (points.length > POINTS_MAX || (points[0] && now - points[0].at_ms > WINDOW_MS)) points.shift();
  }
}

/** @type {Rates} */
const STILL = Object.freeze({ put_near: 0, get_near: 0, put_far: 0, get_far: 0, stored: 0, loaded: 0, generated: 0, prefilled: 0 });

/**
 * @param {Member} member
 * @returns {Rates}
 */
function totalsOf(member) {
  const { transfer, disk, tokens_generated, prefill_computed_tokens } = member.report.counters;
  return {
    put_near: transfer.shm_put.bytes,
    get_near: transfer.shm_get.bytes,
    put_far: transfer.quic_put.bytes,
    get_far: transfer.quic_get.bytes,
    stored: disk.stored.bytes,
    loaded: disk.loaded.bytes,
    generated: tokens_generated,
    prefilled: prefill_computed_tokens,
  };
}

/** @param {number} n */
function sequences(n) {
  return `${n} ${n === 1 ? "sequence" : "sequences"}`;
}
