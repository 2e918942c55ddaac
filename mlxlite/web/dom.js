// Small helpers to build and find elements. Text is always set as text, never as HTML.

/** An element. props: `onclick` and the like are listeners, known properties are set as such, the
 * rest are attributes; null and false are left out. children: nodes, strings, or lists of them. */
export function h(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (PROPERTIES.has(name)) element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** A button with a label. kind: more classes, such as "primary". */
export const button = (label, act, kind = "") =>
  h("button", { type: "button", class: `button ${kind}`.trim(), onclick: act }, label);

const PROPERTIES = new Set(["value", "checked", "disabled", "hidden", "open", "indeterminate", "htmlFor"]);

/** The element with an id. */
export const at = (id) => document.getElementById(id);

let counted = 0;

/** An id that no other element has, for labels and descriptions. */
export const freshId = (stem) => `${stem}-${(counted += 1)}`;

/** What a screen reader should say soon, without moving the focus. */
export function announce(text) {
  const region = at("announcer");
  // The same text twice is no change, so nothing would be said.
  region.textContent = region.textContent === text ? `${text}\u00a0` : text;
}

/** Calls `act` once the calls have stopped for `wait_ms`. */
export function debounced(wait_ms, act) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => act(...given), wait_ms);
  };
}

// ------------------------------------------------------------------------------------ numbers

const whole = new Intl.NumberFormat("en");

export const count = (number) => whole.format(number);

/** 1234567 -> "1.2 MB", in units of 1000. */
export function bytes(number) {
  if (!Number.isFinite(number)) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (number >= 1000 && at < units.length - 1) {
    number /= 1000;
    at += 1;
  }
  return `${number >= 100 || at === 0 ? Math.round(number) : number.toFixed(1)} ${units[at]}`;
}

/** Seconds as a short text: "0.31 s", "4 min", "3 h 12 min". */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 10 && !Number.isInteger(seconds)) return `${seconds.toFixed(2)} s`;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 90) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.round(hours / 24)} days`;
}

/** Unix seconds as "14:02" today, else as a date. */
export function moment(unix_s) {
  const then = new Date(unix_s * 1000);
  const today = new Date();
  if (then.toDateString() === today.toDateString()) {
    return then.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  }
  const year = then.getFullYear() === today.getFullYear() ? undefined : "numeric";
  return then.toLocaleDateString([], { day: "numeric", month: "short", year });
}

// ---------------------------------------------------------------------------------- clipboard

/** Copies text; true if it worked. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Over plain http from another machine there is no clipboard object, only the old command.
    const field = h("textarea", { value: text, "aria-hidden": "true", class: "unseen" });
    const focused = document.activeElement;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    focused?.focus();
    return done;
  }
}

/** Offers a text as a file to keep. */
export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = h("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
