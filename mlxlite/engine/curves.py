"""Curves that bend log-probabilities before the draw (spec 20 sections 6 and 7.1).

`tone` is the HLG curve, borrowed from television: straight around a pivot, logarithmic above it
(the shoulder: the best token does not burn out) and below it (the toe: the tail is not crushed).
`transfer` is a curve that somebody drew through points, which `mlxlite.transfer` checks and works
out. Both give logits to draw from; neither lets a token overtake another or a forbidden one (minus
infinity) back in.

Rows are independent: parameters are (B, 1) columns, and a row gets the same bits alone and in a
batch. Curves are frozen values, checked and worked out on the host when they are made; nothing is
read back from the device. The functions run on the engine thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import mlx.core as mx

from mlxlite.errors import BadRequest
from mlxlite.transfer import Piece, Transfer

_TINY = 1e-9  # spec 20: what logarithms, strengths and percentages are kept above
_COLDEST, _HOTTEST = 1e-30, 1e30  # as in `sample`: what float32 can divide log-probabilities by

_RANGES: dict[tuple[float, float], str] = {  # the limits of all fields of Hlg and its variants
    (0, 100): "shoulder toe pivot_offset max_brightness slope target_gap ref_gap",  # as the CLI's
    (_COLDEST, _HOTTEST): "gain",  # 0 would make all tokens equal
    (2, 10_000): "lw",  # below 1.4 gamma is negative and would turn the ranking over
    (0.01, 100): "window rolloff",
    (0.01, 1): "x_mid y_mid x_floor y_floor",
    (1, 10): "power",
    (0, 1e9): "out_scale",
}


def _refused(param: str, why: str) -> BadRequest:
    return BadRequest(f"{param} {why}", param=param)


def _check(param: str, value: float, low: float, high: float) -> None:
    """Refuse what is no number in [low, high]; NaN is in no range."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise _refused(param, f"must be a number from {low:g} to {high:g}, not {value!r}")


