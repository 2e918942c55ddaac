// The newest chats at the side, and moving between them.

import { get } from "./api.js";
import { at, h } from "./dom.js";

const SHOWN = 30;
const SOON_MS = 100; // several changes at once are one look

/** Chats that are being deleted: {id: act}, which carries it out. Until then it can be taken back. */
export const leaving = new Map();

let sessions = [];
let current = null;
let due = 0; // the timer of a look that is not begun
let coming = null; // the newest look that is

/** Fetches the list anew, soon. */
export function refresh() {
  clearTimeout(due);
  due = setTimeout(look, SOON_MS);
}

function look() {
  clearTimeout(due);
  due = 0;
  // Quiet when it fails: the banner says so already.
  const mine = get(`/api/sessions?limit=${SHOWN}`).catch(() => null).then((found) => {
    if (!found || coming !== mine) return;
    sessions = found.sessions;
    show();
  });
  coming = mine;
}

/** Shows the list without chats that are being deleted, or with those that were taken back. */
export function show() {
  const links = sessions.filter(({ id }) => !leaving.has(id)).map(({ id, title }) => {
    const href = `#/chat/${encodeURIComponent(id)}`;
    const link = h("a", { href, class: "recent-link", "data-id": id, title }, title || "New chat");
    setCurrent(link, id === current);
    return h("li", {}, link);
  });
  const head = h("h2", { id: "recent-head", class: "side-heading" }, "Recent");
  const list = h("ul", { class: "recent-list", "aria-labelledby": "recent-head" }, ...links);
  at("recent").replaceChildren(...(links.length ? [head, list] : []));
}

/** Marks the chat that is shown; null for none. */
export function mark(id) {
  current = id;
  for (const link of at("recent").querySelectorAll("a")) setCurrent(link, link.dataset.id === id);
  if (id !== null && !sessions.some((session) => session.id === id)) refresh();
}

function setCurrent(link, is) {
  if (is) link.setAttribute("aria-current", "page");
  else link.removeAttribute("aria-current");
}

/** Goes to the chat above (-1) or below (1) the one that is shown, by a list that knows of it: a key
 * that comes right after an answer would else find no neighbour, and be lost. */
export async function step(by) {
  if (due) look();
  await coming;
  if (!sessions.length) return;
  const here = sessions.findIndex((session) => session.id === current);
  const next = here < 0 ? 0 : Math.min(Math.max(here + by, 0), sessions.length - 1);
  const { id } = sessions[next];
  mark(id); // the next key counts from there
  location.hash = `#/chat/${encodeURIComponent(id)}`;
}
