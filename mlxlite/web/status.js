// What the server is doing: asked for once a second, and only while somebody looks.

import { get } from "./api.js";
import { Sparkline } from "./charts.js";
import { bytes, count, duration, h, moment } from "./dom.js";
import { icon } from "./icons.js";

const EVERY_MS = 1000;
const REQUESTS_EVERY = [4, 2]; // looks at the counters for one at the requests; while something runs
const SHOWN = 30;

export function mount(root) {
  const view = new StatusView();
  root.append(view.element);
  view.start();
  return view;
}

class StatusView {
  #timer = 0;
  #looks = 0;
  #isBusy = false; // requests are under way
  #before = null; // counters of the last look, for rates
  #isOver = false;

  constructor() {
    this.tiles = Object.fromEntries([
      ["speed", "Tokens a second"], ["rows", "Rows"], ["queue", "Waiting"], ["first", "Time to first token"],
      ["cache", "Prompt cache"], ["memory", "Memory"],
    ].map(([name, label]) => [name, new Tile(label, name !== "first")]));
    this.facts = h("dl", { class: "facts" });
    this.requests = h("tbody", {});
    this.trouble = h("div", { class: "trouble", role: "alert", hidden: true });
    const heads = [
      ["Started"], ["Kind"], ["Prompt", "number"], ["Cached", "number"], ["Answer", "number"],
      ["First token", "number"], ["Tokens/s", "number"], ["End"],
    ].map(([name, kind]) => h("th", { scope: "col", class: kind }, name));
    this.element = h("div", { class: "page" },
      h("h1", { class: "page-title" }, "Status"), this.trouble,
      h("div", { class: "tiles" }, ...Object.values(this.tiles).map((tile) => tile.element)),
      h("h2", {}, "Server"), this.facts,
      h("h2", { id: "requests-head" }, "Requests"),
      h("div", { class: "table-box", tabindex: 0, role: "region", "aria-labelledby": "requests-head" },
        h("table", {},
          h("thead", {}, h("tr", {}, ...heads)), this.requests)));
    this.turn = () => (document.hidden ? this.#pause() : this.#look());
  }

  start() {
    document.addEventListener("visibilitychange", this.turn);
    this.#look();
  }

  unmount() {
    this.#isOver = true;
    this.#pause();
    document.removeEventListener("visibilitychange", this.turn);
    this.element.remove();
  }

  #pause() {
    clearTimeout(this.#timer);
    this.#before = null;
  }

  async #look() {
    clearTimeout(this.#timer);
    try {
      const stats = await get("/stats");
      this.#isBusy ||= Boolean(stats.batch.active_rows || stats.batch.pending_rows);
      if (this.#looks % REQUESTS_EVERY[Number(this.#isBusy)] === 0) {
        const { requests } = await get("/api/requests");
        this.#isBusy = requests.some(({ finish }) => finish === null);
        this.#showRequests(requests);
      }
      this.#looks += 1;
      this.trouble.hidden = true;
      this.#show(stats);
    } catch (error) {
      this.trouble.hidden = false;
      this.trouble.replaceChildren(icon("warn"), h("p", {}, error.message));
    }
    if (!this.#isOver && !document.hidden) this.#timer = setTimeout(() => this.#look(), EVERY_MS);
  }

  #show({ server, batch, http, response_store: store }) {
    const { tiles } = this;
    const now = { at_ms: performance.now(), tokens: batch.generated_tokens ?? 0 };
    const seconds = this.#before ? (now.at_ms - this.#before.at_ms) / 1000 : 0;
    const speed = seconds > 0 ? Math.max(0, now.tokens - this.#before.tokens) / seconds : 0;
    this.#before = now;

    const step = batch.decode_step_ms ? `${precise(batch.decode_step_ms)} ms a step` : "no answer yet";
    tiles.speed.show(speed.toFixed(1), step, speed);
    const names = ["active_rows", "max_rows", "pending_rows", "held_rows", "rejected_rows"];
    const [active, most, waiting, held, refused] = names.map((name) => batch[name] ?? 0);
    tiles.rows.show(`${count(active)} of ${count(most)}`, held ? `${count(held)} held for slow readers` : "", active);
    tiles.queue.show(count(waiting), refused ? `${count(refused)} refused so far` : "", waiting);
    const cache = batch.prompt_cache ?? {};
    const asked = (cache.hits ?? 0) + (cache.misses ?? 0);
    const hits = asked ? `${count(cache.hits)} of ${count(asked)} prompts began there` : "empty";
    tiles.cache.show(bytes(cache.bytes ?? 0), hits, cache.bytes);
    const memory = batch.memory ?? {};
    const peak = `at most ${bytes(memory.peak_bytes ?? 0)} so far`;
    tiles.memory.show(bytes(memory.active_bytes ?? 0), peak, memory.active_bytes);

    const share = Math.round((100 * (batch.cached_tokens ?? 0)) / (batch.prompt_tokens || 1));
    const ended = [batch.completed_rows, batch.cancelled_rows, batch.failed_rows].map((number) => count(number ?? 0));
    this.#showFacts([
      ["Model", server.model],
      ["Engine", batch.state],
      ["Engine restarts", count(batch.restarts ?? 0)],
      ["Answers", `${ended[0]} done, ${ended[1]} left by their client, ${ended[2]} failed`],
      ["Tokens read", `${count(batch.prompt_tokens ?? 0)} (${share} % from the cache)`],
      ["Tokens written", count(batch.generated_tokens ?? 0)],
      ["Connections", `${count(http.connections ?? 0)} open, ${count(http.requests_total ?? 0)} requests so far`],
      ["Stored responses", count(store?.entries ?? store?.responses ?? 0)],
      ["Up for", duration(server.uptime_s)],
      ["Version", server.version],
    ]);
  }

