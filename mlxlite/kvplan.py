"""What the caches of one sequence take: a value from which admission counts bytes (D18).

A plan lists the parts of each cache that mlx-lm makes for a model, in its order. A part grows with
every token (`Full`), grows up to a window (`Window`), or is there from the first token on (`Const`,
the state of recurrent and convolution layers). `models/kv_layout.py` derives plans from configs;
the engine only counts with them, so this file knows no model.

Immutable; the sums are made once, each question is a few integer operations.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SLAB_TOKENS = 256  # mlx-lm's growing caches are allocated in steps of so many tokens


@dataclass(frozen=True, slots=True)
class Full:
    """Keys and values of every token: attention without a window, latent attention, indexers."""

    per_token_bytes: int


@dataclass(frozen=True, slots=True)
class Window:
    """Keys and values of the newest `tokens` tokens."""

    tokens: int
    per_token_bytes: int


@dataclass(frozen=True, slots=True)
class Const:
    """A state of fixed size."""

    n_bytes: int


Part = Full | Window | Const
Layer = tuple[Part, ...]
"""One cache of mlx-lm: a single part, or several where a layer keeps several caches."""


@dataclass(frozen=True, slots=True)
class KVPlan:
    """layers: what each cache of a row consists of, in the order of mlx-lm's `make_cache`.

    per_token_bytes: of what grows without end. constant_bytes: of a row without any token.
    windows: (tokens, bytes a token), narrowest first, each width once.
    """

    layers: tuple[Layer, ...]
    per_token_bytes: int = field(init=False)
    constant_bytes: int = field(init=False)
    windows: tuple[tuple[int, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        growing = constant = 0
        widths: dict[int, int] = {}
        for part in (part for layer in self.layers for part in layer):
            match part:
                case Full(per_token_bytes):
                    growing += per_token_bytes
                case Window(tokens, per_token_bytes):
                    widths[tokens] = widths.get(tokens, 0) + per_token_bytes
                case Const(n_bytes):
                    constant += n_bytes
        object.__setattr__(self, "per_token_bytes", growing)
        object.__setattr__(self, "constant_bytes", constant)
        object.__setattr__(self, "windows", tuple(sorted(widths.items())))

    def row_bytes(self, tokens: int) -> int:
        """Bytes that a row of `tokens` tokens holds, without what is allocated ahead."""
        total = self.constant_bytes + self.per_token_bytes * tokens
        for width, per_token_bytes in self.windows:
            total += per_token_bytes * min(tokens, width)
        return total

    def row_bytes_allocated(self, tokens: int, step: int = SLAB_TOKENS) -> int:
        """The same in whole slabs of `step` tokens; a window ends at its width.

        Exact for caches that grow token by token or from a multiple of `step`, and for slots of a
        pool whose widths are multiples of it. See `row_bytes_peak` for prompts fed in odd chunks.
        """
        return self.row_bytes(-(-tokens // step) * step)

    def row_bytes_peak(self, tokens: int, chunk: int, step: int = SLAB_TOKENS) -> int:
        """The most that a row may ever hold on its way to `tokens` tokens, fed in any chunks up to
        `chunk` tokens.

        mlx-lm's growing cache starts a new slab behind whatever it holds, so it may end `step` - 1
        tokens over; its window cache holds window + chunk - 1 tokens after a chunk, and a started
        slab on top of an odd prompt.
        """
        total = self.constant_bytes + self.per_token_bytes * (tokens + step - 1)
        for width, per_token_bytes in self.windows:
            fed = min(tokens, width - 1 + max(chunk, 1))
            total += per_token_bytes * max(fed, min(tokens + step - 1, width))
        return total


@dataclass(frozen=True, slots=True)
class Room:
    """What memory allows a model on this machine.

    usable_bytes: for everything. plan: of one row. room_bytes: for all rows and kept prefixes
    together. max_context: tokens of the longest row that fits.
    """

    usable_bytes: int
    plan: KVPlan
    room_bytes: int
    max_context: int
