// The chat view: a conversation, the field below it, and what both do.

import { forgetModel, servedModel } from "./api.js";
import { split } from "./attach.js";
import { Composer } from "./composer.js";
import { Conversation, live } from "./conversation.js";
import { TITLE_CHARS, ask, tell, toast } from "./dialogs.js";
import { announce, button, count, h } from "./dom.js";
import { icon, iconButton } from "./icons.js";
import { Log } from "./log.js";
import { Meter } from "./meter.js";
import { Run } from "./run.js";
import { editSettings } from "./settings.js";
import { refresh } from "./sidebar.js";
import { newestLeaf, siblings } from "./tree.js";

const SAY_EVERY_MS = 5000; // how often a screen reader is given what came of an answer

/** Mounts the view of a chat. id: of a saved one, or null for a new one. where: {message} to show.
 * Returns what `app.js` needs: {unmount, act}. */
export function mount(root, { id, message }, { navigated, titled }) {
  const view = new ChatView(navigated, titled);
  root.append(view.element);
  view.open(id, message);
  return view;
}

class ChatView {
  constructor(navigated, titled) {
    this.navigated = navigated; // tells the rest of the page which chat this is
    this.titled = titled; // and what it is called
    this.log = new Log({
      isLive: (message) => this.chat?.run?.message === message,
      siblings: (message) => siblings(this.chat.messages, message),
      canContinue: (message) => this.#canContinue(message),
      edit: (message, text) => this.#edit(message, text),
      regenerate: (message) => this.#regenerate(message),
      continue: (message) => this.#answer(message),
      show: (message) => this.#show(message),
    });
    this.composer = new Composer({
      send: (content) => this.#send(content),
      stop: () => this.stop(),
      typed: (text) => this.#typed(text),
      editLast: () => this.editLast(),
    });
    this.meter = new Meter();
    this.title = h("h1", { class: "chat-title" }, "New chat");
    this.model = h("p", { class: "chat-model" });
    this.speed = h("span", { class: "speed" });
    this.notice = h("div", { class: "notice", role: "alert", hidden: true });
    this.welcome = h("div", { class: "welcome", hidden: true });
    const renames = iconButton("edit", "Rename this chat", () => this.rename());
    const settings = iconButton("sliders", "Settings of this chat", () => this.settings());
    this.element = h("div", { class: "chat" },
      h("div", { class: "chat-head" },
        h("div", { class: "chat-names" }, this.title, this.model), this.speed, this.meter.element, renames, settings),
      this.welcome, this.log.element,
      h("div", { class: "chat-foot" }, this.notice, this.composer.element));
    servedModel().then((model) => this.#greet(model), () => {});
    // Another tab may have changed the model meanwhile.
    this.shown = () => !document.hidden && this.#lookAgain();
    document.addEventListener("visibilitychange", this.shown);
  }

  async #lookAgain() {
    forgetModel();
    const model = await servedModel().catch(() => null);
    if (model === null || this.isOver) return;
    this.#greet(model);
    this.meter.sees(model);
  }

