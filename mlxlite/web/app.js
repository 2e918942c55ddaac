// The page as a whole: which view is shown, and what belongs to none of them.
//
// Addresses are in the hash: #/chat, #/chat/<id>[/<message>], #/sessions[?q=…], #/models, #/status.
// A view is a module with mount(root, parameters, page) -> {unmount, …}. The chat is there from the
// start, the others are fetched when they are first opened.

import * as api from "./api.js";
import * as chat from "./chat.js";
import { live } from "./conversation.js";
import { ask, dialog, toast } from "./dialogs.js";
import { at, button, h } from "./dom.js";
import { icon } from "./icons.js";
import { listen, showHelp } from "./keys.js";
import * as sidebar from "./sidebar.js";

const VIEWS = {
  chat: async () => chat,
  sessions: () => import("./sessions.js"),
  models: async () => withFunction(await import("./models.js")),
  status: () => import("./status.js"),
};

/** models.js returns a function that unmounts it; views here are objects. */
const withFunction = (module) => ({
  mount: (root) => {
    const heading = h("h1", { class: "page-title" }, "Models");
    const inside = h("div", {});
    root.append(h("div", { class: "page" }, heading, inside));
    const unmount = module.mount(inside, api);
    return { unmount: () => typeof unmount === "function" && unmount() };
  },
});

let shown = null; // the view
let shownHash = null;
let turns = 0;
let shownTurn = 0; // whose view is shown; behind while the next one's module is fetched

