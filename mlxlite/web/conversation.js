// A chat: its messages as a tree, its settings, and how both get to the server.
//
// What a person writes is in memory first and saved after, in order, one request at a time. When
// saving fails (no connection, a full disk) nothing is lost: the chat goes on, `problem` says why,
// and the next `sync` saves what is still missing.
//
// A message here: {key, saved, parent, role, content, reasoning, tool_calls, usage, created, isDirty}
//   key      what the tree is built from; saved: the server's id, null until it has one
//   usage    for answers: {state: "streaming" | "stopped" | "failed" | "done", …figures}

import { get, patch, post, send } from "./api.js";
import { branch } from "./tree.js";

/** Chats that another view must not lose, by id: those whose answer is being written, and those that
 * could not be saved; one that never could is "unsaved". */
export const live = new Map();

const AGAIN_MS = 5000; // after a save that failed
const WORDS = "mlxlite-last-words:"; // and the chat's id, in sessionStorage

let made = 0;

export class Conversation {
  id = null;
  title = "";
  settings = {};
  messages = new Map();
  leaf = null;
  run = null; // the answer that is being written
  problem = null; // why the last save failed
  onsaved = () => {}; // after each try to save

  #chain = Promise.resolve();
  #again = 0;
  #movedLeaf = false;
  #changed = {}; // title and settings that the server has not seen

  static async open(id) {
    const { session } = await get(`/api/sessions/${encodeURIComponent(id)}`);
    const chat = new Conversation();
    chat.id = session.id;
    chat.title = session.title;
    chat.settings = session.settings ?? {};
    for (const row of session.messages) {
      const message = {
        ...row,
        key: String(row.id),
        saved: row.id,
        parent: row.parent === null || row.parent === undefined ? null : String(row.parent),
        reasoning: row.reasoning ?? "",
        tool_calls: row.tool_calls ?? [],
        isDirty: false,
      };
      chat.messages.set(message.key, message);
    }
    chat.leaf = session.leaf === null || session.leaf === undefined ? null : String(session.leaf);
    chat.#hearLastWords();
    return chat;
  }

  /** The shown messages, first to last. */
  get branch() {
    return branch(this.messages, this.leaf);
  }

  /** A new message below `parent`, which becomes the leaf. */
  add(parent, role, content, more = {}) {
    const message = {
      key: `new-${(made += 1)}`, saved: null, parent, role, content,
      reasoning: "", tool_calls: [], usage: null, created: Date.now() / 1000, isDirty: false, ...more,
    };
    this.messages.set(message.key, message);
    this.leaf = message.key;
    return message;
  }

  /** Takes back a message that was never saved, and shows what was above it. */
  drop(message) {
    this.messages.delete(message.key);
    if (this.leaf === message.key) this.leaf = message.parent;
  }

  setLeaf(key) {
    this.leaf = key;
    this.#movedLeaf = true;
    return this.sync();
  }

  change(fields) {
    Object.assign(this, fields);
    Object.assign(this.#changed, fields);
    return this.id === null ? Promise.resolve() : this.sync(); // a chat begins with its first message
  }

  /** Saves what the server has not seen yet, later again if that fails. Never raises; see `problem`. */
  sync() {
    clearTimeout(this.#again);
    this.#chain = this.#chain.then(async () => {
      try {
        await this.#push();
        this.problem = null;
        if (this.run === null) this.#rest();
      } catch (error) {
        if (error.status === 404) this.#forget();
        this.problem = error;
        this.#again = setTimeout(() => this.sync(), AGAIN_MS);
      }
      this.onsaved();
    });
    return this.#chain;
  }

