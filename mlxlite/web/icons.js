// Icons as inline SVG, drawn on a grid of 20 by 20 in the colour of the text around them.

import { h } from "./dom.js";

const PATHS = {
  plus: "M10 4v12M4 10h12",
  search: "M9 3.5a5.5 5.5 0 1 1 0 11a5.5 5.5 0 0 1 0-11M13.2 13.2L17 17",
  send: "M10 16.5V4M4.8 9.2L10 4l5.2 5.2",
  stop: "M5.5 5.5h9v9h-9z",
  copy: "M7.5 7.5h9v9h-9zM4.5 12.5h-1v-9h9v1",
  check: "M4 10.5l4 4l8-9",
  edit: "M4 16l.8-3.6L13.6 3.6l2.8 2.8L7.6 15.2zM12 5.2L14.8 8",
  again: "M15.9 8A6.2 6.2 0 1 0 16.2 11.5M16.4 3.8V8h-4.2",
  left: "M12 4.5L6.5 10l5.5 5.5",
  right: "M8 4.5L13.5 10L8 15.5",
  down: "M10 4v12M4.8 10.8L10 16l5.2-5.2",
  sliders: "M3.5 6h6M13.5 6h3M3.5 14h3M10.5 14h6M11.5 4v4M8.5 12v4",
  clip: "M15.5 9.2l-6 6a3.6 3.6 0 0 1-5.1-5.1l6.6-6.6a2.4 2.4 0 0 1 3.4 3.4l-6.5 6.5a1.2 1.2 0 0 1-1.7-1.7l5.8-5.8",
  bin: "M4 5.5h12M8 5.5v-2h4v2M5.5 5.5l.8 11h7.4l.8-11M8.5 8.5v5M11.5 8.5v5",
  menu: "M3.5 5.5h13M3.5 10h13M3.5 14.5h13",
  close: "M5 5l10 10M15 5L5 15",
  help: "M10 2.8a7.2 7.2 0 1 1 0 14.4a7.2 7.2 0 0 1 0-14.4M8 8a2 2 0 1 1 2.9 1.8c-.6.3-.9.7-.9 1.4M10 13.8v.1",
  theme: "M10 2.8a7.2 7.2 0 1 0 0 14.4zM10 2.8a7.2 7.2 0 0 1 0 14.4",
  out: "M10 12.5V3.5M6 7l4-4l4 4M4 12v4.5h12V12",
  in: "M10 3.5v9M6 9l4 4l4-4M4 12v4.5h12V12",
  warn: "M10 3.5L17.5 16.5h-15zM10 8.5v3.5M10 14.2v.1",
};

/** A button that is an icon; its label is for screen readers and who waits over it. */
export function iconButton(name, label, act, { kind = "", title = label, disabled = false } = {}) {
  const props = { type: "button", class: `icon-button ${kind}`.trim(), "aria-label": label, title, disabled };
  const made = h("button", props, icon(name));
  made.addEventListener("click", () => act(made));
  return made;
}

const NS = "http://www.w3.org/2000/svg";

/** An icon. It says nothing to screen readers: what holds it has a name of its own. */
export function icon(name) {
  const svg = document.createElementNS(NS, "svg");
  const path = document.createElementNS(NS, "path");
  const attributes = { viewBox: "0 0 20 20", class: `icon icon-${name}`, "aria-hidden": "true", focusable: "false" };
  for (const [key, value] of Object.entries(attributes)) svg.setAttribute(key, value);
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  return svg;
}
