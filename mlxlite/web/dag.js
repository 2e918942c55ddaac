// Makes drawings of the page's definition lists: boxes to choose, arrows between them.
//
// The page reads well without this: each list is the text of its drawing. `data-at` is a box's place
// on a wide page, `data-to` names the boxes that it leads to. Narrow pages have one column.

import { h } from "./dom.js";
import { svg } from "./lab.js";

const WIDE = matchMedia("(min-width: 40rem)");

class Graph {
  #nodes = [];
  #edges = [];

  constructor(list) {
    for (const term of list.querySelectorAll("dt")) {
      const { at, to, note, other } = term.dataset;
      const { id } = term;
      term.removeAttribute("id"); // from here on an address leads to the box
      const button = h("button", {
        type: "button", id, class: `dag-node${other === undefined ? "" : " is-other"}`, "aria-pressed": "false",
        onclick: () => this.choose(id),
      }, h("strong", {}, term.textContent), h("span", {}, note));
      const [column, row] = at.split(" ").map(Number);
      const cell = h("li", {}, button);
      this.#nodes.push({ id, to: to.split(" "), column, row, cell, button, text: term.nextElementSibling });
    }
    this.canvas = svg("svg", { "aria-hidden": "true" });
    // Their order on the page is the order of reading, whatever place they have.
    this.box = h("ol", { class: `dag ${list.dataset.graph}` }, this.#nodes.map((node) => node.cell));
    const drawing = h("div", { class: "dag-drawing" }, this.box, this.canvas);
    this.panel = h("div", { class: "dag-panel", role: "status" });
    const whole = h("details", { class: "dag-all" }, h("summary", {}, "All of it as text"));
    list.before(h("div", { class: "dag-layout" }, drawing, this.panel), whole);
    whole.append(list);
    for (const from of this.#nodes) {
      for (const id of from.to) {
        const to = this.#nodes.find((node) => node.id === id);
        const edge = { from, to, line: svg("path", { class: "dag-edge" }), tip: svg("path", { class: "dag-tip" }) };
        this.#edges.push(edge);
        this.canvas.append(edge.line, edge.tip);
      }
    }
    new ResizeObserver(() => this.#place()).observe(this.box);
    this.choose(this.#nodes.find((node) => `#${node.id}` === location.hash)?.id ?? this.#nodes[0].id, false);
  }

  has(id) {
    return this.#nodes.some((node) => node.id === id);
  }

  choose(id, remembers = true) {
    const chosen = this.#nodes.find((node) => node.id === id);
    for (const node of this.#nodes) node.button.setAttribute("aria-pressed", String(node === chosen));
    for (const { from, to, line, tip } of this.#edges) {
      const isNear = from === chosen || to === chosen;
      for (const part of [line, tip]) part.classList.toggle("is-near", isNear);
    }
    const names = (edges, side) => edges.map((edge) => edge[side].button.firstChild.textContent).join(", ");
    const into = this.#edges.filter((edge) => edge.to === chosen);
    const out = this.#edges.filter((edge) => edge.from === chosen);
    const about = h("p", {}, [...chosen.text.cloneNode(true).childNodes]);
    this.panel.replaceChildren(
      h("h3", {}, chosen.button.firstChild.textContent), about,
      h("p", { class: "note" }, [into.length > 0 && `From ${names(into, "from")}. `, out.length > 0 && `To ${names(out, "to")}.`]));
    if (remembers) history.replaceState(null, "", `#${id}`);
  }

  #place() {
    for (const { cell, column, row } of this.#nodes) {
      cell.style.gridColumn = WIDE.matches ? column : "auto";
      cell.style.gridRow = WIDE.matches ? row : "auto";
    }
    const home = this.box.getBoundingClientRect();
    this.canvas.setAttribute("viewBox", `0 0 ${home.width} ${home.height}`);
    const boxes = new Map(this.#nodes.map((node) => {
      const { x, y, width, height } = node.cell.getBoundingClientRect();
      const left = x - home.x;
      const top = y - home.y;
      return [node, { left, top, right: left + width, bottom: top + height, x: left + width / 2, y: top + height / 2 }];
    }));
    for (const { from, to, line, tip } of this.#edges) {
      const isFar = Math.abs(from.row - to.row) > 1 && Math.abs(from.column - to.column) > 1;
      const arrow = !WIDE.matches ? down : isFar ? around : across;
      const { d, end, way } = arrow(boxes.get(from), boxes.get(to));
      line.setAttribute("d", d);
      tip.setAttribute("d", "M0 0L-8 -4.5L-8 4.5Z");
      tip.setAttribute("transform", `translate(${end[0]} ${end[1]}) rotate(${way})`);
    }
  }
}

/** An arrow between boxes on a grid: {d, end, way in degrees}. Neighbours get a straight one, others
 * a bow through the gaps. */
function across(from, to) {
  const isLevel = Math.abs(from.y - to.y) < 4;
  const isUpright = Math.abs(from.x - to.x) < 4;
  const isBelow = to.y > from.y;
  const [start, end] = isBelow ? [from.bottom, to.top] : [from.top, to.bottom];
  if (isLevel) {
    const isRight = to.x > from.x;
    const [a, b] = isRight ? [from.right, to.left] : [from.left, to.right];
    if (Math.abs(a - b) < 60) return { d: `M${a} ${from.y}L${b} ${to.y}`, end: [b, to.y], way: isRight ? 0 : 180 };
    const low = from.bottom + 16; // around the boxes between them
    return { d: `M${from.x} ${from.bottom}C${from.x} ${low} ${to.x} ${low} ${to.x} ${to.bottom}`, end: [to.x, to.bottom], way: -90 };
  }
  if (isUpright && Math.abs(start - end) < 60) return { d: `M${from.x} ${start}L${to.x} ${end}`, end: [to.x, end], way: isBelow ? 90 : -90 };
  // It leaves and arrives beside the middle, where no straight arrow is.
  const aside = Math.sign(to.x - from.x) * 22;
  const [a, b] = [from.x + aside, to.x - aside];
  const bend = (end - start) / 2;
  return { d: `M${a} ${start}C${a} ${start + bend} ${b} ${end - bend} ${b} ${end}`, end: [b, end], way: isBelow ? 90 : -90 };
}

/** The same between corners of the drawing: below and left of all boxes. */
function around(from, to) {
  const [low, aside, round] = [from.bottom + 15, to.left - 14, 10];
  return {
    d: `M${from.x} ${from.bottom}V${low - round}Q${from.x} ${low} ${from.x - round} ${low}H${aside + round}` +
      `Q${aside} ${low} ${aside} ${low - round}V${to.y + round}Q${aside} ${to.y} ${aside + round} ${to.y}H${to.left}`,
    end: [to.left, to.y], way: 0,
  };
}

/** The same for one column: to the next box straight down, to others along the left edge. */
function down(from, to) {
  const gap = to.top - from.bottom;
  if (gap > 0 && gap < 40) return { d: `M${from.x} ${from.bottom}L${to.x} ${to.top}`, end: [to.x, to.top], way: 90 };
  const [a, b] = [from.y + 6, to.y - 6];
  const bow = from.left - Math.min(8 + Math.abs(b - a) / 40, 22);
  return { d: `M${from.left} ${a}C${bow} ${a} ${bow} ${a} ${bow} ${(a + b) / 2}S${bow} ${b} ${to.left} ${b}`, end: [to.left, b], way: 0 };
}

const graphs = [...document.querySelectorAll("[data-graph]")].map((list) => new Graph(list));

addEventListener("hashchange", () => {
  const id = location.hash.slice(1);
  graphs.find((graph) => graph.has(id))?.choose(id, false);
});
