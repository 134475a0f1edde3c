// @ts-check
// The cluster as a picture: coordinator, workers and pool nodes, with what flows between them as dots that move.
//
//            coordinator
//           /     |     \          jobs down, tokens up
//     prefill  decode  decode      batch and queue as cells, device memory as a bar
//           \     |     /          blocks: put down, got up
//           pool     pool          each tier as a basin
//
// Nodes are kept between updates, by epoch, so that changes can be animated by the style sheet.

import { say, set, svg } from "./dom.js";
import { count, percent, plural, rate, size } from "./format.js";

/** @typedef {import("./types.js").Blocks} Blocks */
/** @typedef {import("./types.js").Member} Member */
/** @typedef {import("./history.js").History} History */
/** @typedef {import("./history.js").Seen} Seen */
/** @typedef {{ x: number, y: number, w: number, h: number }} Box */

const MARGIN = 10;
const GAP = 16;
const WORKER = { min: 142, max: 214, h: 112 };
const POOL = { min: 168, max: 300, h: 118 };
const COORDINATOR = { max: 250, h: 56 };
/** Room for the edges between the rows. */
const FALL = 52;
const POOL_FALL = 78;
const CELL = 10;
/** Narrower cards have no room for bytes per second below them. */
const BYTES_ROOM = 186;

export class Picture {
  /** @param {HTMLElement} host */
  constructor(host) {
    this.id = `picture-${(pictures += 1)}`;
    this.edges = svg("g", { class: "edges" });
    this.cards = svg("g");
    this.root = svg("svg", { class: "picture", role: "img" }, this.edges, this.cards);
    host.append(this.root);
    this.host = host;
    this.coordinator = new Coordinator();
    this.cards.append(this.coordinator.element);
    /** @type {Map<string, Worker | Pool>} */
    this.nodes = new Map();
    /** @type {Map<string, Edge>} */
    this.lines = new Map();
    /** @type {History | null} */
    this.history = null;
    new ResizeObserver(() => this.history && this.update(this.history)).observe(host);
  }

  /** @param {History} history */
  update(history) {
    this.history = history;
    const width = this.host.clientWidth;
    if (width === 0 || !history.snapshot) return;
    const all = [...history.seen.values()].sort(byRoleAndName);
    const workers = all.filter(({ member }) => member.role !== "kvpool");
    const pools = all.filter(({ member }) => member.role === "kvpool");

    const top = { x: (width - Math.min(COORDINATOR.max, width - 2 * MARGIN)) / 2, y: MARGIN, w: Math.min(COORDINATOR.max, width - 2 * MARGIN), h: COORDINATOR.h };
    const workerBoxes = rows(workers.length, width, top.y + top.h + FALL, WORKER);
    const workersEnd = Math.max(top.y + top.h, ...workerBoxes.map((box) => box.y + box.h));
    const poolBoxes = rows(pools.length, width, workersEnd + POOL_FALL, POOL);
    const height = Math.max(workersEnd, ...poolBoxes.map((box) => box.y + box.h)) + MARGIN;
    set(this.root, "viewBox", `0 0 ${width} ${height}`);
    set(this.root, "height", height);
    set(this.root, "aria-label", describe(all));

    const many = new Set(all.map(({ member }) => member.host)).size > 1;
    this.coordinator.update(top, history);
    /** @type {[Seen, Box][]} */
    const placed = [...zip(workers, workerBoxes), ...zip(pools, poolBoxes)];
    for (const [seen, box] of placed) {
      const { epoch, role } = seen.member;
      let node = this.nodes.get(epoch);
      if (!node) {
        node = role === "kvpool" ? new Pool(`${this.id}-${epoch}`) : new Worker(role);
        this.nodes.set(epoch, node);
        this.cards.append(node.element);
      }
      node.update(seen, box, many);
    }
    for (const [epoch, node] of this.nodes) {
      if (history.seen.has(epoch)) continue;
      node.element.remove();
      this.nodes.delete(epoch);
    }
    this.#connect(top, zip(workers, workerBoxes), zip(pools, poolBoxes));
  }

