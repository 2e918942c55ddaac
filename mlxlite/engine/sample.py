"""From logits to token ids, for all rows of a step at once (spec 20).

Everything is a row transform on a (B, V) array and is the identity at neutral values, so a row
draws the same token alone, in a batch, or in another order. Nothing is read back to the host here.

Thresholds of top-p and top-k come from the best candidates of a row instead of a sort of all V
values. Where those candidates do not hold the whole nucleus, the draw says so (`is_certain`), and
the batch repeats it with `candidates=None`, the plain sort, which is also the oracle of the tests.

Randomness: each draw has its own key, made from the row's seed and the position of the token (spec
20 section 3); noise is drawn per token id, so it does not depend on how candidates are sorted. Runs
on the engine thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxlite.engine import curves
from mlxlite.engine.row import Row
from mlxlite.transfer import Transfer
from mlxlite.types import Sampling

_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, spec 20 section 3
# What float32 can divide log-probabilities by: beyond these, 0 / 0 and inf / inf are not numbers.
_COLDEST, _HOTTEST = 1e-30, 1e30
MOST_CANDIDATES = 1024  # beyond that, sorting everything is no dearer


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the rows of a batch sample; arrays are (B, 1), None where no row needs one.

    Made once whenever the rows of a batch change, not at every step.
    """

    is_greedy: mx.array | None  # bool; None: all rows are greedy
    temperatures: tuple[float, ...] = ()
    temperature: mx.array | None = None  # float32, as the next three
    top_p: mx.array | None = None  # 2 where off
    log_min_p: mx.array | None = None  # minus infinity where off
    xtc: Xtc | None = None
    top_k: mx.array | None = None  # int32, V where off
    largest_k: int = 0
    tones: tuple[curves.Hlg | None, ...] | None = None
    transfers: tuple[Transfer | None, ...] | None = None
    needs_mass: tuple[bool, ...] = ()  # rows whose filters or curve look at shares of probability


@dataclass(frozen=True, slots=True)
class Xtc:
    """Exclude top choices. is_on: bool (B, 1). spared: bool (B, V), ids that always stay."""

    is_on: mx.array
    probability: mx.array
    log_threshold: mx.array
    spared: mx.array


def recipe(rows: Sequence[Row], vocab_size: int) -> Recipe:
    """The recipe of these rows, in their order (spec 20 section 2: exactly one path a row)."""
    samplings = [row.spec.sampling for row in rows]
    if all(s.is_greedy for s in samplings):
        return Recipe(None)

    def is_chain(s: Sampling) -> bool:  # a curve takes the place of all filters
        return not s.is_greedy and s.tone is None and not s.transfer

    def column(value: Callable[[Sampling], float], dtype: mx.Dtype = mx.float32) -> mx.array:
        return mx.array([value(s) for s in samplings], dtype=dtype)[:, None]

    def any_row(test: Callable[[Sampling], bool]) -> bool:
        return any(is_chain(s) and test(s) for s in samplings)

    def has_p(s: Sampling) -> bool:
        return is_chain(s) and 0 < s.top_p < 1

    def has_k(s: Sampling) -> bool:
        return is_chain(s) and 0 < s.top_k < vocab_size

    temperatures = tuple(
        1.0 if s.transfer else min(max(s.temperature, _COLDEST), _HOTTEST) for s in samplings
    )
    xtc = None
    if any_row(lambda s: s.xtc_probability > 0):
        spared = [_spared(s.xtc_special_ids, vocab_size) for s in samplings]
        xtc = Xtc(
            is_on=column(lambda s: is_chain(s) and s.xtc_probability > 0, mx.bool_),
            probability=column(lambda s: s.xtc_probability),
            log_threshold=column(
                lambda s: math.log(s.xtc_threshold) if s.xtc_threshold > 0 else -math.inf
            ),
            spared=mx.stack(spared),
        )
    return Recipe(
        is_greedy=column(lambda s: s.is_greedy, mx.bool_),
        temperatures=temperatures,
        temperature=mx.array(temperatures, dtype=mx.float32)[:, None],
        top_p=column(lambda s: s.top_p if has_p(s) else 2.0) if any_row(has_p) else None,
        log_min_p=mx.log(column(lambda s: s.min_p if is_chain(s) else 0.0))
        if any_row(lambda s: s.min_p > 0)
        else None,
        xtc=xtc,
        top_k=column(lambda s: s.top_k if has_k(s) else vocab_size, mx.int32)
        if any_row(has_k)
        else None,
        largest_k=max((s.top_k for s in samplings if has_k(s)), default=0),
        needs_mass=tuple(
            bool(has_p(s) or s.tone or s.transfer or (is_chain(s) and s.xtc_probability > 0))
            for s in samplings
        ),
        tones=tuple(_tone(s) for s in samplings) if any(s.tone for s in samplings) else None,
        transfers=tuple(_transfer(s) for s in samplings)
        if any(s.transfer for s in samplings)
        else None,
    )


