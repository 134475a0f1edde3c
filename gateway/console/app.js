// @ts-check
// The page: panes, theme, and the live data on its way to them.

import { account } from "./account.js";
import { ApiError, model } from "./api.js";
import { ChatPane } from "./chat.js";
import { ClusterPane } from "./cluster.js";
import { byId, icon, say } from "./dom.js";
import { watch } from "./feed.js";
import { plural } from "./format.js";
import { History } from "./history.js";
import { Picture } from "./picture.js";

/** @typedef {import("./types.js").FeedState} FeedState */

const PANES = ["chat", "cluster"];
/** The model is asked for again while the coordinator cannot be reached. */
const MODEL_RETRY_MS = 2000;

/** @type {Set<string>} panes without anything to show: clients and operators may have a port each */
const absent = new Set();

const history = new History();
const chat = new ChatPane();
const cluster = new ClusterPane();
const small = new Picture(byId("small-picture"));

function redraw() {
  if (byId("cluster").hidden) small.update(history);
  else cluster.update(history, Date.now());
}

/** @param {string} pane */
function show(pane) {
  for (const name of PANES) {
    const chosen = name === pane;
    byId(name).hidden = !chosen;
    const tab = byId(`${name}-tab`);
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
  }
  if (location.hash !== `#${pane}`) window.history.replaceState(null, "", `#${pane}`);
  redraw();
  if (pane === "chat") chat.shown();
}

for (const [index, name] of PANES.entries()) {
  const tab = byId(`${name}-tab`);
  tab.addEventListener("click", () => show(name));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = PANES[(index + 1) % PANES.length] ?? name;
    show(other);
    byId(`${other}-tab`).focus();
  });
}
const fromHash = () => show(PANES.find((name) => location.hash === `#${name}` && !absent.has(name)) ?? PANES.find((name) => !absent.has(name)) ?? "chat");
addEventListener("hashchange", fromHash);

/** @param {string} pane */
function withdraw(pane) {
  absent.add(pane);
  byId(`${pane}-tab`).parentElement?.setAttribute("hidden", "");
  document.body.classList.add(`without-${pane}`);
  fromHash();
}

const theme = byId("theme");
theme.append(icon("theme"));
theme.addEventListener("click", () => {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark" || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  const chosen = dark ? "light" : "dark";
  document.documentElement.dataset.theme = chosen;
  localStorage.setItem("tidemill.theme", chosen);
  name();
});
function name() {
  theme.setAttribute("aria-label", "Switch between light and dark");
}

/** @type {FeedState} */
let state = "connecting";
function status() {
  const members = history.snapshot?.cluster.members.length ?? 0;
  /** @type {Record<FeedState, string>} */
  const words = { connecting: "connecting", live: plural(members, "member"), polling: plural(members, "member"), lost: "no connection", closed: "for operators", absent: "" };
  const element = byId("status");
  element.dataset.state = state;
  element.title = { connecting: "", live: "Live stream", polling: "Asked for once a second", lost: "The coordinator does not answer: trying again", closed: "Sign in to see the cluster", absent: "" }[state];
  const label = element.querySelector("span");
  if (label) say(label, words[state]);
}

async function findModel() {
  for (;;) {
    try {
      const found = await model();
      say(byId("model"), found.id);
      chat.serve(found.id);
      return;
    } catch (error) {
      if (error instanceof ApiError && error.status === 404) return withdraw("chat");
      await new Promise((resolve) => setTimeout(resolve, MODEL_RETRY_MS));
    }
  }
}

name();
fromHash();
void findModel();
void account();
watch({
  state(next) {
    if (next === "absent") withdraw("cluster");
    if (next === "lost" && state !== "lost") history.note(Date.now(), "note", "The coordinator does not answer");
    else if ((next === "live" || next === "polling") && state === "lost") history.note(Date.now(), "note", "The coordinator answers again");
    state = next;
    status();
  },
  snapshot(snapshot) {
    history.update(snapshot, Date.now());
    status();
    redraw();
  },
  recent: (requests) => history.replay(requests, Date.now()),
  request: (request) => history.finished(request, Date.now()),
  latencies: (latencies) => history.latencies(latencies, Date.now()),
});
