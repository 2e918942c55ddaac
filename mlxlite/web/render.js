// Text of a message -> what is shown of it (decision D17).
//
// A finished message is rendered once, when it comes near the screen. One that is being written is
// shown as text at once, and as HTML again and again, at most every 200 ms and never so often that
// rendering takes more than a small share of the time: the model runs on the same machine.

import { post } from "./api.js";
import { copy, h } from "./dom.js";
import { icon } from "./icons.js";
import { safeNodes } from "./sanitise.js";

const EVERY_MS = 200;
const SHARE = 40; // a rendering is followed by so many times its own duration of rest
const AT_ONCE = 3;
const KEPT = 500;

const cache = new Map(); // text -> HTML
const waiting = [];
let running = 0;

/** The server's HTML of a text; null if there is none, and the text itself has to do. */
export async function htmlOf(text) {
  if (cache.has(text)) return cache.get(text);
  if (running >= AT_ONCE) await new Promise((resolve) => waiting.push(resolve));
  running += 1;
  try {
    const { html } = await post("/api/render", { text });
    return html;
  } catch {
    return null;
  } finally {
    running -= 1;
    waiting.shift()?.();
  }
}

function keep(text, html) {
  if (cache.size >= KEPT) cache.delete(cache.keys().next().value);
  cache.set(text, html);
}

/** Text in an element, growing or not. */
export class Rendered {
  #text = "";
  #rendered = 0; // characters that are shown as HTML
  #tail = document.createTextNode("");
  #next_ms = 0;
  #timer = 0;
  #isBusy = false;
  #finished = null; // the text that was rendered for the last time

  constructor(element) {
    this.element = element;
    element.classList.add("prose", "plain");
    element.append(this.#tail);
  }

  /** Shows a text; what was shown before should be its beginning. */
  set(text) {
    this.#text = text;
    this.#tail.data = text.slice(this.#rendered);
  }

  /** Asks for a rendering soon; for text that still grows. */
  soon() {
    if (this.#isBusy || this.#timer || document.hidden) return;
    const wait = Math.max(0, this.#next_ms - performance.now());
    this.#timer = setTimeout(() => {
      this.#timer = 0;
      this.#render();
    }, wait);
  }

  /** Renders the whole text, for the last time. */
  async finish() {
    if (this.#finished === this.#text) return;
    this.#finished = this.#text;
    clearTimeout(this.#timer);
    this.#timer = 0;
    while (this.#isBusy) await this.#busy;
    const html = await this.#render();
    if (html !== null) keep(this.#text, html);
  }

  #busy = Promise.resolve();

  #render() {
    this.#isBusy = true;
    const rendering = this.#renderNow().finally(() => {
      this.#isBusy = false;
    });
    this.#busy = rendering.catch(() => {});
    return rendering;
  }

  async #renderNow() {
    const text = this.#text;
    if (!text) return null;
    const begun = performance.now();
    const html = await htmlOf(text);
    const took = performance.now() - begun;
    this.#next_ms = performance.now() + Math.max(EVERY_MS, Math.min(took * SHARE, 4000));
    if (html === null || !this.#text.startsWith(text)) return null;
    this.#place(safeNodes(html));
    this.#rendered = text.length;
    this.#tail.data = this.#text.slice(text.length);
    return html;
  }

  /** Puts new nodes in; those at the beginning that have not changed stay, and with them what is
   * selected there. */
  #place(fragment) {
    decorate(fragment);
    this.#tail.remove();
    this.element.normalize();
    const old = [...this.element.childNodes];
    const fresh = [...fragment.childNodes];
    let same = 0;
    if (!this.element.classList.contains("plain")) {
      while (same < old.length && same < fresh.length && old[same].isEqualNode(fresh[same])) same += 1;
    }
    for (const node of old.slice(same)) node.remove();
    this.element.append(...fresh.slice(same));
    this.element.classList.remove("plain");
    lastBlock(this.element).append(this.#tail);
  }
}

/** Where the next word belongs: the innermost last block. */
function lastBlock(element) {
  for (;;) {
    let last = element.lastElementChild;
    while (last && last.matches(".code-head, br")) last = last.previousElementSibling;
    if (!last || !last.matches("p, ul, ol, li, blockquote, div, pre, code, h3, h4, h5, h6")) return element;
    const after = element.lastChild;
    if (after !== last && after.nodeType === Node.TEXT_NODE && after.data.trim()) return element;
    element = last;
  }
}

/** Code gets a line with its language and a button to copy it; wide tables may scroll. */
function decorate(fragment) {
  for (const pre of fragment.querySelectorAll("pre")) {
    const language = /language-([\w+#.-]+)/.exec(pre.querySelector("code")?.className ?? pre.className)?.[1] ?? "";
    const props = { type: "button", class: "code-copy", "aria-label": "Copy the code" };
    const button = h("button", props, icon("copy"), "Copy");
    button.addEventListener("click", async () => {
      const done = await copy(pre.textContent);
      button.lastChild.data = done ? "Copied" : "Not copied";
      setTimeout(() => (button.lastChild.data = "Copy"), 1500);
    });
    pre.tabIndex = 0; // it may scroll sideways
    pre.setAttribute("role", "region");
    pre.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
    const box = h("div", { class: "code-box" }, h("div", { class: "code-head" }, h("span", {}, language), button));
    pre.replaceWith(box);
    box.append(pre);
  }
  for (const table of fragment.querySelectorAll("table")) {
    const box = h("div", { class: "table-box", tabindex: 0, role: "region", "aria-label": "Table" });
    table.replaceWith(box);
    box.append(table);
  }
}
