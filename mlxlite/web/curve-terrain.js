// The terrain page: runs a prompt, and shows what each step could have been (spec 70 section 11).

import { events } from "./api.js";
import { announce, at, h } from "./dom.js";
import { keptPoints, spelled, typed } from "./lab.js";
import { pieces, problem, shown } from "./curve-maths.js";
import { entropy, heights, probabilities, RANKS, stepOf } from "./terrain-steps.js";
import { View } from "./terrain-view.js";

const PROMPT = "Write a short poem about a lighthouse.";

const view = new View(at("terrain"));
const slider = at("step");
let steps = [];
let running = null;
let curve = null;

// -------------------------------------------------------------------------------------- run

async function run() {
  running?.abort();
  const mine = (running = new AbortController());
  [steps, slider.value] = [[], 1];
  show();
  at("stop").hidden = false;
  const body = {
    messages: [{ role: "user", content: at("prompt").value }],
    max_tokens: typed(at("limit")), temperature: typed(at("temperature")), seed: typed(at("seed")),
    stream: true, logprobs: true, top_logprobs: RANKS,
  };
  let end = "";
  say("Waiting for the first token …");
  try {
    for await (const frame of events("/v1/chat/completions", body, mine.signal)) {
      const entries = frame.choices[0]?.logprobs?.content ?? [];
      if (entries.length === 0) continue;
      const wasLast = Number(slider.value) >= steps.length;
      steps.push(...entries.map(stepOf));
      if (wasLast) slider.value = slider.max = steps.length;
      say(`${steps.length} steps …`);
      soon();
    }
    end = `${steps.length} steps.`;
  } catch (error) {
    end = error.name === "AbortError" ? `Stopped after ${steps.length} steps.` : error.message;
    at("state").classList.toggle("is-wrong", error.name !== "AbortError");
  }
  if (running !== mine) return; // a newer one has taken over
  say(end);
  at("stop").hidden = true;
  show();
  tabulate();
  announce(`${end} The table has them.`);
}

function say(text) {
  at("state").textContent = text;
}

// ------------------------------------------------------------------------------------- show

let isDue = false;

/** Shows what came, once a frame. */
function soon() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    show();
  });
}

const bent = () => (at("source").value === "curve" ? curve : null);

function show() {
  const isLog = at("height").value === "log";
  slider.max = Math.max(steps.length, 1);
  slider.disabled = steps.length < 2;
  const chosen = Math.min(Number(slider.value), steps.length) - 1;
  const rows = steps.map((step) => heights(probabilities(step, bent()), isLog));
  view.show(rows, steps.map((step) => step.rank), Math.max(chosen, 0));
  at("step-shown").textContent = steps.length > 0 ? `${chosen + 1} of ${steps.length}` : "";
  showStep(chosen);
}

function showStep(chosen) {
  const step = steps[chosen];
  at("here-title").textContent = step ? `Step ${chosen + 1}` : "This step";
  at("so-far").replaceChildren(...(step
    ? [h("span", { class: "muted" }, steps.slice(Math.max(chosen - 40, 0), chosen).map((one) => one.token).join("")), h("mark", {}, step.token)]
    : [h("span", { class: "muted" }, "Nothing has run yet.")]));
  if (!step) {
    at("here").replaceChildren();
    return;
  }
  const shares = probabilities(step, bent());
  at("here").replaceChildren(h("table", {},
    h("thead", {}, h("tr", {}, h("th", { scope: "col", class: "number" }, "Rank"), h("th", { scope: "col" }, "Token"),
      h("th", { scope: "col", class: "number" }, "Probability, %"), h("th", { scope: "col" }, h("span", { class: "unseen" }, "Drawn")))),
    h("tbody", {}, step.top.map(({ token }, rank) => h("tr", {},
      h("td", { class: "number" }, rank + 1), h("td", { class: "token" }, spelled(token)),
      h("td", { class: "number" }, shown(100 * shares[rank])),
      h("td", {}, rank === step.rank && h("span", { class: "badge good" }, "drawn")))),
    step.rank === null && h("tr", {}, h("td", { class: "number" }, `> ${RANKS}`), h("td", { class: "token" }, spelled(step.token)),
      h("td", { class: "number" }, bent() ? "–" : shown(100 * Math.exp(step.u))), h("td", {}, h("span", { class: "badge good" }, "drawn"))))));
}

/** All steps as a table: the terrain for who cannot see it. */
function tabulate() {
  at("table").replaceChildren(h("table", {},
    h("thead", {}, h("tr", {}, ["Step", "Drawn", "Rank", "Probability, %", "Open, bits", "Likeliest"].map((name, index) =>
      h("th", { scope: "col", class: [0, 2, 3, 4].includes(index) ? "number" : null }, name)))),
    h("tbody", {}, steps.map((step, index) => {
      const shares = probabilities(step, bent());
      const share = step.rank === null ? (bent() ? null : Math.exp(step.u)) : shares[step.rank];
      return h("tr", {},
        h("th", { scope: "row", class: "number" }, index + 1), h("td", { class: "token" }, spelled(step.token)),
        h("td", { class: "number" }, step.rank === null ? `> ${RANKS}` : step.rank + 1),
        h("td", { class: "number" }, share === null ? "–" : shown(100 * share)),
        h("td", { class: "number" }, entropy(shares).toFixed(1)),
        h("td", {}, step.top.slice(0, 3).map(({ token }, rank) => [rank > 0 && ", ", h("span", { class: "token" }, spelled(token)), ` ${shown(100 * shares[rank])}`])));
    }))));
}

// ------------------------------------------------------------------------------------ start

const points = keptPoints();
if (points && problem(points) === null) curve = pieces(points);
at("by-curve").disabled = curve === null;
if (curve === null) at("by-curve").textContent = "the curve (none drawn yet)";
at("prompt").value = PROMPT;
at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  at("state").classList.remove("is-wrong");
  run();
});
at("stop").addEventListener("click", () => running?.abort());
slider.addEventListener("input", show);
for (const id of ["height", "source"]) {
  at(id).addEventListener("change", () => {
    show();
    tabulate();
  });
}
show();
