"""The shared vocabulary: Ask -> Row -> Event -> Delta (floor 0: imports only `errors`).

    Ask    what a client wants, whatever API it spoke; values as asked, nothing resolved
    Row    one sequence inside the engine; `RowSpec` is the part that crosses the border
    Event  what one step produced for one row: token ids, or its end
    Delta  what a client sees: text in a channel, a finish reason, usage

Everything here is a plain frozen value: these are the only things that cross between threads.

Letters for array shapes, used in every docstring: B rows, T tokens, H heads, D head size,
V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from mlxlite.errors import MlxliteError

JSON = Any  # a value that json.loads can return


# ---------------------------------------------------------------------------------------- Ask


@dataclass(frozen=True, slots=True)
class Constraint:
    """The form that an answer must have, as asked (decision D7); nothing is compiled.

    kind: json | regex | grammar (GBNF or Lark) | lark | choice. value: the schema (or JSON text of
    one), the expression, the grammar, the choices. field: where the client wrote it. label: its
    name in a Warning header. is_strict: a promise, so kept or refused. is_closed: objects take no
    properties but those that
    their schema names, unless it says otherwise.
    """

    kind: str
    value: JSON
    field: str
    label: str
    is_strict: bool = False
    is_closed: bool = True
    any_whitespace: bool = False
    name: str = ""
    description: str = ""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, API-neutral. None means that the client said nothing (spec 10 section 2).

    Exactly one of `messages` and `prompt` is given. `messages` hold OpenAI-shaped dictionaries;
    `tools` hold nested function tools, checked, none that is no function. Names are those of the
    request fields (`fields.py`).
    """

    messages: tuple[Mapping[str, JSON], ...] | None = None
    prompt: str | tuple[int, ...] | None = None
    echo: bool = False  # the answer starts with the prompt
    n: int = 1  # answers wanted; answer i has seed + i
    stream: bool = False
    include_usage: bool = False
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    repetition_penalty: float | None = None
    repetition_context_size: int | None = None
    presence_penalty: float | None = None
    presence_context_size: int | None = None
    frequency_penalty: float | None = None
    frequency_context_size: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    hlg: Mapping[str, JSON] = field(default_factory=dict)
    top_logprobs: int | None = None  # None: no logprobs; 0: of the drawn tokens only

    tools: tuple[Mapping[str, JSON], ...] = ()
    parallel_tool_calls: bool = True
    max_tool_calls: int | None = None  # the answer ends after so many
    enable_thinking: bool | None = None  # chat_template_kwargs
    preserve_thinking: bool | None = None
    thinking: bool | None = None  # `thinking: {type}`
    reasoning_effort: str | None = None
    thinking_budget: int | None = None  # tokens of reasoning after which it is closed by force
    constraint: Constraint | None = None
    has_format: bool = False  # a form was named, be it plain text
    forced_call: str | None = None  # the answer is a call: of this function, of any if empty


# ---------------------------------------------------------------------------------------- Row


