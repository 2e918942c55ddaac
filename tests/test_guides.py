"""Guides steer their own rows, and a fault stays where it is (decisions D24, D19)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import pytest

from mlxlite.engine.worker import Worker
from mlxlite.errors import EngineFault
from mlxlite.types import Finish, Verdict
from tests.rows import PROMPT, Gate, Heard, Scripted, ask, mask_of, start

# ----------------------------------------------------------------------------------- guides


@pytest.mark.parametrize("may_steer", [True, False])
def test_a_guide_sees_each_id_once_and_in_order(engine: Worker, may_steer: bool) -> None:
    plain = ask(engine, max_tokens=6).ids
    guide = Scripted(lambda so_far, ids: None, may_steer)
    heard = ask(engine, max_tokens=6, guide=guide, eos=plain[5:])
    assert heard.ids == plain[:5]
    assert guide.calls == [(), *((token,) for token in plain[:5])], "EOS is not shown"


@pytest.mark.parametrize("may_steer", [True, False])
@pytest.mark.parametrize("keep", [0, 1])
def test_a_guide_stops_a_row_with_or_without_the_last_token(
    engine: Worker, may_steer: bool, keep: int
) -> None:
    plain = ask(engine, max_tokens=6).ids
    guide = Scripted(
        lambda so_far, ids: Verdict(keep, stop=True) if len(so_far) == 3 else None, may_steer
    )
    heard = ask(engine, max_tokens=6, guide=guide)
    assert (heard.ids, heard.finish) == (plain[: 2 + keep], Finish.GUIDE)
    assert heard.done.generated_tokens == 2 + keep


def test_a_guide_may_stop_before_the_first_token(engine: Worker) -> None:
    heard = ask(engine, guide=Scripted(lambda so_far, ids: Verdict(0, stop=True)))
    assert (heard.ids, heard.finish, heard.done.generated_tokens) == ([], Finish.GUIDE, 0)


@pytest.mark.parametrize("may_steer", [True, False])
def test_a_row_whose_tokens_are_dropped_still_ends(engine: Worker, may_steer: bool) -> None:
    guide = Scripted(lambda so_far, ids: Verdict(keep=0), may_steer)
    heard = ask(engine, max_tokens=4, guide=guide)
    assert (heard.ids, heard.finish, heard.done.generated_tokens) == ([], Finish.LENGTH, 0)
    assert len(guide.calls) == 1 + 4


@pytest.mark.parametrize("after", [0, 2])
def test_forced_ids_come_in_order_and_the_model_goes_on_from_them(
    engine: Worker, after: int
) -> None:
    plain = ask(engine, max_tokens=after).ids if after else []
    forced = (400, 3, 77)
    guide = Scripted(
        lambda so_far, ids: Verdict(1, forced=forced) if len(so_far) == after else None
    )
    heard = ask(engine, max_tokens=after + 6, guide=guide)
    assert heard.ids == plain + [*forced] + ask(engine, [*PROMPT, *plain, *forced], 3).ids
    assert heard.done.generated_tokens == after + 6
    assert guide.calls[1:] == [(token,) for token in heard.ids]


def test_max_tokens_cuts_forced_ids(engine: Worker) -> None:
    guide = Scripted(lambda so_far, ids: None if so_far else Verdict(0, forced=(7, 8, 9)))
    heard = ask(engine, max_tokens=2, guide=guide)
    assert (heard.ids, heard.finish) == ([7, 8], Finish.LENGTH)


def test_a_forced_eos_ends_the_row(engine: Worker) -> None:
    guide = Scripted(lambda so_far, ids: None if so_far else Verdict(0, forced=(7, 2, 9)))
    heard = ask(engine, guide=guide, eos=(2,))
    assert (heard.ids, heard.finish) == ([7], Finish.EOS)
    assert heard.done.generated_tokens == 2


@pytest.mark.parametrize("late", [True, False])
def test_masks_are_set_changed_and_lifted(engine: Worker, late: bool) -> None:
    words: dict[int, Any] = {0: mask_of([10, 511]), 2: mask_of([40]), 4: ()}
    masks = {at: partial(list, mask) if late else mask for at, mask in words.items()}
    guide = Scripted(lambda so_far, ids: Verdict(len(ids), mask=masks.get(len(so_far))))
    neighbour = start(engine, (8, 9), 8)
    heard = ask(engine, max_tokens=7, guide=guide)
    assert set(heard.ids[:2]) <= {10, 511} and heard.ids[2:4] == [40, 40]
    assert heard.ids[4:] == ask(engine, [*PROMPT, *heard.ids[:4]], 3).ids, "free again"
    assert neighbour.done and neighbour.ids == ask(engine, (8, 9), 8).ids


def test_a_mask_is_computed_while_the_forward_runs(
    engine: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each draw, after the row's next forward was begun, whoever is beside it."""
    happened: list[str] = []
    batch: Any = engine._loop.batch
    forward, begin = batch.lanes.forward, mx.async_eval

    def compute(count: int) -> Sequence[int]:
        happened.append(f"mask {count}")
        return mask_of([10, 40])

    def decide(so_far: list[int], ids: Sequence[int]) -> Verdict:
        happened.append(f"saw {len(so_far)}")
        return Verdict(len(ids), mask=partial(compute, len(so_far)))

    def queued(inputs: mx.array) -> mx.array:
        happened.append("forward")
        return forward(inputs)

    def begun(*arrays: Any) -> None:
        if happened and happened[-1] != "begun":
            happened.append("begun")
        begin(*arrays)

    monkeypatch.setattr(batch.lanes, "forward", queued)
    monkeypatch.setattr(mx, "async_eval", begun)
    heard = ask(engine, max_tokens=3, guide=Scripted(decide))
    assert set(heard.ids) <= {10, 40} and heard.finish is Finish.LENGTH
    for count in range(3):
        at = happened.index(f"mask {count}")
        assert happened[at - 1] == "begun" and happened[:at].count("forward") == count + 1
    assert sum(what.startswith("mask") for what in happened) == 3


