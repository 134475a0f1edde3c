// @ts-check
// Elements built as nodes. Text always becomes a text node, so nothing that a model or a worker says is read as markup.

/** @typedef {Node | string | number | null | undefined | false} Child */
/** @typedef {Record<string, string | number | boolean | null | undefined | ((event: any) => void)>} Attributes */

const SVG = "http://www.w3.org/2000/svg";

/**
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Attributes} [attributes] functions become listeners, `true` an empty attribute
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  fill(element, attributes, children);
  return element;
}

/**
 * @template {keyof SVGElementTagNameMap} K
 * @param {K} tag
 * @param {Attributes} [attributes]
 * @param {...Child} children
 * @returns {SVGElementTagNameMap[K]}
 */
export function svg(tag, attributes = {}, ...children) {
  const element = /** @type {SVGElementTagNameMap[K]} */ (document.createElementNS(SVG, tag));
  fill(element, attributes, children);
  return element;
}

/**
 * @param {Element} element
 * @param {Attributes} attributes
 * @param {Child[]} children
 */
function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.replace(/^on/, ""), value);
    else set(element, name, value);
  }
  for (const child of children) {
    if (child !== null && child !== undefined && child !== false) element.append(typeof child === "number" ? String(child) : child);
  }
}

/**
 * Sets an attribute, but only if it changes: the pictures are updated twice a second.
 * @param {Element} element
 * @param {string} name
 * @param {string | number | boolean | null | undefined} value
 */
export function set(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else {
    const text = value === true ? "" : String(value);
    if (element.getAttribute(name) !== text) element.setAttribute(name, text);
  }
}

/**
 * @param {Node} node
 * @param {string} text
 */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/**
 * An element that `index.html` has.
 * @param {string} id
 */
export function byId(id) {
  const element = document.getElementById(id);
  if (!element) throw new Error(`index.html has no #${id}`);
  return element;
}

/** @type {Record<string, string>} */
const ICONS = {
  plus: "M8 3v10M3 8h10",
  send: "M8 13V3M3.5 7.5 8 3l4.5 4.5",
  stop: "M4.5 4.5h7v7h-7z",
  again: "M13 8a5 5 0 1 1-1.5-3.6M13 2.5v3h-3",
  copy: "M5.5 5.5h7v7h-7zM3.5 10.5v-7h7",
  edit: "M3 13l.6-2.8L10.8 3l2.2 2.2-7.2 7.2z",
  trash: "M3 4.5h10M6.5 4.5V3h3v1.5M4.5 4.5l.6 8.5h5.8l.6-8.5M6.8 7v4M9.2 7v4",
  menu: "M2.5 4.5h11M2.5 8h11M2.5 11.5h11",
  tune: "M2.5 5h6M11.5 5h2M2.5 11h2M7.5 11h6M10 3.5v3M6 9.5v3",
  close: "M4 4l8 8M12 4l-8 8",
  theme: "M8 2.5v11a5.5 5.5 0 0 0 0-11zM8 2.5a5.5 5.5 0 0 0 0 11",
  check: "M3.5 8.5l3 3 6-7",
};

/** @param {keyof typeof ICONS & string} name */
export function icon(name) {
  return svg("svg", { class: "icon", viewBox: "0 0 16 16", "aria-hidden": "true" }, svg("path", { d: ICONS[name] ?? "" }));
}
