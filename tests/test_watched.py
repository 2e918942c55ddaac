"""Watch: where a call begins, however its marker is cut; Watched: the reader finds the same."""

from __future__ import annotations

import pytest

from mlxlite.text.tokenizer import Tokenizer
from mlxlite.text.tools.families import route
from mlxlite.text.tools.watched import Watch, spelled_ids
from tests import tokenizers_made as made
from tests.folded import run, sink_of, tokenizer_with

OPENERS = ("<tool_call>", "<|start|>assistant to=f.")
STARTERS = ('{"name": "add", "parameters":', "[add(")


def found(watch: Watch, text: str, size: int) -> list[str]:
    """The calls that begin in a text that comes in pieces of so many bytes; each ends at once."""
    out = []
    data = text.encode()
    for at in range(0, len(data), size):
        begun = watch.take(data[at : at + size])
        if begun is not None:
            out.append(begun.decode())
            watch.ended()
    return out


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("text", "begins"),
    [
        ("so: <tool_call>", ["<tool_call>"]),
        ("<tool_<tool_call>", ["<tool_call>"]),
        ("a <TOOL_Call>", ["<tool_call>"]),
        ("<tool_call>xxxx<tool_call>", ["<tool_call>"] * 2),
        ("<|start|>assistant to=f.", ["<|start|>assistant to=f."]),
        (" \n[add(", ["[add("]),
        ('{"name": "add", "parameters":', ['{"name": "add", "parameters":']),
        ("é [add(", []),
        ('{"name": "add", "arguments":', []),
        ("[1, add(", []),
        ("hm [add(</think> \n[ADD(", ["[add("]),
        ("", []),
    ],
)
def test_where_a_call_begins(text: str, begins: list[str], size: int) -> None:
    calls = found(Watch(OPENERS, STARTERS, restart="</think>"), text, size)
    assert [each[: len(b)] for each, b in zip(calls, begins, strict=True)] == begins


def test_what_follows_in_the_same_token() -> None:
    assert Watch(OPENERS).take(b'x<tool_call>{"') == b'<tool_call>{"'
    assert Watch((), STARTERS).take(b" [add(a") == b"[add(a"


def test_a_thought_that_is_open_is_no_beginning() -> None:
    watch = Watch((), STARTERS, restart="</think>", at_start=False)
    assert found(watch, "[add(", 1) == []
    assert found(watch, "</think>[add(", 1) == ["[add("]


def test_what_is_missing_of_a_marker() -> None:
    watch = Watch(OPENERS, STARTERS)
    assert watch.pending() == set()
    watch.take(b" <tool")
    assert watch.pending() == {b"_call>"}
    watch.take(b"_cAll")
    assert watch.pending() == {b">"}
    watch.take(b" a <")
    assert watch.pending() == {b"tool_call>", b"|start|>assistant to=f."}
    watch = Watch(OPENERS, STARTERS)
    watch.take(b' {"na')
    assert watch.pending() == {b'me": "add", "parameters":'}
    assert Watch(()).pending() == set()


def test_calls_follow_each_other() -> None:
    assert len(found(Watch((), STARTERS), "[add([add(", 5)) == 2


@pytest.mark.parametrize("strips", [False, True])
@pytest.mark.parametrize("text", ["<tool_call>", "[add(", " to=functions.", "[TOOL_CALLS]", "é"])
def test_the_ids_of_a_marker(text: str, strips: bool) -> None:
    """No blank comes ahead of it, as SentencePiece would have it."""
    backend = made.sentencepiece(strips)
    backend.add_special_tokens(["[TOOL_CALLS]"])
    words = Tokenizer(backend)
    assert b"".join(map(words.bytes_of, spelled_ids(text.encode(), words))) == text.encode()


@pytest.mark.parametrize("cut", [0, 1, 9, 12])
def test_only_what_was_watched_is_a_call(cut: int) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    words = tokenizer_with()
    for is_watched in (False, True):
        bare = '{"name": "add", "arguments": {}}'
        routing = route("<tool_call>", "", tools, is_watched=is_watched)
        folded = run(sink_of(words, routing), words, [bare[:cut], bare[cut:]])
        assert (folded.content == bare) is is_watched
        block = f"<tool_call>{bare}</tool_call>"
        folded = run(sink_of(words, routing), words, [block[:cut], block[cut:]])
        assert len(folded.calls) == 1 and not folded.content
