"""Text completions: the official `openai` package, the bytes, and log-probabilities by NumPy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from mlxlite.api import openai_shapes
from mlxlite.api.completions import Choice, Offsets, Style
from mlxlite.engine import batch as engine_batch
from mlxlite.errors import BadRequest
from mlxlite.prepare import Prepared
from mlxlite.text.sink import Sink
from mlxlite.text.tokenizer import Tokenizer
from mlxlite.types import Delta, RowSpec, Sampling
from tests import tiny
from tests.decoding import logits_after, tiny_model
from tests.live import Brake, LiveApp, Reply, frames
from tests.scripted import TOKENIZER
from tests.test_logprobs import NEAR, log_softmax

pytestmark = pytest.mark.slow

PATH = "/v1/completions"
TEXT = "hello world"
HOT: dict[str, Any] = {"model": "m", "max_tokens": 9, "temperature": 1.2}
MARKED = tiny.SPECIAL[1] + "user\nhi"


@pytest.fixture(scope="module")
def client(tiny_server: LiveApp) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=tiny_server.url + "/v1", api_key="x", max_retries=0) as client:
        yield client


def complete(server: LiveApp, **body: Any) -> Reply:
    return server.ask("POST", PATH, {"prompt": TEXT, "temperature": 0, "max_tokens": 6, **body})


def choices(server: LiveApp, **body: Any) -> list[dict[str, Any]]:
    reply = complete(server, **body)
    assert reply.status == 200, reply.body
    found: list[dict[str, Any]] = reply.json()["choices"]
    return found


def streamed(server: LiveApp, count: int, **body: Any) -> list[dict[str, Any]]:
    """The choices that a stream's chunks amount to; checks the grammar of the stream."""
    *chunks, done = frames(complete(server, stream=True, **body).body)
    assert done == "[DONE]"
    found: list[dict[str, Any]] = [
        {"index": i, "text": "", "logprobs": None, "finish_reason": None} for i in range(count)
    ]
    assert len({(c["id"], c["created"], c["model"], c["system_fingerprint"]) for c in chunks}) == 1
    for chunk in chunks:
        assert chunk["object"] == "text_completion" and "usage" not in chunk
        (part,) = chunk["choices"]
        whole = found[part["index"]]
        assert whole["finish_reason"] is None, "nothing comes after the finish"
        whole["text"] += part["text"]
        whole["finish_reason"] = part["finish_reason"]
        for name, values in (part["logprobs"] or {}).items():
            whole["logprobs"] = whole["logprobs"] or {}
            whole["logprobs"].setdefault(name, []).extend(values)
    return found


def same(mine: Any, other: Any) -> None:
    """Equal but for the last digits of numbers: a row in a batch is summed in another order."""
    if isinstance(mine, float):
        assert mine == pytest.approx(other, abs=NEAR)
    elif isinstance(mine, dict):
        assert mine.keys() == other.keys()
        for key in mine:
            same(mine[key], other[key])
    elif isinstance(mine, list):
        assert len(mine) == len(other)
        for one, two in zip(mine, other, strict=True):
            same(one, two)
    else:
        assert mine == other


# ------------------------------------------------------------------------ the official client


def test_plain(client: openai.OpenAI) -> None:
    first = client.completions.create(prompt=TEXT, seed=5, **HOT)
    again = client.completions.create(prompt=TEXT, seed=5, **HOT)
    assert first.object == "text_completion" and first.id.startswith("cmpl-")
    (choice,) = first.choices
    assert choice.text == again.choices[0].text != ""
    assert (choice.index, choice.logprobs) == (0, None)
    assert choice.finish_reason in ("stop", "length")
    assert first.usage is not None
    assert first.usage.prompt_tokens == len(TOKENIZER.encode(TEXT))
    assert first.system_fingerprint and first.system_fingerprint.startswith("fp_")


