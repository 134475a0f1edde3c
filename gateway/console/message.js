// @ts-check
// One message; of an answer, its text and its receipt: what the browser measured and which path the request took.

import { h, icon } from "./dom.js";
import { count, duration, percent, rate } from "./format.js";
import { markdown } from "./markdown.js";
import { provenanceBar, provenanceLegend, reused, route, waterfall } from "./path.js";

/** @typedef {import("./types.js").Message} Message */
/** @typedef {import("./types.js").Receipt} Receipt */

const COPIED_MS = 1200;
const RATE_OVER_MS = 20;

export class MessageView {
  /**
   * @param {Message} message
   * @param {() => void} again asks for another answer
   */
  constructor(message, again) {
    this.message = message;
    this.again = again;
    this.text = h("div", { class: "text" });
    this.foot = h("div", { class: "foot" });
    this.element = h("article", { class: `message ${message.role}`, "aria-label": message.role === "user" ? "You" : "Answer" }, this.text, this.foot);
  }

  /**
   * @param {boolean} running whether it is still being written
   * @param {boolean} last
   */
  update(running, last) {
    const { message } = this;
    if (message.role === "user") {
      this.text.replaceChildren(message.content);
      return;
    }
    this.element.classList.toggle("running", running);
    this.text.replaceChildren(markdown(message.content));
    if (running) {
      if (!message.content) this.text.append(h("p", { class: "waiting" }, h("i"), h("i"), h("i")));
      this.foot.replaceChildren();
      return;
    }
    const parts = [];
    if (message.error) parts.push(h("p", { class: "error", role: "alert" }, message.error));
    if (message.ended === "stopped") parts.push(h("p", { class: "ended" }, "Stopped."));
    if (message.ended === "length") parts.push(h("p", { class: "ended" }, "Cut at the most tokens allowed."));
    if (message.receipt) parts.push(receipt(message.receipt, last));
    parts.push(this.#actions(last));
    this.foot.replaceChildren(...parts);
  }

  /** @param {boolean} last */
  #actions(last) {
    const copy = h("button", { class: "plain", title: "Copy", "aria-label": "Copy", onclick: () => void this.#copy(copy) }, icon("copy"));
    const again = h("button", { class: "plain", title: "Answer again", "aria-label": "Answer again", onclick: () => this.again() }, icon("again"));
    // Browsers give no clipboard to pages that came over plain HTTP from another machine.
    return h("div", { class: "actions" }, navigator.clipboard && copy, last && again);
  }

  /** @param {HTMLElement} button */
  async #copy(button) {
    await navigator.clipboard.writeText(this.message.content);
    button.replaceChildren(icon("check"));
    setTimeout(() => button.replaceChildren(icon("copy")), COPIED_MS);
  }
}

/**
 * @param {Receipt} receipt
 * @param {boolean} open
 */
function receipt({ ttft_ms, stream_ms, chunks, usage }, open) {
  const tokens = usage?.completion_tokens ?? chunks;
  const facts = [fact("first token", duration(ttft_ms))];
  // Tokens that came all at once have no rate.
  if (tokens > 1 && stream_ms >= RATE_OVER_MS) facts.push(fact("tokens/s", rate((tokens - 1) / (stream_ms / 1000))));
  facts.push(fact(tokens === 1 ? "token" : "tokens", count(tokens)));
  const path = usage?.tidemill;
  if (!usage || !path) return h("div", { class: "receipt" }, h("div", { class: "facts" }, ...facts));

  facts.push(h("span", { class: "route" }, route(path)));
  if (path.rescues > 0) facts.push(h("em", { class: "badge" }, path.rescues > 1 ? `rescued ×${path.rescues}` : "rescued"));
  if (path.preemptions > 0) facts.push(h("em", { class: "badge" }, "preempted"));
  const cached = reused(path.tokens);
  const verdict =
    cached > 0
      ? [h("b", {}, percent(cached / usage.prompt_tokens)), ` of ${count(usage.prompt_tokens)} prompt tokens reused`]
      : [`${count(usage.prompt_tokens)} prompt tokens, all computed`];
  return h(
    "details",
    { class: "receipt", open },
    h(
      "summary",
      {},
      h("div", { class: "facts" }, ...facts),
      provenanceBar(path.tokens),
      h("div", { class: "sources" }, h("span", { class: "verdict" }, ...verdict), provenanceLegend(path.tokens)),
    ),
    waterfall(path),
  );
}

/**
 * @param {string} name
 * @param {string} value
 */
function fact(name, value) {
  return h("span", { class: "fact" }, h("b", {}, value), ` ${name}`);
}
