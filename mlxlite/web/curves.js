// The Curve Designer: what belongs together on its page (spec 20 section 7, /signal and /generate).

import { post } from "./api.js";
import { at, button, copy, count, debounced } from "./dom.js";
import { toast } from "./dialogs.js";
import { keepPoints, keptPoints } from "./lab.js";
import { BINS, pieces, problem, topOf } from "./curve-maths.js";
import { Editor, PointTable } from "./curve-editor.js";
import { DIAGONAL, presetButtons, toneKnobs } from "./curve-presets.js";
import { Samples } from "./curve-samples.js";
import { Shares } from "./curve-shares.js";

const PROMPT = "Write one sentence about the sea.";
const WAIT_MS = 350; // after the last key before the server is asked

const prompt = at("prompt");
const check = at("check");
let points = [];
let bins = null;
let asking = null;

const asRequest = () => ({ space: "logprob", points, monotonic: true });

// ------------------------------------------------------------------------------------- parts

const shares = new Shares(at("shares"), at("shares-note"));
const samples = new Samples(at("sample-form"), at("samples"), {
  prompt: () => prompt.value,
  curve: asRequest,
});
const editor = new Editor(at("plot"), (now) => changed(now));
const table = new PointTable(at("points"), editor);
const keep = () => problem(points) === null && keepPoints(points);
const keepSoon = debounced(300, keep);
addEventListener("pagehide", keep); // whoever goes within those 300 ms finds the curve again, too

function changed(now) {
  points = now;
  const wrong = problem(points);
  check.textContent = wrong?.why ?? "It rises everywhere, so it can be drawn by.";
  check.classList.toggle("is-wrong", wrong !== null);
  samples.isReady = wrong === null;
  for (const each of at("copies").children) each.disabled = wrong !== null;
  at("json").textContent = `{"curve": {"space": "logprob", "monotonic": true, "points": [\n${points.map((one) => `  ${JSON.stringify(one)}`).join(",\n")}\n]}}`;
  shares.show(bins, wrong ? null : pieces(points));
  table.show(points);
  keepSoon();
}

// ------------------------------------------------------------------------------------ signal

async function look() {
  asking?.abort();
  asking = new AbortController();
  const note = at("signal");
  note.setAttribute("aria-busy", "true");
  try {
    const found = await post("/signal", { prompt: prompt.value }, { signal: asking.signal });
    bins = found.bins;
    editor.bins = bins;
    const likely = bins.reduce((sum, number, bin) => sum + (bin >= (BINS * 2) / 3 ? number : 0), 0);
    note.textContent = `${count(found.vocab)} tokens could come next; ${count(likely)} of them with 1\u00a0% or more.`;
    note.classList.remove("is-wrong");
    shares.show(bins, problem(points) ? null : pieces(points));
  } catch (error) {
    if (error.name === "AbortError") return;
    note.textContent = error.message;
    note.classList.add("is-wrong");
  }
  note.removeAttribute("aria-busy");
}

// ------------------------------------------------------------------------------------- start

async function copyJson(what, value) {
  toast((await copy(JSON.stringify(value))) ? `${what} copied.` : "The clipboard is closed; copy the text by hand.");
}

at("presets").append(...presetButtons((given) => (editor.points = given)));
at("presets").after(toneKnobs({
  use: (given) => (editor.points = given),
  preview: (knobs) => (editor.preview = knobs && { knobs, top: bins ? topOf(bins) : 0 }),
  top: () => (bins ? topOf(bins) : 0),
  copy: copyJson,
}));
at("copies").append(
  button("Copy the curve", () => copyJson("The curve was", { curve: asRequest() })),
  button("Copy a request", () => copyJson("The request was", { prompt: prompt.value, n: 3, max_tokens: 80, curve: asRequest() })));
at("add").addEventListener("click", () => editor.add());
prompt.value = PROMPT;
prompt.addEventListener("input", debounced(WAIT_MS, look));
editor.points = keptPoints() ?? DIAGONAL;
await look();
