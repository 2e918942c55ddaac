// Samples side by side: the same prompt and seeds drawn by the curve and by the server's recipe.

import { post } from "./api.js";
import { announce, button, freshId, h } from "./dom.js";
import { typed } from "./lab.js";
import { shown } from "./curve-maths.js";

/** prompt(): the text. curve(): what a request takes, or null while there is none. */
export class Samples {
  #running = null;

  constructor(form, columns, { prompt, curve }) {
    this.prompt = prompt;
    this.curve = curve;
    this.columns = columns;
    const field = (label, value, min, max) => {
      const id = freshId("sample");
      const input = h("input", { type: "number", id, value, min, max, step: 1, required: true });
      form.append(h("div", { class: "field" }, h("label", { htmlFor: id }, label), input));
      return input;
    };
    this.n = field("How many", 3, 1, 8);
    this.limit = field("Tokens each", 48, 1, 256);
    this.seed = field("Seed", 1, 0, 4294967295);
    this.button = h("button", { type: "submit", class: "button primary" }, "Sample");
    this.stop = button("Stop", () => this.#running?.abort());
    this.stop.hidden = true;
    this.next = button("Another seed", () => this.#again());
    form.append(h("div", { class: "row" }, this.button, this.stop, this.next));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
  }

  /** Says whether there is a curve to sample by. */
  set isReady(ready) {
    this.button.disabled = this.next.disabled = !ready;
  }

  #again() {
    this.seed.value = Math.floor(Math.random() * 2 ** 32);
    return this.run();
  }

  async run() {
    this.#running?.abort();
    const running = (this.#running = new AbortController());
    const wanted = { prompt: this.prompt(), n: typed(this.n), max_tokens: typed(this.limit), seed: typed(this.seed) };
    const ways = [
      ["By the curve", { ...wanted, curve: this.curve() }],
      ["By the server's recipe", { ...wanted, default: true }],
    ];
    this.stop.hidden = false;
    const columns = ways.map(([title]) => h("section", { class: "sample-column", "aria-busy": "true" },
      h("h3", {}, title), h("p", { class: "note" }, "Drawing …")));
    this.columns.replaceChildren(...columns);
    // Both at once: the server batches them.
    await Promise.all(ways.map(async ([title, body], index) => {
      let content;
      try {
        content = answered(await post("/generate", body, { signal: running.signal }));
      } catch (error) {
        const isStop = error.name === "AbortError";
        content = [h("p", { class: isStop ? "note" : "trouble", role: isStop ? null : "alert" }, isStop ? "Stopped." : error.message)];
      }
      columns[index].removeAttribute("aria-busy");
      columns[index].replaceChildren(h("h3", {}, title), ...content);
    }));
    if (this.#running !== running) return; // a newer one has taken over
    this.stop.hidden = true;
    announce("Both columns are there.");
  }
}

/** What came, as elements; text is only ever text. */
function answered({ mode, recipe, seed, samples }) {
  const how = mode === "curve" ? "the curve as it is drawn above"
    : `temperature ${shown(recipe.temperature)}${recipe.topP ? `, top-p ${recipe.topP}` : ""}${recipe.topK ? `, top-k ${recipe.topK}` : ""}`;
  return [
    h("p", { class: "note" }, how),
    h("ol", { class: "sample-list" }, samples.map(({ text, junk }, index) =>
      h("li", {},
        h("p", { class: "sample-head" }, h("span", { class: "note" }, `seed ${seed + index}`), junk && h("span", { class: "badge warn" }, "fell apart")),
        h("p", { class: "sample-text" }, text || h("span", { class: "note" }, "(nothing)"))))),
  ];
}
