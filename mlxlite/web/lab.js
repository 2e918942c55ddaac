// What the three pages beside the app share: the key, SVG elements, tokens as text, the kept curve.

import { prompts } from "./api.js";
import { ask } from "./dialogs.js";

prompts.key = (wasWrong) => ask("This server wants a key", "Key", {
  type: "password", yes: "Go on",
  note: wasWrong ? "That key was not right." : "It is what --api-key or MLXLITE_API_KEY says. It is kept for this tab only.",
});

const NS = "http://www.w3.org/2000/svg";

/** An SVG element. props: as for `h`, but all that is no listener is an attribute. */
export function svg(tag, props, ...children) {
  const element = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** A token as text that can be seen: blanks and line ends as signs. */
export const spelled = (token) =>
  token === "" ? "(nothing)" : token.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");

/** Calls `draw(width)` now and whenever the element's width changes. */
export function whenWide(element, draw) {
  let width = 0;
  const look = () => {
    const now = Math.round(element.clientWidth);
    if (now > 0 && now !== width) draw((width = now));
  };
  new ResizeObserver(look).observe(element);
  look();
}

/** What a person typed into a number field, or null if it is no number. */
export function typed(field) {
  const value = field.value.trim() === "" ? NaN : Number(field.value);
  return Number.isFinite(value) ? value : null;
}

// ------------------------------------------------------------------------------ the kept curve

const KEPT = "mlxlite-curve";

/** The points that the Curve Designer showed last in this browser, or null. */
export function keptPoints() {
  try {
    const points = JSON.parse(localStorage.getItem(KEPT));
    const isSound = Array.isArray(points) && points.length >= 2 && points.length <= 256 &&
      points.every((one) => Number.isFinite(one?.x_pct) && Number.isFinite(one?.y_pct));
    return isSound ? points : null;
  } catch {
    return null; // no storage, or not ours
  }
}

export function keepPoints(points) {
  try {
    localStorage.setItem(KEPT, JSON.stringify(points));
  } catch {
    // Storage may be switched off or full; then the curve lasts as long as the page.
  }
}
