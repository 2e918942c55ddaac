"""The streams of OpenAI's chat completions and completions, judged by a written grammar.

Chat, where a choice is the chunks with its index:

    stream   = opening{n} ( chunks of choices )* ( end | error )
    choice   = opening reasoning* ( text | call arguments* )* finish      entries anywhere before it
    opening  = {"role": "assistant", "content": ""}            all of them come first, in order
    call     = index, id, type, name, and the first arguments; a finish `tool_calls` means some
    finish   = an empty delta with the reason, once; nothing of this choice comes after it
    end      = usage? [DONE]          usage: no choices, alone, and only if it was asked for
    error    = {"error": {message, type, param, code}}         nothing comes after it, no [DONE]

Completions have no opening, no reasoning and no calls:

    choice   = ( text | entries )* finish

`entries` is a chunk of log-probabilities whose text is still withheld.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from tests.live import CHAT, LiveApp, Reply, chat_body, frames

COMPLETIONS = "/v1/completions"
CHOICE = re.compile(
    r"opening (?:reasoning |entries )*(?:text |entries |call (?:arguments |entries )*)*finish "
)
TEXT_CHOICE = re.compile(r"(?:text |entries )*finish ")
# A choice that an error cut off: any beginning of the above.
BROKEN_CHOICE = re.compile(
    r"opening (?:reasoning |entries )*(?:text |entries |call (?:arguments |entries )*)*(?:finish )?"
)
BROKEN_TEXT_CHOICE = re.compile(r"(?:text |entries )*(?:finish )?")

_CHUNK = TypeAdapter(ChatCompletionChunk)
_WHOLE = TypeAdapter(ChatCompletion)
_COMPLETION = TypeAdapter(Completion)
_REASONING = ("reasoning", "reasoning_content")


@dataclass
class Choice:
    """What the chunks of one choice amount to. calls: id, name and arguments by index."""

    words: str = ""
    text: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    finish: str | None = None
    entries: int = 0

    @property
    def shape(self) -> tuple[str, str, list[tuple[str, Any]], str | None]:
        """Without ids: reasoning, text, calls with their arguments read, finish."""
        calls = [(name, json.loads(arguments)) for _, name, arguments in self.calls]
        return self.reasoning, self.text, calls, self.finish


@dataclass
class Transcript:
    choices: list[Choice]
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


def read(
    reply: Reply | bytes,
    *,
    n: int = 1,
    wants_usage: bool = False,
    is_broken: bool = False,
    is_chat: bool = True,
) -> Transcript:
    """Judge the bytes of a stream by the grammar, the types and the ids; fold it.

    n: choices that it must have. is_broken: whether it must end with an error.
    """
    if isinstance(reply, Reply):
        assert reply.status == 200, reply.body
        assert reply.headers["content-type"] == "text/event-stream"
        reply = reply.body
    *found, last = frames(reply)
    transcript = Transcript([Choice() for _ in range(n)])
    if is_broken:
        transcript.error = last["error"]
        assert set(last) == {"error"} and set(last["error"]) == {
            "message", "type", "param", "code",
        }  # fmt: skip
    else:
        assert last == "[DONE]"
        if wants_usage:
            *found, closing = found
            assert closing["choices"] == []
            transcript.usage = closing["usage"]
    assert "[DONE]" not in found
    _check_frames(found, wants_usage, is_chat)
    if is_chat:
        opened = [chunk["choices"][0]["index"] for chunk in found[:n]]
        assert opened == list(range(n)), "each choice is opened before any goes on"
    for chunk in found:
        (part,) = chunk["choices"]
        push = _push_chat if is_chat else _push_text
        push(transcript.choices[part["index"]], part)
    grammars = {
        (True, False): CHOICE,
        (True, True): BROKEN_CHOICE,
        (False, False): TEXT_CHOICE,
        (False, True): BROKEN_TEXT_CHOICE,
    }
    grammar = grammars[is_chat, is_broken]
    for choice in transcript.choices:
        assert grammar.fullmatch(choice.words), choice.words
        assert choice.finish is None or (choice.finish == "tool_calls") == bool(choice.calls)
        assert len({call[0] for call in choice.calls}) == len(choice.calls)
    return transcript


def _check_frames(found: Sequence[dict[str, Any]], wants_usage: bool, is_chat: bool) -> None:
    """What every chunk shares, and its type by the official package."""
    heads = {(c["id"], c["object"], c["created"], c["model"], c["system_fingerprint"])
             for c in found}  # fmt: skip
    assert len(heads) <= 1
    for chunk in found:
        assert chunk["object"] == ("chat.completion.chunk" if is_chat else "text_completion")
        assert chunk.get("usage") is None and ("usage" in chunk) == wants_usage
        if is_chat:
            _CHUNK.validate_python(chunk)
        elif chunk["choices"][0]["finish_reason"] is not None:  # the type knows only the last one
            _COMPLETION.validate_python(chunk)


def _push_chat(choice: Choice, part: dict[str, Any]) -> None:
    delta = part["delta"]
    assert set(part) <= {"index", "delta", "finish_reason", "logprobs"}
    choice.entries += len((part.get("logprobs") or {"content": []})["content"])
    if part["finish_reason"] is not None:
        assert delta == {}
        choice.finish = part["finish_reason"]
        choice.words += "finish "
    elif "role" in delta:
        assert delta == {"role": "assistant", "content": ""}
        choice.words += "opening "
    elif delta == {}:
        assert part["logprobs"]["content"]
        choice.words += "entries "
    elif "tool_calls" in delta:
        assert set(delta) == {"tool_calls"}
        (piece,) = delta["tool_calls"]
        _push_call(choice, piece)
    elif "content" in delta:
        assert set(delta) == {"content"} and delta["content"]
        choice.text += delta["content"]
        choice.words += "text "
    else:
        assert set(delta) == set(_REASONING) and len(set(delta.values())) == 1
        assert delta["reasoning"]
        choice.reasoning += delta["reasoning"]
        choice.words += "reasoning "


def _push_call(choice: Choice, piece: dict[str, Any]) -> None:
    """One call after the other: id, type and name once, then arguments alone."""
    function = piece["function"]
    if piece["index"] == len(choice.calls):
        assert piece["type"] == "function" and re.fullmatch(r"call_\w+", piece["id"])
        choice.calls.append([piece["id"], function["name"], function["arguments"]])
        choice.words += "call "
        return
    assert piece["index"] == len(choice.calls) - 1
    assert set(piece) == {"index", "function"} and set(function) == {"arguments"}
    assert function["arguments"]
    choice.calls[-1][2] += function["arguments"]
    choice.words += "arguments "


def _push_text(choice: Choice, part: dict[str, Any]) -> None:
    assert set(part) == {"index", "text", "logprobs", "finish_reason"}
    choice.text += part["text"]
    choice.entries += len((part["logprobs"] or {"tokens": []})["tokens"])
    if part["finish_reason"] is not None:
        assert part["text"] == ""
        choice.finish = part["finish_reason"]
        choice.words += "finish "
    elif part["text"]:
        choice.words += "text "
    else:
        assert part["logprobs"]["tokens"]
        choice.words += "entries "


# ------------------------------------------------------------------------------- asking for it


def both(app: LiveApp, **body: Any) -> Transcript:
    """A streamed chat whose plain answer is the same; n and stream_options are read from it."""
    asked = chat_body(**{"max_tokens": None, **body})
    n = asked.get("n") or 1
    reply = app.ask("POST", CHAT, asked)
    assert reply.status == 200, reply.body
    whole = reply.json()
    _WHOLE.validate_python(whole)
    options = {"include_usage": True}
    streamed = app.ask("POST", CHAT, {**asked, "stream": True, "stream_options": options})
    found = read(streamed, n=n, wants_usage=True)
    assert [choice.shape for choice in found.choices] == [_shape(c) for c in whole["choices"]]
    assert found.usage == whole["usage"]
    bare = read(app.ask("POST", CHAT, {**asked, "stream": True}), n=n)
    assert [choice.shape for choice in bare.choices] == [c.shape for c in found.choices]
    return found


def _shape(choice: dict[str, Any]) -> tuple[str, str, list[tuple[str, Any]], str]:
    message = choice["message"]
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls", [])
    ]
    reasoning = message.get("reasoning", "")
    return reasoning, message["content"] or "", calls, choice["finish_reason"]


def both_texts(app: LiveApp, **body: Any) -> Transcript:
    """A streamed completion whose plain answer is the same."""
    asked = {"prompt": "hello world", "temperature": 0, **body}
    reply = app.ask("POST", COMPLETIONS, asked)
    assert reply.status == 200, reply.body
    whole = reply.json()
    _COMPLETION.validate_python(whole)
    options = {"include_usage": True}
    streamed = app.ask("POST", COMPLETIONS, {**asked, "stream": True, "stream_options": options})
    found = read(streamed, n=len(whole["choices"]), wants_usage=True, is_chat=False)
    parts = [(choice.text, choice.finish) for choice in found.choices]
    assert parts == [(choice["text"], choice["finish_reason"]) for choice in whole["choices"]]
    assert found.usage == whole["usage"]
    return found
