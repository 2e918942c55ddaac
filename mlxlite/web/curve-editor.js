// The plot of the Curve Designer: axes, histogram, curve, and points that can be moved.
//
// Points move by pointer and by key. A point stays between its neighbours, so their order is that of
// the page; up and down it is free, and what then falls is shown as wrong. Lengths are CSS pixels.

import { h } from "./dom.js";
import { svg, whenWide } from "./lab.js";
import { at, BINS, hlg, nats, percent, pieces, point, problem, shown, U_MIN, Y_MIN } from "./curve-maths.js";

const EDGE = { left: 66, right: 24, top: 12, bottom: 42 };
const DECADE = Math.log(10);
const GAP = 0.05; // nats between neighbours at least
const STEP = 0.1; // nats a key press moves a point; a fifth of that with Shift

/** changed(points): told of every change, also in the middle of a drag. */
export class Editor {
  #points = [];
  #handles = [];
  #bins = null;
  #ghost = null;
  #curve = null;
  #dragged = null;

  constructor(box, changed) {
    this.changed = changed;
    this.grid = svg("g", { class: "grid", "aria-hidden": "true" });
    this.bars = svg("path", { class: "bars" });
    this.diagonal = svg("path", { class: "diagonal" });
    this.ghost = svg("path", { class: "ghost" });
    this.line = svg("path", { class: "curve" });
    this.grip = svg("path", { class: "grip", onpointerdown: (event) => this.#addAt(event) });
    this.knobs = svg("g", {});
    this.root = svg("svg", {
      class: "curve-plot", role: "group", "aria-label": "Curve over probabilities", "aria-describedby": "plot-help",
      onpointermove: (event) => this.#drag(event),
      onpointerup: () => this.#drop(),
      onpointercancel: () => this.#drop(),
      ondblclick: (event) => this.#removeAt(event),
    }, this.grid, this.bars, this.diagonal, this.ghost, this.line, this.grip, this.knobs);
    box.append(this.root);
    whenWide(box, (width) => this.#resize(width));
  }

  get points() {
    return this.#points.map((each) => ({ ...each }));
  }

  /** Shows other points ({x_pct, y_pct}), sorted by input. */
  set points(given) {
    this.#points = given.map(({ x_pct, y_pct }) => ({ x_pct, y_pct })).sort((a, b) => a.x_pct - b.x_pct);
    this.#redo();
  }

  /** bins: of /signal. */
  set bins(bins) {
    this.#bins = bins;
    this.#drawBars();
  }

  /** A curve that is only shown: {knobs, top} of HLG, or null. */
  set preview(given) {
    this.#ghost = given;
    this.#drawGhost();
  }

  /** Puts a point in the middle of the widest gap, and the focus on it. */
  add() {
    const edges = [U_MIN, ...this.#points.map((each) => nats(each.x_pct)), 0];
    let widest = 0;
    for (let i = 0; i + 1 < edges.length; i += 1) {
      if (edges[i + 1] - edges[i] > edges[widest + 1] - edges[widest]) widest = i;
    }
    this.#insert((edges[widest] + edges[widest + 1]) / 2)?.focus();
  }

  remove(index) {
    if (this.#points.length <= 2) return;
    const hadFocus = document.activeElement === this.#handles[index];
    this.#points.splice(index, 1);
    this.#redo();
    if (hadFocus) this.#handles[Math.min(index, this.#handles.length - 1)].focus();
  }

  /** Puts a point at (x, y) nats, kept on the plot and between its neighbours. */
  move(index, x, y) {
    const before = index > 0 ? nats(this.#points[index - 1].x_pct) + GAP : U_MIN;
    const after = index + 1 < this.#points.length ? nats(this.#points[index + 1].x_pct) - GAP : 0;
    const inside = Math.min(Math.max(x, Math.min(before, after)), Math.max(before, after));
    this.#points[index] = point(Math.min(Math.max(inside, U_MIN), 0), Math.min(Math.max(y, Y_MIN), 0));
    this.#draw();
    this.changed(this.points);
  }

  // ------------------------------------------------------------------------------------ moving

  #insert(x, y = null) {
    const index = this.#points.filter((each) => nats(each.x_pct) < x).length;
    this.#points.splice(index, 0, point(x, Math.min(Math.max(y ?? at(this.#curve, x), Y_MIN), 0)));
    this.#redo();
    return this.#handles[index];
  }

  #addAt(event) {
    if (event.button !== 0) return;
    event.preventDefault();
    const [x, y] = this.#place(event);
    const handle = this.#insert(Math.min(Math.max(x, U_MIN), 0), y);
    handle.focus();
    this.#grab(event, this.#handles.indexOf(handle));
  }

  /** A captured pointer's clicks go to the plot, so what is below it is looked up. */
  #removeAt(event) {
    const index = this.#handles.indexOf(document.elementFromPoint(event.clientX, event.clientY)?.closest(".handle"));
    if (index >= 0) this.remove(index);
  }

  #grab(event, index) {
    if (event.button !== 0) return;
    this.#dragged = index;
    this.root.setPointerCapture(event.pointerId);
    this.#handles[index].classList.add("is-held");
  }

  #drag(event) {
    if (this.#dragged !== null) this.move(this.#dragged, ...this.#place(event));
  }

  #drop() {
    if (this.#dragged === null) return;
    this.#handles[this.#dragged]?.classList.remove("is-held");
    this.#dragged = null;
  }

  #press(event, index) {
    const { x_pct, y_pct } = this.#points[index];
    const step = event.shiftKey ? STEP / 5 : STEP;
    const moves = {
      ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowDown: [0, -step], ArrowUp: [0, step],
      PageDown: [0, -1], PageUp: [0, 1],
    };
    if (event.key === "Delete" || event.key === "Backspace") this.remove(index);
    else if (moves[event.key]) this.move(index, nats(x_pct) + moves[event.key][0], nats(y_pct) + moves[event.key][1]);
    else return;
    event.preventDefault();
  }

  // ----------------------------------------------------------------------------------- drawing

  #resize(width) {
    this.width = width;
    this.height = Math.round(Math.min(Math.max(width * 0.62, 270), 470));
    this.root.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.root.setAttribute("height", this.height);
    this.#drawGrid();
    this.#drawBars();
    this.#draw();
    this.#drawGhost();
  }

