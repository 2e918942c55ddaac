"""The batch: a row's tokens depend on the row alone, and the device never waits for Python.

The oracle is the slowest decoder there is: run the whole sequence from the start for every token.
Chunked prefill, caches, joining, leaving and batching must all give its tokens back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxlite.engine import backend, load
from mlxlite.engine.batch import Batch
from mlxlite.engine.lanes import cache_arrays
from mlxlite.engine.row import Phase, Row
from mlxlite.types import Event, Finish, RowSpec, Sampling, Verdict
from tests import tiny

import mlx.core as mx  # isort: skip

pytestmark = pytest.mark.slow

# One model a kind of cache: plain, sliding window, recurrent, and a list of two kinds a layer.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
        "rms_norm_eps": 1e-6,
    },
    "mamba": {
        "intermediate_size": 128,
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
    "falcon_h1": {
        "head_dim": 16,
        "mamba_d_conv": 4,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 8,
        "mamba_expand": 1,
        "mamba_n_groups": 1,
        "mamba_n_heads": 4,
        "mamba_proj_bias": False,
        "mamba_rms_norm": False,
        "mamba_norm_before_gate": True,
        "mlp_bias": False,
        "projectors_bias": False,
        "attention_bias": False,
    },
}


def loaded(model: Any, config: dict[str, Any] | None = None) -> load.LoadedModel:
    return load.LoadedModel(model, config or {}, "float32", 0, 1024)


@pytest.fixture(scope="module")
def llama(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> load.LoadedModel:
    folder = tmp_path_factory.mktemp("dense")
    return load.load(tiny_folder, backend.start(folder), "auto", folder)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, llama: load.LoadedModel) -> load.LoadedModel:
    if request.param == "llama":
        return llama
    entries = FAMILIES[request.param]
    config = {**tiny.CONFIG, "vocab_size": 512, "model_type": request.param, **entries}
    return loaded(tiny.build(config), config)


@pytest.fixture(params=[True, False], ids=["pool", "alone"])
def batch(request: pytest.FixtureRequest, llama: load.LoadedModel) -> Batch:
    made = Batch(llama)
    made.vocab_size = 512
    made.lanes.may_pool = request.param
    return made


# ------------------------------------------------------------------------- driving a batch


def new_row(prompt: tuple[int, ...], max_tokens: int, sampling: Sampling | None = None) -> Row:
    spec = RowSpec(prompt, sampling or Sampling(), max_tokens, frozenset())
    return Row(1, spec, lambda event: None, phase=Phase.PREFILL)


def prefill(batch: Batch, row: Row, chunk_tokens: int = 10_000) -> None:
    while row.prompt_left:
        tokens = min(chunk_tokens, row.prompt_left)
        batch.prefill(row, tokens)
        row.fed += tokens
    row.phase = Phase.DECODE


def finish_at_length(taken: dict[Row, list[int]]) -> Callable[[Row, int], None]:
    def accept(row: Row, token: int, logprob: Any) -> None:
        taken[row].append(token)
        row.ids.append(token)
        if len(taken[row]) == row.spec.max_tokens:
            row.end(Finish.LENGTH)

    return accept


def decode(batch: Batch, *rows: Row) -> list[list[int]]:
    """Run rows whose prompts are done to their ends; the tokens of each."""
    taken: dict[Row, list[int]] = {row: [] for row in rows}
    accept = finish_at_length(taken)
    while live := [row for row in rows if row.phase is Phase.DECODE]:
        batch.step(live, accept)
    return [taken[row] for row in rows]


def alone(
    model: load.LoadedModel, prompt: tuple[int, ...], count: int, sampling: Sampling | None = None
) -> list[int]:
    batch = Batch(model)
    batch.vocab_size = 512
    row = new_row(prompt, count, sampling)
    prefill(batch, row)
    return decode(batch, row)[0]


def slowest(model: load.LoadedModel, prompt: tuple[int, ...], count: int) -> list[int]:
    """Greedy decoding without any cache."""
    ids = list(prompt)
    for _ in range(count):
        logits = model.model(mx.array([ids]))
        ids.append(int(mx.argmax(logits[0, -1]).item()))
    return ids[len(prompt) :]


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(1000 * seed + length).choices(range(3, 512), k=length))


# --------------------------------------------------------------------- the same tokens, always


@pytest.mark.parametrize("length", [1, 2, 5, 30])
def test_one_row_decodes_like_the_slowest_decoder(family: load.LoadedModel, length: int) -> None:
    assert alone(family, prompt_of(length), 8) == slowest(family, prompt_of(length), 8)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 28])
def test_chunked_prefill_equals_one_shot(family: load.LoadedModel, chunk_tokens: int) -> None:
    batch = Batch(family)
    batch.vocab_size = 512
    row = new_row(prompt_of(29), 6)
    prefill(batch, row, chunk_tokens)
    assert decode(batch, row) == [alone(family, prompt_of(29), 6)]


@pytest.mark.parametrize("may_pool", [False, True])
def test_rows_decode_together_as_each_alone(family: load.LoadedModel, may_pool: bool) -> None:
    batch = Batch(family)
    batch.vocab_size = 512
    batch.lanes.may_pool = may_pool
    lengths = [(1, 4), (13, 1), (5, 9), (20, 6)]
    rows = [new_row(prompt_of(length), count) for length, count in lengths]
    for row in rows:
        prefill(batch, row)
    assert decode(batch, *rows) == [alone(family, prompt_of(n), count) for n, count in lengths]


@pytest.mark.parametrize("fed", [0, 7], ids=["fresh", "after a shared prefix"])
def test_prompts_run_together_as_each_alone(
    llama: load.LoadedModel, batch: Batch, fed: int
) -> None:
    prefix = prompt_of(fed) if fed else ()
    prompts = [(*prefix, *prompt_of(length, 3)) for length in (9, 12, 2, 11)]
    rows = [new_row(prompt, 5) for prompt in prompts]
    for row in rows if fed else []:
        batch.prefill(row, fed)
        row.fed = fed
    lefts = [row.chunk_left for row in rows]
    batch.prefill_together(rows)
    for row, left in zip(rows, lefts, strict=True):
        row.fed += left
        row.phase = Phase.DECODE
    assert decode(batch, *rows) == [alone(llama, prompt, 5) for prompt in prompts]


def test_rows_may_join_and_leave_at_any_step(llama: load.LoadedModel, batch: Batch) -> None:
    pick = random.Random(5)
    rows = []
    for seed in range(16):
        sampling = pick.choice([Sampling(), Sampling(0.9, 0.9, seed=seed), Sampling(1, top_k=9)])
        row = new_row(prompt_of(pick.randint(1, 20), seed), pick.randint(1, 12), sampling)
        row.id = seed
        rows.append(row)
    taken: dict[Row, list[int]] = {row: [] for row in rows}
    given_up = set()
    coming, live = list(rows), list[Row]()
    while coming or live:
        while coming and pick.random() < 0.5:
            live.append(coming.pop())
            prefill(batch, live[-1], pick.randint(1, 9))
        if live and pick.random() < 0.1:
            given_up.add(leaving := pick.choice(live))
            leaving.end(Finish.CANCELLED)
        pick.shuffle(live)
        live = [row for row in live if row.phase is Phase.DECODE]
        batch.step(live, finish_at_length(taken))
        live = [row for row in live if row.phase is Phase.DECODE]
    assert given_up
    for row in rows:
        spec = row.spec
        expected = alone(llama, spec.prompt_ids, spec.max_tokens, spec.sampling)
        assert taken[row] == expected[: len(taken[row])]
        assert len(taken[row]) == spec.max_tokens or row in given_up


def test_a_cancelled_batch_leaves_no_token_for_the_next_rows(
    llama: load.LoadedModel, batch: Batch
) -> None:
    first, second = new_row(prompt_of(4), 9), new_row(prompt_of(6), 5)
    prefill(batch, first)
    batch.step([first], finish_at_length({first: []}))
    first.end(Finish.CANCELLED)
    prefill(batch, second)
    assert decode(batch, second) == [alone(llama, prompt_of(6), 5)]


def test_forgetting_everything_starts_afresh(llama: load.LoadedModel, batch: Batch) -> None:
    row = new_row(prompt_of(4), 9)
    prefill(batch, row)
    batch.step([row], finish_at_length({row: []}))
    batch.drop_all()
    row.end(Finish.ERROR)
    again = new_row(prompt_of(4), 3)
    prefill(batch, again)
    assert decode(batch, again) == [alone(llama, prompt_of(4), 3)]


# --------------------------------------------------------------------------- one step ahead


class Diary:
    """A model that says token n + 1 after token n and writes down when it is asked."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def make_cache(self) -> list[Any]:
        return []

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        self.entries.append("forward")
        return mx.where(mx.arange(64) == inputs[..., None] + 1, 1.0, 0.0)

    def accept(self, row: Row, token: int, logprob: Any) -> None:
        self.entries.append(f"read {token}")
        if token == row.spec.prompt_ids[-1] + row.spec.max_tokens:
            row.end(Finish.LENGTH)


