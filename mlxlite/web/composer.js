// Where a message is written: a field that grows, files to go with it, and the button that sends or
// stops. Enter sends, Shift+Enter begins a new line.

import { bytes, debounced, h } from "./dom.js";
import { icon, iconButton } from "./icons.js";
import { MOST_TOTAL, join, readText } from "./attach.js";

export class Composer {
  #files = [];
  #isBusy = false;

  /** on: {send(content), stop(), typed(content), editLast()} */
  constructor(on) {
    this.on = on;
    this.field = h("textarea", {
      class: "composer-field", id: "composer", rows: 1, placeholder: "Write a message",
      "aria-label": "Message", enterkeyhint: "send",
    });
    this.list = h("ul", { class: "attached", "aria-label": "Attached files", hidden: true });
    this.trouble = h("p", { class: "composer-trouble", role: "alert", hidden: true });
    const files = { type: "file", multiple: true, hidden: true, "aria-label": "Files" };
    this.picker = h("input", { ...files, onchange: () => this.#pick() });
    this.attach = iconButton("clip", "Attach text files", () => this.picker.click());
    this.button = h("button", { type: "submit", class: "send", "aria-label": "Send", title: "Send" }, icon("send"));
    this.element = h("form", { class: "composer" },
      this.trouble, this.list,
      h("div", { class: "composer-row" }, this.attach, this.picker, this.field, this.button));
    this.#listen();
  }

  #listen() {
    const { element, field } = this;
    element.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#isBusy) this.on.stop();
      else this.#send();
    });
    field.addEventListener("keydown", (event) => this.#pressed(event));
    const tell = debounced(150, () => this.on.typed(join(this.#files, field.value)));
    field.addEventListener("input", () => {
      this.#grow();
      tell();
    });
    element.addEventListener("dragover", (event) => event.preventDefault());
    element.addEventListener("drop", (event) => {
      event.preventDefault();
      this.addFiles(event.dataTransfer.files);
    });
    field.addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.addFiles(event.clipboardData.files);
    });
  }

  #pressed(event) {
    if (event.isComposing) return; // an input method is choosing characters
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      if (!this.#isBusy) this.#send();
    } else if (event.key === "ArrowUp" && !this.field.value) {
      event.preventDefault();
      this.on.editLast();
    } else if (event.key === "Escape" && !this.#isBusy) {
      this.field.blur();
    }
  }

  #grow() {
    // Browsers with field-sizing do it themselves, without a layout for every key.
    if (CSS.supports("field-sizing", "content")) return;
    this.field.style.height = "auto";
    this.field.style.height = `${Math.min(this.field.scrollHeight, 240)}px`;
  }

  #send() {
    const content = join(this.#files, this.field.value.trim());
    if (!content.trim()) return;
    this.clear();
    this.on.send(content);
  }

  clear() {
    this.field.value = "";
    this.#files = [];
    this.trouble.hidden = true;
    this.#showFiles();
    this.#grow();
    this.on.typed("");
  }

  focus() {
    this.field.focus();
  }

  /** Puts a text back that was typed before. */
  restore(text) {
    if (!text) return;
    this.field.value = text;
    this.#grow();
    this.on.typed(text);
  }

  /** While an answer comes the button stops it. */
  set busy(is) {
    this.#isBusy = is;
    const name = is ? "Stop" : "Send";
    this.button.replaceChildren(icon(is ? "stop" : "send"));
    this.button.setAttribute("aria-label", name);
    this.button.title = is ? "Stop (Esc)" : name;
    this.button.classList.toggle("is-stop", is);
  }

  async #pick() {
    await this.addFiles(this.picker.files);
    this.picker.value = ""; // the same file may be chosen again
    this.field.focus();
  }

  async addFiles(files) {
    const troubles = [];
    for (const file of files) {
      try {
        const read = await readText(file);
        const total = this.#files.reduce((sum, one) => sum + one.text.length, read.text.length);
        if (total > MOST_TOTAL) throw new Error(`${file.name} would make the files more than ${bytes(MOST_TOTAL)}.`);
        this.#files.push(read);
      } catch (error) {
        troubles.push(error.message);
      }
    }
    this.trouble.textContent = troubles.join(" ");
    this.trouble.hidden = !troubles.length;
    this.#showFiles();
    this.on.typed(join(this.#files, this.field.value));
  }

  #showFiles() {
    this.list.hidden = !this.#files.length;
    this.list.replaceChildren(...this.#files.map((file) => {
      const leave = () => {
        this.#files = this.#files.filter((other) => other !== file);
        this.#showFiles();
        this.field.focus();
        this.on.typed(join(this.#files, this.field.value));
      };
      return h("li", { class: "chip" },
        h("span", {}, file.name), h("span", { class: "muted" }, bytes(file.text.length)),
        iconButton("close", `Remove ${file.name}`, leave, { kind: "small" }));
    }));
  }
}
