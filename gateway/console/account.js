// @ts-check
// Who is signed in, where operators sign in, and what tenants have spent, for those who may look.

import { ApiError, call } from "./api.js";
import { byId, h } from "./dom.js";

/** @typedef {import("./types.js").Account} Account */
/** @typedef {import("./types.js").Spend} Spend */
/** @typedef {import("./types.js").SpendRow} SpendRow */

const SPEND_MS = 30_000;
const RETRY_MS = 5000;

/** Shows the account and keeps what is spent up to date. Where operators do not sign in, nothing is shown. */
export async function account() {
  for (;;) {
    try {
      /** @type {Account} */
      const found = await (await call("console/who")).json();
      show(found);
      if (!found.operator) return;
      await spend();
    } catch (error) {
      if (error instanceof ApiError && error.status === 403) return;
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

/** @param {Account} account */
function show({ operator, sign_in }) {
  const parts = [];
  if (operator) {
    const until = operator.until ? `until ${new Date(operator.until * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" })}` : "";
    parts.push(h("span", { title: `${operator.subject} ${until}` }, operator.shown), h("small", {}, operator.role ?? "no role"));
    if (operator.until) parts.push(h("button", { class: "plain", id: "sign-out", onclick: () => void signOut() }, "Sign out"));
  } else if (sign_in) parts.push(h("a", { id: "sign-in", href: "console/sign-in" }, "Sign in"));
  byId("account").replaceChildren(...parts);
}

async function signOut() {
  await call("console/sign-out", { method: "POST", headers: { "content-type": "application/json" }, body: "{}" });
  location.reload();
}

/** Asks what is spent until that is refused: by then the session is over. */
async function spend() {
  for (;;) {
    if (!document.hidden) {
      /** @type {Spend} */
      const spent = await (await call("admin/spend")).json();
      byId("spend").hidden = false;
      byId("tenants").replaceChildren(...[...spent.tenants].sort(most).map(row));
    }
    await new Promise((resolve) => setTimeout(resolve, SPEND_MS));
  }
}

/** @param {SpendRow} tenant */
function row(tenant) {
  const cells = [tenant.day, tenant.month].flatMap(({ spent, soft, hard }) => [
    h("td", { class: "number" }, spent),
    h("td", { class: "number", title: soft ? `soft budget ${soft}` : "" }, hard ?? "–"),
  ]);
  return h("tr", {}, h("th", { scope: "row" }, tenant.tenant), ...cells);
}

/**
 * @param {SpendRow} a
 * @param {SpendRow} b
 */
function most(a, b) {
  return b.month.spent_micros - a.month.spent_micros || a.tenant.localeCompare(b.tenant, "en", { numeric: true });
}