  #showFacts(facts) {
    this.values ??= new Map();
    for (const [name, value] of facts) {
      if (!this.values.has(name)) {
        const shown = h("dd", {});
        this.values.set(name, shown);
        this.facts.append(h("dt", {}, name), shown);
      }
      if (this.values.get(name).textContent !== value) this.values.get(name).textContent = value;
    }
  }

  #showRequests(requests) {
    const newest = requests.find(({ ttft_s: first }) => Number.isFinite(first));
    const firsts = requests.map(({ ttft_s: first }) => first).filter(Number.isFinite).sort((a, b) => a - b);
    const median = firsts[Math.floor(firsts.length / 2)];
    const usual = firsts.length ? `median of ${firsts.length}: ${duration(median)}` : "no answer yet";
    this.tiles.first.show(newest ? duration(newest.ttft_s) : "–", usual);
    const key = requests.slice(0, SHOWN).map(({ id, finish, completion_tokens: n }) => `${id} ${finish} ${n}`).join();
    if (key === this.shownRequests) return;
    this.shownRequests = key;
    const number = (value) => h("td", { class: "number" }, Number.isFinite(value) ? count(value) : "–");
    this.requests.replaceChildren(...requests.slice(0, SHOWN).map((one) => h("tr", {},
      h("td", {}, moment(one.started)), h("td", {}, one.surface),
      number(one.prompt_tokens), number(one.cached_tokens), number(one.completion_tokens),
      h("td", { class: "number" }, Number.isFinite(one.ttft_s) ? duration(one.ttft_s) : "–"),
      h("td", { class: "number" }, Number.isFinite(one.decode_tok_s) ? one.decode_tok_s.toFixed(1) : "–"),
      h("td", {}, one.finish === null ? h("span", { class: "badge good" }, "running") : endOf(one)))));
    if (requests.length) return;
    const none = h("td", { colspan: 8, class: "muted" }, "None since the server started.");
    this.requests.append(h("tr", {}, none));
  }
}

/** How a request ended, in words. */
function endOf({ finish, status }) {
  if (finish === "refused") return `refused (${status})`;
  return { eos: "done", stop: "done", length: "at its limit", error: "failed", left: "client left" }[finish] ?? finish;
}

/** 75.719 -> "76", 4.861 -> "4.9" */
const precise = (number) => number.toFixed(number < 10 ? 1 : 0);

class Tile {
  constructor(name, hasChart) {
    this.value = h("p", { class: "tile-value" }, "–");
    this.note = h("p", { class: "tile-note" });
    this.chart = hasChart ? new Sparkline() : null;
    this.element = h("section", { class: "tile", "aria-label": name },
      h("p", { class: "tile-name" }, name), this.value, this.note, this.chart?.element);
  }

  show(value, note, plotted) {
    if (this.value.textContent !== value) this.value.textContent = value;
    if (this.note.textContent !== note) this.note.textContent = note;
    this.chart?.push(plotted);
  }
}