def test_streamed_is_plain(client: openai.OpenAI) -> None:
    plain = client.completions.create(prompt=TEXT, seed=5, **HOT)
    options: Any = {"include_usage": True}
    chunks = list(
        client.completions.create(prompt=TEXT, seed=5, stream=True, stream_options=options, **HOT)
    )
    *body, last = chunks
    assert last.choices == [] and last.usage == plain.usage
    assert all(chunk.usage is None for chunk in body)
    assert "".join(chunk.choices[0].text for chunk in body) == plain.choices[0].text
    assert body[-1].choices[0].finish_reason == plain.choices[0].finish_reason


def test_async(tiny_server: LiveApp) -> None:
    async def run() -> None:
        url = tiny_server.url + "/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            plain = await client.completions.create(prompt=[TEXT, "fox"], n=2, seed=1, **HOT)
            chunks = await client.completions.create(
                prompt=[TEXT, "fox"], n=2, seed=1, stream=True, **HOT
            )
            texts = [""] * 4
            async for chunk in chunks:
                texts[chunk.choices[0].index] += chunk.choices[0].text
            assert texts == [choice.text for choice in plain.choices]

    asyncio.run(run())


def test_choices_come_in_the_order_of_prompts(client: openai.OpenAI) -> None:
    prompts = [TEXT, "the quick brown fox", "dog"]
    alone = [
        client.completions.create(prompt=prompt, seed=20 + i, **HOT)
        for prompt in prompts
        for i in range(2)
    ]
    both = client.completions.create(prompt=prompts, n=2, seed=20, **HOT)
    assert [choice.index for choice in both.choices] == list(range(6))
    assert [choice.text for choice in both.choices] == [one.choices[0].text for one in alone]
    assert both.usage is not None
    usages = [one.usage for one in alone if one.usage is not None]
    assert both.usage.prompt_tokens == sum(usage.prompt_tokens for usage in usages[::2])
    assert both.usage.completion_tokens == sum(usage.completion_tokens for usage in usages)


def test_harness(client: openai.OpenAI) -> None:
    """What lm-evaluation-harness sends and reads (clients.md, Requests 12)."""
    prompts = [[5, 9, 200, 31], [7, 8], [300]]
    answer = client.completions.create(
        model="m", prompt=prompts, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        found = choice.logprobs
        assert found is not None and found.token_logprobs is not None
        assert found.tokens is not None and found.top_logprobs is not None
        assert len(found.token_logprobs) == len(prompt) + 1 == len(found.tokens)
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        for token, value, top in list(
            zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True)
        )[1:]:
            assert top[token] == value <= max(top.values())


# -------------------------------------------------------------------------------------- prompts


def test_token_ids_are_as_the_text(tiny_server: LiveApp) -> None:
    ids = TOKENIZER.encode(TEXT)
    (text,) = choices(tiny_server)
    (of_ids,) = choices(tiny_server, prompt=ids)
    (of_list,) = choices(tiny_server, prompt=[ids])
    assert text == of_ids == of_list


def test_raw_text_is_not_a_conversation(tiny_server: LiveApp) -> None:
    """No template; control tokens are read as such; the first space stays (F27)."""
    assert complete(tiny_server).json()["usage"]["prompt_tokens"] == 3
    ids = TOKENIZER.encode(MARKED)
    assert ids[0] == 1
    assert choices(tiny_server, prompt=MARKED) == choices(tiny_server, prompt=ids)
    world = TOKENIZER.encode(" world")
    bias = {str(world[0]): 1000}
    (choice,) = choices(tiny_server, prompt="hello", max_tokens=1, logit_bias=bias)
    assert choice["text"] == TOKENIZER.decode(world[:1]) and choice["text"].startswith(" ")


