// How full the context is: what the last answer counted, what has been written since, what is typed.

import { post, servedModel } from "./api.js";
import { count, h } from "./dom.js";
import { conversationBody } from "./run.js";

const CHARS_A_TOKEN = 3.6; // of English; only for what nobody has counted yet

export class Meter {
  #base = 0; // tokens of the conversation, counted
  #extra = 0; // of an answer that is being written
  #typed = 0;
  #most = 0;
  #asked = 0;

  constructor() {
    this.bar = h("meter", { min: 0, max: 1, value: 0, "aria-label": "Context used" });
    this.text = h("span", { class: "meter-text" });
    const props = { class: "context-meter", title: "Tokens of this chat, of those the model can see" };
    this.element = h("div", { ...props, hidden: true }, this.bar, this.text);
    servedModel().then((model) => this.sees(model), () => {});
  }

  /** How much this model can. */
  sees(model) {
    this.#most = model.context_window ?? 0;
    this.#show();
  }

  /** Counts the shown branch anew: from the last answer's figures, or by asking the tokenizer. */
  async count(chat) {
    const asked = (this.#asked += 1);
    this.#extra = 0;
    const { usage } = chat.branch.at(-1) ?? {};
    if (usage?.prompt_tokens) {
      this.#base = usage.prompt_tokens + usage.completion_tokens;
    } else if (!chat.branch.length && !chat.settings.system) {
      this.#base = 0;
    } else {
      const found = await post("/tokenize", conversationBody(chat)).catch(() => null);
      if (asked !== this.#asked || !found) return;
      this.#base = found.count;
    }
    this.#show();
  }

  answering(tokens) {
    this.#extra = tokens;
    this.#show();
  }

  typed(text) {
    this.#typed = Math.ceil(text.length / CHARS_A_TOKEN);
    this.#show();
  }

  #show() {
    this.element.hidden = !this.#most;
    if (!this.#most) return;
    const used = this.#base + this.#extra + this.#typed;
    this.bar.max = this.#most;
    this.bar.high = this.#most * 0.85;
    this.bar.value = Math.min(used, this.#most);
    this.text.textContent = `${count(used)} / ${count(this.#most)}`;
    this.element.classList.toggle("is-full", used > this.#most);
  }
}
