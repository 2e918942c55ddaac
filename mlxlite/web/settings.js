// What a chat asks of its answers: system prompt, thinking, sampling, the form of the answer.
//
// Kept with the chat. An empty field means: as the model and the server have it.

import { servedModel } from "./api.js";
import { dialog } from "./dialogs.js";
import { button, freshId, h } from "./dom.js";

// name, label, least, most, step, what an empty field means
const NUMBERS = [
  ["temperature", "Temperature", 0, 2, "any", "0 always takes the likeliest token"],
  ["top_p", "Top p", 0, 1, "any", "share of the likeliest tokens to draw from"],
  ["max_tokens", "Most tokens", 1, 1_000_000, 1, "length of an answer; empty: the room left"],
  ["seed", "Seed", 0, 9_007_199_254_740_991, 1, "the same draws again; empty: fresh each time"],
];

// The same, for those who look for them.
const MORE = [
  ["top_k", "Top k", 0, 1_000_000, 1, "so many of the likeliest tokens; 0: all"],
  ["min_p", "Min p", 0, 1, "any", "drops what is less likely than this share of the best"],
  ["repetition_penalty", "Repetition penalty", 0, 10, "any", "above 1: words that were said come less"],
  ["presence_penalty", "Presence penalty", -2, 2, "any", "subtracted once from what was said"],
  ["frequency_penalty", "Frequency penalty", -2, 2, "any", "subtracted for each time it was said"],
];

/** Fields of a request out of a chat's settings; absent ones are the server's to choose. */
export function sampling(settings) {
  const body = {};
  for (const [name] of [...NUMBERS, ...MORE]) {
    if (Number.isFinite(settings[name])) body[name] = settings[name];
  }
  return body;
}

/** Opens the settings; resolves to the new ones, or to null if they were left alone. */
export async function editSettings(settings) {
  const model = await servedModel().catch(() => null);
  return dialog("Settings of this chat", (close) => form(settings, model, close), "sheet");
}

function form(settings, model, close) {
  const defaults = model?.gen_defaults ?? {};
  const system = h("textarea", { rows: 4, value: settings.system ?? "", autofocus: true });
  const canThink = model?.reasoning !== false;
  const choices = [["", "As the model has it"], ["on", "On"], ["off", "Off"]];
  const thinking = h("select", { disabled: !canThink },
    ...choices.map(([value, label]) => h("option", { value }, label)));
  thinking.value = canThink ? settings.thinking ?? "" : "";
  const numbers = [...NUMBERS, ...MORE].map(([name, label, min, max, step, note]) => {
    const usual = defaults[name];
    const input = h("input", {
      type: "number", min, max, step, inputmode: step === 1 ? "numeric" : "decimal",
      value: settings[name] ?? "", placeholder: usual === null || usual === undefined ? "" : String(usual),
    });
    return { name, input, field: labelled(label, input, note) };
  });
  const schema = h("textarea", {
    rows: 6, class: "mono", spellcheck: "false", placeholder: '{"type": "object", "properties": {…}}',
    value: settings.schema ? JSON.stringify(settings.schema, null, 2) : "",
  });
  const schemaField = labelled("JSON schema", schema, "the answer will be JSON of this form");

  function save(event) {
    event.preventDefault();
    const found = {};
    if (system.value.trim()) found.system = system.value.trim();
    if (thinking.value) found.thinking = thinking.value;
    for (const { name, input } of numbers) if (input.value !== "") found[name] = Number(input.value);
    const [value, wrong] = readSchema(schema.value);
    complain(schemaField, wrong);
    if (wrong) return schema.focus();
    if (value) found.schema = value;
    close(found);
  }

  const more = h("details", { open: MORE.some(([name]) => name in settings) },
    h("summary", {}, "More about sampling"),
    h("div", { class: "fields" }, ...numbers.slice(NUMBERS.length).map(({ field }) => field)));
  // A browser cannot show what is wrong with a field that is folded away.
  more.addEventListener("invalid", () => (more.open = true), true);
  return h("form", { class: "settings", onsubmit: save },
    labelled("System prompt", system, "comes before the conversation"),
    labelled("Thinking", thinking, canThink ? null : "this model does not think"),
    h("div", { class: "fields" }, ...numbers.slice(0, NUMBERS.length).map(({ field }) => field)),
    more,
    schemaField,
    h("div", { class: "row end" },
      button("Cancel", () => close()),
      h("button", { type: "submit", class: "button primary" }, "Save")));
}

/** [schema or null, what is wrong or null] */
function readSchema(text) {
  if (!text.trim()) return [null, null];
  try {
    const value = JSON.parse(text);
    if (value !== null && typeof value === "object" && !Array.isArray(value)) return [value, null];
    return [null, "A schema is a JSON object."];
  } catch (error) {
    return [null, `This is no JSON: ${error.message}`];
  }
}

/** A control with its label and a note that screen readers read with it. */
export function labelled(label, control, note = null) {
  const id = freshId("field");
  control.id = id;
  if (note) control.setAttribute("aria-describedby", `${id}-note`);
  return h("div", { class: "field" },
    h("label", { htmlFor: id }, label), control, note && h("p", { class: "note", id: `${id}-note` }, note));
}

/** Shows what is wrong with a labelled control; null takes it back. */
export function complain(field, wrong) {
  const control = field.querySelector("input, textarea, select");
  field.querySelector(".wrong")?.remove();
  control.toggleAttribute("aria-invalid", wrong !== null);
  if (wrong !== null) control.before(h("p", { class: "wrong", role: "alert" }, wrong));
}