  /**
   * @param {Box} top
   * @param {[Seen, Box][]} workers
   * @param {[Seen, Box][]} pools
   */
  #connect(top, workers, pools) {
    const drawn = new Set();
    /**
     * @param {string} id
     * @param {Box} from
     * @param {Box} to
     * @param {Flow} flow
     */
    const draw = (id, from, to, flow) => {
      drawn.add(id);
      let edge = this.lines.get(id);
      if (!edge) {
        edge = new Edge();
        this.lines.set(id, edge);
        this.edges.append(edge.element);
      }
      edge.update(from, to, flow);
    };
    for (const [seen, box] of workers) {
      if (seen.gone_ms !== null) continue;
      const { member, rates } = seen;
      const busy = member.assigned + member.report.running + member.report.waiting > 0;
      draw(`coordinator ${member.epoch}`, top, box, { down: busy ? 1 : 0, up: rates.generated > 0 ? 1 : 0, kind: "jobs", far: false });
      const alive = pools.filter(([pool]) => pool.gone_ms === null);
      const far = alive.filter(([pool]) => pool.member.host !== member.host);
      const farthest = far.length > 0 ? far : alive;
      for (const [pool, poolBox] of alive) {
        // Reports count bytes by transport, not by node: nodes that could have been meant share them in the picture.
        const near = pool.member.host === member.host;
        const share = (/** @type {number} */ here, /** @type {number} */ there) =>
          (near ? here / (alive.length - far.length) : 0) + (farthest.some(([other]) => other === pool) ? there / farthest.length : 0);
        const flow = { down: share(rates.put_near, rates.put_far), up: share(rates.get_near, rates.get_far), kind: "blocks", far: !near };
        draw(`${member.epoch} ${pool.member.epoch}`, box, poolBox, flow);
      }
    }
    for (const [id, edge] of this.lines) {
      if (drawn.has(id)) continue;
      edge.element.remove();
      this.lines.delete(id);
    }
  }
}

/** @typedef {{ down: number, up: number, kind: string, far: boolean }} Flow */

class Edge {
  constructor() {
    this.line = svg("path", { class: "line" });
    this.down = svg("path", { class: "flow down" });
    this.up = svg("path", { class: "flow up" });
    this.element = svg("g", {}, this.line, this.down, this.up);
  }

  /**
   * @param {Box} from the upper one
   * @param {Box} to
   * @param {Flow} flow
   */
  update(from, to, flow) {
    set(this.element, "class", `edge ${flow.kind}${flow.far ? " far" : ""}`);
    set(this.line, "d", curve(from, to, 0));
    set(this.down, "d", curve(from, to, -5));
    set(this.up, "d", curve(from, to, 5));
    for (const [path, amount] of /** @type {[SVGPathElement, number][]} */ ([[this.down, flow.down], [this.up, flow.up]])) {
      path.classList.toggle("on", amount > 0);
      // From a few bytes to gigabytes: each decade a little thicker.
      if (amount > 0) path.style.strokeWidth = `${flow.kind === "jobs" ? 3 : Math.min(7.5, 2.5 + 0.6 * Math.log10(1 + amount))}px`;
    }
  }
}

class Coordinator {
  constructor() {
    this.card = svg("rect", { class: "card", rx: 14 });
    this.name = svg("text", { class: "name", y: 25, "text-anchor": "middle" }, "coordinator");
    this.line = svg("text", { class: "detail", y: 43, "text-anchor": "middle" });
    this.element = svg("g", { class: "node coordinator" }, this.card, this.name, this.line);
  }

  /**
   * @param {Box} box
   * @param {History} history
   */
  update(box, history) {
    const cluster = history.snapshot?.cluster;
    if (!cluster) return;
    place(this.element, this.card, box);
    for (const text of [this.name, this.line]) set(text, "x", box.w / 2);
    say(this.line, `${plural(cluster.sequences_running, "sequence")} running · ${count(cluster.sequences_waiting)} waiting`);
  }
}

class Worker {
  /** @param {import("./types.js").Role} role */
  constructor(role) {
    this.role = role;
    this.card = svg("rect", { class: "card", rx: 14 });
    this.name = svg("text", { class: "name", x: 14, y: 25 });
    this.mark = svg("g", { class: "mark" }, svg("path", { d: role === "decode" ? WHEEL : TIDE }));
    this.state = svg("text", { class: "detail", x: 14, y: 44 });
    this.cells = svg("g", { class: "cells" });
    this.speed = svg("text", { class: "detail strong", x: 14, y: 86 });
    this.memory = svg("text", { class: "detail", y: 86, "text-anchor": "end" });
    this.bar = new Fill(6);
    this.put = svg("text", { class: "bytes put", "text-anchor": "end" });
    this.got = svg("text", { class: "bytes got" });
    this.title = svg("title");
    this.element = svg("g", { class: `node ${role}` }, this.title, this.card, this.name, this.mark, this.state, this.cells, this.speed, this.memory, this.bar.element, this.put, this.got);
  }

