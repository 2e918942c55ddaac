// The server, as the page sees it: JSON requests, streams of events, and the key.
//
// A key, if the server wants one, is asked for once and kept for this tab (sessionStorage), as
// decision D13 has it. Nothing here touches the page; `prompts.key` is what asks.

const KEY = "mlxlite-key";

/** An answer that is no success. status 0: the server could not be reached. */
export class ApiError extends Error {
  constructor(status, message, { code = null, param = null } = {}) {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.code = code;
    this.param = param;
  }
}

/** Set by `app.js`. key(wasWrong): asks the person for the key, resolves to it or to null. */
export const prompts = { key: async () => null };

/** Says "reached" or "lost" when that changes. */
export const link = new EventTarget();
let isReached = true;

function noteReach(now) {
  if (now === isReached) return;
  isReached = now;
  link.dispatchEvent(new Event(now ? "reached" : "lost"));
}

let asking = null; // one question for all requests that found the door shut

function askKey(wasWrong) {
  asking ??= prompts.key(wasWrong).then((key) => {
    asking = null;
    if (key !== null) sessionStorage.setItem(KEY, key);
    return key !== null;
  });
  return asking;
}

/** A Response that is a success, or an ApiError. body: a value for JSON, a string or Blob as is. */
export async function send(method, path, body, { signal, keepalive, type } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = {};
    if (key) headers.authorization = `Bearer ${key}`;
    const isRaw = typeof body === "string" || body instanceof Blob;
    if (body !== undefined) headers["content-type"] = type ?? (isRaw ? "text/plain" : "application/json");
    let response;
    try {
      response = await fetch(path, {
        method, headers, signal, keepalive,
        body: body === undefined || isRaw ? body : JSON.stringify(body),
        cache: "no-store",
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      noteReach(false);
      throw new ApiError(0, "The server cannot be reached. Is it still running?");
    }
    noteReach(true);
    if (response.ok) return response;
    if (response.status === 401) {
      // Another request may have been given the key meanwhile.
      if (sessionStorage.getItem(KEY) !== key || (await askKey(key !== null))) continue;
    }
    throw await failure(response);
  }
}

async function failure(response) {
  const text = await response.text().catch(() => "");
  let found = null;
  try {
    found = JSON.parse(text).error;
  } catch {
    // Not JSON: the text itself is the best that there is.
  }
  if (typeof found === "string") return new ApiError(response.status, found);
  const message = found?.message ?? (text.slice(0, 300) || `The server answered ${response.status}.`);
  return new ApiError(response.status, message, found ?? {});
}

const json = async (method, path, body, options) => (await send(method, path, body, options)).json();

export const get = (path, options) => json("GET", path, undefined, options);
export const post = (path, body, options) => json("POST", path, body, options);
export const patch = (path, body, options) => json("PATCH", path, body, options);
export const remove = (path, options) => json("DELETE", path, undefined, options);

// ------------------------------------------------------------------------------------- streams

/** The JSON frames of a streamed answer, until its end. An error frame is raised as an ApiError;
 * so is a stream that breaks off. */
export async function* events(path, body, signal) {
  const response = await send("POST", path, body, { signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const lines = new Lines();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      for (const line of lines.feed(value)) {
        if (!line.startsWith("data:")) continue; // comments keep the connection open
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const frame = JSON.parse(data);
        if (frame.error) throw new ApiError(500, frame.error.message, frame.error);
        yield frame;
      }
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw new ApiError(0, "The connection broke off in the middle of the answer.");
  } finally {
    await reader.cancel().catch(() => {});
  }
  throw new ApiError(0, "The connection ended before the answer did.");
}

/** Cuts text that comes in pieces into lines. */
class Lines {
  rest = "";

  feed(text) {
    const lines = (this.rest + text).split("\n");
    this.rest = lines.pop();
    return lines;
  }
}

// -------------------------------------------------------------------------------- served model

let served = null;

/** The row of the served model in /v1/models; asked for once, and again after `forgetModel`. */
export function servedModel() {
  served ??= get("/v1/models").then(
    (list) => list.data[0],
    (error) => {
      served = null;
      throw error;
    },
  );
  return served;
}

export function forgetModel() {
  served = null;
}