async function route() {
  if (location.hash && !location.hash.startsWith("#/")) return; // a place in the page
  if (location.hash === shownHash) return;
  const turn = (turns += 1);
  shownHash = location.hash;
  const [path, query = ""] = location.hash.slice(2).split("?");
  const [name = "chat", ...rest] = path.split("/").filter(Boolean).map(decodeURIComponent);
  const known = name in VIEWS ? name : "chat";
  let module;
  try {
    module = await VIEWS[known]();
  } catch {
    module = missing(known);
  }
  if (turn !== turns) return;
  shownTurn = turn;
  shown?.unmount();
  const main = at("main");
  main.replaceChildren();
  main.dataset.view = known;
  for (const link of document.querySelectorAll("[data-route]")) {
    if (link.dataset.route === known) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  titled(TITLES[known]);
  const id = known === "chat" ? rest[0] ?? null : null;
  sidebar.mark(id);
  const parameters = { id, message: rest[1] ?? null, query: new URLSearchParams(query) };
  shown = module.mount(main, parameters, { navigated, moved, titled });
  closeMenu();
  if (known !== "chat" && !main.contains(document.activeElement)) main.focus({ preventScroll: true });
}

const TITLES = { chat: "New chat", sessions: "Chats", models: "Models", status: "Status" };

const missing = (name) => ({
  mount: (root) => {
    const text = `${TITLES[name]} could not be loaded. Is the server still running?`;
    const again = () => {
      shownHash = null;
      route();
    };
    const trouble = h("div", { class: "trouble" }, icon("warn"), h("p", {}, text), button("Try again", again));
    root.append(h("div", { class: "page" }, h("h1", { class: "page-title" }, TITLES[name]), trouble));
    return { unmount: () => {} };
  },
});

/** Somebody is on the way to another view: what the one that is shown says of itself comes too late. */
const isLeaving = () => shownTurn !== turns || location.hash !== shownHash;

/** The view that is shown has another address now. */
function moved(hash) {
  if (isLeaving()) return;
  history.replaceState(null, "", hash);
  shownHash = hash;
}

/** What is shown is called so: at the top of a small screen, and in the browser's tab. */
function titled(title) {
  document.title = `${title} – mlxlite`;
  at("topbar-title").textContent = title;
}

/** A chat was saved: it has an address now, and belongs into the list. */
function navigated(conversation) {
  if (isLeaving()) return sidebar.refresh();
  const hash = `#/chat/${encodeURIComponent(conversation.id)}`;
  if (!location.hash.startsWith(hash)) moved(hash);
  sidebar.mark(conversation.id);
}

// ---------------------------------------------------------------------------- menu and theme

function closeMenu() {
  document.body.classList.remove("has-menu");
  at("menu").setAttribute("aria-expanded", "false");
  at("scrim").hidden = true;
}

function toggleMenu() {
  const isOpen = document.body.classList.toggle("has-menu");
  at("menu").setAttribute("aria-expanded", String(isOpen));
  at("scrim").hidden = !isOpen;
  if (isOpen) at("new-chat").focus();
}

function chooseTheme() {
  const now = document.documentElement.dataset.theme ?? "system";
  dialog("Theme", (close) => h("fieldset", { class: "choices" },
    h("legend", { class: "unseen" }, "Theme"),
    ...[["system", "As the system has it"], ["light", "Light"], ["dark", "Dark"]].map(([value, label]) => {
      const props = { type: "radio", name: "theme", id: `theme-${value}`, value, checked: value === now };
      const box = h("input", { ...props, onchange: () => setTheme(value) });
      return h("div", { class: "check" }, box, h("label", { htmlFor: box.id }, label));
    }),
    h("div", { class: "row end" }, button("Done", () => close(), "primary"))));
}

function setTheme(value) {
  if (value === "system") {
    delete document.documentElement.dataset.theme;
    localStorage.removeItem("mlxlite-theme");
  } else {
    document.documentElement.dataset.theme = value;
    localStorage.setItem("mlxlite-theme", value);
  }
}

// -------------------------------------------------------------------------- the server's link

function watchLink() {
  const banner = at("banner");
  let timer = 0;
  api.link.addEventListener("lost", () => {
    banner.textContent = "The server cannot be reached. Trying again…";
    banner.hidden = false;
    timer = setInterval(() => api.get("/health").catch(() => {}), 3000);
  });
  api.link.addEventListener("reached", () => {
    clearInterval(timer);
    banner.hidden = true;
    api.forgetModel(); // it may have begun again with another one
    sidebar.refresh();
    if (shown?.chat?.problem) shown.chat.sync();
    else if (document.querySelector(".page .trouble:not([hidden]), .chat .notice:not([hidden])") && !live.size) {
      shownHash = null;
      route();
    }
  });
}

api.prompts.key = (wasWrong) => ask("This server wants a key", "Key", {
  type: "password", yes: "Go on",
  note: wasWrong
    ? "That key was not right."
    : "It is what --api-key or MLXLITE_API_KEY says. It is kept for this tab only.",
});

async function keepOffline() {
  if (!("serviceWorker" in navigator)) return; // plain http from another machine
  try {
    await navigator.serviceWorker.register("/sw.js");
  } catch {
    return; // switched off by the browser; the page works without
  }
  const hadOne = Boolean(navigator.serviceWorker.controller);
  navigator.serviceWorker.addEventListener("controllerchange", () => {
    if (hadOne) toast("mlxlite was updated.", { label: "Reload", do: () => location.reload() }, 60_000);
  });
}

// --------------------------------------------------------------------------------------- start

const go = (hash) => {
  if (location.hash === hash) shownHash = null;
  location.hash = hash;
  route();
};

function start() {
  at("menu").append(icon("menu"));
  at("help").append(icon("help"));
  at("theme").append(icon("theme"));
  at("new-chat").prepend(icon("plus"));
  at("menu").addEventListener("click", toggleMenu);
  at("scrim").addEventListener("click", closeMenu);
  at("help").addEventListener("click", showHelp);
  at("theme").addEventListener("click", chooseTheme);
  at("new-chat").addEventListener("click", (event) => {
    event.preventDefault();
    go("#/chat");
  });
  at("skip").addEventListener("click", (event) => {
    event.preventDefault();
    at("main").focus();
  });
  listen({
    new: () => go("#/chat"),
    search: () => go("#/sessions"),
    previous: () => sidebar.step(-1),
    next: () => sidebar.step(1),
    help: showHelp,
    focus: () => shown?.focus?.(),
    editLast: () => shown?.editLast?.(),
    settings: () => shown?.settings?.(),
    stop: () => {
      if (document.body.classList.contains("has-menu")) {
        closeMenu();
        at("menu").focus();
        return true;
      }
      if (!shown?.isAnswering) return false;
      shown.stop();
      return true;
    },
  });
  addEventListener("hashchange", route);
  addEventListener("pagehide", () => {
    for (const conversation of live.values()) conversation.lastWords();
  });
  addEventListener("pageshow", ({ persisted }) => {
    if (persisted) for (const conversation of live.values()) conversation.forgetLastWords();
  });
  addEventListener("beforeunload", (event) => {
    if ([...live.values()].some(({ problem }) => problem) || shown?.chat?.problem) event.preventDefault();
  });
  watchLink();
  sidebar.refresh();
  route();
  // Keeping files for later must not compete with showing them now.
  if (document.readyState === "complete") setTimeout(keepOffline, 500);
  else addEventListener("load", () => setTimeout(keepOffline, 500));
}

start();
