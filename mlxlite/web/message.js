// One message of the conversation, as an article.
//
// Far from the screen it is its text and nothing more; `near` adds the rendering and the buttons.
// actions: what the buttons do, given by the chat view: {edit, regenerate, continue, show, siblings}.

import { button, bytes, copy, count, duration, h } from "./dom.js";
import { icon, iconButton } from "./icons.js";
import { split } from "./attach.js";
import { Rendered } from "./render.js";

export class MessageView {
  #isNear = false;
  #rendered = null;
  #thought = null;

  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.isUser = message.role === "user";
    this.body = h("div", { class: "message-body" });
    this.foot = h("div", { class: "message-foot" });
    const name = this.isUser ? "You" : message.role === "assistant" ? "Answer" : message.role;
    this.element = h("article", { class: `message is-${this.isUser ? "user" : "answer"}`, "aria-label": name },
      h("h2", { class: "message-role" }, name), this.body, this.foot);
    this.element.view = this;
    if (this.isUser) this.#showUser();
    else this.update();
  }

  #showUser() {
    const { files, typed } = split(this.message.content);
    const folded = files.map(({ name, text }) =>
      h("details", { class: "file" },
        h("summary", {}, icon("clip"), h("span", {}, name), h("span", { class: "muted" }, bytes(text.length))),
        h("pre", { tabindex: 0, role: "region", "aria-label": name }, text)));
    this.body.replaceChildren(...folded, h("div", { class: "typed" }, typed));
  }

  /** What has come so far, while more may come. */
  update() {
    const { content, reasoning, tool_calls: calls } = this.message;
    if (reasoning) {
      if (!this.#thought) {
        this.#thought = new Rendered(h("div", {}));
        this.thinking = h("details", { class: "thinking" },
          h("summary", {}, h("span", { class: "thinking-label" }, "Thinking")), this.#thought.element);
        this.body.prepend(this.thinking);
        this.thinking.addEventListener("toggle", () => this.thinking.open && this.#thought.soon());
      }
      this.#thought.set(reasoning);
      if (this.thinking.open && !content) this.#thought.soon();
    }
    if (content || !reasoning) {
      if (!this.#rendered) {
        this.#rendered = new Rendered(h("div", {}));
        this.body.append(this.#rendered.element);
      }
      this.#rendered.set(content);
    }
    if (calls.length) this.#showCalls(calls);
    if (this.isLive) {
      this.#rendered?.soon();
      this.#showState();
    }
  }

  get isLive() {
    return this.actions.isLive(this.message);
  }

  #showState() {
    const label = this.thinking?.querySelector(".thinking-label");
    if (label) label.textContent = this.isLive && !this.message.content ? "Thinking…" : "Thoughts";
    if (this.isLive) this.element.setAttribute("aria-busy", "true");
    const { content, reasoning, tool_calls: calls } = this.message;
    const isWaiting = this.isLive && !content && !reasoning && !calls.length;
    this.waits ??= h("p", { class: "muted waits" }, "Waiting for the model…");
    if (isWaiting) this.body.append(this.waits);
    else this.waits.remove();
  }

  #showCalls(calls) {
    this.calls ??= h("div", { class: "calls" });
    this.body.append(this.calls);
    this.calls.replaceChildren(...calls.filter(Boolean).map((call) => {
      const { name, arguments: given } = call.function ?? { name: call.name, arguments: call.arguments };
      return h("details", { class: "call", open: true },
        h("summary", {}, "Calls ", h("code", {}, name)),
        h("pre", { tabindex: 0, role: "region", "aria-label": `Arguments of ${name}` }, pretty(given)));
    }));
  }

  /** It is near the screen, or its answer is over: rendered, with its buttons. */
  near() {
    if (this.#isNear) return;
    this.#isNear = true;
    this.settle();
  }

  get isNear() {
    return this.#isNear;
  }

  /** Shows everything as it now is. */
  settle() {
    if (!this.isUser) {
      this.update();
      this.#showState();
      if (!this.isLive) this.#finish();
    }
    if (this.#isNear) this.#showFoot();
  }

  async #finish() {
    await Promise.all([this.#rendered?.finish(), this.#thought?.finish()]);
    if (!this.isLive) this.element.setAttribute("aria-busy", "false");
  }

  #showFoot() {
    const { message, actions } = this;
    const parts = [];
    const family = actions.siblings(message);
    if (family.length > 1) parts.push(this.#branches(family));
    if (!this.isLive) {
      parts.push(h("div", { class: "tools" },
        tool("copy", "Copy", (pressed) => this.#copy(pressed)),
        this.isUser && tool("edit", "Edit", () => this.edit()),
        !this.isUser && tool("again", "Answer again", () => actions.regenerate(message))));
    }
    const figures = this.isUser ? null : figuresOf(message.usage);
    if (figures && !this.isLive) parts.push(h("span", { class: "figures" }, figures));
    this.foot.replaceChildren(...parts);
    this.#showEnd();
  }

  #branches(family) {
    const at = family.indexOf(this.message);
    const move = (by) => this.actions.show(family[at + by]);
    return h("div", { class: "branches", role: "group", "aria-label": "Branches" },
      tool("left", "Previous branch", () => move(-1), at === 0),
      h("span", { class: "branch-at" }, `${at + 1} / ${family.length}`),
      tool("right", "Next branch", () => move(1), at === family.length - 1));
  }

  async #copy(pressed) {
    const done = await copy(this.message.content);
    pressed.replaceChildren(icon(done ? "check" : "warn"));
    setTimeout(() => pressed.replaceChildren(icon("copy")), 1500);
  }

  /** How an answer ended, if not as it should. */
  #showEnd() {
    this.end?.remove();
    const { usage } = this.message;
    if (this.isUser || this.isLive || !usage) return;
    const told = ENDS[usage.state] ?? (usage.finish_reason === "length" ? LENGTH : null);
    if (!told) return;
    const isBad = usage.state === "failed";
    const text = isBad && usage.error ? usage.error : told;
    const { message, actions } = this;
    this.end = h("div", { class: isBad ? "trouble" : "aside", role: isBad ? "alert" : null },
      isBad && icon("warn"), h("p", {}, text),
      actions.canContinue(message) && button("Go on", () => actions.continue(message)),
      isBad && button("Try again", () => actions.regenerate(message)));
    this.body.append(this.end);
  }

  /** The text becomes a field; saving it makes a branch. */
  edit() {
    const props = { class: "edit-field", rows: 4, "aria-label": "Edit your message" };
    const field = h("textarea", { ...props, value: this.message.content });
    const leave = () => {
      form.replaceWith(this.body);
      this.element.classList.remove("is-edited");
      this.foot.hidden = false;
      this.foot.querySelector("[aria-label=Edit]")?.focus();
    };
    const save = () => {
      const text = field.value.trim();
      leave();
      if (text && text !== this.message.content) this.actions.edit(this.message, text);
    };
    const form = h("form", { class: "edit-form", onsubmit: (event) => { event.preventDefault(); save(); } },
      field,
      h("div", { class: "row" },
        h("button", { type: "submit", class: "button primary" }, "Send as a new branch"),
        button("Cancel", leave)));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        leave();
      } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        save();
      }
    });
    this.body.replaceWith(form);
    this.element.classList.add("is-edited");
    this.foot.hidden = true;
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }
}

const ENDS = {
  streaming: "This answer was cut off.",
  stopped: "Stopped.",
  failed: "The answer failed.",
};
const LENGTH = "The answer reached the limit of tokens.";

const tool = (name, label, act, disabled = false) => iconButton(name, label, act, { kind: "small", disabled });

/** "214 tokens · 38.1 tokens/s · first after 0.21 s · 96 of 120 cached" */
function figuresOf(usage) {
  if (!usage || !usage.completion_tokens) return null;
  const parts = [`${count(usage.completion_tokens)} tokens`];
  if (usage.tok_s) parts.push(`${usage.tok_s} tokens/s`);
  if (usage.ttft_s !== undefined) parts.push(`first after ${duration(usage.ttft_s)}`);
  if (usage.cached_tokens) parts.push(`${count(usage.cached_tokens)} of ${count(usage.prompt_tokens)} cached`);
  return parts.join(" · ");
}

function pretty(given) {
  if (typeof given !== "string") return JSON.stringify(given, null, 2);
  try {
    return JSON.stringify(JSON.parse(given), null, 2);
  } catch {
    return given; // not whole yet, or not JSON
  }
}
