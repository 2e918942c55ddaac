// What a curve can start from: temperatures, a cut, and the HLG tone curve with its four knobs.

import { button, freshId, h } from "./dom.js";
import { hlgPoints, temperaturePoints } from "./curve-maths.js";

export const DIAGONAL = [{ x_pct: 0.0001, y_pct: 0.0001 }, { x_pct: 0.1, y_pct: 0.1 }, { x_pct: 100, y_pct: 100 }];

const PLAIN = [
  ["Diagonal", () => DIAGONAL],
  ["Temperature 0.7", () => temperaturePoints(0.7)],
  ["Temperature 1.5", () => temperaturePoints(1.5)],
  ["No tail", () => [{ x_pct: 0.1, y_pct: 1e-7 }, { x_pct: 2, y_pct: 0.5 }, { x_pct: 10, y_pct: 10 }, { x_pct: 100, y_pct: 100 }]],
  ["Level top", () => [{ x_pct: 0.01, y_pct: 0.0001 }, { x_pct: 1, y_pct: 4 }, { x_pct: 100, y_pct: 20 }]],
];

// Knobs of the tone curve, spec 20 section 6: in nats; the first set is the server's own.
const TONES = {
  standard: { width: 4, shoulder: 4, toe: 6, pivot_offset: 6 },
  "softer top": { width: 2, shoulder: 1, toe: 0, pivot_offset: 4 },
  "level top": { width: 1, shoulder: 0.5, toe: 0, pivot_offset: 4 },
  "lifted tail": { width: 4, shoulder: 4, toe: 3, pivot_offset: 6 },
};
const KNOBS = [
  ["width", "Straight part", 12],
  ["shoulder", "Shoulder: how the top rolls off", 12],
  ["toe", "Toe: how the tail rolls off", 12],
  ["pivot_offset", "Pivot below the best token", 12],
  ["temperature", "Temperature in the middle", 2],
];

/** Buttons for what is a curve of points at once. use(points): take them. */
export const presetButtons = (use) =>
  PLAIN.map(([name, points]) => button(name, () => use(points())));

/** The knobs of the tone curve, to be opened.
 *
 * use(points): take them. preview(knobs | null): show them beside the curve while this is open.
 * top(): log-probability of the best token. copy(what, value): to the clipboard. */
export function toneKnobs({ use, preview, top, copy }) {
  let knobs = { ...TONES.standard, temperature: 0.7 };
  const fields = KNOBS.map(([name, label, most]) => {
    const id = freshId("knob");
    const shown = h("output", { htmlFor: id });
    const input = h("input", {
      type: "range", id, min: name === "temperature" ? 0.1 : 0, max: most, step: 0.1,
      oninput: () => set({ ...knobs, [name]: Number(input.value) }),
    });
    return { name, input, shown, element: h("div", { class: "field" }, h("label", { htmlFor: id }, label), h("div", { class: "range-row" }, input, shown)) };
  });

  function set(now) {
    knobs = now;
    for (const { name, input, shown } of fields) {
      input.value = knobs[name];
      shown.textContent = name === "temperature" ? String(knobs[name]) : `${knobs[name]} nats`;
    }
    if (box.open) preview(knobs);
  }

  function json() {
    const { temperature, ...tone } = knobs;
    return { temperature, hlg: { enabled: true, ...tone } };
  }

  const box = h("details", { class: "tones", ontoggle: () => preview(box.open ? knobs : null) },
    h("summary", {}, "HLG tone curve"),
    h("p", { class: "note" }, "Straight around a pivot, logarithmic above and below it: the best token does not win every draw, and the tail keeps its order. The plot shows it as a dashed line. A chat request takes the knobs as they are."),
    h("div", { class: "row" }, Object.entries(TONES).map(([name, tone]) =>
      button(name, () => set({ ...tone, temperature: knobs.temperature })))),
    fields.map((field) => field.element),
    h("div", { class: "row" },
      button("Make it points", () => use(hlgPoints(knobs, top()))),
      button("Copy for chats", () => copy("The fields of a chat request were", json()))));
  set(knobs);
  return box;
}
