// @ts-check
// The chat pane: conversations on the left, messages in the middle, settings on the right.

import { key } from "./api.js";
import { answer } from "./answer.js";
import { byId, h, icon, say } from "./dom.js";
import { MessageView } from "./message.js";
import * as store from "./store.js";

/** @typedef {import("./types.js").Conversation} Conversation */
/** @typedef {import("./types.js").Message} Message */
/** @typedef {import("./types.js").Sampling} Sampling */

/** What the demo model knows about. */
const QUESTIONS = ["What is Tidemill?", "How does a request travel?", "What happens when a worker dies?", "How do I use my own model?"];
const DEMO_MODEL = "tidemill-demo";
/** Further from the end than this, the reader has scrolled up and is left alone. */
const NEAR_END_PX = 80;
const DELETE_SURE_MS = 3000;

export class ChatPane {
  constructor() {
    this.model = "";
    this.conversation = store.list()[0] ?? store.create();
    /** @type {Map<string, { conversation: Conversation, stop: AbortController }>} answers that stream, by conversation */
    this.running = new Map();
    /** @type {Map<Message, MessageView>} */
    this.views = new Map();
    this.frame = 0;

    this.messages = byId("messages");
    this.input = /** @type {HTMLTextAreaElement} */ (byId("input"));
    this.send = /** @type {HTMLButtonElement} */ (byId("send"));
    this.settings = /** @type {HTMLFormElement} */ (byId("settings"));

    byId("new").prepend(icon("plus"));
    byId("new").addEventListener("click", () => this.open(store.create()));
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running.has(this.conversation.id)) this.stop();
      else this.ask(this.input.value);
    });
    this.input.addEventListener("input", () => this.#grow());
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.ask(this.input.value);
    });
    addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        if (document.body.dataset.drawer) this.#drawer("");
        else this.stop();
      }
    });
    this.settings.addEventListener("input", () => this.#readSettings());
    this.settings.addEventListener("submit", (event) => event.preventDefault());
    this.#drawers();
    store.onChange((id) => {
      if (id !== this.conversation.id) this.#list();
    });
    this.open(this.conversation);
  }

  /** @param {string} model */
  serve(model) {
    this.model = model;
    this.#compose();
    if (this.conversation.messages.length === 0) this.#draw();
  }

  /** The pane is visible again. */
  shown() {
    this.#grow();
    this.#end(true);
  }

  /** @param {Conversation} conversation */
  open(conversation) {
    // The one that an answer streams into is newer than what is kept of it.
    this.conversation = this.running.get(conversation.id)?.conversation ?? conversation;
    this.#drawer("");
    this.#list();
    this.#draw();
    this.#writeSettings();
    this.#compose();
    if (matchMedia("(hover: hover)").matches) this.input.focus({ preventScroll: true });
  }

  /** @param {string} text */
  ask(text) {
    const { conversation } = this;
    if (!text.trim() || !this.model || this.running.has(conversation.id)) return;
    conversation.messages.push({ role: "user", content: text.trim() });
    store.retitle(conversation);
    this.input.value = "";
    this.#grow();
    void this.#answer(conversation);
  }

  again() {
    const { conversation } = this;
    if (this.running.has(conversation.id) || conversation.messages.at(-1)?.role !== "assistant") return;
    conversation.messages.pop();
    void this.#answer(conversation);
  }

  stop() {
    this.running.get(this.conversation.id)?.stop.abort();
  }

  /** @param {Conversation} conversation */
  async #answer(conversation) {
    /** @type {Message} */
    const message = { role: "assistant", content: "" };
    conversation.messages.push(message);
    conversation.updated_unix_ms = Date.now();
    const stop = new AbortController();
    this.running.set(conversation.id, { conversation, stop });
    store.save(conversation);
    this.#list();
    this.#draw();
    this.#compose();
    await answer(this.model, conversation, message, stop.signal, () => {
      if (this.conversation === conversation) this.#soon(message);
    });
    this.running.delete(conversation.id);
    // It may have been deleted while it ran.
    if (store.list().some((kept) => kept.id === conversation.id)) this.#keep(conversation);
    if (this.conversation !== conversation) return this.#list();
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.#redraw(message);
    this.#compose();
    this.#list();
  }

  /** @param {Conversation} conversation */
  #keep(conversation) {
    if (!store.save(conversation)) say(byId("hint"), "The browser’s storage is full: this conversation lasts until the tab closes.");
  }

  /**
   * Once per frame, however fast tokens come.
   * @param {Message} message
   */
  #soon(message) {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.#redraw(message);
    });
  }

  /** @param {Message} message */
  #redraw(message) {
    const follow = this.#atEnd();
    this.views.get(message)?.update(this.running.has(this.conversation.id), true);
    if (follow) this.#end(false);
  }

  #draw() {
    const { messages } = this.conversation;
    say(byId("title"), this.conversation.title);
    this.views.clear();
    const running = this.running.has(this.conversation.id);
    const elements = messages.map((message, index) => {
      const view = new MessageView(message, () => this.again());
      const last = index === messages.length - 1;
      view.update(running && last, last);
      this.views.set(message, view);
      return view.element;
    });
    this.messages.replaceChildren(...(elements.length > 0 ? elements : [this.#welcome()]));
    this.#end(true);
  }

  #welcome() {
    const questions = this.model === DEMO_MODEL ? QUESTIONS : [];
    return h(
      "div",
      { class: "welcome" },
      h("h2", {}, "Talk to the cluster"),
      h("p", {}, "Each answer shows the path it took: which blocks of KV were found where, and where the time went. Ask twice, and the second turn comes from the pool."),
      h("div", { class: "questions" }, ...questions.map((question) => h("button", { onclick: () => this.ask(question) }, question))),
    );
  }

  #compose() {
    const running = this.running.has(this.conversation.id);
    this.send.replaceChildren(icon(running ? "stop" : "send"));
    this.send.setAttribute("aria-label", running ? "Stop" : "Send");
    this.send.classList.toggle("stop", running);
    this.send.disabled = !running && !this.model;
    this.messages.setAttribute("aria-busy", String(running));
  }

  #grow() {
    this.input.style.height = "auto";
    this.input.style.height = `${this.input.scrollHeight}px`;
  }

  #atEnd() {
    const { scrollTop, scrollHeight, clientHeight } = this.messages;
    return scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
  }

  /** @param {boolean} jump */
  #end(jump) {
    this.messages.scrollTo({ top: this.messages.scrollHeight, behavior: jump ? "instant" : "auto" });
  }

  #list() {
    const kept = store.list();
    const all = kept.some((conversation) => conversation.id === this.conversation.id) ? kept : [this.conversation, ...kept];
    byId("conversation-list").replaceChildren(...all.map((conversation) => this.#item(conversation)));
    say(byId("title"), this.conversation.title);
  }

  /** @param {Conversation} conversation */
  #item(conversation) {
    const current = conversation.id === this.conversation.id;
    const open = () => this.open(current ? this.conversation : conversation);
    const busy = this.running.has(conversation.id);
    const item = h(
      "li",
      { class: current ? "current" : "" },
      h("button", { class: "open", "aria-current": current ? "true" : null, onclick: open }, busy ? h("i", { class: "dot busy" }) : null, h("span", {}, conversation.title)),
      h("button", { class: "plain", "aria-label": `Rename ${conversation.title}`, title: "Rename", onclick: () => this.#rename(conversation, item) }, icon("edit")),
      h("button", { class: "plain delete", "aria-label": `Delete ${conversation.title}`, title: "Delete", onclick: (event) => this.#delete(conversation, event.currentTarget) }, icon("trash")),
    );
    return item;
  }

  /**
   * @param {Conversation} conversation
   * @param {HTMLElement} item
   */
  #rename(conversation, item) {
    const input = h("input", { value: conversation.title, "aria-label": "Title", maxlength: 80 });
    let done = false;
    const finish = (/** @type {boolean} */ take) => {
      if (done) return;
      done = true;
      const target = conversation.id === this.conversation.id ? this.conversation : conversation;
      if (take && input.value.trim() && input.value.trim() !== target.title) {
        target.title = input.value.trim();
        target.named = true;
        this.#keep(target);
      }
      this.#list();
    };
    input.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Enter") finish(true);
      else if (event.key === "Escape") finish(false);
    });
    input.addEventListener("blur", () => finish(true));
    item.replaceChildren(input);
    input.select();
  }

  /**
   * The second click within a moment deletes.
   * @param {Conversation} conversation
   * @param {HTMLElement} button
   */
  #delete(conversation, button) {
    if (!button.classList.contains("sure")) {
      button.classList.add("sure");
      button.replaceChildren("Delete?");
      setTimeout(() => {
        button.classList.remove("sure");
        button.replaceChildren(icon("trash"));
      }, DELETE_SURE_MS);
      return;
    }
    this.running.get(conversation.id)?.stop.abort();
    store.remove(conversation.id);
    if (conversation.id === this.conversation.id) this.open(store.list()[0] ?? store.create());
    else this.#list();
  }

  #writeSettings() {
    const { system, sampling } = this.conversation;
    const values = { system, key: key.read(), ...sampling };
    for (const [name, value] of Object.entries(values)) this.#field(name).value = value === null ? "" : String(value);
  }

  #readSettings() {
    const number = (/** @type {string} */ name) => {
      const field = this.#field(name);
      return field.value !== "" && field.validity.valid ? Number(field.value) : null;
    };
    this.conversation.system = this.#field("system").value;
    this.conversation.sampling = { temperature: number("temperature"), top_p: number("top_p"), max_tokens: number("max_tokens"), seed: number("seed") };
    key.write(this.#field("key").value);
    if (this.conversation.messages.length > 0) this.#keep(this.conversation);
  }

  /** @param {string} name */
  #field(name) {
    return /** @type {HTMLInputElement | HTMLTextAreaElement} */ (this.settings.elements.namedItem(name));
  }

  /** Where there is no room beside the thread, its neighbours are drawers. */
  #drawers() {
    for (const [name, symbol] of [["conversations", "menu"], ["rail", "tune"]]) {
      const button = byId(`open-${name}`);
      button.append(icon(symbol ?? ""));
      button.addEventListener("click", () => this.#drawer(document.body.dataset.drawer === name ? "" : (name ?? "")));
    }
    byId("shade").addEventListener("click", () => this.#drawer(""));
  }

  /** @param {string} name */
  #drawer(name) {
    document.body.dataset.drawer = name;
    for (const drawer of ["conversations", "rail"]) byId(`open-${drawer}`).setAttribute("aria-expanded", String(drawer === name));
  }
}
