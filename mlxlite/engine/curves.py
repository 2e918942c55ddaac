"""Curves that bend log-probabilities before the draw (spec 20 sections 6 and 7.1).

`tone` is the HLG curve, borrowed from television: straight around a pivot, logarithmic above it
(the shoulder, so that the best token does not burn out) and below it (the toe, so that the tail is
not crushed). `transfer` is a curve that somebody drew through points. Both take log-probabilities
and give logits to draw from; both are monotone, so a curve never changes which token is ahead, and
what is forbidden (minus infinity) stays forbidden.

Rows are independent: parameters are (B, 1) columns, and a row gets the same bits alone and in a
batch. Shapes are settled on the host when a curve is made, in Python floats; nothing is read back
from the device. The values are frozen and may cross threads; the functions run on the engine
thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

import mlx.core as mx

from mlxlite.errors import BadRequest

_TINY = 1e-9  # spec 20: what logarithms, strengths and percentages are kept above
_LOWEST = -3e38  # about float32's lowest
_COLDEST, _HOTTEST = 1e-30, 1e30  # as in `sample`: what float32 can divide log-probabilities by


def _column(values: Iterable[float], dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(list(values), dtype=dtype)[:, None]  # (B, 1)


def _check(name: str, value: object, low: float, high: float) -> None:
    """Refuse what is no number in [low, high]; NaN is in no range, infinity only if `high` is."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        name = f"hlg.{name}"
        raise BadRequest(f"{name} must be a number from {low:g} to {high:g}: {value!r}", param=name)


# --------------------------------------------------------- HLG: the research variants (6.4)
#
# Each maps how far a token lies below the best one, `drop` = logprob - max (B, V) <= 0, to logits.
# They replace the parametric curve, temperature included. Light and signal are the words of the
# broadcast standard: the light E = exp(drop) of the best token is 1.

_A, _B, _C = 0.17883277, 0.28466892, 0.55991073  # ITU-R BT.2100, table 5


def _oetf(light: mx.array) -> mx.array:
    """From light to signal, both in [0, 1]: a square root that turns into a logarithm."""
    bright = _A * mx.log(mx.maximum(12 * light - _B, _TINY)) + _C
    return mx.where(light < 1 / 12, mx.sqrt(3 * light), bright)


def _gamma(lw: float) -> float:
    """The system gamma of a display whose peak is `lw` cd/m2."""
    return 1.2 + 0.42 * math.log10(lw / 1000)


def _check_peak(name: str, lw: float) -> None:
    _check(name, lw, 2, 10_000)  # gamma is negative below 1.4, and would turn the ranking over


@dataclass(frozen=True, slots=True)
class Oetf:
    """Draw in proportion to the signal."""

    def logits(self, drop: mx.array) -> mx.array:
        return mx.log(mx.maximum(_oetf(mx.exp(drop)), _TINY))


@dataclass(frozen=True, slots=True)
class Eotf:
    """Take probabilities for a signal and draw in proportion to the light a display makes of it."""

    lw: float = 1000.0  # peak of the display, cd/m2

    def __post_init__(self) -> None:
        _check_peak("eotf.lw", self.lw)

    def logits(self, drop: mx.array) -> mx.array:
        signal = mx.exp(drop)
        bright = mx.log((mx.exp((signal - _C) / _A) + _B) / 12)
        # The square is taken of the logarithm: that of a small signal would underflow.
        return _gamma(self.lw) * mx.where(signal < 0.5, 2 * drop - math.log(3), bright)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The signal, through the display's gamma, is the logit itself."""

    max_brightness: float = 5.0  # the logit of the best token
    lw: float = 1000.0

    def __post_init__(self) -> None:
        _check("pipeline.max_brightness", self.max_brightness, 0, 100)
        _check_peak("pipeline.lw", self.lw)

    def logits(self, drop: mx.array) -> mx.array:
        return self.max_brightness * _oetf(mx.exp(drop)) ** _gamma(self.lw)