  async #push() {
    if (this.id === null) {
      const begun = { title: this.title, settings: this.settings };
      this.#changed = {};
      this.id = (await post("/api/sessions", begun)).session.id;
      if (this.run) live.set(this.id, this);
    }
    const path = `/api/sessions/${encodeURIComponent(this.id)}`;
    for (const message of this.messages.values()) {
      if (message.saved === null && !isUnborn(message)) {
        message.isDirty = false;
        message.saved = (await post(`${path}/messages`, this.#written(message))).message.id;
      } else if (message.saved !== null && message.isDirty) {
        message.isDirty = false;
        await patch(`${path}/messages/${message.saved}`, answered(message)).catch((error) => {
          message.isDirty = true;
          throw error;
        });
      }
    }
    if (this.#movedLeaf) {
      const leaf = this.messages.get(this.leaf)?.saved;
      if (leaf !== null && leaf !== undefined) this.#changed.leaf = leaf;
      this.#movedLeaf = false;
    }
    if (Object.keys(this.#changed).length) {
      const fields = this.#changed;
      this.#changed = {};
      await patch(path, fields).catch((error) => {
        this.#changed = { ...fields, ...this.#changed };
        throw error;
      });
    }
  }

  /** All of it is with the server. */
  #rest() {
    for (const [id, chat] of live) if (chat === this) live.delete(id);
  }

  /** Somebody deleted it meanwhile: the next try saves all of it as a chat of its own. */
  #forget() {
    this.#rest();
    this.id = null;
    for (const message of this.messages.values()) message.saved = null;
  }

  #written(message) {
    const parent = message.parent === null ? null : this.messages.get(message.parent).saved;
    const body = { parent, role: message.role, content: message.content };
    if (message.reasoning) body.reasoning = message.reasoning;
    if (message.tool_calls.length) body.tool_calls = message.tool_calls;
    if (message.usage) body.usage = message.usage;
    return body;
  }

  /** The page goes: what is known of a running answer is sent without waiting, and kept in this tab,
   * since the page that comes next may ask before it has arrived (and a browser sends 64 kB at most). */
  lastWords() {
    const message = this.run?.message;
    if (!message || this.id === null || isUnborn(message)) return;
    const parent = this.messages.get(message.parent)?.saved ?? null;
    if (message.saved === null && parent === null) return;
    const words = { saved: message.saved, parent, ...answered(message) };
    try {
      sessionStorage.setItem(WORDS + this.id, JSON.stringify(words));
    } catch {
      // Storage may be off or full; what is sent below is then all.
    }
    if (message.saved === null) return; // it is just being sent; twice would be two answers
    const path = `/api/sessions/${encodeURIComponent(this.id)}/messages/${message.saved}`;
    send("PATCH", path, answered(message), { keepalive: true }).catch(() => {});
  }

  /** The page came back as it was: there is nothing to take over. */
  forgetLastWords() {
    try {
      sessionStorage.removeItem(WORDS + this.id);
    } catch {
      // No storage, so nothing in it.
    }
  }

  /** Takes over what the page before this one knew of an answer, where the server knows less. */
  #hearLastWords() {
    let words = null;
    try {
      words = JSON.parse(sessionStorage.getItem(WORDS + this.id));
      sessionStorage.removeItem(WORDS + this.id);
    } catch {
      return; // no storage, or not ours
    }
    if (!words) return;
    const isIts = ({ saved, parent, role, usage }) => words.saved === null
      ? role === "assistant" && parent === String(words.parent) && usage?.state === "streaming"
      : saved === words.saved;
    const goesOn = (message) => isIts(message) && words.content.startsWith(message.content) &&
      (words.reasoning ?? "").startsWith(message.reasoning);
    let message = [...this.messages.values()].find(goesOn);
    if (!message && words.saved !== null) return; // deleted or edited meanwhile
    if (!message && !this.messages.has(String(words.parent))) return;
    message ??= this.add(String(words.parent), "assistant", "");
    const { content, usage, reasoning = "", tool_calls = [] } = words;
    Object.assign(message, { content, usage, reasoning, tool_calls, isDirty: true });
    this.sync();
  }
}

/** An answer of which nothing has come yet is not worth a row. */
const isUnborn = (message) =>
  message.usage?.state === "streaming" && !message.content && !message.reasoning && !message.tool_calls.length;

function answered(message) {
  const body = { content: message.content, usage: message.usage };
  if (message.reasoning) body.reasoning = message.reasoning;
  if (message.tool_calls.length) body.tool_calls = message.tool_calls;
  return body;
}