@dataclass(frozen=True, slots=True)
class Tone:
    """The HLG tone curve (spec 20 section 6), in nats; defaults are the built-in ones."""

    width: float = 4.0
    shoulder: float = 4.0
    toe: float = 6.0
    pivot_offset: float = 6.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a row draws its tokens; every field is resolved (spec 20).

    temperature 0 is greedy. top_p is off unless 0 < top_p < 1. top_k 0, min_p 0, xtc_probability 0
    and penalties of 0 are off; so is repetition_penalty 1. A context is how many of the last tokens
    a penalty looks at; 0 is all of them. seed is a 64-bit key; the draw at a position depends on
    (seed, position) alone, never on the row's neighbours.
    """

    temperature: float = 0.0
    top_p: float = 0.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.0
    xtc_special_ids: tuple[int, ...] = ()  # never removed: EOS and newline
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 0.0
    repetition_context: int = 20
    presence_penalty: float = 0.0
    presence_context: int = 20
    frequency_penalty: float = 0.0
    frequency_context: int = 20
    tone: Tone | None = None  # draw by this curve instead of the filters
    transfer: tuple[tuple[float, float], ...] = ()  # points (x %, y %) of a drawn curve, likewise

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 and not self.transfer

    @property
    def penalises_repetition(self) -> bool:
        return self.repetition_penalty not in (0.0, 1.0)


Mask = Sequence[int] | Callable[[], Sequence[int]]
"""Which ids a guide allows next, or what computes it; see `Verdict`."""


@dataclass(frozen=True, slots=True)
class Run:
    """Ids that a guide expects next: the engine may put them through the model in one forward
    (spec 50 section 8; decision D7).

    ids: two at least. is_sure: they come without asking the model. If not, the row's own draw is
    made at every position, and the run is cut before the first id that was drawn otherwise: the ids
    of the answer are then the same with and without it. masks: a count -> for each of so many of
    the first ids, packed words of what may follow it, as in `Verdict`; None if all may. It is asked
    at once or never.

    The engine is free to take none of it, as beside many rows, see `Took`.
    """

    ids: tuple[int, ...]
    is_sure: bool = False
    masks: Callable[[int], Sequence[Sequence[int]]] | None = None


@dataclass(frozen=True, slots=True)
class Took:
    """What became of a run. count: so many of its ids are the row's next ones.

    is_tried: False where it was not worth a forward of its own, so that nothing was found out.
    is_supported: False where the row cannot take such runs at all: a penalty looks at the tokens
    before each draw, log-probabilities are reported one by one. checkpoint_s: host time for keeping
    the caches' state and going back to it.
    """

    count: int
    is_tried: bool = True
    is_supported: bool = True
    checkpoint_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a guide decided after it saw a row's newest tokens (decision D24).

    keep: how many of the observed ids belong to the answer; the rest is dropped, neither counted
    nor cached. stop: the row ends here. forced: ids that come next, whatever the model says. mask:
    packed words, one bit a vocabulary id and 32 ids a word (little-endian), of the ids allowed
    next; None leaves the mask as it was, an empty sequence lifts it. A function computes them: it
    is called once the next forward is under way, or never if the guide sees another id before.
    run: what may be taken at once; not beside forced ids.
    """

    keep: int
    stop: bool = False
    forced: tuple[int, ...] = ()
    mask: Mask | None = None
    run: Run | None = None


class Guide(Protocol):
    """Decides on a row between two steps, from host integers (decision D24).

    Called on the engine thread: once with no ids before the first token is drawn, then with the
    newest ids of the row, in order, each id once, forced ones too; EOS is not shown. It must be
    quick (well under a millisecond) and must not touch an array. An exception ends the row, not its
    neighbours.
    """

    may_steer: bool
    """True if it may ever force ids or set a mask. Such a row's next token is sampled only after
    the guide saw the last one; a guide that only stops leaves the engine one step ahead."""

    def observe(self, ids: Sequence[int]) -> Verdict: ...

    def took(self, what: Took) -> None:
        """Told once for every run that it proposed, before anything else. The ids that were taken
        come to `observe` now, one by one; it must not propose another run before the last."""


@dataclass(frozen=True, slots=True)
class RowSpec:
    """All that the engine needs to know of a request.

    prompt_ids: at least one id. max_tokens: at least 1, already clamped to the room in the
    context. eos_ids: any of them ends the row; it is counted but never delivered (spec 60
    section 2).
    """

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    eos_ids: frozenset[int]
    guide: Guide | None = None
    top_logprobs: int | None = None  # None: no logprobs; 0: of the drawn token only; at most 20
    snapshot_at: int = 0  # prompt tokens that every later turn keeps (spec 10 section 8)
    namespace: str = ""  # state made under one is never reused under another (spec 60 section 1)
    prompt_logprobs: bool = False  # of the prompt's tokens too, from the second on; all are run


# -------------------------------------------------------------------------------------- Event