@dataclass(frozen=True, slots=True)
class Shaper:
    """A film curve y(x) over the last `window` nats: toe, power, then logarithm.

    Beside each field is its name in spec 20 section 6.4.
    """

    lw: float = 1200.0
    window: float = 10.0  # W, nats: x goes from 0 to 1 over it
    x_mid: float = 0.55  # xM, where the logarithm begins
    y_mid: float = 0.5  # yM
    x_floor: float = 0.2  # xFloor, where the toe ends
    y_floor: float = 0.18  # yFloor
    power: float = 2.0  # p
    slope: float = 0.7  # sM, at x_mid
    rolloff: float = 0.35  # A
    target_gap: float = 15.0  # logits between the best token and one `ref_gap` nats below it
    ref_gap: float = 4.0
    out_scale: float | None = None  # the best token's logit; None: from the two gaps

    def __post_init__(self) -> None:
        _check_peak("shaper.lw", self.lw)
        _check("shaper.window", self.window, 0.01, 100)
        for name in ("x_mid", "y_mid", "x_floor"):
            _check(f"shaper.{name}", getattr(self, name), 0.01, 1)
        _check("shaper.y_floor", self.y_floor, 0, 1)
        _check("shaper.power", self.power, 1, 10)
        _check("shaper.rolloff", self.rolloff, 0.01, 100)
        for name in ("slope", "target_gap", "ref_gap"):
            _check(f"shaper.{name}", getattr(self, name), 0, 100)
        if self.out_scale is not None:
            _check("shaper.out_scale", self.out_scale, 0, 1e9)
        if not self.x_floor < self.x_mid:
            raise BadRequest("hlg.shaper.x_floor must be below x_mid", param="hlg.shaper.x_floor")
        # The slope of the middle part runs from `slope` to the one at the floor, and a toe that
        # starts downwards is cut at 0: a rise at the floor is all that monotony takes.
        if self._at_floor()[1] < 0:
            raise BadRequest(
                "hlg.shaper.slope makes the curve fall: lower it, or y_floor",
                param="hlg.shaper.slope",
            )

    def _at_floor(self) -> tuple[float, float]:
        """k, which lets the middle part meet the floor, and its slope s there."""
        reach = self.x_mid - self.x_floor
        k = (self.y_mid - self.slope * reach - self.y_floor) / reach**self.power
        return k, self.slope + k * self.power * reach ** (self.power - 1)

    def _y(self, x: mx.array) -> mx.array:
        k, s = self._at_floor()
        above = mx.maximum(x - self.x_mid, 0)
        below = mx.maximum(self.x_mid - x, 0)
        shoulder = self.y_mid + self.rolloff * mx.log(1 + self.slope / self.rolloff * above)
        middle = self.y_mid - self.slope * below - k * below**self.power
        # The cubic e x^3 + f x^2 with value y_floor and slope s at x_floor.
        e = (s * self.x_floor - 2 * self.y_floor) / self.x_floor**3
        f = (3 * self.y_floor - s * self.x_floor) / self.x_floor**2
        toe = (e * x + f) * x * x
        lower = mx.where(x >= self.x_floor, middle, toe)
        return mx.maximum(mx.where(x >= self.x_mid, shoulder, lower), 0)

    def _r(self, x: mx.array) -> mx.array:
        share = self._y(x) / self._y(mx.array(1.0))
        return mx.maximum(share, _TINY) ** _gamma(self.lw)

    def logits(self, drop: mx.array) -> mx.array:
        shaped = self._r(mx.clip(drop / self.window + 1, 0, 1))
        if self.out_scale is not None:
            return self.out_scale * shaped
        reference = mx.array(max(1 - self.ref_gap / self.window, 0))
        return self.target_gap / mx.maximum(1 - self._r(reference), 1e-6) * shaped


# --------------------------------------------------------------- HLG: the parametric curve


@dataclass(frozen=True, slots=True)
class Hlg:
    """The HLG tone curve of one row (spec 20 section 6.1); lengths are nats.

    pivot: where the base of the pivot lies, at the best token, at the mean log-probability, or at
    the token with which half of the mass is reached. gain: slope in the middle; None is
    1 / temperature. variant: a research curve that takes the place of this one and of all other
    fields; being one field, it excludes the others by itself (spec 20 section 6.4).
    """

    width: float = 4.0  # half of the straight part; infinite: all is straight
    shoulder: float = 4.0  # 0: no rolloff above
    toe: float = 6.0  # 0: no rolloff below
    pivot_offset: float = 6.0  # how far the pivot is below its base
    pivot: Literal["top", "entropy", "median"] = "top"
    gain: float | None = None
    variant: Oetf | Eotf | Pipeline | Shaper | None = None

    def __post_init__(self) -> None:
        if self.width != math.inf:
            _check("width", self.width, 0, 100)
        for name in ("shoulder", "toe", "pivot_offset"):
            _check(name, getattr(self, name), 0, 100)
        if self.pivot not in _BASES:
            names = ", ".join(_BASES)
            raise BadRequest(f"hlg.pivot must be one of {names}: {self.pivot!r}", param="hlg.pivot")
        if self.gain is not None:
            _check("gain", self.gain, _COLDEST, _HOTTEST)  # 0 would make all tokens equal

    @property
    def is_straight(self) -> bool:
        """Whether it is no curve at all, only a temperature (spec 20 section 6.3)."""
        return self.width == math.inf or (self.shoulder == 0 and self.toe == 0)


