// How models come: from the catalogue, from the hub, from a GGUF file on the person's own disk.

import { announce, bytes, count, duration, freshId, h } from "./dom.js";
import { Rows, setText } from "./rows.js";

/** The part of the view that gets models. came: a new one is here. began: something is under way. */
export class Fetching {
  #running = new Set(); // ids of downloads that ran at the last look
  #uploads = new Map(); // id -> Upload, of this page

  constructor(api, came, began) {
    this.api = api;
    this.came = came;
    this.began = began;
    this.trouble = h("div", { class: "trouble", role: "alert", hidden: true });
    const catalogue = h("ul", { class: "models-list" });
    this.catalogue = new Rows(catalogue, (entry) => entry.name, (entry) => new Offer(entry.name, () => this.fetch(entry.name)));
    const found = h("ul", { class: "models-list" });
    this.found = new Rows(found, (model) => model.id, (model) => new Found(model, (file) => this.fetch(model.id, file)));
    this.searched = h("p", { class: "note", role: "status" });
    const queryId = freshId("query");
    this.query = h("input", { id: queryId, type: "search", maxlength: 200, autocomplete: "off", spellcheck: "false" });
    this.searchButton = h("button", { type: "submit", class: "button" }, "Search");
    const fileId = freshId("file");
    this.file = h("input", { id: fileId, type: "file", accept: ".gguf", onchange: () => this.#import(this.file.files[0]) });
    this.list = h("ul", { class: "models-list" });
    this.downloads = new Rows(this.list, (row) => row.id, (row) => new Progress(row, this));
    this.onTheWay = h("section", { class: "models-section", hidden: true }, h("h2", {}, "On the way"), this.list);
    this.element = h("div", { class: "models" }, this.onTheWay,
      h("section", { class: "models-section" }, h("h2", {}, "Get a model"), this.trouble,
        h("h3", {}, "Catalogue"), catalogue,
        h("h3", {}, "Hub"),
        h("form", { role: "search", onsubmit: (event) => { event.preventDefault(); this.#search(); } },
          h("div", { class: "field" }, h("label", { htmlFor: queryId }, "Search the hub by name"),
            h("div", { class: "models-ask" }, this.query, this.searchButton))),
        this.searched, found,
        h("h3", {}, "GGUF file"),
        h("div", { class: "field" }, h("label", { htmlFor: fileId }, "Import a .gguf file from this computer"), this.file)));
  }

  end() {
    // What is being sent goes on no longer; picked again, it continues.
    for (const upload of this.#uploads.values()) upload.stop();
  }

  showCatalogue(entries) {
    this.catalogue.show(entries.map((entry) => ({
      text: `${entry.about} · ${entry.licence} · ${bytes(entry.download_bytes)} to fetch`, isHere: entry.local, name: entry.name,
    })));
  }

  /** Shows the rows of GET /downloads; true while any of them runs. */
  showDownloads({ downloads, uploads }) {
    const sent = uploads.filter((row) => row.offset < row.size).map((row) => ({ ...row, mine: this.#uploads.get(row.id) ?? null, isUpload: true }));
    this.downloads.show([...sent, ...downloads]);
    this.onTheWay.hidden = sent.length + downloads.length === 0;
    const running = new Set(downloads.filter((row) => row.state === "running").map((row) => row.id));
    for (const row of downloads) {
      if (!this.#running.has(row.id) || running.has(row.id)) continue;
      if (row.state === "done") {
        announce(`${row.model} is here`);
        this.came();
      } else if (row.state === "failed") {
        announce(`${row.repo_id} could not be fetched`);
      }
    }
    this.#running = running;
    return running.size > 0 || sent.some((row) => row.mine?.runs);
  }

  async fetch(model, file) {
    await this.#try(async () => {
      await this.api.post("/downloads", file ? { model, file } : { model });
      announce(`Fetching ${file ?? model}`);
      this.began();
    });
  }

  /** Ends a download, or takes one that is over off the list. */
  async drop(row) {
    await this.#try(async () => {
      this.#uploads.get(row.id)?.stop();
      this.#uploads.delete(row.id);
      await this.api.remove(`${row.isUpload ? "/api/imports" : "/downloads"}/${encodeURIComponent(row.id)}`);
      this.began();
    });
  }

  async resume(row) {
    if (!row.isUpload) await this.fetch(row.repo_id, row.file);
    else if (row.mine) this.#send(row.mine);
    else this.file.click(); // the same file again: the server knows how far it came
  }

  async #search() {
    const query = this.query.value.trim();
    if (!query) return;
    this.searchButton.disabled = true;
    setText(this.searched, "Searching…");
    const isDone = await this.#try(async () => {
      const { models } = await this.api.post("/api/hub/search", { query });
      this.found.show(models);
      setText(this.searched, models.length ? `${count(models.length)} found, most used first` : "Nothing was found.");
    });
    if (!isDone) setText(this.searched, "");
    this.searchButton.disabled = false;
  }

  async #import(file) {
    if (!file) return;
    this.file.value = ""; // so that the same file can be picked again
    await this.#try(async () => {
      const { upload } = await this.api.post("/api/imports", { name: file.name, size: file.size, modified: Math.round(file.lastModified) });
      const mine = new Upload(this.api, file, upload);
      this.#uploads.get(upload.id)?.stop();
      this.#uploads.set(upload.id, mine);
      announce(`Sending ${file.name}`);
      this.#send(mine);
    });
  }

  #send(upload) {
    const sent = this.#try(() => upload.run());
    this.began();
    sent.then(() => this.began());
  }

  /** True if it worked; else its error is shown. */
  async #try(act) {
    try {
      await act();
      this.trouble.hidden = true;
      return true;
    } catch (error) {
      if (error.name === "AbortError") return false;
      this.trouble.replaceChildren(h("p", {}, error.message));
      this.trouble.hidden = false;
      return false;
    }
  }
}

