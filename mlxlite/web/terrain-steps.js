// The steps of an answer: what each could have been, by the model or bent by a curve. No page here.

import { at, U_MIN } from "./curve-maths.js";

export const RANKS = 20; // as many alternatives as a chat request may ask for

/** One entry of a chat's log-probabilities as a step: the token that was drawn and the likeliest
 * ones, {token, u} with u in nats, descending. rank: of the drawn one, from 0; null if it is none
 * of them. */
export function stepOf(entry) {
  const top = entry.top_logprobs.map((one) => ({ token: one.token, u: one.logprob, id: one.id }));
  const rank = top.findIndex((one) => one.id === entry.id);
  return { token: entry.token, u: entry.logprob, top, rank: rank < 0 ? null : rank };
}

/** Probabilities of a step's likeliest tokens. Without a curve they are the model's own and sum to
 * less than 1; bent by one they are shares among these tokens, as the others are not known. */
export function probabilities(step, curve = null) {
  if (!curve) return step.top.map(({ u }) => Math.exp(u));
  const logits = step.top.map(({ u }) => at(curve, u));
  const most = Math.max(...logits);
  const masses = logits.map((logit) => Math.exp(logit - most));
  const whole = masses.reduce((sum, mass) => sum + mass, 0);
  return masses.map((mass) => mass / whole);
}

/** Heights from 0 to 1 for probabilities; `log`: over the nats that the Curve Designer shows. */
export const heights = (shares, isLog) =>
  shares.map((share) => (isLog ? Math.min(Math.max(1 - Math.log(Math.max(share, 1e-30)) / U_MIN, 0), 1) : share));

/** How open a step was, in bits, as far as its likeliest tokens tell. */
export const entropy = (shares) =>
  shares.reduce((sum, share) => (share > 0 ? sum - share * Math.log2(share) : sum), 0);