def test_a_masked_row_takes_the_best_of_what_is_allowed(engine: Worker) -> None:
    best = ask(engine, max_tokens=1).ids[0]
    others = [token for token in range(512) if token != best]
    guide = Scripted(lambda so_far, ids: Verdict(len(ids), mask=mask_of(others)))
    second = ask(engine, max_tokens=1, guide=guide).ids[0]
    pair = Scripted(lambda so_far, ids: Verdict(len(ids), mask=mask_of([3, second])))
    assert second != best and ask(engine, max_tokens=1, guide=pair).ids == [second]


# ------------------------------------------------------------------- faults stay where they are


def failing(after: int) -> Callable[[list[int], Sequence[int]], None]:
    def decide(so_far: list[int], ids: Sequence[int]) -> None:
        if len(so_far) >= after:
            raise ZeroDivisionError("the guide's own fault")

    return decide


@pytest.mark.parametrize("may_steer", [True, False])
@pytest.mark.parametrize("after", [0, 2])
def test_a_failing_guide_ends_its_row_only(engine: Worker, may_steer: bool, after: int) -> None:
    neighbour = start(engine, (8, 9), 8)
    heard = ask(engine, guide=Scripted(failing(after), may_steer))
    assert heard.finish is Finish.ERROR and isinstance(heard.error, EngineFault)
    assert len(heard.ids) == max(after - 1, 0)
    assert neighbour.finish is Finish.LENGTH and neighbour.ids == ask(engine, (8, 9), 8).ids


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict(1, forced=(512,)),
        Verdict(1, forced=(-1,)),
        Verdict(1, forced=(2**40,)),
        Verdict(1, mask=(2**40,)),
        Verdict(1, mask=lambda: (2**40,)),
        Verdict(1, mask=lambda: [][0]),
    ],
    ids=["past", "negative", "far-past", "mask", "late-mask", "no-mask"],
)
def test_an_impossible_verdict_ends_its_row_only(engine: Worker, verdict: Verdict) -> None:
    neighbour = start(engine, (8, 9), 8)
    heard = ask(engine, guide=Scripted(lambda so_far, ids: verdict if so_far else None))
    assert isinstance(heard.error, EngineFault)
    assert neighbour.finish is Finish.LENGTH


def test_a_failing_sink_ends_its_row_only(engine: Worker) -> None:
    def fail(heard: Heard) -> None:
        raise OSError("nobody listens")

    neighbour = start(engine, (8, 9), 8)
    heard = ask(engine, at_event=fail)
    assert [event.done is not None for event in heard.events] == [False, True]
    assert isinstance(heard.error, EngineFault)
    assert neighbour.finish is Finish.LENGTH and neighbour.ids == ask(engine, (8, 9), 8).ids


class Breakable:
    """The engine's model, with a switch."""

    def __init__(self, model: Any, breaks: Callable[[tuple[int, ...]], bool]) -> None:
        self._model, self._breaks, self.layers = model, breaks, model.layers

    def __call__(self, inputs: Any, cache: Any) -> Any:
        if self._breaks(inputs.shape):
            raise RuntimeError("out of memory")
        return self._model(inputs, cache=cache)


def test_a_failing_step_ends_its_rows_and_the_engine_goes_on(
    engine: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(engine)
    neighbour = start(engine, (8,), 8)
    batch: Any = engine._loop.batch
    with monkeypatch.context() as patch:
        patch.setattr(batch.lanes, "_model", Breakable(batch._model, lambda shape: True))
        gate.open()
        for row in (gate.heard, neighbour):
            assert row.finish is Finish.ERROR and isinstance(row.error, EngineFault)
    assert len(neighbour.ids) == 0


def test_a_failing_prefill_ends_its_row_only(
    engine: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(engine)
    long = start(engine, range(3, 90), 8)
    batch: Any = engine._loop.batch
    with monkeypatch.context() as patch:
        patch.setattr(batch, "_model", Breakable(batch._model, lambda shape: shape[1] > 1))
        gate.open()
        assert isinstance(long.error, EngineFault)
        assert gate.heard.finish is Finish.LENGTH
    assert gate.heard.ids == ask(engine, max_tokens=4).ids