def test_the_same_prompt_again_and_longer(tiny_server: LiveApp) -> None:
    """F39: a prompt that equals an earlier one with its cut-off answer."""
    bias = {"300": 1000}
    told = {"max_tokens": 4, "logit_bias": bias}
    ids = TOKENIZER.encode(TEXT)
    (first,) = choices(tiny_server, **told)
    assert first["text"] == TOKENIZER.decode([300] * 4)
    for _ in range(2):
        assert choices(tiny_server, prompt=[*ids, *[300] * 4], **told) == [first]


def test_thinking_is_not_told_apart(tiny_folder: Path) -> None:
    template = tiny.TEMPLATE + "<think>"
    (tiny_folder.parent / "think.jinja").write_text(template)
    with LiveApp(tiny_folder, chat_template=str(tiny_folder.parent / "think.jinja")) as server:
        ids = TOKENIZER.encode("<think>a</think>b")
        (choice,) = choices(server, prompt=ids, echo=True, max_tokens=0)
        assert choice["text"] == "<think>a</think>b"
        assert set(choice) == {"index", "text", "logprobs", "finish_reason"}


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        ("", "prompt"),
        ([], "prompt"),
        (5, "prompt"),
        ({}, "prompt"),
        (True, "prompt"),
        ([""], "prompt[0]"),
        ([[]], "prompt[0]"),
        (["a", []], "prompt[1]"),
        (["a", 5], "prompt[1]"),
        ([None], "prompt[0]"),
        ([[1, "a"]], "prompt[0][1]"),
        ([[1], [2, -1]], "prompt[1][1]"),
        ([1, True], "prompt[1]"),
        ([1, 2.0], "prompt[1]"),
        ([2**63], "prompt[0]"),
        ([512], "prompt"),
        ([[1], [2**62]], "prompt"),
        ([[[1]]], "prompt[0][0]"),
        (["a"] * 1025, "prompt"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_wrong_prompts(tiny_server: LiveApp, prompt: Any, param: str, is_stream: bool) -> None:
    reply = complete(tiny_server, prompt=prompt, stream=is_stream)
    assert (reply.status, reply.error["param"]) == (400, param), reply.body
    assert reply.error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("suffix", {"suffix": "end"}),
        ("suffix", {"suffix": 5}),
        ("best_of", {"best_of": 2}),
        ("best_of", {"best_of": 1, "n": 2}),
        ("n", {"n": 129}),
        ("n", {"n": 0}),
        ("prompt", {"n": 128, "prompt": ["a"] * 9}),
        ("logprobs", {"logprobs": 21}),
        ("logprobs", {"logprobs": -1}),
        ("logprobs", {"logprobs": "1"}),
        ("logprobs", {"logprobs": 1.5}),
        ("echo", {"echo": "yes"}),
        ("max_tokens", {"max_tokens": -1}),
        ("temperature", {"temperature": "hot"}),
        ("stop", {"stop": 5}),
        ("logit_bias", {"logit_bias": {"512": 1}}),
        ("response_format", {"response_format": "json_object"}),
        ("response_format.type", {"response_format": {"type": "xml"}}),
        ("guided_regex", {"guided_regex": "("}),
        ("adapter", {"adapter": "mine"}),
    ],
)
def test_wrong_fields(tiny_server: LiveApp, param: str, body: dict[str, Any]) -> None:
    reply = complete(tiny_server, **body)
    assert (reply.status, reply.error["param"]) == (400, param), reply.body


def test_hints(tiny_server: LiveApp) -> None:
    hints = {"best_of": 1, "suffix": "", "user": "me", "tools": "x", "messages": 5, "echo": None}
    assert choices(tiny_server, **hints) == choices(tiny_server)


def test_too_long(tiny_server: LiveApp) -> None:
    reply = complete(tiny_server, prompt=["a", [5] * 1024])
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert reply.error["param"] == "prompt"
    (choice,) = choices(tiny_server, prompt=[5] * 1020, max_tokens=32_000)
    assert choice["finish_reason"] in ("length", "stop")