def _tone(sampling: Sampling) -> curves.Hlg | None:
    tone = sampling.tone
    if tone is None or sampling.is_greedy or sampling.transfer:
        return None  # a curve cannot move the argmax, and a drawn curve goes first
    return curves.Hlg(
        width=tone.width, shoulder=tone.shoulder, toe=tone.toe, pivot_offset=tone.pivot_offset
    )


def _transfer(sampling: Sampling) -> Transfer | None:
    return Transfer(points=sampling.transfer) if sampling.transfer else None


def _spared(ids: Sequence[int], vocab_size: int) -> mx.array:
    known = [token for token in ids if token < vocab_size]
    spared = mx.zeros(vocab_size, dtype=mx.int32)
    return (spared.at[mx.array(known)].add(1) if known else spared) > 0


def keys(rows: Sequence[Row]) -> mx.array:
    """One random key a row, (B, 2) uint32, for the token that the row draws next."""
    return mx.array([_key(row, row.sampled) for row in rows], dtype=mx.uint32)


def keys_ahead(row: Row, count: int) -> mx.array:
    """The keys of the row's next `count` draws, (count, 2) uint32."""
    places = range(row.sampled, row.sampled + count)
    return mx.array([_key(row, place) for place in places], dtype=mx.uint32)


def _key(row: Row, place: int) -> list[int]:
    mixed = (row.spec.sampling.seed ^ ((place + 1) * _GOLDEN)) & (2**64 - 1)
    return [mixed >> 32, mixed & 0xFFFFFFFF]


def sample(logits: mx.array, how: Recipe, rows: Sequence[Row]) -> mx.array:
    """Draw one token a row by sorting; ids (B,) uint32. The plain form of `draw`."""
    return draw(logits, how, keys(rows), None)[0]


def draw(
    logits: mx.array, how: Recipe, row_keys: mx.array, candidates: int | None
) -> tuple[mx.array, mx.array | None]:
    """Draw one token a row, lazily.

    logits: (B, V), any float dtype. row_keys: (B, 2), of `keys`. candidates: how many of the best
    to look at; None: all, sorted.
    Returns ids (B,) uint32 and is_certain, bool (B,): False where the candidates were too few to
    know the filters' edges; None where every row is certain.

    Filters act on log-probabilities before temperature and are not renormalised between stages
    (spec 20 section 2).
    """
    best = mx.argmax(logits, axis=-1)
    if how.is_greedy is None or how.temperature is None:
        return best.astype(mx.uint32), None
    logits = logits.astype(mx.float32)
    logprobs = logits - _base(logits, how)
    kept, is_certain = _filtered(logprobs, how, row_keys, candidates)
    if how.transfers is not None:
        kept = curves.transfer(kept, how.transfers)
    if how.tones is not None:
        scaled = curves.tone(kept, how.tones, how.temperatures)
    else:
        scaled = kept / how.temperature
    if how.xtc is not None:  # its coin took the first half of the key
        halves = mx.vmap(lambda key: mx.random.split(key, 2)[1])(row_keys)
        row_keys = mx.where(how.xtc.is_on, halves, row_keys)
    noise = mx.vmap(lambda key: mx.random.gumbel((scaled.shape[-1],), key=key))(row_keys)
    drawn = mx.argmax(scaled + noise, axis=-1)
    ids = mx.where(how.is_greedy[:, 0], best, drawn).astype(mx.uint32)
    if is_certain is not None:
        is_certain = (is_certain | how.is_greedy)[:, 0]
    return ids, is_certain


