// The models of this machine: which are here, which one is served, and how others come.

import { announce, bytes, count, h } from "./dom.js";
import { Fetching } from "./fetching.js";
import { Rows, setText } from "./rows.js";
import { Upkeep } from "./upkeep.js";

const EVERY_MS = 5000; // looks at what goes on
const SOON_MS = 700; // while something does

/** Puts the view into `root`. api: {get, post, remove, send, forgetModel}. Returns what ends it. */
export function mount(root, api) {
  const view = new ModelsView(api);
  root.append(view.element);
  view.start();
  return () => view.end();
}

class ModelsView {
  #timer = 0;
  #isOver = false;
  #said = ""; // of the change that was last told
  #isChanging = false;

  constructor(api) {
    this.api = api;
    this.heading = h("h2", { tabindex: -1 }, "Served now");
    this.served = h("p", { class: "models-served", role: "status" }, "…");
    this.answersLeft = h("p", { class: "note" });
    this.cancel = h("button", { type: "button", class: "button", hidden: true, onclick: () => this.#cancel() }, "Cancel the change");
    this.bar = h("progress", { class: "models-bar", "aria-label": "The change of the model", hidden: true });
    this.trouble = h("div", { class: "trouble", role: "alert", hidden: true });
    const list = h("ul", { class: "models-list" });
    this.empty = h("p", { class: "muted", hidden: true }, "No model is here yet. Get one below.");
    this.disk = h("p", { class: "note" });
    this.models = new Rows(list, (row) => row.repo_id, (row) => new ModelRow(row, (name) => this.serve(name)));
    this.fetching = new Fetching(api, () => this.look(true), () => this.soon());
    this.upkeep = new Upkeep(api, () => this.look(true));
    this.element = h("div", { class: "models" },
      sheet(),
      this.trouble,
      section(this.heading, this.served, this.bar, this.answersLeft, h("div", {}, this.cancel)),
      section("On this machine", list, this.empty,
        h("div", { class: "row" },
          h("button", { type: "button", class: "button", onclick: () => this.look(true) }, "Look again"), this.disk)),
      this.fetching.element,
      this.upkeep.element);
    this.turn = () => (document.hidden ? clearTimeout(this.#timer) : this.#watch());
  }

  start() {
    document.addEventListener("visibilitychange", this.turn);
    this.look(false);
    this.upkeep.start();
    this.#watch();
  }

  end() {
    this.#isOver = true;
    clearTimeout(this.#timer);
    document.removeEventListener("visibilitychange", this.turn);
    this.fetching.end();
    this.element.remove();
  }

  /** Reads the library. isFresh: also what came or went since the server last looked. */
  async look(isFresh) {
    try {
      const found = await this.api.get(`/library${isFresh ? "?refresh=1" : ""}`);
      if (this.#isOver) return;
      this.models.show(found.models.map((row) => ({ ...row, isChanging: this.#isChanging })));
      this.empty.hidden = found.models.length > 0;
      setText(this.disk, found.disk_free_bytes === null ? "" : `${bytes(found.disk_free_bytes)} free on the disk`);
      this.fetching.showCatalogue(found.catalogue);
      this.#tell(null);
    } catch (error) {
      this.#tell(error);
    }
  }

  /** Something began: look at it more often. */
  soon() {
    clearTimeout(this.#timer);
    this.#watch();
  }

  async serve(name) {
    try {
      const answer = await this.api.post("/api/models/serve", { model: name });
      this.#showServe(answer.serve);
      this.#tell(null);
      this.soon();
    } catch (error) {
      this.#tell(error);
    }
  }

  async #cancel() {
    try {
      this.#showServe((await this.api.remove("/api/models/serve")).serve);
      this.#tell(null);
    } catch (error) {
      if (error.status !== 404) this.#tell(error); // 404: it was done a moment before
    }
    this.soon();
  }

  async #watch() {
    clearTimeout(this.#timer);
    if (this.#isOver) return;
    let isBusy = false;
    try {
      const [serve, downloads] = await Promise.all([this.api.get("/api/models/serve"), this.api.get("/downloads")]);
      if (this.#isOver) return;
      isBusy = this.#showServe(serve.serve);
      isBusy = this.fetching.showDownloads(downloads) || isBusy;
    } catch (error) {
      if (error.status !== 0) this.#tell(error); // the page as a whole says when the server is gone
    }
    clearTimeout(this.#timer);
    if (!this.#isOver && !document.hidden) this.#timer = setTimeout(() => this.#watch(), isBusy ? SOON_MS : EVERY_MS);
  }

  /** Shows what is served and what it is changed to; true while a change goes on. */
  #showServe({ model, ready, swap }) {
    const isChanging = swap !== null && ["loading", "draining", "cancelling", "stopping"].includes(swap.state);
    let text = `${model} is served.`;
    if (isChanging) {
      if (swap.state === "cancelling") text = `Going back to ${swap.previous}. ${ready ? `${model} answers meanwhile.` : "Requests wait for it."}`;
      else if (swap.state === "loading") text = `Loading ${swap.model}. ${ready ? `${model} answers until it is there.` : "Requests wait for it."}`;
      else text = ready ? `${model} is served; ${swap.previous} ends the answers that it began.` : `${swap.previous} ends the answers that it began; then ${swap.model} is loaded. Requests wait for it.`;
    } else if (!ready) {
      text = `${model} is loading.`;
    } else if (swap?.state === "failed") {
      text = `${swap.model} could not be served: ${swap.error} ${model} is served.`;
    }
    setText(this.served, text);
    this.bar.hidden = !isChanging;
    const isFocused = document.activeElement === this.cancel;
    this.cancel.hidden = !isChanging || ["cancelling", "stopping"].includes(swap.state);
    if (isFocused && this.cancel.hidden) this.heading.focus(); // not left nowhere
    setText(this.answersLeft, isChanging && swap.answers_left ? `${count(swap.answers_left)} ${swap.answers_left === 1 ? "answer" : "answers"} left` : "");
    const mark = swap === null ? "" : `${swap.started_at} ${swap.state} ${model}`;
    if (mark !== this.#said || isChanging !== this.#isChanging) {
      this.#isChanging = isChanging;
      if (this.#said !== "" || isChanging) this.api.forgetModel?.();
      this.#said = mark;
      this.look(false);
    }
    return isChanging;
  }

  #tell(error) {
    this.trouble.hidden = error === null;
    this.trouble.replaceChildren(...(error === null ? [] : [h("p", {}, error.message)]));
  }
}

class ModelRow {
  constructor(row, serve) {
    this.title = h("h3", { class: "models-name" }, row.repo_id);
    this.facts = h("p", { class: "note" });
    this.fit = h("span", { class: "badge" });
    this.why = h("span", { class: "note" });
    this.here = h("span", { class: "badge good" }, "served");
    this.button = h("button", { type: "button", class: "button", onclick: () => {
      announce(`Changing to ${row.repo_id}`);
      serve(row.repo_id);
    } }, "Serve");
    this.element = h("li", { class: "models-row" },
      h("div", { class: "models-what" }, this.title, this.facts, h("p", { class: "row" }, this.here, this.fit, this.why)),
      this.button);
    this.button.setAttribute("aria-label", `Serve ${row.repo_id}`);
  }

  show(row) {
    const facts = [row.model_type, row.quant_bits ? `${row.quant_bits}-bit` : "not quantised", bytes(row.size_bytes)];
    if (row.max_context) facts.push(`context ${count(row.max_context)}`);
    if (row.assessment?.predicted_decode_tps) facts.push(`about ${Math.round(row.assessment.predicted_decode_tps)} tokens/s`);
    if (!row.chat) facts.push("no chat template");
    setText(this.facts, facts.join(" · "));
    const [text, kind, why] = fitness(row);
    setText(this.fit, text);
    this.fit.className = `badge ${kind}`;
    setText(this.why, why);
    this.here.hidden = !row.serving;
    this.button.hidden = row.serving;
    this.button.disabled = row.isChanging || !row.supported;
  }
}

/** In words: whether a model fits, how good that is, and by which figures. */
function fitness({ supported, assessment }) {
  if (!supported) return ["not supported", "bad", "The installed mlx-lm has no code for this kind of model."];
  if (assessment === null) return ["size unknown", "warn", "Its files do not tell how much memory it takes."];
  const why = `takes ${bytes(assessment.total_bytes)} at ${count(assessment.context_tokens)} tokens, of ${bytes(assessment.usable_bytes)}`;
  if (assessment.fits) return ["fits", "good", why];
  if (assessment.max_safe_context > 0) return [`fits up to ${count(assessment.max_safe_context)} tokens`, "warn", why];
  return ["too large for this machine", "bad", why];
}

/** The style sheet of this view, from where this file came; it leaves with the view. */
const sheet = () => h("link", { rel: "stylesheet", href: new URL("./models.css", import.meta.url).pathname });

function section(title, ...children) {
  return h("section", { class: "models-section" }, typeof title === "string" ? h("h2", {}, title) : title, ...children);
}