def test_stop(tiny_server: LiveApp) -> None:
    (whole,) = choices(tiny_server, max_tokens=12)
    stop = whole["text"][6:8]
    (cut,) = choices(tiny_server, max_tokens=12, stop=[stop])
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["finish_reason"] == "stop"
    assert streamed(tiny_server, 1, max_tokens=12, stop=stop) == [cut]


# -------------------------------------------------------------------------- echo, logprobs


@pytest.mark.parametrize("logprobs", [None, 0, 3, True])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_streamed_is_plain_in_all_shapes(
    tiny_server: LiveApp, logprobs: Any, echo: bool, max_tokens: int
) -> None:
    body = {"logprobs": logprobs, "echo": echo, "max_tokens": max_tokens, "n": 2}
    prompts = [TEXT, [300], [0, 5, 226, 130, 172], MARKED]
    plain = choices(tiny_server, prompt=prompts, **body)
    found = streamed(tiny_server, 8, prompt=prompts, **body)
    for mine, other in zip(found, plain, strict=True):
        if other["logprobs"] is not None and not other["logprobs"]["tokens"]:
            other = {**other, "logprobs": None}  # no token, no chunk
        same(mine, other)
    for index, choice in enumerate(plain):
        prompt = prompts[index // 2]
        ids = prompt if isinstance(prompt, list) else TOKENIZER.encode(prompt)
        text = prompt if isinstance(prompt, str) else TOKENIZER.decode(ids, keep_special=True)
        assert choice["text"].startswith(text) or not echo
        if logprobs is None:
            assert choice["logprobs"] is None
        elif max_tokens != 5:  # it may end before
            count = len(choice["logprobs"]["tokens"])
            assert count - (len(ids) if echo else 0) in (max_tokens, max_tokens - 1)
            assert {len(values) for values in choice["logprobs"].values()} == {count}


@pytest.mark.parametrize("count", [0, 1, 20])
@pytest.mark.parametrize("piece", [1, 2, 3, 128])
def test_logprobs_of_the_prompt(
    tiny_server: LiveApp, monkeypatch: pytest.MonkeyPatch, count: int, piece: int
) -> None:
    """Each token's is the model's after those before it, whatever pieces the prompt is run in."""
    monkeypatch.setattr(engine_batch, "_SCORED_TOKENS", piece)
    ids = [5, 9, 200, 31, 77, 400, 2, 0, 11]
    (choice,) = choices(
        tiny_server, prompt=ids, echo=True, logprobs=count, max_tokens=2, logit_bias={"5": 3}
    )
    found = choice["logprobs"]
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    for place in range(1, len(ids)):
        expected = log_softmax(np.array(logits_after(tiny_model(), ids[:place])))
        token = ids[place]
        assert found["token_logprobs"][place] == pytest.approx(expected[token], abs=NEAR)
        top = found["top_logprobs"][place]
        assert count <= len(top) <= count + 1
        assert top[found["tokens"][place]] == found["token_logprobs"][place]
        best = sorted(expected)[::-1][:count]
        assert sorted(top.values())[::-1][:count] == pytest.approx(best, abs=NEAR)


def test_long_prompts_in_chunks(tiny_server: LiveApp) -> None:
    ids = [(7 * n + n // 3) % 500 + 3 for n in range(700)]
    chunks = tiny_server.batch()["prefill_chunks"]
    body = {"prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 1}
    (choice,) = choices(tiny_server, **body)
    assert tiny_server.batch()["prefill_chunks"] - chunks > 1
    values = choice["logprobs"]["token_logprobs"]
    assert len(values) == 701
    logits = np.array(tiny_model().model(_array(ids))[0])
    for place in range(1, 700):
        expected = log_softmax(logits[place - 1])[ids[place]]
        assert values[place] == pytest.approx(expected, abs=5e-4)
    same(streamed(tiny_server, 1, **body), [choice])


def _array(ids: list[int]) -> Any:
    import mlx.core as mx

    return mx.array([ids])


def test_the_head_runs_only_for_rows_that_want_it(tiny_folder: Path) -> None:
    with LiveApp(tiny_folder) as server:
        scored = Brake(server.worker._loop.batch, "_run_scored", hold=False)
        for body in ({}, {"echo": True}, {"logprobs": 3}):
            complete(server, **body)
        assert scored.calls == 0
        complete(server, echo=True, logprobs=0)
        assert scored.calls == 1


def test_a_fault_while_scoring(tiny_folder: Path) -> None:
    with LiveApp(tiny_folder) as server:

        def broken(row: Any, ids: Any) -> None:
            raise RuntimeError("no head")

        server.worker._loop.batch._run_scored = broken
        reply = complete(server, prompt=[TEXT, "fox"], echo=True, logprobs=1)
        assert reply.status == 500 and "no head" in reply.error["message"]
        *_, last = frames(complete(server, echo=True, logprobs=1, stream=True).body)
        assert "no head" in last["error"]["message"]
        assert complete(server, echo=True).status == 200
        server.wait_batch(lambda stats: stats["active_rows"] == 0)


def test_echo_of_any_text(tiny_server: LiveApp) -> None:
    for prompt in ("é 🙂 中文", "\u2028\x00"):
        body = json.dumps({"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 1})
        reply = tiny_server.ask("POST", PATH, body.encode())
        assert reply.status == 200
        (choice,) = reply.json()["choices"]
        assert choice["text"] == prompt
        offsets = choice["logprobs"]["text_offset"]
        assert offsets == sorted(offsets) and offsets[-1] <= len(prompt)


def test_tokens_start_where_their_text_starts(tiny_server: LiveApp) -> None:
    prompt = "hello world again 🙂!"
    (choice,) = choices(tiny_server, prompt=prompt, echo=True, logprobs=1, max_tokens=6)
    found = choice["logprobs"]
    for token, at in zip(found["tokens"], found["text_offset"], strict=True):
        if not token.startswith("bytes:") and "\ufffd" not in choice["text"][: at + len(token)]:
            assert choice["text"][at:].startswith(token)


def test_offsets() -> None:
    tokenizer: Tokenizer = TOKENIZER
    ids = tokenizer.encode("a🙂b", add_special_tokens=False)
    offsets = Offsets(tokenizer, start=10)
    found = [offsets.next(token) for token in ids]
    assert found == [10, 11, 11, 11, 11, 12]
    hidden = Offsets(tokenizer)
    assert [hidden.next(token) for token in (1, *ids[:1], 2, *ids[:1])] == [0, 0, 1, 1]
    shown = Offsets(tokenizer, limit=12)
    assert [shown.next(token) for token in (1, 1, 1)] == [0, 12, 12]


def test_parsing_in_isolation() -> None:
    from mlxlite.asks import parse_completion

    first, second = parse_completion({"prompt": ["a", [1, 2]], "n": 3, "logprobs": True})
    assert (first.prompt, second.prompt, first.n) == ("a", (1, 2), 3)
    assert first.top_logprobs == 1 and first.messages is None
    assert parse_completion({"prompt": "a", "logprobs": False})[0].top_logprobs is None
    with pytest.raises(BadRequest, match="prompt required"):
        parse_completion({})


@pytest.mark.parametrize("text", ["a", "%", "%b %%", "\0", '"\\', "é😀\u2028", "\n", "x" * 9000])
def test_filled_frames_are_the_encoded_ones(text: str) -> None:
    style = Style("cmpl-1", 1, "50%", "fp_1", True, 1, TOKENIZER)
    spec = RowSpec((5,), Sampling(), 1, frozenset())
    choice = Choice(style, 2, Prepared(spec, lambda: Sink(TOKENIZER), 1))
    (part,) = choice.render_delta(Delta(text=text))
    assert choice.frame(Delta(text=text)) == openai_shapes.frame(style.chunk([part]))