def _base(logits: mx.array, how: Recipe) -> mx.array:
    """What is subtracted from each row (B, 1): the logarithm of its mass, or its maximum.

    Only shares of probability need the mass, and it costs more than all the rest of a plain draw. A
    row's base depends on the row alone, or rounding would tie its draw to its neighbours.
    """
    needs_mass = how.needs_mass
    if not any(needs_mass):
        return mx.max(logits, axis=-1, keepdims=True)
    mass = mx.logsumexp(logits, axis=-1, keepdims=True)
    if all(needs_mass):
        return mass
    is_needed = mx.array(needs_mass)[:, None]
    return mx.where(is_needed, mass, mx.max(logits, axis=-1, keepdims=True))


def _filtered(
    logprobs: mx.array, how: Recipe, row_keys: mx.array, candidates: int | None
) -> tuple[mx.array, mx.array | None]:
    """Log-probabilities (B, V) with what top-p, min-p, XTC and top-k throw out at minus infinity.

    Top-p, min-p and top-k each keep a prefix of the tokens in order of probability, so together
    they keep the shortest of their prefixes: a threshold each, and the maximum of these. Equal
    values at the edge stay together. XTC is no prefix; it comes between them.
    """
    count: int | None = None
    if candidates is not None:
        count = max(candidates, how.largest_k)
        count = None if count > MOST_CANDIDATES or count >= logprobs.shape[-1] else count
    floor: mx.array | None = None
    ordered: mx.array | None = None
    is_certain: mx.array | None = None
    if how.log_min_p is not None:
        floor = mx.max(logprobs, axis=-1, keepdims=True) + how.log_min_p
    if how.top_p is not None:
        ordered = _ordered(logprobs, count)
        mass = mx.exp(ordered)
        before = mx.cumsum(mass, axis=-1) - mass
        inside = mx.sum(before < how.top_p, axis=-1, keepdims=True)
        edge = mx.take_along_axis(ordered, mx.maximum(inside, 1) - 1, axis=-1)
        is_off = how.top_p > 1
        edge = mx.where(is_off, -mx.inf, edge)
        if count is not None:
            is_certain = is_off | (inside < count)
            if floor is not None:  # min-p cuts within the candidates anyway
                is_certain = is_certain | (floor >= ordered[:, -1:])
            if how.top_k is not None and how.xtc is None:  # and so does top-k
                is_certain = is_certain | (how.top_k <= count)
        floor = edge if floor is None else mx.maximum(floor, edge)
    if floor is not None:
        logprobs = mx.where(logprobs >= floor, logprobs, -mx.inf)
    if how.xtc is not None:
        logprobs = _without_top_choices(logprobs, how.xtc, row_keys)
        ordered = None  # the order has changed
    if how.top_k is not None:
        # What is out already is minus infinity and at the end of the order: the edge is the same.
        ordered = _ordered(logprobs, count) if ordered is None else ordered
        last = mx.minimum(how.top_k, ordered.shape[-1]) - 1
        edge = mx.take_along_axis(ordered, last, axis=-1)
        # With few candidates, a row without top-k would be cut at the last of them.
        edge = mx.where(how.top_k <= ordered.shape[-1], edge, -mx.inf)
        logprobs = mx.where(logprobs >= edge, logprobs, -mx.inf)
    return logprobs, is_certain


def _without_top_choices(logprobs: mx.array, xtc: Xtc, row_keys: mx.array) -> mx.array:
    """XTC (spec 20 section 4): drop all tokens above the threshold but the least likely of them.

    The threshold is a share of what the filters left. That is summed over all V values, since sums
    of candidates and of sorted values would round differently.
    """
    coins = mx.vmap(lambda key: mx.random.uniform(key=mx.random.split(key, 2)[0]))(row_keys)
    shares = logprobs - mx.logsumexp(logprobs, axis=-1, keepdims=True)
    is_above = shares > xtc.log_threshold
    least = mx.min(mx.where(is_above, shares, mx.inf), axis=-1, keepdims=True)
    is_out = is_above & (shares > least) & ~xtc.spared
    is_out = is_out & xtc.is_on & (coins[:, None] <= xtc.probability)
    return mx.where(is_out, -mx.inf, logprobs)


