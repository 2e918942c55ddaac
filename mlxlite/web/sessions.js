// All chats: a list to rename, delete, export and import, and the search through their messages.

import { get, patch, remove, send } from "./api.js";
import { TITLE_CHARS, ask, tell, toast } from "./dialogs.js";
import { announce, button, count, debounced, download, h, moment } from "./dom.js";
import { icon, iconButton } from "./icons.js";
import { leaving, refresh, show } from "./sidebar.js";

const PAGE = 100;
const UNDO_MS = 6000;
const MOST_IMPORT = 30_000_000; // bytes; the server takes bodies up to 32 MiB

const address = (id) => `/api/sessions/${encodeURIComponent(id)}`;

// Whoever goes has decided.
addEventListener("pagehide", () => {
  for (const go of leaving.values()) go(true);
});

export function mount(root, { query }, { moved }) {
  const view = new SessionsView(query.get("q") ?? "", moved);
  root.append(view.element);
  view.start();
  return view;
}

class SessionsView {
  #asked = 0;

  constructor(query, moved) {
    this.moved = moved; // tells the page the address of a search
    const label = "Search all messages";
    const search = { type: "search", id: "search", placeholder: label, "aria-label": label, autocomplete: "off" };
    this.field = h("input", { ...search, value: query });
    const files = { type: "file", accept: ".jsonl,.json,.txt", multiple: true, hidden: true };
    this.picker = h("input", { ...files, "aria-label": "Chats as JSONL", onchange: () => this.#import() });
    const importer = { type: "button", class: "button", onclick: () => this.picker.click() };
    this.result = h("p", { class: "muted", role: "status" });
    this.content = h("div", {});
    this.element = h("div", { class: "page" },
      h("h1", { class: "page-title" }, "Chats"),
      h("div", { class: "toolbar" },
        h("div", { class: "search", role: "search" }, icon("search"), this.field),
        h("button", importer, icon("in"), "Import"), this.picker),
      this.result, this.content);
    const soon = debounced(120, () => this.#search());
    this.field.addEventListener("input", soon);
    this.field.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.field.value) {
        event.preventDefault();
        this.field.value = "";
        this.#search();
      } else if (event.key === "ArrowDown") {
        event.preventDefault();
        this.content.querySelector("a")?.focus();
      }
    });
  }

  start() {
    this.#search();
    this.field.focus();
  }

  focus() {
    this.field.focus();
  }

  unmount() {
    this.#asked += 1;
    this.element.remove();
  }

  // -------------------------------------------------------------------------------- searching

