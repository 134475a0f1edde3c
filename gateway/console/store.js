// @ts-check
// Conversations, each under a key of its own in the browser's storage, so that two tabs do not overwrite each other's.

/** @typedef {import("./types.js").Conversation} Conversation */

const PREFIX = "tidemill.conversation.";
/** The oldest go first. */
const CONVERSATIONS_MAX = 50;
const TITLE_MAX = 48;

/** @returns {Conversation} */
export function create() {
  const last = list()[0];
  return {
    id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`,
    title: "New conversation",
    named: false,
    updated_unix_ms: Date.now(),
    system: last?.system ?? "",
    sampling: last?.sampling ?? { temperature: null, top_p: null, max_tokens: 512, seed: null },
    messages: [],
  };
}

/** @returns {Conversation[]} newest first */
export function list() {
  const found = [];
  for (let index = 0; index < localStorage.length; index += 1) {
    const key = localStorage.key(index);
    const conversation = key?.startsWith(PREFIX) ? read(key) : null;
    if (conversation) found.push(conversation);
  }
  return found.sort((a, b) => b.updated_unix_ms - a.updated_unix_ms);
}

/**
 * @param {string} key
 * @returns {Conversation | null}
 */
function read(key) {
  try {
    const value = JSON.parse(localStorage.getItem(key) ?? "");
    return typeof value.id === "string" && Array.isArray(value.messages) ? value : null;
  } catch {
    return null;
  }
}

/**
 * @param {Conversation} conversation
 * @returns {boolean} whether there was room
 */
export function save(conversation) {
  const text = JSON.stringify(conversation);
  const others = list().filter((other) => other.id !== conversation.id);
  for (const old of others.slice(CONVERSATIONS_MAX - 1)) remove(old.id);
  for (;;) {
    try {
      localStorage.setItem(PREFIX + conversation.id, text);
      return true;
    } catch {
      const oldest = others.pop();
      if (!oldest) return false;
      remove(oldest.id);
    }
  }
}

/** @param {string} id */
export function remove(id) {
  localStorage.removeItem(PREFIX + id);
}

/**
 * Until the user names it, a conversation is called by how it begins.
 * @param {Conversation} conversation
 */
export function retitle(conversation) {
  const first = conversation.messages.find((message) => message.role === "user");
  if (conversation.named || !first) return;
  const line = first.content.trim().replaceAll(/\s+/g, " ");
  conversation.title = line.length > TITLE_MAX ? `${line.slice(0, TITLE_MAX - 1)}…` : line;
}

/** @param {(id: string) => void} changed in another tab */
export function onChange(changed) {
  addEventListener("storage", (event) => {
    if (event.key?.startsWith(PREFIX)) changed(event.key.slice(PREFIX.length));
  });
}