/** A file on its way to the server, piece by piece. */
class Upload {
  #abort = null;

  constructor(api, file, { id, offset, piece_bytes }) {
    Object.assign(this, { api, file, id, offset, pieceBytes: piece_bytes });
  }

  get runs() {
    return this.#abort !== null;
  }

  stop() {
    this.#abort?.abort();
  }

  async run() {
    if (this.runs) return;
    this.#abort = new AbortController();
    try {
      while (this.offset < this.file.size) {
        const piece = this.file.slice(this.offset, this.offset + this.pieceBytes);
        const path = `/api/imports/${this.id}?offset=${this.offset}`;
        const response = await this.api.send("PUT", path, piece, { type: "application/octet-stream", signal: this.#abort.signal });
        this.offset = (await response.json()).upload.offset;
      }
    } finally {
      this.#abort = null;
    }
  }
}

/** A model of the catalogue. */
class Offer {
  constructor(name, fetch) {
    this.text = h("p", { class: "note" });
    this.here = h("span", { class: "badge good" }, "here");
    this.button = h("button", { type: "button", class: "button", "aria-label": `Fetch ${name}`, onclick: fetch }, "Fetch");
    this.element = h("li", { class: "models-row" },
      h("div", { class: "models-what" }, h("h4", { class: "models-name" }, name), this.text), this.here, this.button);
  }

  show({ text, isHere }) {
    setText(this.text, text);
    this.here.hidden = !isHere;
    this.button.hidden = isHere;
  }
}

/** A GGUF file to choose. Blocks of the IQ kinds cannot be imported, and files are named after their
 * blocks: better to say so before gigabytes came. */
function fileOption(name) {
  const isStrange = /(^|[-._ ])IQ\d/i.test(name);
  return h("option", { value: name, disabled: isStrange }, isStrange ? `${name} (IQ: cannot be imported)` : name);
}

/** A model of the hub: whole, or one of its GGUF files. */
class Found {
  constructor(model, fetch) {
    this.text = h("p", { class: "note" });
    this.actions = h("div", { class: "models-actions" });
    if (model.safetensors) {
      this.actions.append(h("button", { type: "button", class: "button", "aria-label": `Fetch ${model.id}`, onclick: () => fetch() }, "Fetch"));
    }
    if (model.gguf.length) {
      const select = h("select", { "aria-label": `GGUF file of ${model.id}` }, ...model.gguf.map(fileOption));
      this.actions.append(select,
        h("button", { type: "button", class: "button", "aria-label": `Import the chosen file of ${model.id}`, onclick: () => fetch(select.value) }, "Import"));
    }
    if (!model.safetensors && !model.gguf.length) this.actions.append(h("span", { class: "badge" }, "no weights to use"));
    this.element = h("li", { class: "models-row" },
      h("div", { class: "models-what" }, h("h4", { class: "models-name" }, model.id), this.text), this.actions);
  }

  show(model) {
    const facts = [];
    if (model.size_bytes) facts.push(bytes(model.size_bytes));
    if (model.parameters) facts.push(`${short(model.parameters)} parameters`);
    if (model.downloads !== null) facts.push(`${short(model.downloads)} downloads`);
    if (model.licence) facts.push(model.licence);
    if (model.task) facts.push(model.task);
    if (model.gated) facts.push("needs a token and its owner's leave");
    setText(this.text, facts.join(" · "));
  }
}

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const short = (number) => compact.format(number);

const STAGES = { prepare: "Asking", download: "Fetching", copy: "Copying", unpack: "Unpacking", import: "Importing" };
const ENDS = { done: "Here", failed: "Failed", cancelled: "Stopped" };

/** A row of what is on its way, or was. */
class Progress {
  constructor(row, fetching) {
    this.row = row;
    const name = row.name ?? (row.file ? `${row.repo_id} ${row.file}` : row.repo_id);
    this.state = h("p", { class: "note" });
    this.bar = h("progress", { class: "models-bar", "aria-label": `Progress of ${name}` });
    this.why = h("p", { class: "models-why" });
    this.stop = h("button", { type: "button", class: "button", "aria-label": `Stop ${name}`, onclick: () => fetching.drop(this.row) }, "Stop");
    this.resume = h("button", { type: "button", class: "button", "aria-label": `Resume ${name}`, onclick: () => fetching.resume(this.row) }, "Resume");
    this.dismiss = h("button", { type: "button", class: "button", "aria-label": `Take ${name} off the list`, onclick: () => fetching.drop(this.row) }, "Dismiss");
    this.element = h("li", { class: "models-row" },
      h("div", { class: "models-what" }, h("h3", { class: "models-name" }, name), this.state, this.bar, this.why),
      h("div", { class: "models-actions" }, this.resume, this.stop, this.dismiss));
  }

  show(row) {
    this.row = row;
    const [done, total] = row.isUpload ? [row.offset, row.size] : [row.received_bytes, row.total_bytes];
    const runs = row.isUpload ? row.mine?.runs ?? false : row.state === "running";
    const amount = total ? `${bytes(Math.min(done, total))} of ${bytes(total)}` : "";
    let state = row.isUpload ? (runs ? "Sending" : "Sending stopped") : ENDS[row.state] ?? STAGES[row.stage] ?? row.stage;
    if (row.state !== "done" && amount) state += ` · ${amount}`;
    if (runs && row.bytes_per_sec) {
      state += ` · ${bytes(row.bytes_per_sec)}/s`;
      if (total > done) state += ` · ${duration((total - done) / row.bytes_per_sec)} left`;
    }
    if (row.resumes === false && row.stage === "download" && row.state !== "done") state += " · would start over";
    if (runs && row.files_total > 1) state += ` · ${row.files_done} of ${row.files_total} files`;
    setText(this.state, state);
    this.bar.hidden = row.state === "done";
    if (total) {
      this.bar.max = total;
      this.bar.value = Math.min(done, total);
    } else {
      this.bar.removeAttribute("value");
    }
    setText(this.why, row.error ?? "");
    this.why.hidden = !row.error;
    const focused = document.activeElement;
    this.stop.hidden = !runs;
    this.resume.hidden = runs || row.state === "done" || (row.kind === "import" && !row.isUpload);
    this.dismiss.hidden = runs;
    // Whoever pressed a button that is gone now is left at the one in its place.
    const buttons = [this.stop, this.resume, this.dismiss];
    if (focused?.hidden && buttons.includes(focused)) buttons.find((button) => !button.hidden)?.focus();
  }
}
