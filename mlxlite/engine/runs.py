"""Runs: several known tokens of a row put through the model in one forward (spec 50 section 8).

What a grammar or a template leaves no choice about costs one forward instead of one a token. A
guide proposes a run after it saw the row's newest token; that token's forward is queued then, so
the run's own follows it, in the row's place, and the row's next draw is made from its last logits.

A run that is not sure is checked (decision D7): at each of its positions the row's own draw is
made, with its key, its bias and the mask that the guide gave, and the run ends before the first id
that was drawn otherwise. So the ids are those that the row would have drawn one by one, greedy or
not.

Runs on the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxlite.engine import sample
from mlxlite.engine.recent import adjusted, strengths_of
from mlxlite.engine.row import Row

FEWEST_TOKENS = 2  # a single one saves no forward


def pays(tokens: int, rows: int, share: float) -> bool:
    """Whether a forward of the row's own costs less than what it saves. rows: those that share a
    step. share: see `Backend`."""
    return tokens >= FEWEST_TOKENS and tokens > share * rows


def may_check(row: Row) -> bool:
    """Whether the row's draws at later positions can be made at once. A penalty looks at the tokens
    before, which differ from one position to the next."""
    how = strengths_of([row])
    return row.penalties is None and (how is None or how.width == 0)


def drawn(
    row: Row, logits: mx.array, masks: Sequence[Sequence[int]], first: int, vocab_size: int
) -> list[int]:
    """The row's own draws at several positions; waits for the device.

    logits: (T, V), of the positions. masks: packed words for each, empty where all is free, or none
    at all. first: how many draws from now the first of them is.
    """
    count = logits.shape[0]
    rows = [row] * count
    if (how := strengths_of(rows)) is not None:  # a bias only, see `may_check`
        logits = adjusted(logits, how, None)
    if masks:
        bounds = [sample.bound(words, vocab_size) if len(words) else None for words in masks]
        logits = sample.bounded(logits, bounds)
    keys = sample.keys_ahead(row, first + count)[first:]
    ids, _ = sample.draw(logits, sample.recipe(rows, vocab_size), keys, None)
    found: list[int] = ids.tolist()  # type: ignore[assignment]  # MLX: any nesting of numbers
    return found


def agreed(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many of the first ids are the same."""
    pairs = zip(ids, others, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(others)))
