"""The packages `openai`, `@anthropic-ai/sdk` and `ai` with its three providers, in Node.

Each has a script that does everything once and prints what it got. The model plays a part
(`stage.py`), the server is the live one.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from tests.clients_npm.conftest import NPM, SCRIPTS, Desk, Door
from tests.clients_npm.stage import Stage, call, last_turn

pytestmark = pytest.mark.npm

HELLO = "the quick brown fox"
THOUGHT = "Hm, so."
TOWNS = ["Rome", "Bonn"]
MILD = "It is mild."


def part(prompt: str) -> str:
    """Two calls for the question about two towns, an end after their results, else a fox."""
    if "<tool_response>" in last_turn(prompt):
        return MILD
    if "two towns" in prompt:
        calls = "\n".join(call("weather", town=town) for town in TOWNS)
        return f"<think>Two.</think>Let me see. {calls}"
    return f"<think>{THOUGHT}</think>{HELLO}"


def printed(stage: Stage, desk: Desk, name: str) -> Any:
    """What a script prints. Node finds packages beside or above a script, so it runs from there."""
    script = shutil.copy(SCRIPTS / f"{name}.mjs", NPM / f"{name}.mjs")
    stage.plays(part)
    done = desk.run("node", script, stage.url)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# -------------------------------------------------------------------------------------- openai


def test_openai(stage: Stage, desk: Desk) -> None:
    found = printed(stage, desk, "openai")
    assert (found["models"], found["model"]) == ([stage.name], stage.name)
    chat, usage = found["chat"], found["chat"]["usage"]
    assert (chat["content"], chat["reasoning"], chat["finish"]) == (HELLO, THOUGHT, "stop")
    assert found["stream"] == {
        "text": HELLO, "reasoning": THOUGHT, "finish": ["stop"], "usage": [usage],
    }  # fmt: skip
    assert found["helper"] == {"final": HELLO, "last": HELLO, "many": True}
    for name in ("runTools", "runTools stream"):
        ran = found[name]
        assert (ran["final"], ran["asked"]) == (MILD, TOWNS), name
        assert ran["roles"] == ["user", "assistant", "tool", "tool", "assistant"], name
    assert found["responses"] == {
        "text": HELLO, "again": HELLO, "types": ["reasoning", "message"],
        "items": ["message", "reasoning", "message", "message"],
    }  # fmt: skip
    assert found["responses loop"] == {
        "asked": TOWNS, "turns": 2, "text": MILD,
        "ends": ["response.created", "response.completed"],
    }  # fmt: skip
    said = f"<think>{THOUGHT}</think>{HELLO}"  # completions know no reasoning
    assert found["completions"] == [[0, said], [1, said]]
    assert found["completions stream"] == said
    assert found["errors"] == [
        ["BadRequestError", 400, "temperature", "invalid_request_error"],
        ["NotFoundError", 404, None, "invalid_request_error"],
        ["NotFoundError", 404, None, "invalid_request_error"],
        ["BadRequestError", 400, "input[0].role", "invalid_request_error"],
    ]
    assert [seen.status for seen in stage.log.refused()] == [400, 404, 404, 400]
    # Node's fetch sends it without an Origin, and is no page of another site.
    assert all(seen.headers["sec-fetch-mode"] == "cors" for seen in stage.log.all)
    assert not any("origin" in seen.headers for seen in stage.log.all)


# ----------------------------------------------------------------------------------- anthropic


def test_anthropic(stage: Stage, desk: Desk) -> None:
    found = printed(stage, desk, "anthropic")
    words = [THOUGHT, HELLO]
    assert found["plain"] == {"words": words, "stop": "end_turn", "types": ["thinking", "text"]}
    assert [kind for n, kind in enumerate(found["raw"]) if kind not in found["raw"][:n]] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert found["helper"] == {"text": HELLO, "thinking": THOUGHT, "final": words}
    usage = found["usage"]
    counted = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert found["count"] == {"input_tokens": counted}
    loop = found["loop"]
    assert (loop["asked"], loop["stops"], loop["final"]) == (
        TOWNS,
        ["tool_use", "end_turn"],
        [MILD],
    )
    assert loop["pieces"] > 2, "the input of a call comes in pieces"
    assert found["runner"] == found["runner stream"] == {"final": [MILD], "asked": TOWNS}
    assert found["errors"] == [["BadRequestError", 400, "invalid_request_error", True]] * 3
    # The tool runner asks for a thread first, and goes on without one.
    refused = stage.log.refused()
    assert [("thread" in seen.body) for seen in refused] == [True, True, False, False, False]


# ------------------------------------------------------------------------------------------ ai


@pytest.fixture(scope="module")
def answers(
    stage: Stage, door: Door, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """By provider; one run for all, since Node takes longer to start than they do to answer."""
    desk = Desk(tmp_path_factory.mktemp("ai"), door)
    desk.home.mkdir()
    desk.work.mkdir()
    door.knocks.clear()
    found: dict[str, dict[str, Any]] = printed(stage, desk, "ai")
    assert door.knocks == [] and stage.log.refused() == []
    return found


@pytest.mark.parametrize("provider", ["chat", "responses", "anthropic", "compatible"])
def test_ai(answers: dict[str, dict[str, Any]], provider: str) -> None:
    found = answers[provider]
    thought = None if provider == "chat" else THOUGHT  # OpenAI's chat has no reasoning to read
    assert (found["plain"], found["reasoning"], found["finish"]) == (HELLO, thought, "stop")
    assert (found["streamed"], found["streamed reasoning"]) == (HELLO, thought)
    assert found["streamed finish"] == "stop"
    for name in ("inputTokens", "outputTokens", "totalTokens"):
        assert found["usage"][name] == found["streamed usage"][name] > 0, name
    assert found["usage"]["outputTokenDetails"]["reasoningTokens"] > 0
    for name in ("tools", "tools streamed"):
        ran = found[name]
        assert (ran["text"], ran["asked"]) == (MILD, TOWNS), name
        assert ran["finishes"] == ["tool-calls", "stop"], name
