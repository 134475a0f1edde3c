// @ts-check
// A small subset of Markdown as DOM nodes: paragraphs, headings, lists, fenced and inline code, bold, italics.
// Whatever else a model writes stays the text that it is. Text may end anywhere: answers are rendered while they stream.

import { h } from "./dom.js";

const FENCE = /^\s*```\s*([\w+#.-]*)/;
const ITEM = /^\s*(?:[-*•]|(\d{1,9})[.)])(?:\s+(.*))?$/;
const HEADING = /^#{1,6}\s+(.*)$/;

/**
 * @param {string} text
 * @returns {DocumentFragment}
 */
export function markdown(text) {
  const out = document.createDocumentFragment();
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  let at = 0;
  while (at < lines.length) {
    const line = lines[at] ?? "";
    if (FENCE.test(line)) at = code(lines, at, out);
    else if (ITEM.test(line)) at = list(lines, at, out);
    else if (HEADING.test(line)) {
      out.append(h("h4", {}, ...inline(HEADING.exec(line)?.[1] ?? "")));
      at += 1;
    } else if (line.trim() === "") at += 1;
    else at = paragraph(lines, at, out);
  }
  return out;
}

/**
 * @param {string[]} lines
 * @param {number} from
 * @param {DocumentFragment} out
 */
function code(lines, from, out) {
  let end = from + 1;
  while (end < lines.length && !/^\s*```\s*$/.test(lines[end] ?? "")) end += 1;
  out.append(h("pre", { tabindex: 0 }, h("code", {}, lines.slice(from + 1, end).join("\n"))));
  return end + 1;
}

/**
 * One level: a list in a list becomes part of it.
 * @param {string[]} lines
 * @param {number} from
 * @param {DocumentFragment} out
 */
function list(lines, from, out) {
  const first = ITEM.exec(lines[from] ?? "");
  const ordered = first?.[1] !== undefined;
  const element = ordered ? h("ol", { start: Number(first?.[1]) }) : h("ul");
  let at = from;
  for (; at < lines.length; at += 1) {
    const item = ITEM.exec(lines[at] ?? "");
    if (item) {
      if ((item[1] !== undefined) !== ordered) break;
      element.append(h("li", {}, ...inline(item[2] ?? "")));
    } else if (/^\s+\S/.test(lines[at] ?? "")) element.lastElementChild?.append(" ", ...inline((lines[at] ?? "").trim()));
    else if ((lines[at] ?? "").trim() !== "" || !ITEM.test(lines[at + 1] ?? "")) break;
  }
  out.append(element);
  return at;
}

/**
 * @param {string[]} lines
 * @param {number} from
 * @param {DocumentFragment} out
 */
function paragraph(lines, from, out) {
  const element = h("p");
  let at = from;
  for (; at < lines.length; at += 1) {
    const line = lines[at] ?? "";
    if (line.trim() === "" || FENCE.test(line) || HEADING.test(line) || ITEM.test(line)) break;
    if (at > from) element.append(h("br"));
    element.append(...inline(line));
  }
  out.append(element);
  return at;
}

/**
 * @param {string} text
 * @returns {Node[]}
 */
function inline(text) {
  /** @type {Node[]} */
  const nodes = [];
  const mark = /`([^`]+)`|\*\*([^*]+)\*\*|(?<![\w*])\*([^*\s](?:[^*]*[^*\s])?)\*(?![\w*])/g;
  let from = 0;
  for (const found of text.matchAll(mark)) {
    nodes.push(document.createTextNode(text.slice(from, found.index)));
    if (found[1] !== undefined) nodes.push(h("code", {}, found[1]));
    else if (found[2] !== undefined) nodes.push(h("strong", {}, found[2]));
    else nodes.push(h("em", {}, found[3]));
    from = found.index + found[0].length;
  }
  nodes.push(document.createTextNode(text.slice(from)));
  return nodes;
}