def tone(
    logprobs: mx.array, curves: Sequence[Hlg | None], temperatures: Sequence[float]
) -> mx.array:
    """Logits (B, V) to draw from, for log-probabilities (B, V) float32; one curve a row.

    A row without a curve, or with a straight one, is exactly `logprobs / temperature`. Temperature
    0 is the caller's: argmax, no curve.
    """
    # The mid gain m is a factor of every line of the table in section 6.2, so the curve is shaped
    # for m = 1 and divided at the end, as `sample` divides.
    heat = [
        temperature if curve is None or curve.gain is None else 1 / curve.gain
        for curve, temperature in zip(curves, temperatures, strict=True)
    ]
    bends = [c is not None and c.variant is None and not c.is_straight for c in curves]
    shaped = logprobs
    if any(bends):
        some = [
            c if c is not None and bent else Hlg() for c, bent in zip(curves, bends, strict=True)
        ]
        shaped = mx.where(_column(bends, mx.bool_), _shaped(logprobs, some), logprobs)
    logits = shaped / _column(min(max(t, _COLDEST), _HOTTEST) for t in heat)
    variants = [None if c is None else c.variant for c in curves]
    if not any(variants):
        return logits
    lines = [
        logits[row : row + 1] if v is None else _replaced(logprobs[row : row + 1], v)
        for row, v in enumerate(variants)
    ]
    return mx.concatenate(lines, axis=0)


def _shaped(logprobs: mx.array, curves: Sequence[Hlg]) -> mx.array:
    """The table of section 6.2 for m = 1, in one line: what lies in the straight part, plus what
    the shoulder adds to it, minus what the toe takes away.

    Each of the three only ever rises with the log-probability, rounding included.
    """
    width = _column(c.width for c in curves)
    pivot = _base(logprobs, curves) - _column(c.pivot_offset for c in curves)
    centred = logprobs - pivot  # zc (B, V)
    above = mx.maximum(centred - width, 0)
    below = mx.maximum(-width - centred, 0)
    straight = mx.clip(centred, -width, width)
    return (
        straight
        + _rolled(above, [c.shoulder for c in curves])
        - _rolled(below, [c.toe for c in curves])
    )


def _rolled(beyond: mx.array, strengths: Sequence[float]) -> mx.array:
    """How far the curve goes on for a log-probability `beyond` nats outside of the straight part.

    Strength 0 is no rolloff: the straight part goes on (spec 20 section 6.3).
    """
    # Below _TINY the division overflows, and the curve is as flat as it can be before that.
    strength = _column(max(s, _TINY) for s in strengths)
    rolled = strength * mx.log(1 + beyond / strength)
    if all(strengths):
        return rolled
    return mx.where(_column([s > 0 for s in strengths], mx.bool_), rolled, beyond)


def _base(logprobs: mx.array, curves: Sequence[Hlg]) -> mx.array:
    """Where each row's pivot is measured from, (B, 1)."""
    pivots = [c.pivot for c in curves]
    base = _top(logprobs)
    for name, measure in _BASES.items():
        if name in pivots and name != "top":
            chosen = _column([pivot == name for pivot in pivots], mx.bool_)
            base = mx.where(chosen, measure(logprobs), base)
    # A row that may draw nothing has its best token at minus infinity; a finite pivot leaves the
    # row there, where inf - inf is not a number.
    return mx.maximum(base, _LOWEST)


def _top(logprobs: mx.array) -> mx.array:
    return mx.max(logprobs, axis=-1, keepdims=True)


def _mean(logprobs: mx.array) -> mx.array:
    """The expected log-probability: minus the entropy."""
    mass = mx.exp(logprobs)
    return mx.sum(mx.where(mass > 0, mass * logprobs, 0), axis=-1, keepdims=True)


def _median(logprobs: mx.array) -> mx.array:
    ordered = -mx.sort(-logprobs, axis=-1)
    reached = mx.cumsum(mx.exp(ordered), axis=-1)
    # The margin is for rounding: a token of probability one half does reach it.
    short = mx.sum(reached < 0.5 - 1e-6, axis=-1, keepdims=True)
    return mx.take_along_axis(ordered, mx.minimum(short, ordered.shape[-1] - 1), axis=-1)


_BASES = {"top": _top, "entropy": _mean, "median": _median}


def _replaced(logprobs: mx.array, variant: Oetf | Eotf | Pipeline | Shaper) -> mx.array:
    """What a research variant makes of one row (1, V)."""
    logits = variant.logits(logprobs - _top(logprobs))
    # The variants have a floor, and a floor would let forbidden tokens in again.
    return mx.where(logprobs == -mx.inf, -mx.inf, logits)


# ------------------------------------------------------------------ the transfer curve (7.1)


class _Piece(NamedTuple):
    """A cubic from one knot to the next: value + d (slope + t (bend + t twist)), where d is the way
    from the knot, in nats, and t = d / span the share of the piece."""

    value: float
    start: float
    slope: float
    span: float
    bend: float
    twist: float


