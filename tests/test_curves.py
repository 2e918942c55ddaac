"""The curves against NumPy in float64, written line by line from spec 20 sections 6 and 7.1.

The references branch where the code adds, and use Hermite's four polynomials where it uses one.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from mlxlite.engine import backend, curves  # noqa: F401  (backend first: it picks the BLAS)
from mlxlite.engine.curves import Eotf, Hlg, Oetf, Pipeline, Shaper, Transfer
from mlxlite.errors import BadRequest

import mlx.core as mx  # isort: skip

pytestmark = pytest.mark.slow

INF = math.inf
GRID = np.linspace(-60, 0, 4801, dtype=np.float32)  # every region of every curve, top at 0


def logprobs_of(vocab: int, seed: int = 0, spread: float = 4.0) -> np.ndarray:
    """Random log-probabilities, float32."""
    logits = np.random.default_rng(seed).normal(0, spread, vocab)
    return (logits - np.log(np.exp(logits).sum())).astype(np.float32)


def tone(logprobs: np.ndarray, curve: Hlg | None, temperature: float = 1.0) -> np.ndarray:
    toned = np.array(curves.tone(mx.array(logprobs[None]), [curve], [temperature]))
    assert toned.dtype == np.float32
    return toned[0]


def transfer(logprobs: np.ndarray, curve: Transfer) -> np.ndarray:
    return np.array(curves.transfer(mx.array(logprobs[None]), [curve]))[0]


def bits(values: np.ndarray) -> list[int]:
    return np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).tolist()


def assert_near(found: np.ndarray, expected: np.ndarray, epsilons: float = 16) -> None:
    """Equal but for float32 rounding, of the largest number that takes part."""
    assert not np.isnan(found).any()
    assert (np.isneginf(found) == np.isneginf(expected)).all()
    finite = np.isfinite(expected)
    allowed = epsilons * 2.0**-23 * max(float(np.abs(expected[finite]).max()), 60)
    assert np.abs(found[finite] - expected[finite]).max() <= allowed


def assert_sound(logprobs: np.ndarray, found: np.ndarray, slack: float = 0) -> None:
    """Only numbers, forbidden tokens stay out, and no token overtakes another."""
    assert not np.isnan(found).any() and not np.isposinf(found).any()
    assert np.isneginf(found)[np.isneginf(logprobs)].all()
    ordered = found[np.argsort(logprobs)]
    assert (np.diff(ordered[np.isfinite(ordered)]) >= -slack).all()


# ------------------------------------------------------------------ HLG, section 6.2 and 6.3


def base_of(logprobs: np.ndarray, pivot: str) -> float:
    if pivot == "top":
        return float(logprobs.max())
    probs = np.exp(logprobs)
    if pivot == "entropy":
        return float((probs[probs > 0] * logprobs[probs > 0]).sum())
    ordered = np.sort(logprobs)[::-1]
    return float(ordered[np.cumsum(np.exp(ordered)) >= 0.5 - 1e-9][0])


def toned(logprobs: np.ndarray, c: Hlg, temperature: float) -> np.ndarray:
    m = 1 / temperature if c.gain is None else c.gain
    logprobs = logprobs.astype(np.float64)
    if math.isinf(c.width) or (c.shoulder <= 0 and c.toe <= 0):
        return m * logprobs
    mu = base_of(logprobs, c.pivot) - c.pivot_offset

    def g(zc: float) -> float:
        if zc < -c.width and c.toe > 0:
            return -m * c.width - m * c.toe * math.log(max(1 + (-zc - c.width) / c.toe, 1e-9))
        if zc >= c.width and c.shoulder > 0:
            bent = c.shoulder * math.log(max(1 + (zc - c.width) / c.shoulder, 1e-9))
            return m * c.width + m * bent
        return m * zc

    return np.array([g(logprob - mu) for logprob in logprobs])


SHAPES = [
    Hlg(),
    Hlg(width=0),
    Hlg(shoulder=0),
    Hlg(toe=0),
    Hlg(width=0, shoulder=0),
    Hlg(width=1, shoulder=0.5, toe=0.25, pivot_offset=3),
    Hlg(width=0.5, shoulder=1e-40, toe=1e-12, pivot_offset=2),
    Hlg(width=2, shoulder=100, toe=100, pivot_offset=20),
    Hlg(gain=2.5),
    Hlg(pivot="entropy", width=1, pivot_offset=1),
    Hlg(pivot="median", width=1, pivot_offset=0),
]


@pytest.mark.parametrize("curve", SHAPES, ids=str)
def test_tone_is_the_table_of_the_spec(curve: Hlg) -> None:
    for temperature in (1.0, 0.7, 1.9):
        if curve.pivot != "entropy":  # the others ask for no distribution
            assert_near(tone(GRID, curve, temperature), toned(GRID, curve, temperature))
        for seed, spread in enumerate((0.1, 1, 4, 12)):
            line = logprobs_of(1003, seed, spread)
            assert_near(tone(line, curve, temperature), toned(line, curve, temperature))


def test_the_regions_meet_the_numbers_by_hand() -> None:
    logprobs = np.float32([0, -2, -5, -10, -16, -INF])  # zc: 6 4 1 -4 -10
    expected = np.array([4 + 4 * math.log(1.5), 4, 1, -4, -4 - 6 * math.log(2), -INF])
    assert_near(tone(logprobs, Hlg()), expected)
    assert_near(tone(logprobs, Hlg(), temperature=0.5), 2 * expected)
    assert_near(tone(logprobs, Hlg(gain=3), temperature=0.5), 3 * expected)


def test_half_is_reached_by_a_token_of_one_half() -> None:
    curve = Hlg(pivot="median", pivot_offset=0)
    for shares in ([0.2, 0.3, 0.5], [0.1, 0.1, 1 / 6, 1 / 6, 1 / 6, 0.1, 0.1, 0.1]):
        assert tone(np.log(shares).astype(np.float32), curve)[2] == 0, "it is the pivot"


STRAIGHT = [
    None,
    Hlg(width=INF),
    Hlg(width=INF, pivot="median", shoulder=1, toe=0),
    Hlg(width=0, shoulder=0, toe=0, pivot="entropy"),
]


@pytest.mark.parametrize("curve", STRAIGHT, ids=str)
def test_a_straight_curve_is_a_temperature_to_the_bit(curve: Hlg | None) -> None:
    for temperature in (1.0, 0.7, 1 / 3, 1.9, 1e-30, 1e30):
        for logprobs in (logprobs_of(1003), GRID, np.float32([0, -INF])):
            column = mx.array([[temperature]], dtype=mx.float32)
            plain = bits(np.array(mx.array(logprobs[None]) / column))
            assert [bits(tone(logprobs, curve, temperature))] == plain
            lines = mx.array(np.stack([logprobs, logprobs]))
            beside = curves.tone(lines, [Hlg(), curve], [1.0, temperature])
            assert bits(np.array(beside)[1:]) == plain


def test_a_gain_is_one_over_a_temperature() -> None:
    logprobs = logprobs_of(1003)
    assert bits(tone(logprobs, Hlg(width=INF, gain=4), 9)) == bits(tone(logprobs, None, 0.25))
    assert bits(tone(logprobs, Hlg(gain=4), 9)) == bits(tone(logprobs, Hlg(), 0.25))


# --------------------------------------------------------- the research variants, section 6.4

A, B, C = 0.17883277, 0.28466892, 0.55991073


def gamma(lw: float) -> float:
    return 1.2 + 0.42 * math.log10(lw / 1000)


def oetf(light: float) -> float:
    if light < 1 / 12:
        return math.sqrt(3) * math.sqrt(light)
    return A * math.log(12 * light - B) + C


def eotf_log(drop: float) -> float:
    signal = math.exp(drop)
    if signal < 0.5:
        return 2 * drop - math.log(3)
    return math.log((math.exp((signal - C) / A) + B) / 12)


def shaped(s: Shaper, drop: float) -> float:
    d = s.x_mid - s.x_floor
    k = (s.y_mid - s.slope * d - s.y_floor) / d**s.power
    rise = s.slope + k * s.power * d ** (s.power - 1)
    cubic = np.array([[s.x_floor**3, s.x_floor**2], [3 * s.x_floor**2, 2 * s.x_floor]])
    e, f = np.linalg.solve(cubic, [s.y_floor, rise])

    def y(x: float) -> float:
        if x >= s.x_mid:
            return s.y_mid + s.rolloff * math.log(1 + s.slope / s.rolloff * (x - s.x_mid))
        if x >= s.x_floor:
            return s.y_mid - s.slope * (s.x_mid - x) - k * (s.x_mid - x) ** s.power
        return max(float(e * x**3 + f * x**2), 0)

    def r(x: float) -> float:
        return max(y(x) / y(1), 1e-9) ** gamma(s.lw)

    x_ref = min(max(1 - s.ref_gap / s.window, 0), 1)
    scale = s.target_gap / max(1e-6, 1 - r(x_ref)) if s.out_scale is None else s.out_scale
    return scale * r(min(max(drop / s.window + 1, 0), 1))


SHAPERS = [
    Shaper(),
    Shaper(out_scale=7),
    Shaper(window=20, power=3, ref_gap=25, target_gap=4),
    Shaper(window=3, ref_gap=9, x_floor=0.3, y_floor=0.1),  # a toe that is cut at 0
]
VARIANTS = [
    (Oetf(), lambda drop: math.log(max(oetf(math.exp(drop)), 1e-9))),
    (Eotf(), lambda drop: 1.2 * eotf_log(drop)),
    (Eotf(lw=400), lambda drop: gamma(400) * eotf_log(drop)),
    (Pipeline(), lambda drop: 5 * oetf(math.exp(drop)) ** 1.2),
    (Pipeline(12, lw=2000), lambda drop: 12 * oetf(math.exp(drop)) ** gamma(2000)),
    *((s, lambda drop, s=s: shaped(s, drop)) for s in SHAPERS),
]


@pytest.mark.parametrize(("variant", "reference"), VARIANTS, ids=[str(v) for v, _ in VARIANTS])
def test_variants_follow_the_spec(variant: Any, reference: Any) -> None:
    for logprobs in (GRID, logprobs_of(1003), logprobs_of(1003, 1, 12)):
        drops = logprobs.astype(np.float64) - logprobs.max()
        expected = np.array([reference(drop) for drop in drops])
        found = tone(logprobs, Hlg(variant=variant), temperature=0.3)
        assert_near(found, expected)
        assert_sound(logprobs, found, slack=2e-6)


# ------------------------------------------------------------------- what holds for all of them

ALL = [*STRAIGHT, *SHAPES, *(Hlg(variant=variant) for variant, _ in VARIANTS)]
EXTREMES = [
    np.float32([-INF, 0, -INF]),
    np.float32([-INF, -INF, -INF]),
    np.float32([0, -1e30, -1e38, -3e38, -INF]),
    np.float32([-1e-38, -1e-30, -1, -88, -104, -1e4]),
    np.full(64, -math.log(64), dtype=np.float32),
]


@pytest.mark.parametrize("curve", ALL, ids=str)
def test_nothing_becomes_nan_and_nothing_overtakes(curve: Hlg | None) -> None:
    for temperature in (0.0, 1e-40, 1.0, 1e40, INF):
        for logprobs in EXTREMES:
            assert_sound(logprobs, tone(logprobs, curve, temperature))
    if curve is None or curve.variant is None:  # rounding included
        for logprobs in (logprobs_of(5000, seed) for seed in range(5)):
            assert_sound(logprobs, tone(logprobs, curve))


@pytest.mark.parametrize("vocab", [1, 50, 1003])
def test_a_row_is_toned_the_same_alone_in_a_batch_and_in_any_order(vocab: int) -> None:
    pick = random.Random(vocab)
    heats = [pick.uniform(0.1, 2) for _ in ALL]
    lines = mx.array(np.stack([logprobs_of(vocab, seed) for seed in range(len(ALL))]))
    alone = [bits(tone(np.array(lines)[n], ALL[n], heats[n])) for n in range(len(ALL))]
    for _ in range(4):
        order = pick.sample(range(len(ALL)), pick.randint(2, len(ALL)))
        some, heat = [ALL[n] for n in order], [heats[n] for n in order]
        batch = curves.tone(lines[mx.array(order)], some, heat)
        for found, n in zip(np.array(batch), order, strict=True):
            assert bits(found) == alone[n]


@pytest.mark.parametrize("curve", [Hlg(), Hlg(width=1, pivot="median", pivot_offset=1)], ids=str)
def test_draws_follow_the_curve(curve: Hlg) -> None:
    logprobs, count = logprobs_of(24, seed=11, spread=3), 20_000
    weights = np.exp(toned(logprobs, curve, 0.8))
    expected = weights / weights.sum()
    lines = mx.broadcast_to(mx.array(tone(logprobs, curve, 0.8)), (count, 24))
    drawn = np.array(mx.random.categorical(lines, key=mx.random.key(5)))
    share = np.bincount(drawn, minlength=24) / count
    chi_square = (count * (share - expected) ** 2 / expected).sum()
    assert chi_square < 23 + 5 * math.sqrt(2 * 23), "five standard deviations"


LIMITED = "width shoulder toe pivot_offset gain eotf.lw pipeline.max_brightness shaper.window"


@pytest.mark.parametrize("path", [*LIMITED.split(), "shaper.out_scale"])
def test_what_is_out_of_range_is_refused_by_name(path: str) -> None:
    def make(value: Any) -> Hlg:
        *variant, name = path.split(".")
        if not variant:
            return Hlg(**{name: value})
        kinds: Any = {"eotf": Eotf, "pipeline": Pipeline, "shaper": Shaper}
        return Hlg(variant=kinds[variant[0]](**{name: value}))

    make(10)
    for value in (-0.001, 1e31, math.nan, -INF, "4", True, 10**400):
        with pytest.raises(BadRequest, match=f"hlg.{path} must be a number") as caught:
            make(value)
        assert caught.value.param == f"hlg.{path}"


def test_the_ends_of_the_ranges() -> None:
    Hlg(0, 0, 0, 0), Hlg(100, 100, 100, 100), Hlg(width=INF)
    for refused in ({"toe": None}, {"toe": INF}, {"width": 100.5}, {"gain": 0}, {"pivot": ""}):
        with pytest.raises(BadRequest, match=f"hlg.{next(iter(refused))} must"):
            Hlg(**refused)
    for falling in (Shaper(x_floor=0.55), Shaper(slope=3), Shaper(y_floor=0.9)):
        with pytest.raises(BadRequest, match="hlg.shaper must rise"):
            Hlg(variant=falling)


# -------------------------------------------------------------------- transfer, section 7.1


def hermite(points: tuple[tuple[float, float], ...], u: float) -> float:
    x, y = np.log(np.maximum(sorted(points), 1e-9) / 100).T.tolist()
    n = len(x)
    h = [x[i + 1] - x[i] for i in range(n - 1)]
    D = [(y[i + 1] - y[i]) / h[i] for i in range(n - 1)]
    t = [D[0], *D]
    for i in range(1, n - 1):
        w1, w2 = 2 * h[i] + h[i - 1], h[i] + 2 * h[i - 1]
        t[i] = 0 if D[i - 1] * D[i] <= 0 else (w1 + w2) / (w1 / D[i - 1] + w2 / D[i])
    if u < x[0]:
        return y[0] + max(t[0], 1) * (u - x[0])
    if u >= x[-1]:
        return y[-1] + t[-1] * (u - x[-1])
    i = max(j for j in range(n) if x[j] <= u)
    s = (u - x[i]) / h[i]
    from_values = (2 * s**3 - 3 * s**2 + 1) * y[i] + (-2 * s**3 + 3 * s**2) * y[i + 1]
    return from_values + h[i] * ((s**3 - 2 * s**2 + s) * t[i] + (s**3 - s**2) * t[i + 1])


DRAWN = {
    "gentle": ((1e-4, 1e-5), (0.1, 0.02), (5, 8), (100, 100)),
    "flat below": ((0.01, 1), (1, 1), (100, 100)),  # the tail falls with slope 1 all the same
    "flat above": ((0.01, 0.001), (1, 10), (20, 10)),
    "stairs": ((1e-3, 1e-3), (0.01, 1), (0.1, 1), (1, 30), (10, 30), (100, 100)),
    "steep": ((1, 1e-6), (1.01, 50), (100, 100)),
    "from nothing": ((0, 0), (10, 1), (100, 100)),
    "unsorted": ((100, 100), (1e-4, 1e-5), (5, 8), (0.1, 0.02)),
    "many": tuple((100 * 0.7**n, 100 * 0.7 ** (n * 1.5 - (n % 3) / 2)) for n in range(40)),
}


@pytest.mark.parametrize("points", DRAWN.values(), ids=DRAWN)
def test_transfer_is_the_interpolation_of_the_spec(points: Any) -> None:
    curve = Transfer(points)
    for logprobs in (GRID, logprobs_of(1003), logprobs_of(1003, 1, 12)):
        found = transfer(logprobs, curve)
        expected = np.array([hermite(points, float(u)) for u in logprobs])
        # A steep piece magnifies the rounding of its argument.
        steepness = max(piece.slope for piece in curve.pieces)
        assert_near(found, expected, epsilons=16 + 4 * steepness)
        assert_sound(logprobs, found, slack=2e-5)


def test_the_knots_are_met_and_the_outside_is_straight() -> None:
    points = DRAWN["gentle"]
    knots = np.log(np.array(points) / 100)
    assert_near(transfer(knots[:, 0].astype(np.float32), Transfer(points)), knots[:, 1])
    first = (knots[1, 1] - knots[0, 1]) / (knots[1, 0] - knots[0, 0])
    last = (knots[3, 1] - knots[2, 1]) / (knots[3, 0] - knots[2, 0])
    found = transfer(np.float32([knots[0, 0] - 5, 3]), Transfer(points))
    assert_near(found, np.array([knots[0, 1] - 5 * first, 3 * last]))


def test_the_diagonal_is_temperature_one() -> None:
    ends, three, zero = ((1, 1), (100, 100)), ((50, 50), (1e-4, 1e-4), (3, 3)), ((0, 0), (7, 7))
    for points in (ends, three, zero):
        for logprobs in (GRID, logprobs_of(1003)):
            assert np.abs(transfer(logprobs, Transfer(points)) - logprobs).max() <= 2.0**-23 * 60


def test_transferred_extremes_are_numbers() -> None:
    close = ((50, 10), (50.00000000000001, 90), (100, 100))  # one knot in float32, two in float64
    for points in (*DRAWN.values(), close, ((0, 0), (1e-8, 1e12)), ((1e-8, 0), (1e20, 1e20))):
        for logprobs in EXTREMES:
            assert_sound(logprobs, transfer(logprobs, Transfer(points)), slack=2e-5)


def test_a_row_is_transferred_the_same_alone_and_in_a_batch() -> None:
    drawn: list[Transfer | None] = [None, *map(Transfer, DRAWN.values()), None]
    lines = mx.array(np.stack([logprobs_of(1003, seed) for seed in range(len(drawn))]))
    batch = np.array(curves.transfer(lines, drawn))
    for row, curve in enumerate(drawn):
        line = np.array(lines[row])
        assert bits(batch[row]) == bits(line if curve is None else transfer(line, curve))
    assert bits(np.array(curves.transfer(lines, [None] * len(drawn)))) == bits(np.array(lines))


REFUSED = [
    ((), "at least 2"),
    (((1, 1),), "at least 2"),
    (((1, 1), (1, 2)), "share"),
    (((0, 0), (50, 1), (1e-12, 0)), "share"),  # both are at the floor
    (((1, 2), (100, 1)), "never fall"),
    (((1, 1), (10, 30), (20, 29.9), (100, 100)), "slopes must be >= 0"),
    *((((1, 1), (2, wrong)), "number") for wrong in (math.nan, INF, 10**400, "2", None)),
]


@pytest.mark.parametrize(("points", "why"), REFUSED)
def test_points_that_make_no_curve_are_refused(points: Any, why: str) -> None:
    with pytest.raises(BadRequest, match=f"curve.points .*{why}") as caught:
        Transfer(points)
    assert caught.value.param == "curve.points"
