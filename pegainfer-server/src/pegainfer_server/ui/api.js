// Talks to the server: the key, errors as the server words them, and streams of chunks. Knows nothing of the page.

import { memory } from "./dom.js";

/** A request that did not work, with all that is known about it. */
export class Failure extends Error {
  constructor(message, facts = {}) {
    super(message);
    this.facts = facts; // status, code, param, request id: strings, for showing
    this.status = facts.status ?? 0;
  }
}

export const apiKey = {
  get: () => memory.get("key"),
  set: (key) => memory.set("key", key),
};

/** The response of a request that worked. Throws Failure, or AbortError. */
export async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (apiKey.get()) headers.Authorization = `Bearer ${apiKey.get()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The server cannot be reached.");
  }
  if (!response.ok) throw await failureOf(response);
  return response;
}

async function failureOf(response) {
  const facts = { status: response.status, "request id": response.headers.get("X-Request-Id") };
  const text = await response.text().catch(() => "");
  try {
    const { error } = JSON.parse(text);
    return new Failure(error.message, { ...facts, code: error.code, param: error.param });
  } catch {
    return new Failure(text.slice(0, 500) || "The server gave no reason.", facts);
  }
}

/** The chunks of a streamed chat completion. Throws Failure also for an error, or an end, in mid-stream. */
export async function* chatChunks(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const facts = { "request id": response.headers.get("X-Request-Id") };
  try {
    for await (const data of eventData(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Failure(chunk.error.message, { ...facts, code: chunk.error.code });
      yield chunk;
    }
  } catch (error) {
    if (error instanceof Failure || error.name === "AbortError") throw error;
    throw new Failure("The connection was lost in the middle of the answer.", facts);
  }
  throw new Failure("The answer ended early: the server did not say that it was complete.", facts);
}

async function* eventData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const lines = event.split("\n").filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.slice(5).trim()).join("\n");
    }
  }
}