  #greet(model) {
    this.model.textContent = model.id;
    const what = `${model.backend}, ${count(model.context_window)} tokens of context`;
    const text = `${model.id} answers on this machine (${what}). Nothing you write leaves it.`;
    this.welcome.replaceChildren(h("h2", {}, "What would you like to know?"), h("p", { class: "muted" }, text));
  }

  async open(id, message) {
    try {
      this.chat = id === null ? new Conversation() : live.get(id) ?? (await Conversation.open(id));
    } catch (error) {
      this.chat = new Conversation();
      this.#notify(error.status === 404 ? "This chat does not exist any more." : error.message);
    }
    if (this.isOver) return; // another view came first
    this.chat.onsaved = () => this.#saved();
    if (this.chat.problem) this.#saved();
    // What was searched for may be on another branch.
    if (message && this.chat.messages.has(message) && !this.chat.branch.some(({ key }) => key === message)) {
      this.chat.leaf = newestLeaf(this.chat.messages, message);
    }
    this.#titled();
    this.#draw();
    this.composer.restore(sessionStorage.getItem(this.#draft) ?? "");
    if (this.chat.run) this.#watch(this.chat.run);
    if (message) await this.log.focus(message);
    else this.log.toEnd();
    if (!message && !matchMedia("(pointer: coarse)").matches) this.composer.focus();
  }

  unmount() {
    this.isOver = true;
    document.removeEventListener("visibilitychange", this.shown);
    const { chat } = this;
    if (chat) {
      chat.onsaved = () => {};
      if (chat.run) {
        chat.run.onprogress = () => {};
        chat.run.onend = () => {};
      }
      if (chat.problem && chat.branch.length) {
        const key = chat.id ?? "unsaved";
        live.set(key, chat);
        const back = () => (location.hash = `#/chat/${encodeURIComponent(key)}`);
        toast(`“${chat.title}” is not saved yet.`, { label: "Back", do: back }, 60_000);
      }
    }
    clearInterval(this.saying);
    this.log.close();
    this.element.remove();
  }

  // ------------------------------------------------------------------------------- showing

  #draw() {
    const shown = this.chat.branch;
    this.welcome.hidden = shown.length > 0;
    this.log.element.hidden = shown.length === 0;
    this.log.show(shown);
    this.composer.busy = this.chat.run !== null;
    this.meter.count(this.chat);
    if (shown.at(-1)?.role === "user" && !this.chat.run) this.#offer("This message has no answer yet.", "Answer");
  }

  /** A line below the messages with a button that answers the last one. */
  #offer(text, label, isBad = false) {
    this.log.list.querySelector(".is-loose")?.remove();
    const props = { class: `${isBad ? "trouble" : "aside"} is-loose`, role: isBad ? "alert" : null };
    const answer = button(label, () => this.#answer());
    this.log.list.append(h("div", props, isBad && icon("warn"), h("p", {}, text), answer));
    this.log.toEnd();
  }

  /** The buttons below messages depend on the tree and on whether an answer is coming. */
  #redrawFeet() {
    for (const view of this.log.views.values()) if (view.isNear) view.settle();
  }

  #titled() {
    const title = this.chat.title || "New chat";
    this.title.textContent = title;
    this.titled(title);
  }

  #notify(text, act = null) {
    if (text && !this.notice.hidden && this.notice.textContent.includes(text)) return; // read out once
    this.notice.hidden = !text;
    this.notice.replaceChildren(icon("warn"), h("p", {}, text ?? ""),
      ...(act ? [button(act.label, act.do)] : []));
  }

  #saved() {
    const { problem } = this.chat;
    if (problem) {
      const text = `This chat is not saved: ${problem.message} It goes on here meanwhile.`;
      this.#notify(text, { label: "Save again", do: () => this.chat.sync() });
    } else {
      this.#notify(null);
      if (this.chat.id !== null) this.navigated(this.chat);
    }
  }

  // ---------------------------------------------------------------------------- conversing

  #send(content) {
    const { chat } = this;
    if (chat.run) return;
    if (!chat.title) {
      chat.title = titleOf(content);
      this.#titled();
    }
    chat.add(chat.leaf, "user", content);
    this.#answer();
  }

  /** Answers the leaf, or goes on with an answer. */
  #answer(message = null) {
    if (this.chat.run) return;
    const run = new Run(this.chat, message);
    this.chat.sync();
    this.#draw();
    this.#redrawFeet();
    this.log.toEnd();
    this.#watch(run);
    run.go();
    announce("Answering.");
  }

  #watch(run) {
    let said = run.message.content.length;
    const say = () => {
      const text = run.message.content.slice(said);
      const end = Math.max(...[". ", "? ", "! ", "\n"].map((mark) => text.lastIndexOf(mark)));
      if (end > 0) {
        announce(text.slice(0, end + 1));
        said += end + 1;
      }
    };
    clearInterval(this.saying);
    this.saying = setInterval(say, SAY_EVERY_MS);
    run.onprogress = () => {
      this.log.views.get(run.message.key)?.update();
      this.meter.answering(run.text_tokens);
      this.speed.textContent = run.tokensPerSecond ? `${run.tokensPerSecond.toFixed(1)} tokens/s` : "";
    };
    run.onend = () => {
      clearInterval(this.saying);
      this.speed.textContent = "";
      const isThere = this.chat.messages.has(run.message.key);
      this.#draw();
      this.#redrawFeet();
      if (!isThere && run.error) this.#offer(run.error.message, "Try again", true); // no message could show it
      refresh();
      const rest = run.message.content.slice(said) || "The answer is over.";
      announce(run.error ? `The answer failed: ${run.error.message}` : rest);
    };
  }

  #canContinue(message) {
    const { chat } = this;
    const { usage } = message;
    if (chat.run || message.role !== "assistant" || message.key !== chat.leaf || !message.content) return false;
    if (chat.settings.schema || message.tool_calls.length) return false; // a form cannot begin in its middle
    return ["streaming", "stopped", "failed"].includes(usage?.state) || usage?.finish_reason === "length";
  }

  #edit(message, text) {
    if (this.chat.run) return;
    this.chat.add(message.parent, "user", text);
    this.#answer();
  }

  #regenerate(message) {
    if (this.chat.run) return;
    this.chat.leaf = message.parent;
    this.#answer();
  }

  #show(message) {
    if (this.chat.run) return;
    this.chat.setLeaf(newestLeaf(this.chat.messages, message.key));
    this.#draw();
    this.#redrawFeet();
    const view = this.log.views.get(message.key);
    view?.near();
    view?.element.querySelector(".branches button:not(:disabled)")?.focus();
  }

  // ------------------------------------------------------- what keys and buttons ask for

  stop() {
    this.chat?.run?.stop();
    this.composer.focus();
  }

  get isAnswering() {
    return Boolean(this.chat?.run);
  }

  focus() {
    this.composer.focus();
  }

  editLast() {
    const last = this.chat?.branch.findLast((message) => message.role === "user");
    if (!last || this.chat.run) return;
    const view = this.log.views.get(last.key);
    view.near();
    view.edit();
    view.element.scrollIntoView({ block: "nearest" });
  }

  async settings() {
    if (!this.chat) return;
    const found = await editSettings(this.chat.settings);
    if (found === null) return;
    await this.chat.change({ settings: found });
    this.meter.count(this.chat);
    if (!this.chat.problem) toast("Settings saved.");
  }

  async rename() {
    if (!this.chat) return;
    const title = await ask("Rename this chat", "Title", { value: this.chat.title, most: TITLE_CHARS });
    if (title === null) return;
    await this.chat.change({ title });
    if (this.chat.problem) tell(this.chat.problem);
    this.#titled();
    if (this.chat.id !== null) this.navigated(this.chat);
    refresh();
  }

  // --------------------------------------------------------------------------------- drafts

  /** Where what is typed is kept until it is sent, so that neither a reload nor a look elsewhere
   * loses it. */
  get #draft() {
    return `mlxlite-draft-${this.chat?.id ?? "new"}`;
  }

  #typed(text) {
    this.meter.typed(text);
    if (this.composer.field.value) sessionStorage.setItem(this.#draft, this.composer.field.value);
    else sessionStorage.removeItem(this.#draft);
  }
}

/** A title out of a first message: what was typed, on one line, else the name of a file. */
function titleOf(content) {
  const { files, typed } = split(content);
  const line = typed.replace(/\s+/g, " ").trim() || files[0].name;
  return line.length > TITLE_CHARS ? `${line.slice(0, TITLE_CHARS - 1)}…` : line;
}