  async #search() {
    const asked = (this.#asked += 1);
    const text = this.field.value.trim();
    this.moved(text ? `#/sessions?q=${encodeURIComponent(text)}` : "#/sessions");
    if (!text) return this.#list();
    try {
      const { results } = await get(`/api/sessions/search?q=${encodeURIComponent(text)}`);
      if (asked === this.#asked) this.#showHits(results);
    } catch (error) {
      if (asked === this.#asked) this.#fail(error);
    }
  }

  #showHits(results) {
    const all = results.reduce((sum, one) => sum + one.matches.length, 0);
    const found = `${many(all, "match", "matches")} in ${many(results.length, "chat", "chats")}`;
    this.result.textContent = results.length ? found : "Nothing found.";
    this.content.replaceChildren(h("ul", { class: "hits" }, ...results.map(({ id, title, matches }) => {
      const link = `#/chat/${encodeURIComponent(id)}`;
      const lines = matches.map(({ role, snippet, ranges, message }) =>
        h("li", {}, h("a", { href: `${link}/${encodeURIComponent(message)}` },
          h("span", { class: "muted" }, role === "user" ? "You: " : "Answer: "), ...marked(snippet, ranges))));
      return h("li", { class: "hit" }, h("h2", { class: "session-title" }, title), h("ul", {}, ...lines));
    })));
  }

  // ---------------------------------------------------------------------------------- listing

  async #list() {
    const asked = (this.#asked += 1);
    this.result.textContent = "";
    try {
      const { sessions } = await get(`/api/sessions?limit=${PAGE}`);
      if (asked !== this.#asked) return;
      this.list = h("ul", { class: "session-list", "aria-label": "Chats" });
      this.content.replaceChildren(this.list);
      this.#more(sessions);
      if (!sessions.length) {
        const first = h("a", { href: "#/chat" }, "Begin one");
        this.content.replaceChildren(h("p", { class: "muted" }, "No chats yet. ", first, "."));
      }
    } catch (error) {
      if (asked === this.#asked) this.#fail(error);
    }
  }

  #more(sessions) {
    this.list.append(...sessions.filter(({ id }) => !leaving.has(id)).map((session) => this.#row(session)));
    if (sessions.length < PAGE) return;
    const more = button("Earlier chats", async () => {
      more.disabled = true;
      try {
        const last = sessions.at(-1);
        const found = await get(`/api/sessions?limit=${PAGE}&before=${last.updated}`);
        more.remove();
        this.#more(found.sessions);
      } catch (error) {
        more.disabled = false;
        tell(error);
      }
    });
    this.content.append(more);
  }

  #row(session) {
    const { id, updated, messages } = session;
    const title = h("span", { class: "session-title" }, session.title || "New chat");
    const tool = (name, label, act) => iconButton(name, `${label} ${session.title}`, act, { title: label });
    const row = h("li", { class: "session" },
      h("a", { class: "session-link", href: `#/chat/${encodeURIComponent(id)}` }, title,
        h("span", { class: "note" }, `${moment(updated)} · ${many(messages, "message", "messages")}`)),
      tool("edit", "Rename", () => this.#rename(session, title)),
      tool("out", "Export", () => this.#export(session)),
      tool("bin", "Delete", () => this.#delete(session, row)));
    return row;
  }

  async #rename(session, shown) {
    const title = await ask("Rename this chat", "Title", { value: session.title, most: TITLE_CHARS });
    if (title === null) return;
    try {
      await patch(address(session.id), { title });
      session.title = title;
      shown.textContent = title;
      refresh();
    } catch (error) {
      tell(error);
    }
  }

  /** Out of sight at once, deleted when it can no longer be taken back. */
  #delete(session, row) {
    const next = row.nextElementSibling ?? row.previousElementSibling;
    row.remove();
    (next?.querySelector("a") ?? this.field).focus();
    const go = (isLast = false) => {
      clearTimeout(timer);
      leaving.delete(session.id);
      remove(address(session.id), { keepalive: isLast }).then(refresh, (error) => {
        tell(error);
        this.#search();
      });
    };
    const timer = setTimeout(go, UNDO_MS);
    leaving.set(session.id, go);
    show();
    announce(`${session.title} is deleted.`);
    toast(`“${session.title}” is deleted.`, { label: "Undo", do: () => {
      clearTimeout(timer);
      leaving.delete(session.id);
      show();
      this.#search();
    } }, UNDO_MS - 200);
  }

  // ------------------------------------------------------------------------ files in and out

  async #export(session) {
    try {
      const text = await (await send("GET", `${address(session.id)}/export`)).text();
      const name = (session.title || "chat").replace(/[^\p{L}\p{N} ._-]+/gu, "").trim().slice(0, 60) || "chat";
      download(`${name}.jsonl`, "application/x-ndjson", text);
    } catch (error) {
      tell(error);
    }
  }

  async #import() {
    const files = [...this.picker.files];
    this.picker.value = "";
    for (const file of files) {
      try {
        if (file.size > MOST_IMPORT) throw new Error(`${file.name} is larger than ${MOST_IMPORT / 1e6} MB.`);
        const type = "application/x-ndjson";
        const response = await send("POST", "/api/sessions/import", await file.text(), { type });
        const { session, skipped } = await response.json();
        const lost = skipped ? ` ${many(skipped, "broken line was", "broken lines were")} left out.` : "";
        const open = () => (location.hash = `#/chat/${encodeURIComponent(session.id)}`);
        toast(`“${session.title}” is here.${lost}`, { label: "Open", do: open });
      } catch (error) {
        tell(error);
      }
    }
    refresh();
    this.#search();
  }

  #fail(error) {
    this.result.textContent = "";
    this.content.replaceChildren(h("div", { class: "trouble", role: "alert" }, icon("warn"), h("p", {}, error.message),
      button("Try again", () => this.#search())));
  }
}

const many = (number, one, several) => `${count(number)} ${number === 1 ? one : several}`;

/** A snippet with its matches marked. ranges: [from, to) in UTF-16 units, as strings here have. */
function marked(snippet, ranges) {
  const parts = [];
  let at = 0;
  for (const [from, to] of ranges) {
    parts.push(snippet.slice(at, from), h("mark", {}, snippet.slice(from, to)));
    at = to;
  }
  return [...parts, snippet.slice(at)];
}
