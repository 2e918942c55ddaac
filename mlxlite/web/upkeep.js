// Room on the disk and the key to the hub.

import { confirm } from "./dialogs.js";
import { announce, bytes, count, freshId, h } from "./dom.js";
import { setText } from "./rows.js";

const APPROVALS = "/api/settings/tool-approvals";

/** The part of the view that cleans up and keeps the token. changed: models may be gone. */
export class Upkeep {
  constructor(api, changed) {
    this.api = api;
    this.changed = changed;
    this.trouble = h("div", { class: "trouble", role: "alert", hidden: true });
    this.plan = h("p", { role: "status" });
    this.rows = h("ul", { class: "models-plan" });
    this.delete = h("button", { type: "button", class: "button danger", hidden: true, onclick: () => this.#delete() }, "Delete these");
    const tokenId = freshId("token");
    this.token = h("input", { id: tokenId, type: "password", autocomplete: "off", maxlength: 1024, spellcheck: "false" });
    this.has = h("p", { role: "status" });
    this.forget = h("button", { type: "button", class: "button", hidden: true, onclick: () => this.#setToken("forget") }, "Forget the token");
    this.tools = h("ul", { class: "models-plan" });
    this.allowed = h("section", { class: "models-section", hidden: true }, h("h2", {}, "Tools that are always allowed"),
      h("p", { class: "muted" }, "Whoever runs tools for a model on this machine does not ask before these."), this.tools);
    this.element = h("div", { class: "models" }, this.trouble,
      h("section", { class: "models-section" }, h("h2", {}, "Clean up"),
        h("p", { class: "muted" }, "Versions of hub models that newer ones replaced, and files that none needs any more. First only a look."),
        h("div", { class: "row" },
          h("button", { type: "button", class: "button", onclick: () => this.#look() }, "See what can go"), this.delete),
        this.plan, this.rows),
      h("section", { class: "models-section" }, h("h2", {}, "Hub token"),
        h("p", { class: "muted" }, "For models whose owner asks who you are. It is kept on the server's disk, for its owner alone, and never shown."),
        this.has,
        h("form", { onsubmit: (event) => { event.preventDefault(); this.#setToken("keep"); } },
          h("div", { class: "field" }, h("label", { htmlFor: tokenId }, "Token"),
            h("div", { class: "models-ask" }, this.token, h("button", { type: "submit", class: "button" }, "Keep"), this.forget)))),
      this.allowed);
  }

  start() {
    this.#setToken("look");
    this.#showTools(() => this.api.get(APPROVALS));
  }

  async #showTools(ask) {
    await this.#try(async () => {
      const { alwaysAllow } = await ask();
      this.allowed.hidden = alwaysAllow.length === 0;
      this.tools.replaceChildren(...alwaysAllow.map((tool) => h("li", {}, h("span", { class: "models-name" }, tool), " ",
        h("button", {
          type: "button", class: "button", "aria-label": `Ask again before ${tool}`,
          onclick: () => this.#showTools(() => this.api.remove(`${APPROVALS}?tool=${encodeURIComponent(tool)}`)),
        }, "Ask again"))));
    });
  }

  async #look() {
    await this.#try(async () => this.#show(await this.api.get("/api/gc/plan")));
  }

  #show({ superseded, reclaim_bytes }) {
    const goes = superseded.filter((row) => row.prune_snapshots.length || row.dead_blobs);
    setText(this.plan, goes.length ? `${bytes(reclaim_bytes)} can be freed:` : "There is nothing to delete.");
    this.rows.replaceChildren(...superseded.map((row) => {
      const parts = [`${count(row.prune_snapshots.length)} old versions`, `${count(row.dead_blobs)} files`, bytes(row.reclaim_bytes)];
      if (row.skipped_snapshots.length) parts.push(`${count(row.skipped_snapshots.length)} kept, with files of their own`);
      return h("li", {}, h("span", { class: "models-name" }, row.repo_id), h("span", { class: "note" }, ` ${parts.join(" · ")}`));
    }));
    this.delete.hidden = goes.length === 0;
    this.freed = reclaim_bytes;
  }

  async #delete() {
    if (!(await confirm("Delete old versions", `${bytes(this.freed)} will be freed. This cannot be undone.`, "Delete", true))) return;
    await this.#try(async () => {
      const done = await this.api.post("/api/gc/execute", { yes: true });
      this.#show(await this.api.get("/api/gc/plan"));
      setText(this.plan, `${bytes(done.reclaimed_bytes)} are free again.`);
      this.changed();
    });
  }

  async #setToken(what) {
    await this.#try(async () => {
      const path = "/api/settings/hf-token";
      let found;
      if (what === "keep") {
        found = await this.api.post(path, { token: this.token.value });
        this.token.value = "";
        announce("The token is kept");
      } else {
        found = what === "forget" ? await this.api.remove(path) : await this.api.get(path);
      }
      const texts = { stored: "A token is kept.", environment: "The server's environment has a token." };
      setText(this.has, texts[found.source] ?? "There is no token.");
      this.forget.hidden = found.source !== "stored";
    });
  }

  async #try(act) {
    try {
      await act();
      this.trouble.hidden = true;
    } catch (error) {
      this.trouble.replaceChildren(h("p", {}, error.message));
      this.trouble.hidden = false;
    }
  }
}
