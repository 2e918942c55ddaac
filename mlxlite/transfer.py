"""Transfer: a curve over log-probabilities that somebody drew through points (floor 0, spec 20
section 7.1).

Plain arithmetic on plain numbers: surfaces check a curve with it before a row is made, and the
engine draws by the pieces that it gives (`engine/curves.py`). `web/curve-maths.js` says the same in
the browser; a test compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from mlxlite.errors import BadRequest

_TINY = 1e-9  # spec 20: what percentages are kept above
_MOST = 1e30  # of a percentage; its logarithm is far from what float32 can hold


class Piece(NamedTuple):
    """value + d (slope + t (bend + t twist)), with d nats past the knot and t = d / span."""

    value: float
    knot: float
    slope: float
    span: float = 1.0  # a straight piece needs none; any will do
    bend: float = 0.0
    twist: float = 0.0


@dataclass(frozen=True)
class Transfer:
    """A curve through points (percent of probability in, percent out), in any order.

    A monotone cubic (Fritsch and Carlson 1980) between their logarithms; points on the diagonal
    draw as temperature 1 does. Raises BadRequest naming `curve.points`.
    """

    points: tuple[tuple[float, float], ...]
    pieces: tuple[Piece, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pieces", _pieces(self.points))


def _refused(why: str) -> BadRequest:
    return BadRequest(f"curve.points {why}", param="curve.points")


def _pieces(points: Sequence[tuple[float, float]]) -> tuple[Piece, ...]:
    """One piece below the first knot and one from each knot on; the outer ones are straight."""
    if len(points) < 2:
        raise _refused(f"must be at least 2, not {len(points)}")
    for number in (number for point in points for number in point):
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not -_MOST <= number <= _MOST:  # NaN is in no range
            raise _refused(f"must be a number from {-_MOST:g} to {_MOST:g}, not {number!r}")
    knots = sorted(tuple(math.log(max(n, _TINY) / 100) for n in point) for point in points)
    xs, ys = [x for x, _ in knots], [y for _, y in knots]
    spans = [right - left for left, right in pairwise(xs)]
    # Seen in nats, where percentages below the floor, and some close neighbours, are the same.
    if min(spans) == 0:
        raise _refused("must differ in x_pct: two share one")
    secants = [(right - left) / h for (left, right), h in zip(pairwise(ys), spans, strict=True)]
    if min(secants) < -1e-12:
        raise _refused("must never fall from left to right: all slopes must be >= 0")
    slopes = [secants[0]]
    for (left, right), (before, after) in zip(pairwise(spans), pairwise(secants), strict=True):
        # The weighted harmonic mean: small enough that the cubic does not overshoot.
        w1, w2 = 2 * right + left, right + 2 * left
        slopes.append((w1 + w2) / (w1 / before + w2 / after) if min(before, after) > 0 else 0.0)
    slopes.append(secants[-1])
    pieces = [Piece(ys[0], xs[0], max(slopes[0], 1.0))]  # the deep tail stays suppressed
    for i, span in enumerate(spans):
        bend = 3 * secants[i] - 2 * slopes[i] - slopes[i + 1]
        twist = slopes[i] + slopes[i + 1] - 2 * secants[i]
        pieces.append(Piece(ys[i], xs[i], slopes[i], span, bend, twist))
    return (*pieces, Piece(ys[-1], xs[-1], slopes[-1]))