def _column(values: Iterable[float], dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(list(values), dtype=dtype)[:, None]  # (B, 1)


# --------------------------------------------------------- HLG: the research variants (6.4)
#
# Each maps how far a token lies below the best one, `drop` = logprob - max (B, V), to logits. They
# replace the parametric curve, temperature included. Light and signal are the words of the
# broadcast standard: the best token's light E = exp(drop) is 1.

_A, _B, _C = 0.17883277, 0.28466892, 0.55991073  # ITU-R BT.2100, table 5


def _oetf(light: mx.array) -> mx.array:
    """From light to signal, both in [0, 1]: a square root that turns into a logarithm."""
    bright = _A * mx.log(mx.maximum(12 * light - _B, _TINY)) + _C
    return mx.where(light < 1 / 12, mx.sqrt(3 * light), bright)


def _gamma(lw: float) -> float:
    return 1.2 + 0.42 * math.log10(lw / 1000)


@dataclass(frozen=True, slots=True)
class Oetf:
    """Draw in proportion to the signal."""

    def logits(self, drop: mx.array) -> mx.array:
        return mx.log(mx.maximum(_oetf(mx.exp(drop)), _TINY))


@dataclass(frozen=True, slots=True)
class Eotf:
    """Take probabilities for a signal and draw in proportion to the light a display makes of it."""

    lw: float = 1000.0  # the display's peak, cd/m2

    def logits(self, drop: mx.array) -> mx.array:
        signal = mx.exp(drop)
        bright = mx.log((mx.exp((signal - _C) / _A) + _B) / 12)
        # Squared as a logarithm: a small signal's square would be 0.
        return _gamma(self.lw) * mx.where(signal < 0.5, 2 * drop - math.log(3), bright)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The signal, through a display's gamma, is the logit itself."""

    max_brightness: float = 5.0  # the best token's logit
    lw: float = 1000.0

    def logits(self, drop: mx.array) -> mx.array:
        return self.max_brightness * _oetf(mx.exp(drop)) ** _gamma(self.lw)


@dataclass(frozen=True, slots=True)
class Shaper:
    """A film curve y(x) over the last nats: a toe, a power, a logarithm. Spec's names at right."""

    lw: float = 1200.0
    window: float = 10.0  # W: x goes from 0 to 1 over so many nats
    x_mid: float = 0.55  # xM: the logarithm begins
    y_mid: float = 0.5  # yM
    x_floor: float = 0.2  # xFloor: the toe ends
    y_floor: float = 0.18  # yFloor
    power: float = 2.0  # p
    slope: float = 0.7  # sM, at x_mid
    rolloff: float = 0.35  # A
    target_gap: float = 15.0  # logits from the best token to one `ref_gap` nats below it
    ref_gap: float = 4.0
    out_scale: float | None = None  # the best token's logit; None: what the gaps ask for

    @property
    def rises(self) -> bool:
        # The slope of the middle part runs from `slope` to the one at the floor, and a toe that
        # falls is cut at 0, so the floor decides. The least reach keeps k within float32.
        return self.x_mid - self.x_floor >= 0.01 and self._at_floor()[1] >= 0

    def _at_floor(self) -> tuple[float, float]:
        """k, with which the middle part meets the floor, and its slope s there."""
        reach = self.x_mid - self.x_floor
        k = (self.y_mid - self.slope * reach - self.y_floor) / reach**self.power
        return k, self.slope + k * self.power * reach ** (self.power - 1)

    def _y(self, x: mx.array) -> mx.array:
        k, s = self._at_floor()
        above, below = mx.maximum(x - self.x_mid, 0), mx.maximum(self.x_mid - x, 0)
        shoulder = self.y_mid + self.rolloff * mx.log(1 + self.slope / self.rolloff * above)
        middle = self.y_mid - self.slope * below - k * below**self.power
        # The cubic e x^3 + f x^2 with value y_floor and slope s at x_floor.
        e = (s * self.x_floor - 2 * self.y_floor) / self.x_floor**3
        f = (3 * self.y_floor - s * self.x_floor) / self.x_floor**2
        lower = mx.where(x >= self.x_floor, middle, (e * x + f) * x * x)
        return mx.maximum(mx.where(x >= self.x_mid, shoulder, lower), 0)

    def _r(self, x: mx.array) -> mx.array:
        return mx.maximum(self._y(x) / self._y(mx.array(1.0)), _TINY) ** _gamma(self.lw)

    def logits(self, drop: mx.array) -> mx.array:
        shaped = self._r(mx.clip(drop / self.window + 1, 0, 1))
        if self.out_scale is not None:
            return self.out_scale * shaped
        reference = mx.array(max(1 - self.ref_gap / self.window, 0.0))
        return self.target_gap / mx.maximum(1 - self._r(reference), 1e-6) * shaped


# --------------------------------------------------------------- HLG: the parametric curve


@dataclass(frozen=True, slots=True)
class Hlg:
    """The HLG tone curve of one row (spec 20 section 6.1); lengths are nats.

    pivot: what it is measured from: the best token, the mean log-probability, or the token with
    which half of the mass is reached. variant: a research curve that takes the place of this one;
    being one field, it excludes the others by itself. Raises BadRequest naming `hlg.<field>`.
    """

    width: float = 4.0  # half of the straight part; infinite: all is straight
    shoulder: float = 4.0  # 0: no rolloff above
    toe: float = 6.0  # 0: no rolloff below
    pivot_offset: float = 6.0  # the pivot is so far below what it is measured from
    pivot: Literal["top", "entropy", "median"] = "top"
    gain: float | None = None  # slope in the middle; None: 1 / temperature
    variant: Oetf | Eotf | Pipeline | Shaper | None = None

    def __post_init__(self) -> None:
        if self.width != math.inf:
            _check("hlg.width", self.width, 0, 100)
        if self.pivot not in ("top", "entropy", "median"):
            raise _refused("hlg.pivot", f"must be top, entropy or median, not {self.pivot!r}")
        path = f"hlg.{type(self.variant).__name__.lower()}"
        for owner, prefix in ((self, "hlg"), (self.variant, path)):
            for (low, high), names in _RANGES.items():
                for name in filter(partial(hasattr, owner), names.split()):
                    value = getattr(owner, name)
                    if value is not None or name not in ("gain", "out_scale"):
                        _check(f"{prefix}.{name}", value, low, high)
        if isinstance(self.variant, Shaper) and not self.variant.rises:
            raise _refused(path, "must rise: x_floor below x_mid, and a slope that y_floor allows")

    @property
    def bends(self) -> bool:
        """False for a curve that is only a temperature (spec 20 section 6.3) or a variant."""
        can_bend = self.width != math.inf and (self.shoulder > 0 or self.toe > 0)
        return can_bend and self.variant is None


def tone(
    logprobs: mx.array, curves: Sequence[Hlg | None], temperatures: Sequence[float]
) -> mx.array:
    """Logits (B, V) to draw from, for log-probabilities (B, V) float32; one curve a row.

    A row without a curve, or with a straight one, is exactly `logprobs / temperature`. A greedy row
    (temperature 0) is the caller's: no curve moves its best token.
    """
    # The mid gain m is a factor of every line of the table in section 6.2, so curves are shaped for
    # m = 1 and divided at the end, as `sample` divides.
    heat = [1 / c.gain if c and c.gain else t for c, t in zip(curves, temperatures, strict=True)]
    bent = [c if c is not None and c.bends else None for c in curves]
    shaped = logprobs
    if any(bent):
        some = _shaped(logprobs, [c or Hlg() for c in bent])
        shaped = mx.where(_column([c is not None for c in bent], mx.bool_), some, logprobs)
    logits = shaped / _column(min(max(t, _COLDEST), _HOTTEST) for t in heat)
    for row, curve in enumerate(curves):
        if curve is not None and curve.variant is not None:
            drop = logprobs[row] - mx.max(logprobs[row])
            # Variants have a floor, and a floor would let forbidden tokens in again.
            forbidden = logprobs[row] == -mx.inf
            logits[row] = mx.where(forbidden, -mx.inf, curve.variant.logits(drop))
    return logits


def _shaped(logprobs: mx.array, curves: Sequence[Hlg]) -> mx.array:
    """The table of section 6.2 for m = 1, as a sum: what lies in the straight part, what the
    shoulder adds, what the toe takes away. Each only ever rises, rounding included."""
    width = _column(c.width for c in curves)
    pivot = _base(logprobs, curves) - _column(c.pivot_offset for c in curves)
    centred = logprobs - pivot  # zc (B, V)
    added = _rolled(mx.maximum(centred - width, 0), [c.shoulder for c in curves])
    taken = _rolled(mx.maximum(-width - centred, 0), [c.toe for c in curves])
    return mx.clip(centred, -width, width) + added - taken


def _rolled(beyond: mx.array, strengths: Sequence[float]) -> mx.array:
    """What is left of the nats `beyond` the straight part; all of them at strength 0 (6.3)."""
    # Below _TINY the division would overflow, and the curve is flat long before that.
    strength = _column(max(s, _TINY) for s in strengths)
    rolled = strength * mx.log(1 + beyond / strength)
    return mx.where(_column([s > 0 for s in strengths], mx.bool_), rolled, beyond)


def _base(logprobs: mx.array, curves: Sequence[Hlg]) -> mx.array:
    """What each row's pivot is measured from, (B, 1)."""
    base = mx.max(logprobs, axis=-1, keepdims=True)
    for name, measure in (("entropy", _mean), ("median", _median)):
        if any(c.pivot == name for c in curves):
            chosen = _column([c.pivot == name for c in curves], mx.bool_)
            base = mx.where(chosen, measure(logprobs), base)
    # A row that may draw nothing has its top at minus infinity, and inf - inf is not a number.
    return mx.maximum(base, -3e38)  # nearly float32's lowest


def _mean(logprobs: mx.array) -> mx.array:
    mass = mx.exp(logprobs)
    return mx.sum(mx.where(mass > 0, mass * logprobs, 0), axis=-1, keepdims=True)


def _median(logprobs: mx.array) -> mx.array:
    ordered = -mx.sort(-logprobs, axis=-1)
    # The margin is for rounding: a token of probability one half does reach it.
    is_short = mx.cumsum(mx.exp(ordered), axis=-1) < 0.5 - 1e-6
    short = mx.minimum(mx.sum(is_short, axis=-1, keepdims=True), logprobs.shape[-1] - 1)
    return mx.take_along_axis(ordered, short, axis=-1)


# ------------------------------------------------------------------ the transfer curve (7.1)


_DIAGONAL = Transfer(((1.0, 1.0), (100.0, 100.0)))
_at = partial(mx.take_along_axis, axis=1)  # (B, pieces), (B, V) -> (B, V)


def transfer(logprobs: mx.array, curves: Sequence[Transfer | None]) -> mx.array:
    """Logits (B, V) to draw from, for log-probabilities (B, V) float32; None leaves a row alone."""
    if not any(curves):
        return logprobs
    # 1. One table for all rows. Short rows get pieces at infinity, where nobody arrives, up to a
    #    power of two, which lets the search halve.
    rows = [(curve or _DIAGONAL).pieces for curve in curves]
    levels = max(len(pieces) - 1 for pieces in rows).bit_length()
    nowhere = Piece(0.0, math.inf, 0.0)
    table = mx.array([[*pieces, *[nowhere] * (2**levels - len(pieces))] for pieces in rows])
    value, knot, slope, span, bend, twist = (table[:, :, n] for n in range(len(nowhere)))
    # 2. Which piece holds a log-probability: the last whose knot it has reached, else the first.
    place = mx.zeros(logprobs.shape, dtype=mx.int32)
    for level in reversed(range(levels)):
        further = place + 2**level
        place = mx.where(logprobs >= _at(knot, further), further, place)
    # 3. The cubic. Minus infinity has t = 0 and a slope of at least 1, so it stays.
    past, reach = logprobs - _at(knot, place), _at(span, place)
    t = mx.clip(past, 0, reach) / reach
    steep = _at(slope, place) + t * (_at(bend, place) + t * _at(twist, place))
    is_curved = _column([curve is not None for curve in curves], mx.bool_)
    return mx.where(is_curved, _at(value, place) + past * steep, logprobs)