  #x(u) {
    return EDGE.left + (1 - u / U_MIN) * (this.width - EDGE.left - EDGE.right);
  }

  #y(v) {
    return EDGE.top + (v / Y_MIN) * (this.height - EDGE.top - EDGE.bottom);
  }

  /** Where a pointer is, in nats. */
  #place(event) {
    const box = this.root.getBoundingClientRect();
    const across = (event.clientX - box.left - EDGE.left) / (this.width - EDGE.left - EDGE.right);
    const down = (event.clientY - box.top - EDGE.top) / (this.height - EDGE.top - EDGE.bottom);
    return [U_MIN * (1 - across), Y_MIN * down];
  }

  #drawGrid() {
    const [right, bottom] = [this.width - EDGE.right, this.height - EDGE.bottom];
    const parts = [];
    const every = this.width < 420 ? 2 : 1;
    for (let decade = 0; -decade * DECADE >= U_MIN - 0.01; decade += 1) {
      const x = this.#x(-decade * DECADE);
      parts.push(svg("line", { x1: x, x2: x, y1: EDGE.top, y2: bottom }));
      if (decade % every === 0) parts.push(label(x, bottom + 16, "middle", `${shown(100 / 10 ** decade)} %`));
    }
    for (let decade = 0; -decade * DECADE >= Y_MIN - 0.01; decade += 1) {
      const y = this.#y(-decade * DECADE);
      parts.push(svg("line", { x1: EDGE.left, x2: right, y1: y, y2: y }));
      if (decade % 2 === 0) parts.push(label(EDGE.left - 12, y + 4, "end", `${shown(100 / 10 ** decade)} %`));
    }
    parts.push(label((EDGE.left + right) / 2, bottom + 35, "middle", "probability by the model"));
    this.grid.replaceChildren(...parts);
    this.diagonal.setAttribute("d", `M${this.#x(U_MIN)} ${this.#y(U_MIN)}L${this.#x(0)} ${this.#y(0)}`);
  }

  #drawBars() {
    if (!this.width || !this.#bins) return;
    const bottom = this.height - EDGE.bottom;
    const most = Math.log1p(Math.max(...this.#bins, 1));
    const wide = (this.#x(0) - this.#x(U_MIN)) / BINS;
    const bars = this.#bins.map((count, bin) => {
      const tall = (Math.log1p(count) / most) * (bottom - EDGE.top) * 0.45;
      const x = this.#x(U_MIN) + bin * wide;
      return count > 0 ? `M${fixed(x + 0.5)} ${bottom}v${fixed(-tall)}h${fixed(wide - 1)}v${fixed(tall)}z` : "";
    });
    this.bars.setAttribute("d", bars.join(""));
  }

  /** Another number of points: handles anew. */
  #redo() {
    this.#handles = this.#points.map((_, index) => {
      const handle = svg("g", {
        class: "handle", role: "slider", tabindex: 0, "aria-valuemin": 0, "aria-valuemax": 100,
        onpointerdown: (event) => {
          event.preventDefault();
          handle.focus();
          this.#grab(event, index);
        },
        onkeydown: (event) => this.#press(event, index),
      }, svg("circle", { class: "reach", r: 18 }), svg("circle", { class: "dot", r: 7 }));
      return handle;
    });
    this.knobs.replaceChildren(...this.#handles);
    this.#draw();
    this.changed(this.points);
  }

  #draw() {
    if (this.#points.length < 2) return;
    this.#curve = pieces(this.#points);
    if (!this.width) return;
    const wrong = problem(this.#points);
    const d = this.#path((u) => at(this.#curve, u));
    this.line.setAttribute("d", d);
    this.grip.setAttribute("d", d);
    this.line.classList.toggle("is-wrong", wrong !== null);
    for (const [index, { x_pct, y_pct }] of this.#points.entries()) {
      const handle = this.#handles[index];
      handle.setAttribute("transform", `translate(${fixed(this.#x(nats(x_pct)))} ${fixed(this.#y(Math.max(nats(y_pct), Y_MIN)))})`);
      handle.setAttribute("aria-label", `Point ${index + 1} of ${this.#points.length}`);
      handle.setAttribute("aria-valuenow", y_pct);
      handle.setAttribute("aria-valuetext", `${shown(x_pct)} % counts as ${shown(y_pct)} %`);
      handle.classList.toggle("is-wrong", wrong?.at.includes(index) ?? false);
    }
  }

  #drawGhost() {
    if (!this.width) return;
    const { knobs, top } = this.#ghost ?? {};
    const best = knobs && hlg(top, knobs, top);
    this.ghost.setAttribute("d", knobs ? this.#path((u) => hlg(u, knobs, top) - best + top, top) : "");
  }

  /** A function of nats as a line from the left edge to `to`; cut at the plot's bottom and top. */
  #path(value, to = 0) {
    const parts = [];
    const count = Math.max(Math.round(this.width / 4), 60);
    for (let i = 0; i <= count; i += 1) {
      const u = U_MIN + ((to - U_MIN) * i) / count;
      const v = value(u);
      if (v < Y_MIN - 0.5 || v > 0.3) continue;
      parts.push(`${fixed(this.#x(u))} ${fixed(this.#y(v))}`);
    }
    return parts.length > 1 ? `M${parts.join("L")}` : "";
  }
}

