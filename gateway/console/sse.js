// @ts-check
// Server-sent events from a `fetch`. `EventSource` can neither post a body nor send a key.

/** @typedef {{ event: string, data: string }} ServerEvent */

/**
 * @param {ReadableStream<Uint8Array<ArrayBuffer>>} body
 * @returns {AsyncGenerator<ServerEvent>}
 */
export async function* serverEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = "";
  /** @type {string[]} */
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      for (let end = rest.indexOf("\n"); end >= 0; end = rest.indexOf("\n")) {
        const line = rest.slice(0, end).replace(/\r$/, "");
        rest = rest.slice(end + 1);
        if (line === "") {
          if (data.length > 0) yield { event: event || "message", data: data.join("\n") };
          event = "";
          data = [];
        } else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        else if (line.startsWith("event:")) event = line.slice(6).trim();
      }
    }
  } finally {
    // Leaving the loop early must end the request too.
    reader.cancel().catch(() => {});
  }
}
