// @ts-check
// One answer as it streams in, and what the browser measures of it.

import { chat } from "./api.js";

/** @typedef {import("./types.js").Conversation} Conversation */
/** @typedef {import("./types.js").Message} Message */
/** @typedef {import("./types.js").Receipt} Receipt */

/**
 * Asks for the answer to everything before `message`, and fills `message`. Never throws: how it ended is in the message.
 * @param {string} model
 * @param {Conversation} conversation
 * @param {Message} message the last one
 * @param {AbortSignal} signal
 * @param {() => void} changed after each piece
 */
export async function answer(model, conversation, message, signal, changed) {
  const asked = performance.now();
  /** @type {Receipt} */
  const receipt = { ttft_ms: 0, stream_ms: 0, chunks: 0, usage: null };
  try {
    for await (const chunk of chat(request(model, conversation), signal)) {
      const choice = chunk.choices[0];
      if (choice?.delta.content) {
        const now = performance.now() - asked;
        if (receipt.chunks === 0) receipt.ttft_ms = now;
        receipt.stream_ms = now - receipt.ttft_ms;
        receipt.chunks += 1;
        message.content += choice.delta.content;
      }
      if (choice?.finish_reason === "length") message.ended = "length";
      if (chunk.usage) receipt.usage = chunk.usage;
      changed();
    }
  } catch (error) {
    message.ended = signal.aborted ? "stopped" : "failed";
    if (!signal.aborted) message.error = explain(error);
  }
  if (receipt.chunks > 0 || receipt.usage) message.receipt = receipt;
  changed();
}

/**
 * @param {string} model
 * @param {Conversation} conversation
 */
function request(model, conversation) {
  const system = conversation.system.trim() ? [{ role: "system", content: conversation.system }] : [];
  const turns = conversation.messages.slice(0, -1).map(({ role, content }) => ({ role, content }));
  const sampling = Object.fromEntries(Object.entries(conversation.sampling).filter(([, value]) => value !== null));
  return { model, messages: [...system, ...turns], ...sampling };
}

/** @param {unknown} error */
function explain(error) {
  // The browser's words for a connection that was refused or lost are "Failed to fetch" or "network error".
  if (error instanceof TypeError) return "The coordinator cannot be reached.";
  return error instanceof Error ? error.message : String(error);
}