  /**
   * @param {Seen} seen
   * @param {Box} box
   * @param {boolean} showHost
   */
  update({ member, rates, gone_ms }, box, showHost) {
    const { waiting, blocks } = member.report;
    // A report is up to a second old; what this coordinator has given out is not, but other coordinators give, too.
    const running = Math.max(member.report.running, member.assigned - waiting);
    place(this.element, this.card, box);
    set(this.element, "class", `node ${this.role}${condition(member, gone_ms)}`);
    say(this.name, fit(member.name, box.w - 56));
    this.mark.style.transform = `translate(${box.w - 24}px, 21px)`;
    set(this.mark, "class", `mark${rates.generated + rates.prefilled > 0 ? " turning" : ""}`);
    const doing = this.role === "decode" ? "batch" : "jobs";
    say(this.state, gone_ms !== null ? "gone" : member.unhealthy ? "unhealthy" : member.draining ? "draining" : `${doing} ${count(running)} · queue ${count(waiting)}`);
    this.#squares(running, waiting, Math.floor((box.w - 28) / CELL));
    const speed = this.role === "decode" ? rates.generated : rates.prefilled;
    say(this.speed, speed > 0 ? `${rate(speed)} tok/s` : "");
    set(this.memory, "x", box.w - 14);
    say(this.memory, blocks.hbm.total > 0 && gone_ms === null ? `HBM ${percent(1 - blocks.hbm.free / blocks.hbm.total)}` : "");
    this.bar.update(14, 94, box.w - 28, blocks.hbm);
    const put = rates.put_near + rates.put_far;
    const got = rates.get_near + rates.get_far;
    const room = box.w >= BYTES_ROOM;
    write(this.put, box.w / 2 - 14, box.h + 17, put > 0 && room ? `${size(put)}/s ↓` : "");
    write(this.got, box.w / 2 + 14, box.h + 17, got > 0 && room ? `↑ ${size(got)}/s` : "");
    say(this.title, title(member, showHost));
  }

  /**
   * @param {number} running
   * @param {number} waiting
   * @param {number} room
   */
  #squares(running, waiting, room) {
    const shown = Math.min(room, running + waiting);
    while (this.cells.childElementCount > shown) this.cells.lastElementChild?.remove();
    while (this.cells.childElementCount < shown) {
      this.cells.append(svg("rect", { x: 14 + CELL * this.cells.childElementCount, y: 55, width: 7, height: 7, rx: 2 }));
    }
    // Where there is no room for all, the share of those that run is kept.
    const full = running + waiting > room ? Math.round((room * running) / (running + waiting)) : running;
    [...this.cells.children].forEach((cell, index) => set(cell, "class", index < full ? "running" : "waiting"));
  }
}

class Pool {
  /** @param {string} id */
  constructor(id) {
    this.card = svg("rect", { class: "card", rx: 14 });
    this.name = svg("text", { class: "name", x: 14, y: 25 });
    this.state = svg("text", { class: "detail", "text-anchor": "end", y: 25 });
    this.dram = new Basin("DRAM", `${id}-dram`);
    this.nvme = new Basin("NVMe", `${id}-nvme`);
    this.title = svg("title");
    this.element = svg("g", { class: "node kvpool" }, this.title, this.card, this.name, this.state, this.dram.element, this.nvme.element);
  }

  /**
   * @param {Seen} seen
   * @param {Box} box
   * @param {boolean} showHost
   */
  update({ member, rates, gone_ms }, box, showHost) {
    const { dram, nvme } = member.report.blocks;
    place(this.element, this.card, box);
    set(this.element, "class", `node kvpool${condition(member, gone_ms)}`);
    say(this.name, fit(member.name, box.w / 2));
    set(this.state, "x", box.w - 14);
    const disk = rates.stored + rates.loaded > 0 ? ` · disk ${size(rates.stored + rates.loaded)}/s` : "";
    const held = `${plural(dram.cached + dram.used + nvme.cached + nvme.used, "block")}${disk}`;
    say(this.state, gone_ms !== null ? "gone" : member.draining ? "draining" : held);
    const room = box.w - 28;
    const both = nvme.total > 0;
    this.dram.update({ x: 14, y: 38, w: both ? (room - 8) / 2 : room, h: 66 }, dram);
    set(this.nvme.element, "display", both ? null : "none");
    if (both) this.nvme.update({ x: 14 + (room + 8) / 2, y: 38, w: (room - 8) / 2, h: 66 }, nvme);
    say(this.title, title(member, showHost));
  }
}