class Finish(Enum):
    """Why a row ended."""

    EOS = "eos"  # the model ended it
    GUIDE = "guide"  # the guide stopped it: a stop string, a finished grammar
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"  # its client left, or the server stops
    ERROR = "error"  # a fault; `Done.error` says which


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a row. generated_tokens counts a terminating EOS; times are seconds.

    queued_s: submit -> first prefill chunk. prefill_s: until the first token is on the host.
    decode_s: from there to the end.
    """

    finish: Finish
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    queued_s: float
    prefill_s: float
    decode_s: float
    error: MlxliteError | None = None
    lane: str = "serial"  # batched: it shared a forward with others, once at least


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one drawn token, after penalties and masks and before any filter or
    temperature (spec 20 section 8). top: the likeliest ids with theirs, descending."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """What one step gave one row: new ids (never EOS), and its end if it ended.

    logprobs: one an id, if the row asked for them. Those of the prompt come before, a chunk at a
    time, in events without ids.
    """

    ids: tuple[int, ...] = ()
    done: Done | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


Sink = Callable[[Event], bool | None]
"""Takes the events of one row, in order, on the engine thread. It must not wait. True asks the
engine to hold the row: no token is drawn for it until `Engine.resume`."""


# -------------------------------------------------------------------------------------- Delta


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and times of one answer, as the clients' `usage` and the request log show them."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cached_tokens: int
    queued_s: float
    prefill_s: float
    decode_s: float
    lane: str = "serial"  # see `Done`
    fill: Mapping[str, JSON] | None = None  # what was filled (spec 50 section 10), if it was armed


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a tool call. Pieces with the same index make one call.

    id and name are in every piece, the same in all pieces of a call; the first announces them.
    arguments: a fragment of JSON text; all fragments of an index joined are one JSON object.
    """

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer: content, reasoning or a piece of a call, never two of them.

    logprobs belong to the tokens that came since the delta before; those of the prompt come first,
    in deltas of their own. Only the last delta carries `finish` (stop | length | tool_calls) and
    `usage`, and `stop`, the stop string that was found.
    """

    text: str = ""
    reasoning: str = ""
    call: CallPiece | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None
    usage: Usage | None = None
    stop: str | None = None


# ------------------------------------------------------------------------- the engine's border


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the loaded model is, for the start line, `/v1/models` and `prepare`."""

    model_type: str
    backend: str  # metal | cuda | cpu
    dtype: str  # of the activations: float32 | bfloat16 | float16
    weight_bytes: int  # as loaded
    max_context: int  # tokens, prompt and answer together
    vocab_size: int
    memory_bytes: int = 0  # RAM, or the GPU's; 0: unknown


@dataclass(frozen=True, slots=True)
class EmbedSpec:
    """Inputs to embed: token ids, at least one each, none longer than the context.

    pooling: the hidden state that stands for an input: of its `last` token, of its first (`cls`),
    or the `mean` of all; scaled to length 1. logit_ids: if given, the vector is the logits of these
    ids after the last token instead, as they are.
    """

    inputs: tuple[tuple[int, ...], ...]
    pooling: str = "last"
    logit_ids: tuple[int, ...] = ()

    def count_tokens(self) -> int:
        """Of all inputs together: what the model sees."""
        return sum(map(len, self.inputs))


class EngineState(Enum):
    LOADING = "loading"
    READY = "ready"
    STOPPED = "stopped"
    DOWN = "down"


class Engine(Protocol):
    """The engine as everything above it sees it; all methods are safe from any thread."""

    @property
    def state(self) -> EngineState: ...

    @property
    def facts(self) -> ModelFacts:
        """Raises EngineDown before the model is loaded."""

    def submit(self, spec: RowSpec, sink: Sink) -> int:
        """Queue a row and return its id. Raises Busy or EngineDown. The sink is always told the
        end.
        """

    def cancel(self, row_id: int) -> None:
        """Give a row up within one step; unknown and ended ids are ignored."""

    def resume(self, row_id: int) -> None:
        """Let a row go on that its sink had held; unknown, ended and free ones are ignored."""

    def embed(self, spec: EmbedSpec) -> Future[tuple[bytes, ...]]:
        """One vector an input, in order, as little-endian float32. Cancelling the future drops what
        is left of the work. Raises Busy or EngineDown, and so may the future, or EngineFault.
        """

    def stats(self) -> dict[str, JSON]:
        """Counters and gauges for `/stats`: a fresh plain dictionary."""
