// One answer being written: asks the server, collects what comes, saves it now and then.
//
// It belongs to a conversation, not to the page: it goes on while another view is shown. Whoever
// wants to see it sets `onprogress` (text has come, a few times a second) and `onend`.

import { events, post, servedModel } from "./api.js";
import { live } from "./conversation.js";
import { sampling } from "./settings.js";
import { branch } from "./tree.js";

const SHOW_MS = 90; // between two looks at the text; each costs the page a layout
const SAVE_MS = 2000;
const STREAMED = { stream: true, stream_options: { include_usage: true } };

function chatBody(chat, above) {
  const { settings } = chat;
  const messages = settings.system ? [{ role: "system", content: settings.system }] : [];
  for (const { role, content, tool_calls: calls } of branch(chat.messages, above)) {
    messages.push(calls.length ? { role, content, tool_calls: calls } : { role, content });
  }
  const body = { messages, ...sampling(settings) };
  if (settings.thinking === "off") body.reasoning_effort = "none";
  if (settings.thinking === "on") body.reasoning_effort = "medium";
  return body;
}

/** The conversation above a message, as /tokenize and the chat endpoint read it. */
export const conversationBody = (chat, above = chat.leaf) => ({ messages: chatBody(chat, above).messages });

export class Run {
  text_tokens = 0; // pieces that came: nearly always one token each
  error = null;
  onprogress = () => {};
  onend = () => {};

  #abort = new AbortController();
  #isStopped = false;
  #shown = 0;
  #timer = 0;

  /** chat: its leaf is the message to answer, or, with `message`, the answer to go on with. */
  constructor(chat, message = null) {
    this.chat = chat;
    this.isContinued = message !== null;
    this.message = message ?? chat.add(chat.leaf, "assistant", "", { usage: { state: "streaming" } });
    this.message.usage = { ...this.message.usage, state: "streaming" };
    chat.run = this;
    if (chat.id !== null) live.set(chat.id, chat);
  }

  stop() {
    this.#isStopped = true;
    this.#abort.abort();
  }

  get tokensPerSecond() {
    const seconds = (this.last_ms - this.first_ms) / 1000;
    return seconds > 0.05 ? (this.text_tokens - 1) / seconds : null;
  }

  /** Resolves when the answer is over, however it ended; never raises. */
  async go() {
    const saving = setInterval(() => this.#save(), SAVE_MS);
    this.begun_ms = performance.now();
    let usage = null;
    let finish = null;
    try {
      const frames = this.isContinued ? await this.#continuation() : this.#answer();
      for await (const frame of frames) {
        if (frame.usage) usage = frame.usage;
        const choice = frame.choices?.[0];
        if (!choice) continue;
        finish = choice.finish_reason ?? finish;
        if (!this.#take(choice)) continue;
        if (this.text_tokens === 1) this.#save(); // from here on it has a row that may be told more
        this.#progressed();
      }
      this.#end("done", usage, finish);
    } catch (error) {
      if (!this.#isStopped) this.error = error;
      this.#end(this.#isStopped ? "stopped" : "failed", usage, finish);
    } finally {
      clearInterval(saving);
      clearTimeout(this.#timer);
    }
  }

  #answer() {
    const { schema } = this.chat.settings;
    const body = { ...chatBody(this.chat, this.message.parent), ...STREAMED };
    if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    return events("/v1/chat/completions", body, this.#abort.signal);
  }

  /** Goes on where an answer broke off: its prompt and what there is of it, as token ids. Thinking
   * is over by then, so the template is asked for a prompt without. */
  async #continuation() {
    const signal = this.#abort.signal;
    const body = chatBody(this.chat, this.message.parent);
    if ((await servedModel()).reasoning) body.reasoning_effort = "none";
    const { prompt } = await post("/apply-template", body, { signal });
    const text = { prompt: prompt + this.message.content, add_special_tokens: false };
    const { tokens } = await post("/tokenize", text, { signal });
    return events("/v1/completions", { prompt: tokens, ...sampling(this.chat.settings), ...STREAMED }, signal);
  }

  /** Whether anything came with this choice. */
  #take(choice) {
    const delta = choice.delta ?? { content: choice.text };
    const thought = delta.reasoning ?? delta.reasoning_content;
    if (!delta.content && !thought && !delta.tool_calls) return false;
    this.last_ms = performance.now();
    this.first_ms ??= this.last_ms;
    this.text_tokens += 1;
    if (delta.content) this.message.content += delta.content;
    if (thought) this.message.reasoning += thought;
    for (const piece of delta.tool_calls ?? []) this.#takeCall(piece);
    return true;
  }

  #takeCall(piece) {
    const calls = this.message.tool_calls;
    calls[piece.index] ??= { id: piece.id, type: "function", function: { name: "", arguments: "" } };
    const call = calls[piece.index].function;
    call.name += piece.function?.name ?? "";
    call.arguments += piece.function?.arguments ?? "";
  }

  #progressed() {
    const wait = this.#shown + SHOW_MS - performance.now();
    clearTimeout(this.#timer);
    if (wait > 0) {
      this.#timer = setTimeout(() => this.#progressed(), wait);
      return;
    }
    this.#shown = performance.now();
    this.onprogress();
  }

  #save() {
    this.message.isDirty = true;
    if (!this.chat.problem) this.chat.sync();
  }

  #end(state, usage, finish) {
    const { chat, message } = this;
    const figures = { state, finish_reason: finish };
    if (usage) {
      figures.prompt_tokens = usage.prompt_tokens;
      figures.completion_tokens = usage.completion_tokens;
      figures.cached_tokens = usage.prompt_tokens_details?.cached_tokens ?? 0;
      figures.reasoning_tokens = usage.completion_tokens_details?.reasoning_tokens ?? 0;
      this.text_tokens = usage.completion_tokens;
    } else if (this.text_tokens) {
      figures.completion_tokens = this.text_tokens;
    }
    if (this.first_ms) figures.ttft_s = Number(((this.first_ms - this.begun_ms) / 1000).toFixed(3));
    if (this.tokensPerSecond) figures.tok_s = Number(this.tokensPerSecond.toFixed(1));
    if (this.error) figures.error = this.error.message;
    message.usage = figures;
    message.isDirty = true;
    chat.run = null;
    const isEmpty = !message.content && !message.reasoning && !message.tool_calls.length;
    if (isEmpty && state !== "done" && message.saved === null) chat.drop(message);
    chat.sync();
    this.onend();
  }
}