def _ordered(values: mx.array, count: int | None) -> mx.array:
    return _descending(values) if count is None else largest(values, count)


def _descending(values: mx.array) -> mx.array:
    return -mx.sort(-values, axis=-1)


def largest(values: mx.array, count: int) -> mx.array:
    """The `count` largest values of each row, descending; (B, count), exact."""
    return _best(values, count)[0]


def top(values: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The `count` largest values of each row, descending, and their ids; (B, count) each."""
    rough, ids = _best(values, count, wants_ids=True)
    assert ids is not None
    return rough, ids


def _best(
    values: mx.array, count: int, wants_ids: bool = False
) -> tuple[mx.array, mx.array | None]:
    """The best of each block are found first; the `count` blocks with the best maxima hold all of
    the answer. That reads the row once instead of sorting it (engine-notes section 6: 0.3 ms
    instead of 5.4 at V = 49k).
    """
    rows, width = values.shape
    block = 64 if count <= 64 else 16
    blocks = -(-width // block)
    if blocks <= count:
        chosen, ids = values, mx.broadcast_to(mx.arange(width), values.shape)
    else:
        if blocks * block != width:
            missing = blocks * block - width
            values = mx.pad(values, [(0, 0), (0, missing)], constant_values=-mx.inf)
        grouped = values.reshape(rows, blocks, block)
        best = mx.argpartition(-mx.max(grouped, axis=-1), count - 1, axis=-1)[:, :count]
        chosen = mx.take_along_axis(grouped, best[:, :, None], axis=1).reshape(rows, -1)
        ids = (best[:, :, None] * block + mx.arange(block)).reshape(rows, -1)
    if not wants_ids:
        if chosen.shape[-1] > count:  # on the CPU, dividing takes a tenth of the time of sorting
            chosen = -mx.partition(-chosen, count - 1, axis=-1)[:, :count]
        return _descending(chosen), None
    order = mx.argsort(-chosen, axis=-1)[:, :count]
    return mx.take_along_axis(chosen, order, axis=-1), mx.take_along_axis(ids, order, axis=-1)


_BITS = mx.array([1 << bit for bit in range(32)], dtype=mx.uint32)


def bound(words: Sequence[int], vocab_size: int) -> mx.array:
    """What a guide's packed mask, 32 ids a word, lets logits be at most: float32 (V,) of infinity
    where an id is allowed and minus infinity where it is not.

    A minimum with it costs a third of a choice by a bool array on a CPU, where that has no vector
    instructions.
    """
    if isinstance(words, list | tuple):
        packed = mx.array(list(words), dtype=mx.uint32)
    else:
        buffer: Any = words  # of 32-bit words; MLX takes it as it is, its stubs do not
        packed = mx.array(buffer)
    flat = (packed[:, None] & _BITS).reshape(-1).astype(mx.float32)  # 0 or a power of two
    if flat.size < vocab_size:  # ids beyond the grammar's vocabulary are padding of the model
        flat = mx.concatenate([flat, mx.zeros(vocab_size - flat.size)])
    return (flat[:vocab_size] - 0.5) * mx.inf


def bounded(logits: mx.array, bounds: Sequence[mx.array | None]) -> mx.array:
    """Logits (B, V) of which each row is at most its bound (V,), None: as it is; NaN stays NaN."""
    if all(each is None for each in bounds):
        return logits
    free = mx.full(logits.shape[-1], mx.inf)
    most = mx.stack([free if each is None else each for each in bounds])
    return mx.minimum(logits, most.astype(logits.dtype))


def masked(logits: mx.array, rows: Sequence[Row]) -> mx.array:
    """Logits (B, V) with what the rows' guides forbid at minus infinity."""
    return bounded(logits, [row.mask for row in rows])