/** A tier of a pool node: water stands as high as it is full, what is in use at the bottom. */
class Basin {
  /**
   * @param {string} label
   * @param {string} id
   */
  constructor(label, id) {
    this.wall = svg("rect", { class: "basin", rx: 8 });
    this.clip = svg("rect", { rx: 8 });
    this.cached = svg("rect", { class: "water cached" });
    this.used = svg("rect", { class: "water used" });
    this.wave = svg("path", { class: "wave", d: WAVE });
    this.level = svg("g", { class: "level" }, this.wave, this.cached);
    // Water rises from below.
    this.level.style.transform = `translateY(${POOL.h}px)`;
    const water = svg("g", { "clip-path": `url(#${id})` }, this.level, this.used);
    this.label = svg("text", { class: "tier" }, label);
    this.amount = svg("text", { class: "tier-amount" });
    this.element = svg("g", {}, svg("clipPath", { id }, this.clip), this.wall, water, this.label, this.amount);
  }

  /**
   * @param {Box} box
   * @param {Blocks} blocks
   */
  update({ x, y, w, h }, blocks) {
    for (const rect of [this.wall, this.clip]) sized(rect, x, y, w, h);
    const share = (/** @type {number} */ n) => (blocks.total > 0 && n > 0 ? Math.max(n / blocks.total, 0.04) : 0);
    const full = Math.min(1, share(blocks.cached + blocks.used)) * h;
    sized(this.cached, x, 0, w, h);
    this.level.style.transform = `translateY(${y + h - full + (full > 0 ? 0 : 6)}px)`;
    this.wave.style.setProperty("--x", `${x}px`);
    const used = Math.min(1, share(blocks.used)) * h;
    sized(this.used, x, y + h - used, w, used);
    write(this.label, x + 9, y + 18, this.label.textContent ?? "");
    const held = (blocks.cached + blocks.used) * blocks.bytes_per_block;
    // A pool node learns how large blocks are from the first one.
    write(this.amount, x + 9, y + 34, blocks.total > 0 ? `${size(held)} of ${size(blocks.total * blocks.bytes_per_block)}` : "empty");
  }
}

/** Used, cached and free blocks as a bar. */
class Fill {
  /** @param {number} height */
  constructor(height) {
    this.height = height;
    this.track = svg("rect", { class: "track", rx: height / 2 });
    this.cached = svg("rect", { class: "part cached", rx: height / 2 });
    this.used = svg("rect", { class: "part used", rx: height / 2 });
    this.element = svg("g", {}, this.track, this.cached, this.used);
  }

  /**
   * @param {number} x
   * @param {number} y
   * @param {number} w
   * @param {Blocks} blocks
   */
  update(x, y, w, blocks) {
    const width = (/** @type {number} */ n) => (n > 0 && blocks.total > 0 ? Math.max(this.height, (n / blocks.total) * w) : 0);
    sized(this.track, x, y, w, this.height);
    sized(this.cached, x, y, width(blocks.used + blocks.cached), this.height);
    sized(this.used, x, y, width(blocks.used), this.height);
  }
}

/**
 * Boxes of equal width in as few rows as fit.
 * @param {number} n
 * @param {number} width
 * @param {number} y
 * @param {{ min: number, max: number, h: number }} shape
 * @returns {Box[]}
 */
function rows(n, width, y, shape) {
  const room = width - 2 * MARGIN;
  const most = Math.max(1, Math.floor((room + GAP) / (shape.min + GAP)));
  const lines = Math.ceil(n / most);
  const columns = Math.ceil(n / Math.max(lines, 1));
  const w = Math.min(shape.max, (room - GAP * (columns - 1)) / Math.max(columns, 1));
  return Array.from({ length: n }, (_, index) => {
    const line = Math.floor(index / columns);
    const inLine = Math.min(columns, n - line * columns);
    const start = (width - inLine * w - (inLine - 1) * gapOf(w, inLine, room)) / 2;
    return { x: start + (index % columns) * (w + gapOf(w, inLine, room)), y: y + line * (shape.h + FALL), w, h: shape.h };
  });
}

