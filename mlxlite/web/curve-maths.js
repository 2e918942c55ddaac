// The maths of the Curve Designer: no page, no server, only numbers (spec 20 sections 6 and 7).
//
// `pieces` and `at` are `mlxlite/transfer.py` and `engine/curves.py` once more; a test compares them.
// Lengths are nats, probabilities of points are percentages.

export const BINS = 80;
export const U_MIN = Math.log(1e-6); // the left edge of the plot; less likely tokens share bin 0
export const Y_MIN = Math.log(1e-9); // the bottom of the plot
const TINY = 1e-9; // what percentages are kept above

/** Percent -> nats. */
export const nats = (percent) => Math.log(Math.max(percent, TINY) / 100);

/** Nats -> percent. */
export const percent = (u) => 100 * Math.exp(u);

/** Points as the plot has them: {x, y} in nats, sorted by x; `index` is the place they came from. */
function knots(points) {
  return points
    .map((point, index) => ({ x: nats(point.x_pct), y: nats(point.y_pct), index }))
    .sort((one, other) => one.x - other.x || one.y - other.y);
}

/** Why these points ({x_pct, y_pct}) make no curve: null if they do, else {why, at}, `at` being the
 * indexes of the points at fault. */
export function problem(points) {
  if (points.length < 2) return { why: "A curve needs two points at least.", at: [] };
  for (const [index, point] of points.entries()) {
    const isNumber = Number.isFinite(point.x_pct) && Number.isFinite(point.y_pct);
    if (!isNumber) return { why: `Point ${index + 1} is not a number.`, at: [index] };
  }
  const sorted = knots(points);
  for (let i = 0; i + 1 < sorted.length; i += 1) {
    const [left, right] = [sorted[i], sorted[i + 1]];
    const at = [left.index, right.index];
    if (right.x === left.x) return { why: "Two points have the same input.", at };
    if ((right.y - left.y) / (right.x - left.x) < -1e-12) {
      return { why: `The curve falls after ${shown(percent(left.x))} %: every slope must be 0 or more.`, at };
    }
  }
  return null;
}

/** The monotone cubic of Fritsch and Carlson: a piece below the first knot, one from each knot on.
 * Points that fall give pieces too, so that what is wrong can be drawn. */
export function pieces(points) {
  const sorted = knots(points);
  const spans = [];
  const secants = [];
  for (let i = 0; i + 1 < sorted.length; i += 1) {
    spans.push(sorted[i + 1].x - sorted[i].x || 1e-12); // equal ones are refused, but drawn
    secants.push((sorted[i + 1].y - sorted[i].y) / spans[i]);
  }
  const slopes = [secants[0]];
  for (let i = 0; i + 1 < spans.length; i += 1) {
    const [before, after] = [secants[i], secants[i + 1]];
    const w1 = 2 * spans[i + 1] + spans[i];
    const w2 = spans[i + 1] + 2 * spans[i];
    slopes.push(Math.min(before, after) > 0 ? (w1 + w2) / (w1 / before + w2 / after) : 0);
  }
  slopes.push(secants.at(-1));
  const straight = { span: 1, bend: 0, twist: 0 };
  const found = [{ value: sorted[0].y, knot: sorted[0].x, slope: Math.max(slopes[0], 1), ...straight }];
  for (const [i, span] of spans.entries()) {
    found.push({
      value: sorted[i].y,
      knot: sorted[i].x,
      slope: slopes[i],
      span,
      bend: 3 * secants[i] - 2 * slopes[i] - slopes[i + 1],
      twist: slopes[i] + slopes[i + 1] - 2 * secants[i],
    });
  }
  found.push({ value: sorted.at(-1).y, knot: sorted.at(-1).x, slope: slopes.at(-1), ...straight });
  return found;
}

/** The curve at u nats: the logit to draw from. */
export function at(curve, u) {
  let place = 0;
  for (let i = 1; i < curve.length && u >= curve[i].knot; i += 1) place = i;
  const { value, knot, slope, span, bend, twist } = curve[place];
  const past = u - knot;
  const t = Math.min(Math.max(past, 0), span) / span;
  return value + past * (slope + t * (bend + t * twist));
}

