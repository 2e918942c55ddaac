// What is drawn: the share of the draws that falls to each bin, by the model and by the curve; as a
// chart and as a table.

import { count, h } from "./dom.js";
import { svg, whenWide } from "./lab.js";
import { BINS, percent, shares, shown, tailAtMost, U_MIN } from "./curve-maths.js";

const EDGE = { left: 66, right: 24, top: 8, bottom: 8 }; // the sides are those of the plot above
const HEIGHT = 120;
const low = (bin) => shown(percent(U_MIN * (1 - bin / BINS)));

export class Shares {
  #bins = null;
  #curve = null;

  constructor(box, note) {
    this.note = note;
    this.before = svg("path", { class: "share-before" });
    this.after = svg("path", { class: "share-after" });
    this.most = svg("text", { x: EDGE.left - 12, y: EDGE.top + 10, "text-anchor": "end" });
    this.base = svg("line", { y1: HEIGHT - EDGE.bottom, y2: HEIGHT - EDGE.bottom, x1: EDGE.left });
    this.root = svg("svg", { class: "share-plot", height: HEIGHT, role: "img", "aria-labelledby": "shares-title", "aria-describedby": "shares-note" },
      svg("g", { class: "grid" }, this.most, this.base), this.after, this.before);
    this.rows = h("tbody", {});
    this.table = h("details", { ontoggle: () => this.#tabulate() }, h("summary", {}, "As a table"),
      h("div", { class: "table-box", tabindex: 0, role: "group", "aria-label": "What is drawn, as a table" }, h("table", {},
        h("thead", {}, h("tr", {}, ["Probability from, %", "Tokens", "Drawn by the model", "Drawn by the curve"].map((name) => h("th", { scope: "col", class: "number" }, name)))),
        this.rows)));
    box.append(this.root, legend(), this.table);
    whenWide(box, (width) => {
      this.width = width;
      this.root.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      this.base.setAttribute("x2", width - EDGE.right);
      this.#draw();
    });
  }

  /** bins: of /signal, or null. curve: its pieces, or null while it is none. */
  show(bins, curve) {
    this.#bins = bins;
    this.#curve = curve;
    this.#draw();
  }

  #draw() {
    if (!this.width || !this.#bins) return;
    const before = shares(this.#bins);
    const after = this.#curve ? shares(this.#bins, this.#curve) : before.map(() => 0);
    const most = Math.max(...before, ...after, 1e-9);
    const wide = (this.width - EDGE.left - EDGE.right) / BINS;
    const bottom = HEIGHT - EDGE.bottom;
    const bars = (values) => values.map((share, bin) => {
      const tall = (share / most) * (bottom - EDGE.top);
      return tall < 0.3 ? "" : `M${(EDGE.left + bin * wide + 0.5).toFixed(1)} ${bottom}v${(-tall).toFixed(1)}h${(wide - 1).toFixed(1)}v${tall.toFixed(1)}`;
    }).join("");
    this.before.setAttribute("d", bars(before));
    this.after.setAttribute("d", bars(after));
    this.most.textContent = `${shown(100 * most)} %`;
    const likely = (values) => Math.round(100 * values.reduce((sum, share, bin) => sum + (bin >= BINS / 2 ? share : 0), 0));
    this.note.textContent = `Tokens over ${low(BINS / 2)} % are drawn ${likely(before)} times in 100 by the model` +
      (this.#curve ? ` and ${likely(after)} times by the curve.` : ".") +
      ` The ${count(this.#bins[0])} tokens below ${low(1)} % are left out here` +
      (this.#curve ? `; by the curve they take ${shown(100 * tailAtMost(this.#bins, this.#curve))} % at most.` : ".");
    this.#tabulate(before, after);
  }

  #tabulate(before = null, after = null) {
    if (!this.table.open || !this.#bins) return;
    before ??= shares(this.#bins);
    after ??= this.#curve ? shares(this.#bins, this.#curve) : null;
    const part = (values, bin) => (bin === 0 || values === null ? "–" : `${shown(100 * values[bin])} %`);
    const rows = this.#bins.map((number, bin) => number > 0 && h("tr", {},
      [bin === 0 ? "0" : low(bin), count(number), part(before, bin), part(after, bin)].map((text) => h("td", { class: "number" }, text))));
    this.rows.replaceChildren(...rows.filter(Boolean).reverse());
  }
}

const legend = () => h("ul", { class: "legend", "aria-hidden": "true" },
  h("li", { class: "of-before" }, "by the model"), h("li", { class: "of-after" }, "by the curve"));
