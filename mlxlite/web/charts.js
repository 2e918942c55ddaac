// Small charts as inline SVG: a line of the last values, with the area below it.

const NS = "http://www.w3.org/2000/svg";
const WIDTH = 120;
const HEIGHT = 40;

/** A line of at most `length` values that moves on with `push`. */
export class Sparkline {
  #values = [];

  constructor(length = 60) {
    this.length = length;
    const box = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" };
    this.element = make("svg", { class: "chart", ...box, "aria-hidden": "true" });
    this.area = make("path", { class: "chart-area" });
    this.line = make("path", { class: "chart-line" });
    this.element.append(this.area, this.line);
  }

  push(value) {
    this.#values.push(Number.isFinite(value) ? value : 0);
    if (this.#values.length > this.length) this.#values.shift();
    const most = Math.max(...this.#values, 1e-9);
    const step = WIDTH / (this.length - 1);
    const start = WIDTH - (this.#values.length - 1) * step;
    const height = (one) => HEIGHT - 1 - (one / most) * (HEIGHT - 3);
    const points = this.#values.map((one, at) => `${(start + at * step).toFixed(1)} ${height(one).toFixed(1)}`);
    const line = `M${points.join("L")}`;
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", `${line}L${WIDTH} ${HEIGHT}L${start.toFixed(1)} ${HEIGHT}Z`);
  }
}

function make(tag, attributes) {
  const element = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}