/** The HLG tone curve at u nats (section 6.2). top: the best token's log-probability. */
export function hlg(u, { width, shoulder, toe, pivot_offset, temperature }, top) {
  const centred = u - (top - pivot_offset);
  const rolled = (beyond, strength) => (strength > 0 ? strength * Math.log(1 + beyond / strength) : beyond);
  const middle = Math.min(Math.max(centred, -width), width);
  const above = rolled(Math.max(centred - width, 0), shoulder);
  const below = rolled(Math.max(-width - centred, 0), toe);
  return (middle + above - below) / Math.max(temperature, 1e-3);
}

/** An HLG curve as points to draw by. Only differences of logits count, so it is moved to leave the
 * best token where it is; less than the plot's lowest output is cut there. */
export function hlgPoints(knobs, top) {
  const best = hlg(top, knobs, top);
  const pivot = top - knobs.pivot_offset;
  const bends = [pivot - knobs.width, pivot + knobs.width];
  const places = new Set([top]);
  const room = top - U_MIN;
  for (let i = 0; i <= 8; i += 1) places.add(U_MIN + (room * i) / 8);
  for (const bend of bends) if (bend > U_MIN + 0.2 && bend < top - 0.2) places.add(bend);
  const sorted = [...places].sort((one, other) => one - other);
  const kept = sorted.filter((u, i) => i === 0 || u === top || (u - sorted[i - 1] > 0.3 && top - u > 0.3));
  return kept.map((u) => point(u, Math.max(hlg(u, knobs, top) - best + top, Y_MIN)));
}

/** A straight line through 100 %: what a temperature is as a curve. */
export function temperaturePoints(temperature) {
  const left = Math.max(U_MIN, Y_MIN * temperature); // a steep line leaves the plot at the bottom
  return [point(left, left / temperature), point(0, 0)];
}

/** A point of the plot, in nats, as a request has it; four digits are finer than a hand. */
export const point = (x, y) => ({ x_pct: rounded(percent(x)), y_pct: rounded(percent(y)) });

const rounded = (number) => Number(number.toPrecision(4));

/** A percentage for people: 12, 3.1, 0.04, 2e-5. */
export function shown(number) {
  if (number >= 0.001 || number === 0) return String(Number(number.toPrecision(2)));
  return number.toExponential(0);
}

/** The middle of a bin, in nats. */
export const centre = (bin) => U_MIN * (1 - (bin + 0.5) / BINS);

/** The share of the draws that falls to each bin: by the model, or bent by `curve`.
 *
 * bins: tokens in each. Tokens of bin 0 are left out: all that is known of them is that each is
 * less likely than the plot's left edge. */
export function shares(bins, curve = null) {
  const logits = bins.map((count, bin) => {
    const u = centre(bin);
    return count > 0 && bin > 0 ? Math.log(count) + (curve ? at(curve, u) : u) : -Infinity;
  });
  const most = Math.max(...logits);
  if (most === -Infinity) return bins.map(() => 0);
  const masses = logits.map((logit) => Math.exp(logit - most));
  const whole = masses.reduce((sum, mass) => sum + mass, 0);
  return masses.map((mass) => mass / whole);
}

/** The share of the draws that the tokens of bin 0 take by `curve`, if all of them were as likely as
 * the plot's left edge: they take less than that, and how much less is not known. */
export function tailAtMost(bins, curve) {
  const logits = bins.map((count, bin) => (count > 0 ? Math.log(count) + at(curve, centre(bin)) : -Infinity));
  const most = Math.max(...logits);
  const masses = logits.map((logit) => Math.exp(logit - most));
  return masses[0] / masses.reduce((sum, mass) => sum + mass, 0);
}

/** The likeliest token's log-probability, as far as the bins tell; 0 without any. */
export function topOf(bins) {
  const bin = bins.findLastIndex((count) => count > 0);
  return bin < 0 ? 0 : centre(bin);
}
