"""From logits to token ids, for all rows of a step at once (spec 20).

Everything is a row transform on a (B, V) array and is the identity at neutral values, so a row
draws the same token alone, in a batch, or in another order. Nothing is read back to the host here.

Randomness: each draw has its own key, made from the row's seed and the position of the token (spec
20 section 3); noise is drawn per token id, so it does not depend on how candidates are sorted. Runs
on the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxlite.engine.row import Row

_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, spec 20 section 3
_BLOCK = 64  # width of a block in the preselection of top candidates
# What float32 can divide log-probabilities by: beyond these, 0 / 0 and inf / inf are not numbers.
_COLDEST, _HOTTEST = 1e-30, 1e30


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the rows of a batch sample; arrays are (B, 1) float32, None where no row needs one.

    Made once whenever the rows of a batch change, not at every step.
    """

    is_greedy: mx.array | None  # bool; None: all rows are greedy
    temperature: mx.array | None
    top_p: mx.array | None
    log_min_p: mx.array | None
    top_k: mx.array | None  # int32
    most_k: int  # the largest top_k, when every row with a filter has a small one; else 0


def recipe(rows: Sequence[Row], vocab_size: int) -> Recipe:
    """The recipe of these rows, in their order."""
    samplings = [row.spec.sampling for row in rows]
    if all(s.is_greedy for s in samplings):
        return Recipe(None, None, None, None, None, 0)
    drawn = [s for s in samplings if not s.is_greedy]
    uses_p = any(0 < s.top_p < 1 for s in drawn)
    uses_k = any(0 < s.top_k < vocab_size for s in drawn)
    largest_k = max((s.top_k for s in drawn if 0 < s.top_k < vocab_size), default=0)

    def column(values: list[float], dtype: mx.Dtype = mx.float32) -> mx.array:
        return mx.array(values, dtype=dtype)[:, None]

    return Recipe(
        is_greedy=column([s.is_greedy for s in samplings], mx.bool_),
        temperature=column([min(max(s.temperature, _COLDEST), _HOTTEST) for s in samplings]),
        # Off is 2, not 1: a rounded sum of probabilities reaches 1 before the last token.
        top_p=column([s.top_p if 0 < s.top_p < 1 else 2.0 for s in samplings]) if uses_p else None,
        log_min_p=mx.log(column([s.min_p for s in samplings]))
        if any(s.min_p for s in drawn)
        else None,
        top_k=column(
            [s.top_k if 0 < s.top_k < vocab_size else vocab_size for s in samplings], mx.int32
        )
        if uses_k
        else None,
        most_k=largest_k if not uses_p and largest_k <= _BLOCK else 0,
    )


def keys(rows: Sequence[Row]) -> mx.array:
    """One random key a row, (B, 2) uint32, for the token that the row draws next."""
    words = []
    for row in rows:
        mixed = (row.spec.sampling.seed ^ ((row.sampled + 1) * _GOLDEN)) & (2**64 - 1)
        words.append([mixed >> 32, mixed & 0xFFFFFFFF])
    return mx.array(words, dtype=mx.uint32)


def sample(logits: mx.array, how: Recipe, rows: Sequence[Row]) -> mx.array:
    """Draw one token a row.

    logits: (B, V), any float dtype. Returns ids (B,) uint32, lazily. Filters act on
    log-probabilities before temperature and are not renormalised between stages (spec 20 section
    2).
    """
    best = mx.argmax(logits, axis=-1)
    if how.is_greedy is None or how.temperature is None:
        return best.astype(mx.uint32)
    logits = logits.astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    floor = _floor(logprobs, how)
    if floor is not None:
        logprobs = mx.where(logprobs >= floor, logprobs, -mx.inf)
    noise = mx.vmap(lambda key: mx.random.gumbel((logprobs.shape[-1],), key=key))(keys(rows))
    drawn = mx.argmax(logprobs / how.temperature + noise, axis=-1)
    return mx.where(how.is_greedy[:, 0], best, drawn).astype(mx.uint32)


def _floor(logprobs: mx.array, how: Recipe) -> mx.array | None:
    """The log-probability (B, 1) below which a token is out, or None without filters.

    Top-p, min-p and top-k each keep a prefix of the tokens in order of probability, so together
    they keep the shortest of their prefixes: three thresholds and their maximum. Equal values at
    the edge stay together.
    """
    floors: list[mx.array] = []
    if how.log_min_p is not None:
        floors.append(mx.max(logprobs, axis=-1, keepdims=True) + how.log_min_p)
    if how.top_p is not None or how.top_k is not None:
        ordered = largest(logprobs, how.most_k) if how.most_k else _descending(logprobs)
        if how.top_p is not None:
            mass = mx.exp(ordered)
            before = mx.cumsum(mass, axis=-1) - mass
            inside = mx.sum(before < how.top_p, axis=-1, keepdims=True)
            floors.append(mx.take_along_axis(ordered, mx.maximum(inside, 1) - 1, axis=-1))
        if how.top_k is not None:
            last = mx.minimum(how.top_k, ordered.shape[-1]) - 1
            edge = mx.take_along_axis(ordered, last, axis=-1)
            # With few candidates, a row without top-k would be cut at the last of them.
            floors.append(mx.where(how.top_k <= ordered.shape[-1], edge, -mx.inf))
    if not floors:
        return None
    floor = floors[0]
    for other in floors[1:]:
        floor = mx.maximum(floor, other)
    return floor


def _descending(values: mx.array) -> mx.array:
    return -mx.sort(-values, axis=-1)


def largest(values: mx.array, count: int) -> mx.array:
    """The `count` largest values of each row, descending; (B, count), exact, count <= 64.

    The best of each block of 64 are found first; the `count` blocks with the best maxima hold all
    of the answer. That reads the row once instead of sorting it (engine-notes section 6: 0.3 ms
    instead of 5.4 at V = 49k).
    """
    rows, width = values.shape
    blocks = -(-width // _BLOCK)
    if blocks <= count:
        return _descending(values)[:, :count]
    if blocks * _BLOCK != width:
        values = mx.pad(values, [(0, 0), (0, blocks * _BLOCK - width)], constant_values=-mx.inf)
    grouped = values.reshape(rows, blocks, _BLOCK)
    best = mx.argpartition(-mx.max(grouped, axis=-1), count - 1, axis=-1)[:, :count]
    chosen = mx.take_along_axis(grouped, best[:, :, None], axis=1).reshape(rows, -1)
    return _descending(chosen)[:, :count]


def allowed(words: Sequence[int], vocab_size: int) -> mx.array:
    """A guide's packed mask, 32 ids a word, as a bool array (V,)."""
    packed = mx.array(list(words), dtype=mx.uint32)
    bits = (packed[:, None] >> mx.arange(32, dtype=mx.uint32)) & 1
    flat = bits.reshape(-1).astype(mx.bool_)
    if flat.size < vocab_size:  # ids beyond the grammar's vocabulary are padding of the model
        flat = mx.concatenate([flat, mx.zeros(vocab_size - flat.size, dtype=mx.bool_)])
    return flat[:vocab_size]


def masked(logits: mx.array, rows: Sequence[Row]) -> mx.array:
    """Logits (B, V) with what the rows' guides forbid at minus infinity."""
    if all(row.mask is None for row in rows):
        return logits
    free = mx.ones(logits.shape[-1], dtype=mx.bool_)
    masks = mx.stack([free if row.mask is None else row.mask for row in rows])
    return mx.where(masks, logits, -mx.inf)
