"""prepare: which value wins, how long an answer may be, what a row is told.

Thinking is in `test_prepare_thinking`, prompts and their stable boundary in `test_prepare_prompt`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxlite.errors import BadRequest, TooLong
from mlxlite.text.guides import TextGuide
from mlxlite.text.tokenizer import Tokenizer
from mlxlite.types import Ask, Tone
from tests import tiny
from tests.prepared import MESSAGES, TOKENIZER, TOOLS, ask, make

# ---------------------------------------------------------------------- which value wins


@pytest.mark.parametrize(
    ("field", "request_value", "server", "model", "built_in"),
    [
        ("temperature", 0.1, 0.2, 0.3, 0.7),
        ("temperature", 0.0, 0.2, 0.3, 0.7),
        ("top_p", 0.1, 0.2, 0.3, 0.0),
        ("top_p", 0.0, 0.2, 0.3, 0.0),
        ("top_k", 1, 2, 3, 0),
        ("top_k", 0, 2, 3, 0),
    ],
)
def test_precedence(
    field: str,
    request_value: float,
    server: float,
    model: float,
    built_in: float,
) -> None:
    """Spec 10 section 2: request, server, generation config, built-in; 0 is a value."""

    def resolved(asked: bool, flagged: bool, configured: bool) -> float:
        preparation = make(
            defaults={field: model} if configured else {},
            **({field: str(server)} if flagged else {}),
        )
        sampling = preparation.sampling(ask(**({field: request_value} if asked else {})))
        return float(getattr(sampling, field))

    assert resolved(True, True, True) == request_value
    assert resolved(True, False, False) == request_value
    assert resolved(False, True, True) == server
    assert resolved(False, False, True) == model
    assert resolved(False, False, False) == built_in


def test_min_p_comes_from_the_request_alone() -> None:
    preparation = make(defaults={"min_p": 0.5})
    assert preparation.sampling(ask()).min_p == 0.0
    assert preparation.sampling(ask(min_p=0.25)).min_p == 0.25


@pytest.mark.parametrize("junk", ["0.5", None, True, [0.5], {"a": 1}])
def test_generation_config_junk_is_ignored(junk: Any) -> None:
    sampling = make(defaults={"temperature": junk, "top_k": junk}).sampling(ask())
    assert (sampling.temperature, sampling.top_k) == (0.7, 0)


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k"])
@pytest.mark.parametrize("raw", ["NaN", "Infinity", "-Infinity", "-1"])
def test_generation_config_nonsense_is_ignored(name: str, raw: str) -> None:
    defaults = json.loads(f'{{"{name}": {raw}}}')  # Python writes and reads these
    assert make(defaults=defaults).sampling(ask(seed=1)) == make().sampling(ask(seed=1))


@pytest.mark.parametrize("bad", [{"temperature": 10**400}, {"top_p": 5}])
def test_generation_config_has_the_limits_of_a_request(bad: dict[str, Any]) -> None:
    assert make(defaults=bad).sampling(ask(seed=1)) == make().sampling(ask(seed=1))


# ------------------------------------------------------------------------------ max tokens


def test_max_tokens() -> None:
    plain, flagged = make(), make(max_tokens="50")
    room = 1024 - len(plain.prompt(ask()).ids)
    assert plain(ask()).limit == plain(ask()).spec.max_tokens == room
    assert flagged(ask()).limit == 50
    assert flagged(ask(max_tokens=70)).limit == 70  # the request wins, also upwards
    assert flagged(ask(max_tokens=7)).limit == 7
    assert plain(ask(max_tokens=32_000)).limit == room  # clients.md, Requests 1
    assert plain(ask(max_tokens=10**30)).limit == room
    nothing = plain(ask(max_tokens=0))
    assert nothing.limit == 0 and nothing.spec.max_tokens == 1


def test_too_long() -> None:
    count = len(make().prompt(ask()).ids)
    assert make(context=count + 1)(ask()).limit == 1
    for context in (count, count - 1, 1):
        with pytest.raises(TooLong) as caught:
            make(context=context)(ask(max_tokens=1))
        error = caught.value
        assert (error.status, error.code, error.param) == (
            400,
            "context_length_exceeded",
            "messages",
        )
        assert str(count) in error.message and str(context) in error.message
    with pytest.raises(TooLong) as caught:
        make(context=1)(Ask(prompt="hello world"))
    assert caught.value.param == "prompt"


# ----------------------------------------------------------------------------------- seeds


def test_fresh_seeds_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxlite.prepare.time.time", lambda: 1e9)  # one and the same millisecond
    preparation = make()
    seeds = [preparation.sampling(ask()).seed for _ in range(1000)]
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 2**32 for seed in seeds)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 - 1, 2**64 + 5, -(10**30)])
def test_explicit_seed(seed: int) -> None:
    preparation = make()
    first, second = (preparation(ask(seed=seed)).spec for _ in range(2))
    assert first == second
    assert first.sampling.seed == seed % 2**64


# ------------------------------------------------------------------------- penalties and XTC

FROM_THE_REQUEST = {  # spec 10 section 2: request, else the value on the right
    "min_p": (0.25, 0.0),
    "xtc_probability": (0.5, 0.0),
    "xtc_threshold": (0.1, 0.0),
    "presence_penalty": (-1.5, 0.0),
    "frequency_penalty": (1e30, 0.0),
    "repetition_penalty": (1.3, 0.0),
}


@pytest.mark.parametrize("name", FROM_THE_REQUEST)
def test_options_of_the_request_alone(name: str) -> None:
    value, neutral = FROM_THE_REQUEST[name]
    junk = {} if name == "repetition_penalty" else {name: 0.125}  # the config's is not read
    preparation = make(defaults=junk)
    assert getattr(preparation.sampling(ask(**{name: value})), name) == value
    assert getattr(preparation.sampling(ask()), name) == neutral


@pytest.mark.parametrize("kind", ["repetition", "presence", "frequency"])
@pytest.mark.parametrize(
    ("given", "size"), [(None, 20), (0, 0), (7, 7), (1023, 1023), (1024, 0), (10**30, 0)]
)
def test_penalty_windows(kind: str, given: int | None, size: int) -> None:
    """A window as wide as the context looks at all of it; the engine is given no huge number."""
    sampling = make().sampling(ask(**{f"{kind}_context_size": given}))
    assert getattr(sampling, f"{kind}_context") == size


def test_repetition_penalty_precedence() -> None:
    preparation = make(defaults={"repetition_penalty": 1.1})
    assert preparation.sampling(ask()).repetition_penalty == 1.1
    assert preparation.sampling(ask(repetition_penalty=1.5)).repetition_penalty == 1.5
    off = preparation.sampling(ask(repetition_penalty=0.0))  # 0 is a value: off
    assert off.repetition_penalty == 0.0 and not off.penalises_repetition


def test_xtc_special_ids_only_when_on() -> None:
    """All EOS ids and a newline without special tokens (spec 10 section 10)."""
    (newline,) = TOKENIZER.encode("\n", add_special_tokens=False)
    preparation = make()
    assert preparation.sampling(ask(xtc_probability=0.1)).xtc_special_ids == (0, 2, newline)
    for off in (None, 0.0):
        assert preparation.sampling(ask(xtc_probability=off)).xtc_special_ids == ()


@pytest.mark.parametrize("token", [0, 511])
def test_logit_bias(token: int) -> None:
    assert make().sampling(ask(logit_bias=((token, 5.0),))).logit_bias == ((token, 5.0),)


@pytest.mark.parametrize("token", [512, 10**17])
def test_logit_bias_outside_the_vocabulary(token: int) -> None:
    with pytest.raises(BadRequest) as caught:
        make()(ask(logit_bias=((1, 5.0), (token, 5.0))))
    assert caught.value.param == "logit_bias"
    assert str(token) in caught.value.message and "511" in caught.value.message


# ----------------------------------------------------------------------------------- tone curve


def test_tone_is_off_unless_asked_for() -> None:
    assert make().sampling(ask()).tone is None
    assert make().sampling(ask(hlg={"width": 2.0})).tone is None
    assert make(hlg_sampling="on").sampling(ask(hlg={"enabled": False})).tone is None
    assert make(hlg_sampling="on").sampling(ask(hlg={"enabled": None})).tone == Tone()
    assert make().sampling(ask(hlg={"enabled": True})).tone == Tone(4.0, 4.0, 6.0, 6.0)


@pytest.mark.parametrize("name", ["width", "shoulder", "toe", "pivot_offset"])
def test_tone_precedence(name: str) -> None:
    """Each field for itself: request, server, built-in (spec 20 section 6.1)."""
    built_in = getattr(Tone(), name)
    for asked, server, right in (
        (None, None, built_in),
        (None, 3.5, 3.5),
        (0.0, 3.5, 0.0),
        (2.5, None, 2.5),
    ):
        flags = {f"hlg_{name}": str(server)} if server is not None else {}
        tone = make(hlg_sampling="on", **flags).sampling(ask(hlg={name: asked})).tone
        assert tone is not None and getattr(tone, name) == right
        others = {"width", "shoulder", "toe", "pivot_offset"} - {name}
        assert all(getattr(tone, other) == getattr(Tone(), other) for other in others)


# ---------------------------------------------------------------------------- what a row is told


def test_eos_set(tmp_path: Path) -> None:
    assert make()(ask()).spec.eos_ids == {0, 2}
    # The config names one, the tokenizer another: both end an answer.
    folder = tiny.make_model(tmp_path / "m", eos_token_id=1)
    assert make(Tokenizer.load(folder))(ask()).spec.eos_ids == {1, 2}


def test_stops_become_a_guide() -> None:
    preparation = make()
    assert preparation(ask()).spec.guide is None
    prepared = preparation(ask(stop=("a", "b")))
    guide = prepared.spec.guide
    assert isinstance(guide, TextGuide) and not guide.may_steer
    assert preparation(ask(stop=("a",))).spec.guide is not guide  # one a row
    sink = prepared.make_sink()
    assert sink is not prepared.make_sink()
    assert [delta.text for delta in sink.push(TOKENIZER.encode("xbx"))] == ["x"]
    assert sink.stopped == "b"


def test_guides_are_made_only_where_needed() -> None:
    """A guide that steers costs the engine its step of lead."""
    plain, thinker = make(), make(template=tiny.TEMPLATE + "{# <think> #}")
    assert plain(ask(tools=TOOLS)).spec.guide is None
    assert plain(ask(parallel_tool_calls=False)).spec.guide is None  # no tools, no calls
    single = plain(ask(tools=TOOLS, parallel_tool_calls=False)).spec.guide
    assert single is not None and not single.may_steer
    assert plain(ask(thinking_budget=5)).spec.guide is None  # it does not think
    budgeted = thinker(ask(thinking_budget=5)).spec.guide
    assert budgeted is not None and budgeted.may_steer
    assert thinker(Ask(prompt="x", thinking_budget=5)).spec.guide is None
    stopped = thinker(Ask(prompt="x", stop=("a",), tools=TOOLS)).spec.guide
    assert stopped is not None and not stopped.may_steer


@pytest.mark.parametrize("count", [None, 0, 20])
def test_logprobs_reach_the_row(count: int | None) -> None:
    assert make()(ask(top_logprobs=count)).spec.top_logprobs == count


def test_a_preparation_is_used_by_many_at_once() -> None:
    """Nothing of one request is seen in another's."""
    preparation = make()
    first = preparation(ask(seed=1, stop=("a",), logit_bias=((5, 1.0),)))
    second = preparation(ask(seed=1))
    assert second.spec == preparation(ask(seed=1)).spec
    assert second.spec.guide is None and second.spec.sampling.logit_bias == ()
    assert first.spec.sampling.logit_bias == ((5, 1.0),)
    assert MESSAGES == ({"role": "user", "content": "hello world"},)
