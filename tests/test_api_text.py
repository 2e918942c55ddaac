"""/tokenize, /detokenize, /apply-template: what a prompt becomes, without an answer."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import pytest

from mlxlite import fields
from mlxlite.api import responses_request, text
from tests import tiny
from tests.live import HELLO, LiveApp, Reply
from tests.scripted import QWEN, TOKENIZER, ScriptedApp

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
RENDERED = f"{tiny.SPECIAL[1]}user\nhello world{tiny.SPECIAL[2]}\n{tiny.SPECIAL[1]}assistant\n"


def post(server: LiveApp, path: str, **body: Any) -> Reply:
    return server.ask("POST", path, body)


def found(server: LiveApp, path: str, **body: Any) -> dict[str, Any]:
    reply = post(server, path, **body)
    assert reply.status == 200, reply.body
    answer: dict[str, Any] = reply.json()
    return answer


@pytest.mark.parametrize("text", ["hello world", "", " a", "é🙂\n", tiny.SPECIAL[1] + "x", "\x00"])
@pytest.mark.parametrize("name", ["prompt", "content"])
@pytest.mark.parametrize("adds", [None, True, False])
def test_there_and_back(tiny_server: LiveApp, text: str, name: str, adds: Any) -> None:
    answer = found(tiny_server, "/tokenize", add_special_tokens=adds, **{name: text})
    ids = TOKENIZER.encode(text, add_special_tokens=adds is not False)
    assert answer == {"tokens": ids, "count": len(ids), "max_model_len": 1024}
    back = found(tiny_server, "/detokenize", tokens=ids)
    assert back == {"prompt": text, "content": text}


def test_conversations(tiny_server: LiveApp) -> None:
    answer = found(tiny_server, "/tokenize", messages=HELLO)
    assert answer["tokens"] == TOKENIZER.encode(RENDERED)
    assert answer["count"] == tiny_server.chat().json()["usage"]["prompt_tokens"]
    assert found(tiny_server, "/apply-template", messages=HELLO) == {"prompt": RENDERED}
    assert found(tiny_server, "/detokenize", tokens=answer["tokens"])["prompt"] == RENDERED


def test_longer_than_the_context(tiny_server: LiveApp) -> None:
    messages = [{"role": "user", "content": "word " * 2000}]
    assert found(tiny_server, "/tokenize", messages=messages)["count"] > 1024
    assert found(tiny_server, "/tokenize", prompt="word " * 2000)["count"] > 1024


@pytest.mark.parametrize("count", [text._PORTION, text._PORTION + 1, 3 * text._PORTION])
def test_many_tokens(tiny_server: LiveApp, count: int) -> None:
    """They are written in portions."""
    ids = [5 + at % 200 for at in range(count)]
    words = found(tiny_server, "/detokenize", tokens=ids)["prompt"]
    right = TOKENIZER.encode(words)
    answer = found(tiny_server, "/tokenize", prompt=words)
    assert (answer["tokens"], answer["count"]) == (right, len(right)) and len(right) > count // 2


def test_tools_and_options(tiny_folder: Any) -> None:
    path = tiny_folder.parent / "qwen.jinja"
    path.write_text(QWEN + "{% if enable_thinking is defined %}T{{ enable_thinking }}{% endif %}")
    with ScriptedApp(tiny_folder, str(path)) as server:
        plain = found(server, "/apply-template", messages=HELLO)["prompt"]
        assert "look" not in plain
        for path_of, key in (("/apply-template", "prompt"), ("/tokenize", "tokens")):
            with_tool = found(
                server,
                path_of,
                messages=HELLO,
                tools=[TOOL],
                chat_template_kwargs={"enable_thinking": False},
            )[key]
            text = with_tool if key == "prompt" else TOKENIZER.decode(with_tool, keep_special=True)
            assert '"name": "look"' in text and text.endswith("TFalse")
        assert server.engine.specs == [], "the model does not run"


@pytest.mark.parametrize(
    ("path", "param", "body"),
    [
        ("/tokenize", "prompt", {}),
        ("/tokenize", "prompt", {"prompt": "a", "content": "b"}),
        ("/tokenize", "prompt", {"prompt": "a", "messages": HELLO}),
        ("/tokenize", "prompt", {"prompt": ["a"]}),
        ("/tokenize", "content", {"content": 5}),
        ("/tokenize", "messages", {"messages": []}),
        ("/tokenize", "messages", {"messages": "hi"}),
        ("/tokenize", "add_special_tokens", {"prompt": "a", "add_special_tokens": "no"}),
        ("/tokenize", "tools", {"messages": HELLO, "tools": 5}),
        ("/detokenize", "tokens", {}),
        ("/detokenize", "tokens", {"tokens": "5"}),
        ("/detokenize", "tokens[1]", {"tokens": [1, -1]}),
        ("/detokenize", "tokens[0]", {"tokens": [True]}),
        ("/detokenize", "tokens", {"tokens": [512]}),
        ("/apply-template", "messages", {}),
        ("/apply-template", "messages", {"messages": None}),
        ("/apply-template", "tools[0]", {"messages": HELLO, "tools": [5]}),
    ],
)
def test_wrong_values(tiny_server: LiveApp, path: str, param: str, body: dict[str, Any]) -> None:
    reply = post(tiny_server, path, **body)
    assert (reply.status, reply.error["param"]) == (400, param), reply.body


def test_bodies_and_methods(tiny_server: LiveApp) -> None:
    for path in ("/tokenize", "/detokenize", "/apply-template"):
        assert tiny_server.ask("POST", path, b"[]").status == 400
        assert tiny_server.ask("GET", path).headers["allow"] == "OPTIONS, POST"
    assert found(tiny_server, "/detokenize", tokens=[]) == {"prompt": "", "content": ""}


@pytest.mark.parametrize(
    ("module", "reader", "path", "body"),
    [
        (fields, "take_tools", "/v1/chat/completions", {"messages": HELLO, "max_tokens": 1}),
        (fields, "take_tools", "/v1/responses", {"input": "a", "max_output_tokens": 1}),
        (responses_request, "check_body", "/v1/responses", {"input": "a", "max_output_tokens": 1}),
        (responses_request, "echo", "/v1/responses", {"input": "a", "max_output_tokens": 1}),
        (fields, "take_ids", "/v1/completions", {"prompt": [5, 6], "max_tokens": 1}),
        (fields, "take_tools", "/tokenize", {"messages": HELLO}),
        (text, "_render_tokens", "/tokenize", {"prompt": "a"}),
        (fields, "take_ids", "/detokenize", {"tokens": [5]}),
        (fields, "take_tools", "/apply-template", {"messages": HELLO}),
    ],
)
def test_reading_is_not_the_event_loops_work(
    tiny_server: LiveApp,
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    reader: str,
    path: str,
    body: dict[str, Any],
) -> None:
    """A body of millions of ids, or of thousands of tools, would stop every stream for a second."""
    seen: list[str] = []
    original = getattr(module, reader)

    def spied(*given: Any) -> Any:
        seen.append(threading.current_thread().name)
        return original(*given)

    monkeypatch.setattr(module, reader, spied)
    assert post(tiny_server, path, **body).status == 200
    assert seen and all(name.startswith("mlxlite-prepare") for name in seen)
