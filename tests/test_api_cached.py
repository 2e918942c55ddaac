"""What a prompt cost and what it did not, on every surface (spec 60 section 2, clients.md).

One server of the tiny model with a prompt cache; each surface asks the same twice, plain or as a
stream, and the second time all but the last token of the prompt is cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anthropic
import openai
import pytest

from tests.live import LiveApp

pytestmark = pytest.mark.slow

Ask = Callable[[LiveApp, str], tuple[int, int]]


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[LiveApp]:
    with LiveApp(tiny_folder, prompt_cache="0.1") as made:
        yield made


def openai_client(server: LiveApp) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)


def anthropic_client(server: LiveApp) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0)


def chat(server: LiveApp, text: str) -> tuple[int, int]:
    with openai_client(server) as client:
        usage = client.chat.completions.create(
            model="m", max_tokens=3, messages=[{"role": "user", "content": text}]
        ).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0


def streamed_chat(server: LiveApp, text: str) -> tuple[int, int]:
    with openai_client(server) as client:
        *_, last = client.chat.completions.create(
            model="m",
            max_tokens=3,
            stream=True,
            stream_options={"include_usage": True},
            messages=[{"role": "user", "content": text}],
        )
    assert last.usage is not None and last.usage.prompt_tokens_details is not None
    return last.usage.prompt_tokens, last.usage.prompt_tokens_details.cached_tokens or 0


def completion(server: LiveApp, text: str) -> tuple[int, int]:
    with openai_client(server) as client:
        usage = client.completions.create(model="m", max_tokens=3, prompt=text).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0


def response(server: LiveApp, text: str) -> tuple[int, int]:
    with openai_client(server) as client:
        usage = client.responses.create(model="m", max_output_tokens=3, input=text).usage
    assert usage is not None
    return usage.input_tokens, usage.input_tokens_details.cached_tokens


def message(server: LiveApp, text: str) -> tuple[int, int]:
    """Anthropic counts what was cached apart from `input_tokens`."""
    with anthropic_client(server) as client:
        usage = client.messages.create(
            model="m", max_tokens=3, messages=[{"role": "user", "content": text}]
        ).usage
    cached = usage.cache_read_input_tokens or 0
    return usage.input_tokens + cached, cached


SURFACES: list[Ask] = [chat, streamed_chat, completion, response, message]


@pytest.mark.parametrize("ask", SURFACES, ids=lambda ask: ask.__name__)
def test_the_second_time_all_but_one_token_is_cached(server: LiveApp, ask: Ask) -> None:
    text = f"{ask.__name__}: say something nice about whales, seals and the sea"
    prompt, cached = ask(server, text)
    assert cached < prompt - 1
    assert ask(server, text) == (prompt, prompt - 1)


def test_a_chat_goes_on_where_it_was(server: LiveApp) -> None:
    """Fault: each turn of a chat computes all of it again."""
    turn = [{"role": "user", "content": "tell me of the whale and the storm at sea"}]
    first = server.chat(messages=turn, max_tokens=20, temperature=0).json()
    turn += [
        {"role": "assistant", "content": first["choices"][0]["message"]["content"]},
        {"role": "user", "content": "and then?"},
    ]
    usage = server.chat(messages=turn, max_tokens=3).json()["usage"]
    before = first["usage"]["prompt_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= before - 1


def test_the_lane_is_told(server: LiveApp) -> None:
    """Spec 70 section 3: whether a request shared forwards with others."""
    alone = server.chat(max_tokens=3).json()["usage"]
    assert alone["lane"] == "serial"
    server.wait_batch(lambda batch: batch["shares_forwards"])
    never = {"0": -100, "2": -100}
    with ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(server.chat, max_tokens=200, seed=n, logit_bias=never) for n in range(4)
        ]
        lanes = {each.result().json()["usage"]["lane"] for each in asked}
    assert "batched" in lanes


def test_metrics_tell_of_the_cache(server: LiveApp) -> None:
    server.chat(max_tokens=3)
    server.chat(max_tokens=3)
    lines = server.ask("GET", "/metrics").body.decode().splitlines()
    told = dict(line.rsplit(" ", 1) for line in lines if line.startswith("mlxlite_prompt_cache"))
    assert float(told["mlxlite_prompt_cache_hits_total"]) >= 1
    assert float(told["mlxlite_prompt_cache_bytes"]) > 0
