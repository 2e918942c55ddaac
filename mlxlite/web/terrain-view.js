// A surface of steps by ranks on a 2D canvas, seen from where the reader turned it.
//
// Plain projection: turn around the upright axis, tilt, divide by the distance. Patches are painted
// from the back to the front, so the near ones cover the far ones. Lengths are CSS pixels; the model
// box is 2 wide (steps), 1.2 deep (ranks) and at most 0.8 high.

const START = { turn: -0.55, tilt: 0.5, zoom: 1 };
const DEEP = 1.2;
const HIGH = 0.8;
const AWAY = 4.2; // of the eye, in lengths of the box
const COLOURS = ["--bg", "--text", "--muted", "--accent", "--line-strong", "--warn"];

export class View {
  #rows = [];
  #marks = [];
  #eye = { ...START };
  #isDue = false;
  #chosen = 0;

  constructor(canvas) {
    this.canvas = canvas;
    this.pen = canvas.getContext("2d");
    let held = null;
    canvas.addEventListener("pointerdown", (event) => {
      held = { x: event.clientX, y: event.clientY, ...this.#eye };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!held) return;
      const tilt = event.pointerType === "mouse" ? (event.clientY - held.y) / 160 : 0; // a finger scrolls
      this.#look({ turn: held.turn + (event.clientX - held.x) / 160, tilt: held.tilt + tilt });
    });
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => (held = null));
    canvas.addEventListener("keydown", (event) => this.#press(event));
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /** rows: heights 0 to 1, one array a step, by rank. marks: the rank drawn at each step, or null.
   * chosen: the step that is being read. */
  show(rows, marks, chosen) {
    [this.#rows, this.#marks, this.#chosen] = [rows, marks, chosen];
    this.draw();
  }

  /** Paints with the next frame, once however often it is asked. */
  draw() {
    if (this.#isDue) return;
    this.#isDue = true;
    requestAnimationFrame(() => {
      this.#isDue = false;
      this.#paint();
    });
  }

  #look(eye) {
    Object.assign(this.#eye, eye);
    this.#eye.tilt = Math.min(Math.max(this.#eye.tilt, 0.05), 1.4);
    this.#eye.zoom = Math.min(Math.max(this.#eye.zoom, 0.6), 2.5);
    this.draw();
  }

  #press(event) {
    const { turn, tilt, zoom } = this.#eye;
    const moves = {
      ArrowLeft: { turn: turn - 0.1 }, ArrowRight: { turn: turn + 0.1 },
      ArrowUp: { tilt: tilt + 0.08 }, ArrowDown: { tilt: tilt - 0.08 },
      "+": { zoom: zoom * 1.1 }, "=": { zoom: zoom * 1.1 }, "-": { zoom: zoom / 1.1 }, Home: START,
    };
    if (!moves[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    this.#look(moves[event.key]);
  }

  // ---------------------------------------------------------------------------------- painting

  #paint() {
    const { canvas, pen } = this;
    const width = canvas.parentElement.clientWidth;
    const height = Math.round(Math.min(Math.max(width * 0.55, 260), 520));
    const scale = devicePixelRatio || 1;
    if (canvas.width !== width * scale || canvas.height !== height * scale) {
      canvas.width = width * scale;
      canvas.height = height * scale;
      canvas.style.height = `${height}px`;
    }
    const style = getComputedStyle(canvas);
    const colour = Object.fromEntries(COLOURS.map((name) => {
      canvas.style.color = `var(${name})`; // a computed colour is one that a canvas knows
      return [name, style.color];
    }));
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    const put = this.#projection(width, height);
    this.#frame(put, colour);
    if (this.#rows.length > 0) this.#surface(put, colour);
    this.#names(put, width, colour, style);
  }

  /** (across 0..1, deep 0..1, high 0..1) -> [x, y, how far away]. */
  #projection(width, height) {
    const { turn, tilt, zoom } = this.#eye;
    const [sin, cos, up, on] = [Math.sin(turn), Math.cos(turn), Math.sin(tilt), Math.cos(tilt)];
    const size = Math.min(width / 2.9, height / 2.2) * zoom;
    return (across, deep, high) => {
      const [x, z, y] = [(across - 0.5) * 2, (deep - 0.5) * DEEP, high * HIGH - HIGH * 0.4];
      const [turned, away] = [x * cos + z * sin, z * cos - x * sin];
      const far = away * on - y * up;
      const near = AWAY / (AWAY + far);
      return [width / 2 + turned * near * size, height * 0.48 - (y * on + away * up) * near * size, far];
    };
  }

  #frame(put, colour) {
    this.pen.strokeStyle = colour["--line-strong"];
    this.pen.lineWidth = 1;
    this.#line([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 0, 0]].map((corner) => put(...corner)));
    this.#line([put(0, 1, 0), put(0, 1, 1)]);
  }

  #line(points) {
    const { pen } = this;
    pen.beginPath();
    for (const [x, y] of points) pen.lineTo(x, y);
    pen.stroke();
  }

  #surface(put, colour) {
    const rows = this.#rows;
    const ranks = Math.max(...rows.map((row) => row.length));
    const across = (step) => (rows.length > 1 ? step / (rows.length - 1) : 0.5);
    const deep = (rank) => 1 - rank / Math.max(ranks - 1, 1); // the likeliest at the back, where it hides none
    const corner = (step, rank) => put(across(step), deep(rank), rows[step][rank] ?? 0);
    const patches = [];
    for (let step = 0; step + 1 < rows.length; step += 1) {
      for (let rank = 0; rank + 1 < ranks; rank += 1) {
        const corners = [corner(step, rank), corner(step + 1, rank), corner(step + 1, rank + 1), corner(step, rank + 1)];
        const high = Math.max(rows[step][rank] ?? 0, rows[step + 1][rank] ?? 0);
        patches.push({ corners, high, far: corners.reduce((sum, one) => sum + one[2], 0) });
      }
    }
    patches.sort((one, other) => other.far - one.far);
    const { pen } = this;
    pen.lineJoin = "round";
    for (const { corners, high } of patches) {
      pen.beginPath();
      for (const [x, y] of corners) pen.lineTo(x, y);
      pen.closePath();
      pen.fillStyle = mix(colour["--bg"], colour["--accent"], 0.06 + 0.94 * Math.sqrt(high));
      pen.strokeStyle = mix(colour["--bg"], colour["--accent"], 0.35 + 0.4 * Math.sqrt(high));
      pen.lineWidth = 0.6;
      pen.fill();
      pen.stroke();
    }
    // The step that is being read, and what was drawn: on top, so that they can always be found.
    pen.strokeStyle = colour["--text"];
    pen.lineWidth = 2;
    const here = Math.min(this.#chosen, rows.length - 1);
    this.#line(rows[here].map((_, rank) => corner(here, rank)));
    pen.fillStyle = colour["--warn"];
    for (const [step, rank] of this.#marks.entries()) {
      if (rank === null || step >= rows.length) continue;
      const [x, y] = corner(step, rank);
      pen.beginPath();
      pen.arc(x, y, step === here ? 5 : 2.5, 0, 2 * Math.PI);
      pen.fill();
    }
  }

  #names(put, width, colour, style) {
    const { pen } = this;
    pen.fillStyle = colour["--muted"];
    pen.font = `12px ${style.fontFamily}`;
    pen.textAlign = "center";
    const isNearer = (one, other) => put(...one)[2] < put(...other)[2];
    const side = isNearer([1, 0.5, 0], [0, 0.5, 0]) ? 1.1 : -0.1; // where no patch is in front of it
    const end = isNearer([0.5, 0, 0], [0.5, 1, 0]) ? -0.14 : 1.14;
    for (const [text, ...place] of [["steps", 0.5, end, 0], ["rank 1", side, 0.95, 0], ["rank 20", side, 0.05, 0]]) {
      const [x, y] = put(...place);
      pen.fillText(text, Math.min(Math.max(x, 26), width - 26), y + 4);
    }
  }
}

/** Between two computed colours. */
function mix(from, to, part) {
  const [a, b] = [from, to].map((text) => text.match(/[\d.]+/g).map(Number));
  return `rgb(${a.map((one, i) => Math.round(one + (b[i] - one) * Math.min(part, 1))).join(" ")})`;
}
