// @ts-check
// One number over the last two minutes: what it is now, and how it came there.

import { h, say, set, svg } from "./dom.js";
import { WINDOW_MS } from "./history.js";

/** @typedef {import("./history.js").Point} Point */

const WIDTH = 200;
const HEIGHT = 44;

export class Spark {
  /**
   * @param {string} name
   * @param {string} meaning
   * @param {(value: number) => string} format
   * @param {{ dots?: boolean, most?: number }} [options] dots: each value is an event, not a state; most: the scale's upper end
   */
  constructor(name, meaning, format, options = {}) {
    this.format = format;
    this.options = options;
    this.value = h("strong", {}, "–");
    this.note = h("small");
    this.area = svg("path", { class: "area" });
    this.line = svg("path", { class: "line", "vector-effect": "non-scaling-stroke" });
    this.second = svg("path", { class: "line second", "vector-effect": "non-scaling-stroke" });
    const chart = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" }, this.area, this.second, this.line);
    this.element = h("div", { class: options.dots ? "spark dots" : "spark", title: meaning }, h("span", {}, name), this.value, this.note, chart);
  }

  /**
   * @param {Point[]} points
   * @param {number} now
   * @param {string} note
   * @param {Point[]} [others] a second line on the same scale
   */
  update(points, now, note, others = []) {
    const shown = points.filter((point) => now - point.at_ms <= WINDOW_MS);
    const last = points.at(-1);
    say(this.value, last ? this.format(last.value) : "–");
    say(this.note, note);
    const most = this.options.most ?? Math.max(1e-9, ...shown.map((point) => point.value), ...others.map((point) => point.value));
    const x = (/** @type {Point} */ point) => ((WIDTH - 3) * (1 - (now - point.at_ms) / WINDOW_MS)).toFixed(1);
    const y = (/** @type {Point} */ point) => (HEIGHT - 3 - (HEIGHT - 8) * Math.min(1, point.value / most)).toFixed(1);
    const draw = (/** @type {Point[]} */ run) => run.map((point, index) => `${index ? "L" : "M"}${x(point)} ${y(point)}`).join("");
    if (this.options.dots) {
      // A line of no length with a round cap is a dot that does not scale.
      set(this.line, "d", shown.map((point) => `M${x(point)} ${y(point)}h0`).join(""));
      return;
    }
    const path = draw(shown);
    const [first, end] = [shown[0], shown.at(-1)];
    set(this.line, "d", path);
    set(this.area, "d", first && end ? `${path}L${x(end)} ${HEIGHT}L${x(first)} ${HEIGHT}z` : "");
    set(this.second, "d", draw(others.filter((point) => now - point.at_ms <= WINDOW_MS)));
  }
}

/** @param {Point[]} points */
export function median(points) {
  const sorted = points.map((point) => point.value).sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)];
}