const fixed = (number) => Math.round(number * 10) / 10;

const label = (x, y, anchor, text) => svg("text", { x, y, "text-anchor": anchor }, text);

/** The points as a table with a field for each number. */
export class PointTable {
  #rows = [];

  constructor(box, editor) {
    this.editor = editor;
    this.body = h("tbody", {});
    box.append(h("table", { class: "point-table" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Model, %"), h("th", { scope: "col" }, "Counts as, %"),
        h("th", { scope: "col" }, h("span", { class: "unseen" }, "Remove")))),
      this.body));
  }

  show(points) {
    if (points.length !== this.#rows.length) {
      this.#rows = points.map((_, index) => this.#row(index));
      this.body.replaceChildren(...this.#rows.map((row) => row.element));
    }
    for (const [index, { x, y, remove }] of this.#rows.entries()) {
      if (document.activeElement !== x) x.value = points[index].x_pct;
      if (document.activeElement !== y) y.value = points[index].y_pct;
      remove.disabled = points.length <= 2;
    }
  }

  #row(index) {
    const field = (name) => h("input", {
      type: "number", step: "any", min: 0, max: 100, "aria-label": `Point ${index + 1}: ${name}, percent`,
      onchange: () => this.#take(index),
    });
    const [x, y] = [field("model"), field("counts as")];
    const remove = h("button", {
      type: "button", class: "button", "aria-label": `Remove point ${index + 1}`, onclick: () => this.editor.remove(index),
    }, "Remove");
    return { x, y, remove, element: h("tr", {}, h("td", {}, x), h("td", {}, y), h("td", {}, remove)) };
  }

  #take(index) {
    const { x, y } = this.#rows[index];
    const now = this.editor.points[index];
    const pick = (field, old) => (field.value !== "" && Number.isFinite(Number(field.value)) ? Number(field.value) : old);
    this.editor.move(index, nats(pick(x, now.x_pct)), nats(pick(y, now.y_pct)));
    const moved = this.editor.points[index];
    [x.value, y.value] = [moved.x_pct, moved.y_pct]; // it may have been brought into its range
  }
}
