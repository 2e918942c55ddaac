"""Chat completions: log-probabilities, penalties, bias, curves and seeds on the tiny model.

The oracle for log-probabilities is the same model, run here over the whole sequence at once, and
NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import openai
import pytest

from tests import tiny
from tests.live import HELLO, LiveApp, frames
from tests.scripted import TOKENIZER

pytestmark = pytest.mark.slow

PROMPT = TOKENIZER.encode("<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n")
EVERYTHING: dict[str, Any] = {
    "temperature": 1.1,
    "seed": 11,
    "max_tokens": 24,
    "top_p": 0.95,
    "top_k": 60,
    "min_p": 0.01,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.05,
    "repetition_penalty": 1.2,
    "repetition_context_size": 0,
    "presence_penalty": 0.3,
    "frequency_penalty": -0.2,
    "frequency_context_size": 5,
    "logit_bias": {"40": 1.5, "41": -100},
    "logprobs": True,
    "top_logprobs": 5,
}


@pytest.fixture(scope="module")
def client(tiny_server: LiveApp) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=tiny_server.url + "/v1", api_key="x", max_retries=0) as client:
        yield client


def answer(server: LiveApp, **body: Any) -> dict[str, Any]:
    """The choice of a plain answer, with its number of tokens."""
    reply = server.chat(**body)
    assert reply.status == 200, reply.body
    whole = reply.json()
    return {**whole["choices"][0], "tokens": whole["usage"]["completion_tokens"]}


def entries(server: LiveApp, **body: Any) -> list[dict[str, Any]]:
    """The log-probabilities of a plain answer; checks that the stream carries the same."""
    asked = {"logprobs": True, **body}
    choice = answer(server, **asked)
    found: list[dict[str, Any]] = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    eos = 1 if choice["finish_reason"] == "stop" else 0
    assert len(found) == choice["tokens"] - eos
    streamed = []
    for frame in frames(server.chat(stream=True, **asked).body)[:-1]:
        (part,) = frame["choices"]
        if part.get("logprobs"):
            assert part["finish_reason"] is None
            streamed += part["logprobs"]["content"]
    assert streamed == found
    text = b"".join(bytes(entry["bytes"]) for entry in found).decode("utf-8", "replace")
    assert text == choice["message"]["content"]
    return found


def ids(server: LiveApp, **body: Any) -> list[int]:
    return [entry["id"] for entry in entries(server, **body)]


@cache
def model() -> Any:
    """The model of the server, with the same weights."""
    return tiny.build({**tiny.CONFIG, "vocab_size": 512})


def oracle(answered: list[int]) -> np.ndarray:
    """Log-probabilities (T, V) of the model at each answered position."""
    logits = model()(mx.array([PROMPT + answered[:-1]]))
    values = np.array(logits[0], dtype=np.float64)[len(PROMPT) - 1 :]
    top = values.max(axis=-1, keepdims=True)
    return values - top - np.log(np.exp(values - top).sum(axis=-1, keepdims=True))


# ----------------------------------------------------------------------------------- logprobs


@pytest.mark.parametrize("count", [0, 1, 5, 20])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}])
def test_shape_and_numbers(tiny_server: LiveApp, count: int, sampling: dict[str, Any]) -> None:
    """D9 and F92, F93: token, logprob, bytes, top_logprobs and the id; before any filter."""
    found = entries(tiny_server, top_logprobs=count, max_tokens=16, **sampling)
    right = oracle([entry["id"] for entry in found])
    for entry, row in zip(found, right, strict=True):
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs", "id"}
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
        assert entry["logprob"] == pytest.approx(row[entry["id"]], abs=2e-4)
        tops = entry["top_logprobs"]
        assert len(tops) == count
        assert [top["logprob"] for top in tops] == sorted(
            (top["logprob"] for top in tops), reverse=True
        )
        best = np.sort(row)[::-1][:count]
        assert [top["logprob"] for top in tops] == pytest.approx(list(best), abs=2e-4)
        for top in tops:
            assert set(top) == {"token", "logprob", "bytes", "id"}
            assert top["logprob"] == pytest.approx(row[top["id"]], abs=2e-4)
        if not sampling and count:  # greedy
            assert tops[0]["id"] == entry["id"] and tops[0]["logprob"] == entry["logprob"]
    total = sum(entry["logprob"] for entry in found)
    wanted = sum(row[entry["id"]] for entry, row in zip(found, right, strict=True))
    assert total == pytest.approx(wanted, abs=1e-3)


def test_the_official_client_reads_them(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "m", "messages": HELLO, "temperature": 0, "max_tokens": 8}
    whole = client.chat.completions.create(logprobs=True, top_logprobs=2, **asked)
    content = whole.choices[0].logprobs.content
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in content)
    chunks = client.chat.completions.create(logprobs=True, top_logprobs=2, stream=True, **asked)
    found = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert found == content
    without = client.chat.completions.create(**asked)
    assert without.choices[0].logprobs is None
    assert without.choices[0].message.content == whole.choices[0].message.content


def test_they_change_nothing(tiny_server: LiveApp) -> None:
    for body in ({}, {"temperature": 1.0, "seed": 3}):
        plain = answer(tiny_server, **body)
        assert "logprobs" not in plain
        for top in (0, 20):
            told = answer(tiny_server, logprobs=True, top_logprobs=top, **body)
            assert told["message"] == plain["message"]


def test_a_stop_string_hides_text_but_not_entries(tiny_server: LiveApp) -> None:
    """Spec 20 section 8: also of tokens hidden by a stop match, up to the halt."""
    whole = answer(tiny_server, max_tokens=24)["message"]["content"]
    stopped = answer(tiny_server, max_tokens=24, stop=whole[8:11], logprobs=True)
    content = stopped["logprobs"]["content"]
    assert len(content) == stopped["tokens"]
    text = b"".join(bytes(entry["bytes"]) for entry in content).decode("utf-8", "replace")
    assert text.startswith(stopped["message"]["content"]) and whole[8:11] in text


def test_no_tokens_no_key(tiny_server: LiveApp) -> None:
    assert "logprobs" not in answer(tiny_server, max_tokens=0, logprobs=True)
    assert "logprobs" not in answer(tiny_server, logit_bias={"2": 100}, logprobs=True)


def test_what_cannot_come_is_a_number(tiny_server: LiveApp) -> None:
    """JSON has no infinity."""
    banned = {str(n): -1e30 for n in range(512)}
    found = entries(tiny_server, logit_bias={**banned, "40": 0}, top_logprobs=20, max_tokens=2)
    values = [top["logprob"] for entry in found for top in entry["top_logprobs"]]
    assert all(math.isfinite(value) and -9999 <= value <= 0 for value in values)


# -------------------------------------------------------------------------- penalties and bias


def test_bias(tiny_server: LiveApp) -> None:
    assert ids(tiny_server, logit_bias={"77": 100}, max_tokens=4) == [77] * 4
    free = ids(tiny_server, max_tokens=4)
    assert ids(tiny_server, logit_bias={str(free[0]): -100}, max_tokens=4)[0] != free[0]
    ended = answer(tiny_server, logit_bias={"2": 100})
    assert (ended["message"]["content"], ended["finish_reason"]) == ("", "stop")
    assert ended["tokens"] == 1
    # It shows in the log-probabilities, which come after it.
    (first, *_) = entries(tiny_server, logit_bias={"77": 100}, max_tokens=1)
    assert first["logprob"] == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize(
    "penalty",
    [
        {"repetition_penalty": 1e6},
        {"presence_penalty": 1e4},
        {"frequency_penalty": 1e4},
    ],
)
def test_penalties(tiny_server: LiveApp, penalty: dict[str, Any]) -> None:
    """Nothing within the window comes twice; with all of the past, nothing at all."""
    (name,) = penalty
    window = name.replace("penalty", "context_size")
    if name == "repetition_penalty":  # what it divides must be positive
        positive = {str(n): 60 for n in range(3, 512)}
        penalty = {**penalty, "logit_bias": positive}
    found = ids(tiny_server, max_tokens=40, **penalty, **{window: 0})
    assert len(set(found)) == len(found)
    free = {"logit_bias": {"77": 100}, "max_tokens": 6}
    assert ids(tiny_server, **free, **{name: 1.0 if name.startswith("rep") else 0}) == [77] * 6
    negative = ids(tiny_server, max_tokens=12, **{name: 1e-6 if "rep" in name else -1e4})
    assert len(set(negative)) < 6, "drawn to what it has said"


def test_curves_draw(tiny_server: LiveApp) -> None:
    """The tone curve takes the place of the filters, and does not move the best token."""
    seeded = {"temperature": 1.5, "seed": 4, "max_tokens": 10}
    plain = ids(tiny_server, **seeded)
    bent = ids(tiny_server, hlg={"enabled": True}, **seeded)
    assert bent == ids(tiny_server, hlg={"enabled": True}, top_k=1, min_p=1, **seeded)
    assert ids(tiny_server, hlg={"enabled": True, "width": 0}, **seeded) != plain
    greedy = ids(tiny_server, max_tokens=10)
    assert ids(tiny_server, max_tokens=10, hlg={"enabled": True}) == greedy


# --------------------------------------------------------------------------------------- seeds


def test_everything_on_is_repeatable(tiny_server: LiveApp) -> None:
    alone = answer(tiny_server, **EVERYTHING)
    assert answer(tiny_server, **EVERYTHING) == alone
    assert answer(tiny_server, **{**EVERYTHING, "seed": 12}) != alone
    assert entries(tiny_server, **EVERYTHING) == alone["logprobs"]["content"]


def test_everything_on_is_independent_of_neighbours(tiny_server: LiveApp) -> None:
    """Rows of every kind at the same time; each is what it is alone."""
    bodies: list[dict[str, Any]] = [
        EVERYTHING,
        {"max_tokens": 30},
        {"max_tokens": 30, "temperature": 1.3, "seed": 2, "hlg": {"enabled": True}},
        {**EVERYTHING, "seed": 12, "top_logprobs": 20, "max_tokens": 30},
        {"max_tokens": 30, "logprobs": True, "repetition_penalty": 1.3},
        {**EVERYTHING, "seed": 2**63, "logprobs": False, "top_logprobs": None},
    ]
    alone = [answer(tiny_server, **body) for body in bodies]

    def same(first: dict[str, Any], second: dict[str, Any]) -> None:
        """Equal text and ids; the numbers to the accuracy of a batch."""
        assert first["message"] == second["message"]
        pairs = [choice.get("logprobs", {"content": []})["content"] for choice in (first, second)]
        assert [e["id"] for e in pairs[0]] == [e["id"] for e in pairs[1]]
        numbers = [[e["logprob"] for e in found] for found in pairs]
        assert numbers[0] == pytest.approx(numbers[1], abs=1e-4)

    with ThreadPoolExecutor(len(bodies)) as pool:
        together = list(pool.map(lambda body: answer(tiny_server, **body), bodies))
    for first, second in zip(alone, together, strict=True):
        same(first, second)
