"""FillGuide beside an engine that takes runs in every way, and its trace (spec 50 section 8)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxlite.prepare import Preparation
from mlxlite.text.fill.guide import FillGuide
from mlxlite.text.fill.trace import Trace
from mlxlite.types import Took, Verdict
from tests import prepared
from tests.filling import DOCS, EOS, HERMES, TOKENIZER, WEATHER, XML, Engine, ids_of

HEAD = "\n<function=get_weather><parameter=city>\n"
CITY = f"<tool_call>{HEAD}{{}}\n</parameter>\n</function>\n</tool_call>"
TWO = CITY.format("Rome") + "\n" + CITY.format("Oslo")


def preparation(template: str = XML, **flags: Any) -> Preparation:
    return prepared.make(
        TOKENIZER,
        template=template,
        vocab_size=TOKENIZER.vocab_size,
        **{"fill": "strict", **flags},
    )


def guide_of(made: Preparation, **fields: Any) -> FillGuide:
    found = made(prepared.ask(**{"tools": (WEATHER,), "max_tokens": 500, **fields})).spec.guide
    assert isinstance(found, FillGuide)
    return found


def written(text: str) -> list[int]:
    return [*ids_of(text), EOS]


# ------------------------------------------------------------------------------ what it takes


def test_a_turn_with_two_calls_is_the_same_in_fewer_draws() -> None:
    script = written(TWO)
    guide = guide_of(preparation())
    engine = Engine(script)
    assert engine.run(guide) == script[:-1]
    assert [run.is_sure for run, _ in engine.runs] == [True] * 4
    texts = [TOKENIZER.decode(run.ids, keep_special=True) for run, _ in engine.runs]
    assert (
        texts == ["\n<function=get_weather><parameter=city>\n", "\n</function>\n</tool_call>"] * 2
    )
    assert engine.draws < 0.65 * len(script)
    counters = guide.counters
    assert counters.decode_steps == engine.draws - 1, "EOS is not shown"
    assert counters.injected == counters.strict == len(script) - engine.draws
    assert counters.span_lens == [12, 6, 12, 6] and counters.wasted_samples == 0


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_an_engine_that_takes_less(count: int) -> None:
    """What was not taken is drawn, and what follows is proposed as ever."""
    script = written(TWO)
    guide = guide_of(preparation())
    engine = Engine(script, take=lambda run, agreed: min(count, len(run.ids)))
    assert engine.run(guide) == script[:-1]
    assert len(engine.runs) == 4
    assert guide.counters.injected == 4 * count
    assert guide.counters.events == (4 if count else 0)


def test_two_tools_are_told_apart_by_the_model() -> None:
    docs = '<tool_call>\n{"name": "search_docs", "arguments": {"query": "a"}}\n</tool_call>'
    city = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "a"}}\n</tool_call>'
    script = written(f"<think>First docs.</think>\n{docs}\n{city}")
    guide = guide_of(preparation(HERMES), tools=(DOCS, WEATHER))
    engine = Engine(script)
    assert engine.run(guide) == script[:-1]
    texts = [TOKENIZER.decode(run.ids) for run, _ in engine.runs]
    head = '\n{"name": "'
    assert texts == [head, '", "arguments": {"', head, '_weather", "arguments": {"city": ']


@pytest.mark.parametrize("most", range(1, 30))
def test_the_limit_of_an_answer_holds(most: int) -> None:
    script = written(TWO)
    engine = Engine(script, most=most)
    assert engine.run(guide_of(preparation(), max_tokens=most)) == script[:most]


def test_the_largest_span_holds() -> None:
    guide = guide_of(preparation(fill_max_span="4"))
    engine = Engine(written(TWO))
    engine.run(guide)
    assert max(guide.counters.span_lens) == 4 and guide.counters.index_truncated == 4


@pytest.mark.parametrize("chunk", [2, 3, 4, 5, 12, 100])
@pytest.mark.parametrize("take", [None, 0, 1, 2, 3])
def test_what_is_sure_goes_in_pieces(chunk: int, take: int | None) -> None:
    """No forward of more than a chunk; what is left over of one token is drawn."""
    script = written(TWO)
    guide = guide_of(preparation(fill_append_chunk_size=str(chunk)))
    engine = Engine(script)
    if take is not None:
        engine.take = lambda run, agreed: min(take, len(run.ids))
    assert engine.run(guide) == script[:-1]
    assert max(len(run.ids) for run, _ in engine.runs) <= chunk
    assert sum(count for _, count in engine.runs) == guide.counters.injected
    assert guide.counters.injected + guide.counters.decode_steps == len(script) - 1
    if take is None:
        left = sum(span % chunk == 1 for span in (12, 6, 12, 6))
        assert guide.counters.injected == 36 - left and guide.counters.events == 4


def test_a_chunk_of_one_is_a_step_for_each_token() -> None:
    script = written(TWO)
    guide = guide_of(preparation(fill_append_chunk_size="1"))
    engine = Engine(script)
    assert engine.run(guide) == script[:-1]
    assert engine.runs == [] and guide.counters.injected == 36
    most = Engine(script, most=9)
    assert most.run(guide_of(preparation(fill_append_chunk_size="1"), max_tokens=9)) == script[:9]


def test_an_echo_is_one_run_whatever_the_chunk() -> None:
    made = preparation(fill="echo", fill_k="4", fill_append_chunk_size="2")
    engine = Engine(written("red green blue and yellow. red green blue and purple!"))
    engine.run(guide_of(made))
    assert max(len(run.ids) for run, _ in engine.runs) > 2


def test_a_stop_between_two_pieces_counts_what_was_taken() -> None:
    guide = guide_of(preparation(fill_append_chunk_size="2"), parallel_tool_calls=False)
    engine = Engine(written(TWO))
    engine.run(guide)
    assert engine.is_stopped and guide.counters.events == 2
    assert guide.counters.injected + guide.counters.decode_steps - len(engine.ids) in (0, 1)


def test_prose_is_not_filled() -> None:
    guide = guide_of(preparation())
    engine = Engine(written("I would call <tool_call> with it's name."))
    engine.run(guide)
    assert engine.runs == []
    assert guide.counters.events == 0 and guide.counters.decode_steps == engine.draws - 1


# -------------------------------------------------------------------- what text decides besides


def test_a_run_may_end_the_row_in_its_middle() -> None:
    """`parallel_tool_calls: false`: the call is complete before its closing markers are."""
    plain = Engine(written(TWO))
    without = preparation(fill="off")(
        prepared.ask(tools=(WEATHER,), parallel_tool_calls=False, max_tokens=500)
    ).spec.guide
    assert without is not None and not isinstance(without, FillGuide)
    plain.run(without)
    filled = Engine(written(TWO))
    filled.run(guide_of(preparation(), parallel_tool_calls=False))
    assert filled.ids == plain.ids and filled.is_stopped
    assert len(filled.runs) == 2 and len(filled.ids) < len(ids_of(CITY.format("Rome")))


def test_a_stop_string_holds() -> None:
    text = "<think>a</think>" + CITY.format("Rome") + " The END is near."
    engine = Engine(written(text))
    engine.run(guide_of(preparation(), stop=("END",)))
    assert engine.is_stopped and TOKENIZER.decode(engine.ids).endswith("The END")


def test_forced_ids_come_first_and_are_known_to_the_session() -> None:
    """A thought that is cut short: what closes it is no draw, and a call after it is filled."""
    made = preparation(XML + "{# enable_thinking <think> #}")
    guide = guide_of(made, thinking_budget=5)
    closing = "\n</think>\n\n"
    script = written("<think>Hmm." + closing + CITY.format("Rome"))
    engine = Engine(script)
    assert engine.run(guide) == script[:-1]
    assert guide.counters.events == 2
    forced = len(ids_of(closing))
    assert guide.counters.decode_steps == len(engine.ids) - forced - guide.counters.injected


# ---------------------------------------------------------------------------------------- echo


def test_an_echo_is_checked_and_cut_where_the_model_goes_another_way() -> None:
    made = preparation(fill="echo", fill_k="4")
    text = "red green blue and yellow. red green blue and purple!"
    script = written(text)
    guide = guide_of(made)
    engine = Engine(script)
    assert engine.run(guide) == script[:-1]
    assert engine.runs and not any(run.is_sure for run, _ in engine.runs)
    counters = guide.counters
    assert counters.echo == counters.injected == counters.verify_accepted > 0
    proposed = sum(len(run.ids) for run, _ in engine.runs)
    assert counters.verify_rejected == proposed - counters.verify_accepted > 0
    assert counters.verify_events == sum(count > 0 for _, count in engine.runs)


@pytest.mark.parametrize(
    ("tell", "unsupported"),
    [(lambda count: Took(0, is_tried=False), False), (lambda count: Took(0, False, False), True)],
)
def test_a_check_that_was_not_made_rejects_nothing(
    tell: Callable[[int], Took], unsupported: bool
) -> None:
    guide = guide_of(preparation(fill="echo", fill_k="4"))
    script = written("red green blue and yellow. red green blue and purple!")
    engine = Engine(script, take=lambda run, agreed: 0, tell=tell)
    assert engine.run(guide) == script[:-1]
    found = guide.counters
    assert found.verify_unsupported == (len(engine.runs) if unsupported else 0)
    assert found.verify_events == found.verify_accepted == found.verify_rejected == 0


def test_the_time_of_checkpoints_is_summed() -> None:
    guide = guide_of(preparation(fill="echo", fill_k="4"))
    script = written("red green blue and yellow. red green blue and purple!")
    engine = Engine(script, tell=lambda count: Took(count, checkpoint_s=0.002))
    engine.run(guide)
    assert guide.counters.render()["checkpointMs"] == pytest.approx(2 * len(engine.runs))


def test_echo_reads_the_prompt_and_comes_after_strict_rows() -> None:
    made = preparation(fill="echo", fill_k="4")
    guide = guide_of(made, messages=({"role": "user", "content": "Say abracadabra-simsalabim."},))
    script = written("abracadabra-simsalabim. " + CITY.format("Rome"))
    engine = Engine(script)
    assert engine.run(guide) == script[:-1]
    assert guide.counters.echo > 10 and guide.counters.strict == 0, "prose before a call"
    strict = Engine(written(TWO))
    guide = guide_of(made)
    strict.run(guide)
    assert guide.counters.strict > 0


# --------------------------------------------------------------------------------- the protocol


def test_ids_that_come_together_are_each_seen_once() -> None:
    script = written(TWO)
    guide = guide_of(preparation())
    verdict = guide.observe(tuple(script[:5]))
    assert verdict == Verdict(5), "the trigger is not the last one"
    assert guide.observe(()).run is None
    single = guide_of(preparation())
    verdict = single.observe(tuple(script[:1]))
    assert verdict.keep == 1 and verdict.run is not None and verdict.run.is_sure
    with pytest.raises(AssertionError):
        single.observe(tuple(script[1:2]))  # `took` was not called
    with pytest.raises(AssertionError):
        guide_of(preparation()).took(Took(0))


@pytest.mark.parametrize(
    ("text", "steers"),
    [
        ("", True),
        ("\n\n", True),
        ("<think>", True),
        ("<think>It is", True),
        ("<think>a</think>\n", True),
        ("<think>It's so.</think>", False),  # the guard will allow nothing
        ("S", False),
        ("<think>a</think>Sure", False),
        ("<tool_call>\n<fun", True),
        (TWO + "\n", True),
    ],
)
def test_in_prose_the_engine_gets_its_lead_back(text: str, steers: bool) -> None:
    """Once nothing can be proposed any more; but not in echo, nor where text itself steers."""
    for more, expected in (
        ({}, steers),
        ({"fill": "echo"}, True),
        ({"fill": "echo", "fields": {"thinking_budget": 500}}, True),
        ({"fields": {"thinking_budget": 500}}, True),
        ({"fields": {"stop": ("x",)}}, steers),
    ):
        fields: dict[str, Any] = dict(more).pop("fields", {})  # type: ignore[assignment]  # a mapping
        flags = {key: value for key, value in more.items() if key != "fields"}
        guide = guide_of(preparation(XML + "{# <think> #}", **flags), **fields)
        Engine(written(text)).run(guide)
        assert guide.may_steer is expected


def test_it_steers_and_rows_do_not_share_a_session() -> None:
    rows = preparation().choices(prepared.ask(tools=(WEATHER,), n=2, max_tokens=500))
    first, second = (row.spec.guide for row in rows)
    assert isinstance(first, FillGuide) and isinstance(second, FillGuide)
    assert first.may_steer and first.session is not second.session
    Engine(written(TWO)).run(first)
    assert second.counters.decode_steps == 0
    Engine(written(TWO)).run(second)
    assert second.counters == first.counters


# --------------------------------------------------------------------------------------- trace


def test_the_trace_is_a_line_of_json_for_each_proposal(tmp_path: Path) -> None:
    file = tmp_path / "fill.jsonl"
    made = preparation(fill="echo", fill_k="4", fill_trace=str(file))
    script = written("red green blue and yellow. red green blue and purple!")
    guide = guide_of(made)
    engine = Engine(script)
    engine.run(guide)
    guide.ended(calls=0)
    Engine(written(TWO)).run(guide_of(made))
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    echoes = [line for line in lines if line["origin"] == "echo"]
    assert len([line for line in echoes if line["generated"] < len(script)]) >= len(engine.runs)
    for line, (run, count) in zip(echoes, engine.runs, strict=False):
        assert line["policy"] == "verify" and line["proposed"] == list(run.ids)
        assert (line["proposedLen"], line["accepted"]) == (len(run.ids), count)
        start = line["generated"]
        if count == len(run.ids):
            assert line["firstMismatch"] == -1 and line["actual"] == line["proposed"]
        else:
            assert line["firstMismatch"] == count
            assert line["actual"] == script[start : start + count + 1]
        assert line["proposedText"] == TOKENIZER.decode(run.ids)
        assert line["ts"].startswith("20")
    strict = [line for line in lines if line["policy"] == "assert"]
    assert strict and all(line["actual"] == [] for line in strict)


def test_the_trace_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    guide = guide_of(preparation(fill_trace="1"))
    with caplog.at_level(logging.INFO, "mlxlite.text.fill.trace"):
        Engine(written(TWO)).run(guide)
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "fill: template assert after 1 tokens, 12 of 12 taken" and len(said) == 4
    assert "get_weather" not in caplog.text


def test_a_trace_that_cannot_be_written_costs_nothing_but_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    guide = guide_of(preparation(fill_trace=str(tmp_path)))  # a folder
    script = written(TWO)
    assert Engine(script).run(guide) == script[:-1]
    assert len(caplog.records) == 1 and "cannot be written" in caplog.text


def test_with_a_trace_a_run_must_come_as_it_was_taken() -> None:
    for trace, is_checked in (("1", True), ("off", False)):
        guide = guide_of(preparation(fill_trace=trace))
        run = guide.observe(ids_of("<tool_call>")).run
        assert run is not None
        guide.took(Took(2))
        if is_checked:
            with pytest.raises(ValueError, match="came where"):
                guide.observe((run.ids[1],))
        else:
            guide.observe((run.ids[1],))


def test_what_turns_a_trace_off() -> None:
    for word in (None, "", "0", "off", "False"):
        assert Trace.of(word, TOKENIZER.decode) is None
    for word in ("1", "true", "a.jsonl"):
        assert Trace.of(word, TOKENIZER.decode) is not None
