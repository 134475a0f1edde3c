// @ts-check
// The front door's endpoints, beside which this page is served.

import { serverEvents } from "./sse.js";

/** @typedef {import("./types.js").Chunk} Chunk */
/** @typedef {import("./types.js").ClusterView} ClusterView */

/** The page's modules are one folder below the API. */
const ROOT = new URL("../", import.meta.url);
const KEY = "tidemill.key";

/** A refusal, in the server's words. */
export class ApiError extends Error {
  /**
   * @param {number} status
   * @param {string} message
   */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** An API key never outlives the tab. */
export const key = {
  read: () => sessionStorage.getItem(KEY) ?? "",
  /** @param {string} value */
  write: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/**
 * @param {string} path
 * @param {RequestInit} [init]
 */
export async function call(path, init = {}) {
  const headers = new Headers(init.headers);
  if (key.read()) headers.set("authorization", `Bearer ${key.read()}`);
  const response = await fetch(new URL(path, ROOT), { ...init, headers, cache: "no-store" });
  if (!response.ok) throw new ApiError(response.status, await reason(response));
  return response;
}

/** @param {Response} response */
async function reason(response) {
  const text = await response.text();
  try {
    return String(JSON.parse(text).error.message);
  } catch {
    return text.slice(0, 300) || `${response.status} ${response.statusText}`;
  }
}

/** @returns {Promise<{ id: string, max_model_len: number }>} */
export async function model() {
  const models = await (await call("v1/models")).json();
  return models.data[0];
}

/**
 * @param {object} request
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<Chunk>}
 */
export async function* chat(request, signal) {
  const body = JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } });
  const response = await call("v1/chat/completions", { method: "POST", headers: { "content-type": "application/json" }, body, signal });
  if (!response.body) throw new Error("the answer has no body");
  for await (const { data } of serverEvents(response.body)) {
    if (data === "[DONE]") return;
    /** @type {Chunk} */
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(500, chunk.error.message);
    yield chunk;
  }
  throw new Error("the answer broke off: the connection to the coordinator was lost");
}

/**
 * @param {AbortSignal} signal
 * @returns {Promise<ClusterView>}
 */
export async function cluster(signal) {
  return (await call("cluster", { signal })).json();
}