@dataclass(frozen=True)
class Transfer:
    """A curve through points (percent of probability in, percent out), in any order.

    It is a monotone cubic (Fritsch and Carlson 1980) between logarithms: the identity, say (1, 1)
    and (100, 100), draws as temperature 1 does. Raises BadRequest naming `curve.points`.
    """

    points: tuple[tuple[float, float], ...]
    pieces: tuple[_Piece, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pieces", _pieces(_knots(self.points)))


def _refuse(why: str) -> BadRequest:
    return BadRequest(f"curve.points {why}", param="curve.points")


def _knots(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points in nats, ordered by x."""
    if len(points) < 2:
        raise _refuse(f"must be at least 2 points: {len(points)} given")
    if not all(math.isfinite(number) for point in points for number in point):
        raise _refuse("must be finite numbers")
    knots = sorted(
        (math.log(max(x, _TINY) / 100), math.log(max(y, _TINY) / 100)) for x, y in points
    )
    # Compared as logarithms: percentages below the floor, and neighbours that round to one, meet.
    if any(left[0] == right[0] for left, right in pairwise(knots)):
        raise _refuse("must have different x_pct: two points share one")
    return knots


def _pieces(knots: Sequence[tuple[float, float]]) -> tuple[_Piece, ...]:
    """One piece below the first knot, one after each knot; the outer ones are straight."""
    spans = [right[0] - left[0] for left, right in pairwise(knots)]
    secants = [
        (right[1] - left[1]) / span
        for (left, right), span in zip(pairwise(knots), spans, strict=True)
    ]
    if min(secants) < -1e-12:
        raise _refuse("must not fall: y_pct may only rise or stay with x_pct (all slopes >= 0)")
    slopes = [secants[0]]
    for before, after in pairwise(range(len(secants))):
        slopes.append(_tangent(spans[before], spans[after], secants[before], secants[after]))
    slopes.append(secants[-1])

    # A straight piece has no span of its own; any will do.
    x, y = knots[0]
    pieces = [_Piece(y, x, max(slopes[0], 1.0), 1.0, 0.0, 0.0)]  # the deep tail stays suppressed
    for index, (span, secant) in enumerate(zip(spans, secants, strict=True)):
        (x, y), here, there = knots[index], slopes[index], slopes[index + 1]
        bend, twist = 3 * secant - 2 * here - there, here + there - 2 * secant
        pieces.append(_Piece(y, x, here, span, bend, twist))
    x, y = knots[-1]
    pieces.append(_Piece(y, x, slopes[-1], 1.0, 0.0, 0.0))
    return tuple(pieces)


def _tangent(left: float, right: float, before: float, after: float) -> float:
    """The slope at a knot between spans left and right with secants before and after: a weighted
    harmonic mean, small enough for a cubic that does not overshoot."""
    if before <= 0 or after <= 0:
        return 0.0
    w1, w2 = 2 * right + left, right + 2 * left
    return (w1 + w2) / (w1 / before + w2 / after)


_IDENTITY = Transfer(((1.0, 1.0), (100.0, 100.0)))


def transfer(logprobs: mx.array, curves: Sequence[Transfer | None]) -> mx.array:
    """Logits (B, V) to draw from, for log-probabilities (B, V) float32; None leaves a row alone."""
    if not any(curves):
        return logprobs
    rows = [(curve or _IDENTITY).pieces for curve in curves]
    # 1. One table for all rows. A row with fewer pieces than the longest gets some that begin at
    #    infinity, where nobody arrives; a power of two lets the search take halves.
    levels = max(len(pieces) - 1 for pieces in rows).bit_length()
    nowhere = _Piece(0.0, math.inf, 0.0, 1.0, 0.0, 0.0)
    table = mx.array([[*pieces, *[nowhere] * (2**levels - len(pieces))] for pieces in rows])
    value, start, slope, span, bend, twist = (table[:, :, n] for n in range(len(nowhere)))  # (B, P)
    # 2. Which piece holds a log-probability: the last that begins at or below it, else the first.
    place = mx.zeros(logprobs.shape, dtype=mx.int32)
    for level in reversed(range(levels)):
        further = place + 2**level
        place = mx.where(logprobs >= _at(start, further), further, place)
    # 3. The cubic. Minus infinity has t = 0 and a slope of at least 1, hence stays.
    way = logprobs - _at(start, place)
    span = _at(span, place)
    t = mx.clip(way, 0, span) / span
    curved = _at(value, place) + way * (
        _at(slope, place) + t * (_at(bend, place) + t * _at(twist, place))
    )
    return mx.where(_column([c is not None for c in curves], mx.bool_), curved, logprobs)


def _at(table: mx.array, place: mx.array) -> mx.array:
    return mx.take_along_axis(table, place, axis=1)  # (B, P), (B, V) -> (B, V)
