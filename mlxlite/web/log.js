// The list of messages: thousands of them, of which few are on the screen.
//
// The last ones are there at once, the earlier ones follow in portions between other work. Those
// far from the screen are their text alone, and the browser lays them out only when they come
// near (content-visibility in app.css). At the end of the list the view follows a growing answer,
// until somebody scrolls up.

import { h } from "./dom.js";
import { icon } from "./icons.js";
import { MessageView } from "./message.js";

const AT_ONCE = 30;
const PORTION = 60;
const NEAR_END_PX = 80;
const FRAME_MS = 4; // of a frame's 16

export class Log {
  views = new Map(); // message key -> MessageView

  #pending = 0;
  #follows = true;
  #wanted = new Set(); // elements near the screen that are their text alone
  #frame = 0;

  constructor(actions) {
    this.actions = actions;
    this.list = h("div", { class: "log-list" });
    // Not live: each token would be read out. The chat view tells what came, in sentences.
    const props = { role: "log", "aria-live": "off", "aria-label": "Conversation", tabindex: 0 };
    this.scroller = h("div", { class: "log", ...props }, this.list);
    const jump = { type: "button", class: "jump", hidden: true, onclick: () => this.toEnd() };
    this.jump = h("button", jump, icon("down"), "Latest");
    this.element = h("div", { class: "log-frame" }, this.scroller, this.jump);
    this.near = new IntersectionObserver((seen) => {
      for (const { isIntersecting, target } of seen) {
        if (isIntersecting) this.#wanted.add(target);
        else this.#wanted.delete(target); // scrolled past before its turn
      }
      this.#frame ||= requestAnimationFrame(() => this.#prepare());
    }, { root: this.scroller, rootMargin: "600px 0px" });
    this.scroller.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    this.sizes = new ResizeObserver(() => this.#follows && this.toEnd());
    this.sizes.observe(this.scroller);
    this.sizes.observe(this.list);
  }

  close() {
    cancelIdle(this.#pending);
    cancelAnimationFrame(this.#frame);
    this.near.disconnect();
    this.sizes.disconnect();
  }

  /** Renders what came near, a few at a time, so that scrolling goes on. */
  #prepare() {
    const end_ms = performance.now() + FRAME_MS;
    this.#frame = 0;
    for (const element of this.#wanted) {
      if (performance.now() > end_ms) break;
      this.#wanted.delete(element);
      this.near.unobserve(element);
      element.view.near();
    }
    if (this.#wanted.size) this.#frame = requestAnimationFrame(() => this.#prepare());
  }

  /** Shows these messages. Those at the beginning that are shown already stay. */
  show(messages) {
    cancelIdle(this.#pending);
    for (const element of [...this.list.children]) if (!element.view) element.remove();
    const shown = [...this.list.children];
    const isKept = shown.length > 0 && messages[0]?.key === shown[0].view.message.key;
    let same = 0;
    if (isKept) while (same < shown.length && shown[same].view.message === messages[same]) same += 1;
    for (const element of shown.slice(same)) this.#forget(element);
    const rest = messages.slice(same);
    const late = same ? 0 : Math.max(0, rest.length - AT_ONCE);
    this.list.append(...rest.slice(late).map((message) => this.#make(message)));
    if (late) this.#earlier(rest, late);
  }

  #earlier(messages, end) {
    this.#pending = whenIdle(() => {
      const begin = Math.max(0, end - PORTION);
      const before = this.scroller.scrollHeight - this.scroller.scrollTop;
      this.list.prepend(...messages.slice(begin, end).map((message) => this.#make(message)));
      if (this.#follows) this.toEnd();
      else this.scroller.scrollTop = this.scroller.scrollHeight - before;
      if (begin) this.#earlier(messages, begin);
      else this.#pending = 0;
    });
  }

  /** Whether all messages are in the page. */
  get isWhole() {
    return this.#pending === 0;
  }

  #make(message) {
    const view = new MessageView(message, this.actions);
    this.views.set(message.key, view);
    this.near.observe(view.element);
    return view.element;
  }

  #forget(element) {
    this.near.unobserve(element);
    this.#wanted.delete(element);
    this.views.delete(element.view.message.key);
    element.remove();
  }

  /** Brings a message into view and the focus to it. */
  async focus(key) {
    for (let tries = 0; !this.views.has(key) && !this.isWhole && tries < 200; tries += 1) {
      await new Promise((resolve) => setTimeout(resolve, 20)); // until its portion has come
    }
    const element = this.views.get(key)?.element;
    if (!element) return;
    this.#follows = false;
    this.views.get(key).near();
    element.tabIndex = -1;
    element.scrollIntoView({ block: "center" });
    element.focus({ preventScroll: true });
    element.classList.add("is-found");
  }

  toEnd() {
    this.#follows = true;
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.jump.hidden = true;
  }

  #scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    this.#follows = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    this.jump.hidden = this.#follows;
  }
}

// Safari has no requestIdleCallback.
const whenIdle = (act) =>
  window.requestIdleCallback ? requestIdleCallback(act, { timeout: 300 }) : setTimeout(act, 30);
const cancelIdle = (handle) => (window.cancelIdleCallback ? cancelIdleCallback(handle) : clearTimeout(handle));