class Watching:
    """A guide that may steer, and never does."""

    may_steer = True

    def observe(self, ids: Any) -> Verdict:
        return Verdict(keep=1)

    def took(self, count: int) -> None:
        raise AssertionError("no run was proposed")


@pytest.mark.parametrize("guide", [None, Watching()])
def test_the_next_forward_is_queued_before_a_token_is_read(guide: Watching | None) -> None:
    diary = Diary()
    batch = Batch(loaded(diary))
    batch.vocab_size = 64
    row = Row(
        1, RowSpec((4,), Sampling(), 3, frozenset(), guide), lambda event: None, phase=Phase.DECODE
    )
    while row.phase is Phase.DECODE:
        batch.step([row], diary.accept)
    assert diary.entries == ["forward", "forward", "read 5", "forward", "read 6", "read 7"]


@pytest.mark.parametrize("guide", [None, Watching()])
@pytest.mark.parametrize("runs_ahead", [True, False])
def test_where_a_forward_cannot_run_ahead_tokens_are_read_before_it_starts(
    guide: Watching | None, runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    diary = Diary()
    batch = Batch(loaded(diary), runs_ahead)
    batch.vocab_size = 64
    spec = RowSpec((4,), Sampling(), 3, frozenset(), guide)
    row = Row(1, spec, lambda event: None, phase=Phase.DECODE)
    start = mx.async_eval

    def started(*arrays: mx.array) -> None:
        diary.entries.append("start")
        start(*arrays)

    monkeypatch.setattr(mx, "async_eval", started)
    while row.phase is Phase.DECODE:
        batch.step([row], diary.accept)
    order = [entry for entry in diary.entries if entry != "forward"]
    late = ["start"] if guide is not None else []  # of the draw, which waits for the guide
    if runs_ahead:
        assert order == ["start", "start", "read 5", *late, "start", "read 6", *late, "read 7"]
    else:
        assert order == ["start", "read 5", "start", "read 6", "start", "read 7"]


def test_no_forward_is_wasted_on_a_row_of_one_token() -> None:
    diary = Diary()
    batch = Batch(loaded(diary))
    batch.vocab_size = 64
    rows = [new_row((n,), count) for n, count in ((4, 1), (20, 2))]
    for row in rows:
        row.phase = Phase.DECODE
    while live := [row for row in rows if row.phase is Phase.DECODE]:
        batch.step(live, diary.accept)
    assert diary.entries == ["forward", "forward", "forward", "read 5", "read 21", "read 22"]


# ----------------------------------------------------------------------------------- memory


def buffers_of(value: Any) -> Iterator[mx.array]:
    """Every array that a cache holds, however deep."""
    if isinstance(value, mx.array):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from buffers_of(item)
    elif isinstance(value, dict):
        yield from buffers_of(list(value.values()))
    elif hasattr(value, "__dict__"):
        yield from buffers_of(vars(value))


def test_every_buffer_of_a_cache_is_evaluated_with_the_step(family: load.LoadedModel) -> None:
    batch = Batch(family)
    row = new_row(prompt_of(9), 1)
    prefill(batch, row, 4)
    assert row.cache is not None
    expected = {id(array) for array in buffers_of(row.cache)}
    assert expected
    assert {id(array) for array in cache_arrays(row.cache)} == expected


class LoudHead:
    """A model whose logits take 4 MB a token once they are computed."""

    layers = (None,)

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        keys = inputs[:, None, :, None].astype(mx.float32)
        cache[0].update_and_fetch(keys, keys)
        return mx.arange(1 << 20) * inputs[..., None].astype(mx.float32)


def test_prefill_computes_no_logits(llama: load.LoadedModel) -> None:
    batch = Batch(loaded(LoudHead()))
    row = new_row(prompt_of(9), 1)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    prefill(batch, row, 4)
    assert mx.get_peak_memory() - before < 1 << 20


def test_a_step_writes_into_the_cache_instead_of_copying_it(batch: Batch) -> None:
    rows = [new_row(prompt_of(900, seed), 100) for seed in range(2)]
    taken: dict[Row, list[int]] = {row: [] for row in rows}
    for row in rows:
        prefill(batch, row)
    batch.step(rows, finish_at_length(taken))
    smallest = min(array.nbytes for array in batch.lanes.arrays)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(8):
        batch.step(rows, finish_at_length(taken))
    assert mx.get_peak_memory() - before < smallest, "one buffer was copied at least"


def test_an_ended_row_lets_go_of_its_cache(batch: Batch) -> None:
    row = new_row(prompt_of(9), 3)
    prefill(batch, row)
    batch.step([row], finish_at_length({row: []}))
    row.mask = mx.ones(512, dtype=mx.bool_)
    row.end(Finish.CANCELLED)
    assert row.cache is None and row.mask is None


def test_the_last_event_of_a_row_has_its_numbers() -> None:
    heard: list[Event] = []
    row = Row(1, RowSpec((1, 2, 3), Sampling(), 5, frozenset()), heard.append)
    row.start()
    row.accepted = 4
    row.end(Finish.EOS)
    done = heard[0].done
    assert done is not None
    assert (done.prompt_tokens, done.generated_tokens, done.cached_tokens) == (3, 4, 0)
    assert min(done.queued_s, done.prefill_s, done.decode_s) >= 0


def test_warm_up_learns_the_width_of_the_vocabulary(llama: load.LoadedModel) -> None:
    batch = Batch(llama)
    assert batch.warm_up(4) > 0
    assert batch.vocab_size == 512
    assert not batch.is_busy