/**
 * A little air where there is much room.
 * @param {number} w
 * @param {number} n
 * @param {number} room
 */
function gapOf(w, n, room) {
  return n < 2 ? GAP : Math.min(3 * GAP, (room - n * w) / (n - 1));
}

/**
 * @param {Box} from
 * @param {Box} to
 * @param {number} shift to the right
 */
function curve(from, to, shift) {
  const [x1, y1, x2, y2] = [from.x + from.w / 2 + shift, from.y + from.h, to.x + to.w / 2 + shift, to.y];
  const bend = (y2 - y1) / 2;
  return `M${x1} ${y1}C${x1} ${y1 + bend} ${x2} ${y2 - bend} ${x2} ${y2}`;
}

/**
 * @param {SVGGElement} element
 * @param {SVGRectElement} card
 * @param {Box} box
 */
function place(element, card, box) {
  element.style.transform = `translate(${box.x}px, ${box.y}px)`;
  sized(card, 0, 0, box.w, box.h);
}

/**
 * @param {SVGTextElement} text
 * @param {number} x
 * @param {number} y
 * @param {string} words
 */
function write(text, x, y, words) {
  set(text, "x", x);
  set(text, "y", y);
  say(text, words);
}

/**
 * @param {SVGRectElement} rect
 * @param {number} x
 * @param {number} y
 * @param {number} w
 * @param {number} h
 */
function sized(rect, x, y, w, h) {
  set(rect, "x", x);
  set(rect, "y", y);
  set(rect, "width", Math.max(0, w));
  set(rect, "height", Math.max(0, h));
}

/**
 * @param {Member} member
 * @param {number | null} gone
 */
function condition(member, gone) {
  return gone !== null ? " gone" : member.unhealthy ? " unhealthy" : member.draining ? " draining" : "";
}

/**
 * @param {Member} member
 * @param {boolean} showHost
 */
function title(member, showHost) {
  return `${member.name} · pid ${member.pid} · epoch ${member.epoch}${showHost ? ` · host ${member.host}` : ""}`;
}

/**
 * @param {string} name
 * @param {number} width
 */
function fit(name, width) {
  const most = Math.max(4, Math.floor(width / 7.6));
  return name.length > most ? `${name.slice(0, most - 1)}…` : name;
}

/**
 * @param {Seen} a
 * @param {Seen} b
 */
function byRoleAndName(a, b) {
  const order = { prefill: 0, decode: 1, kvpool: 2 };
  return order[a.member.role] - order[b.member.role] || a.member.name.localeCompare(b.member.name, "en", { numeric: true });
}

/** @param {Seen[]} all */
function describe(all) {
  const here = all.filter(({ gone_ms }) => gone_ms === null);
  const n = (/** @type {string} */ role) => here.filter(({ member }) => member.role === role).length;
  return `Cluster with ${plural(n("prefill"), "prefill worker")}, ${plural(n("decode"), "decode worker")} and ${plural(n("kvpool"), "pool node")}`;
}

/**
 * @template A, B
 * @param {A[]} a
 * @param {B[]} b
 * @returns {[A, B][]}
 */
function zip(a, b) {
  return a.map((item, index) => [item, /** @type {B} */ (b[index])]);
}

/** A page has several pictures, and an `id` is the whole page's. */
let pictures = 0;

/** A mill wheel around the origin: eight paddles. */
const WHEEL = `M5 0A5 5 0 1 1 -5 0A5 5 0 1 1 5 0${[0, 45, 90, 135, 180, 225, 270, 315]
  .map((angle) => {
    const [x, y] = [Math.cos((angle * Math.PI) / 180), Math.sin((angle * Math.PI) / 180)];
    return `M${(x * 2).toFixed(2)} ${(y * 2).toFixed(2)}L${(x * 9).toFixed(2)} ${(y * 9).toFixed(2)}`;
  })
  .join("")}`;
/** A rising tide around the origin. */
const TIDE = "M-9 -4q2.25 -3 4.5 0t4.5 0t4.5 0t4.5 0M-9 1q2.25 -3 4.5 0t4.5 0t4.5 0t4.5 0M-9 6q2.25 -3 4.5 0t4.5 0t4.5 0t4.5 0";
/** The water's surface, wider than any basin, three pixels high. */
const WAVE = `M-40 1q10 -4 20 0${"t20 0".repeat(30)}V8H-40z`;
