"""Structured output, line by line of spec 40 section 9, with decision D7 where it departs.

What is not here is in `test_api_structured` (precedence, the switch, batches), `test_schemas` and
`test_grammar` (single flight). The model is tiny and random.
"""

from __future__ import annotations

import gc
import logging
import re
import socket
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxlite.errors import BadRequest
from mlxlite.text import grammar, vocabulary
from mlxlite.text.grammar import Grammars, Matcher
from tests import schema_table as table
from tests import tiny
from tests.grammars import VOCAB, count_vocabularies, form
from tests.live import (
    CHAT,
    WAIT_S,
    Brake,
    LiveApp,
    Reply,
    chat_body,
    connect,
    post_bytes,
    read_until,
)
from tests.prepared import TOKENIZER
from tests.test_schemas import BIAS, as_schema
from tests.validity import validate

TREE_JSON = table.obj(name=table.S, size=table.I)
SHAPES: dict[str, tuple[dict[str, Any], str | dict[str, Any]]] = {
    "json_object": ({"response_format": {"type": "json_object"}}, {"type": "object"}),
    "json_schema": ({"response_format": as_schema(TREE_JSON, strict=True)}, TREE_JSON),
    "json_schema-open": ({"response_format": as_schema(TREE_JSON, strict=False)}, TREE_JSON),
    "json_schema-blanks": (
        {"response_format": as_schema(TREE_JSON, any_whitespace=True)}, TREE_JSON,
    ),
    "guided_json": ({"guided_json": TREE_JSON}, TREE_JSON),
    "structured_outputs": ({"structured_outputs": TREE_JSON}, TREE_JSON),
    "structured_outputs-json": ({"structured_outputs": {"json": TREE_JSON}}, TREE_JSON),
    "guided_regex": ({"guided_regex": "[a-z]{2,5}-[0-9]{1,3}"}, "[a-z]{2,5}-[0-9]{1,3}"),
    "guided_choice": ({"guided_choice": ["yes", "no", "may be"]}, "yes|no|may be"),
    "guided_grammar": ({"guided_grammar": 'root ::= [a-c] [a-c]? "!" | "ok"'}, "[a-c]{1,2}!|ok"),
    "guided_grammar-lark": ({"guided_grammar": 'start: /[a-c]{1,4}/ "!"'}, "[a-c]{1,4}!"),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_twenty_seeds_of_each_shape(tiny_server: LiveApp, name: str) -> None:
    body, wanted = SHAPES[name]
    texts = []
    for seed in range(0, 20, 5):
        reply = tiny_server.chat(
            **body, temperature=1, seed=seed, n=5, max_tokens=700, logit_bias=BIAS
        )
        assert reply.status == 200 and "warning" not in reply.headers, reply.body
        for choice in reply.json()["choices"]:
            assert choice["finish_reason"] == "stop"
            texts.append(choice["message"]["content"])
    for text in texts:
        if isinstance(wanted, str):
            assert re.fullmatch(wanted, text)
        else:
            validate(text, wanted)
    assert len(texts) == 20 and len(set(texts)) > 1


# ------------------------------------------------------------------ what cannot be, or not so


NOT = {"type": "boolean", "not": {"const": False}}


def prompt_tokens(reply: Reply) -> int:
    return int(reply.json()["usage"]["prompt_tokens"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_json", NOT),
        ("guided_json", {"type": "string", "pattern": "^(?=a)a$"}),
        ("structured_outputs", NOT),
        ("guided_regex", "(?=a)a"),
    ],
    ids=["keyword", "pattern", "bare", "regex"],
)
def test_what_is_not_supported(tiny_server: LiveApp, field: str, value: Any) -> None:
    """Chat: asked for in the prompt, with a header. Completions: the header alone."""
    plain, asked = tiny_server.chat(), tiny_server.chat(**{field: value})
    assert asked.status == 200 and field in asked.headers["warning"]
    assert "prompt injection is used instead" in asked.headers["warning"]
    assert prompt_tokens(asked) > prompt_tokens(plain)
    body = {"prompt": "hello", "max_tokens": 3}
    plain = tiny_server.ask("POST", "/v1/completions", body)
    asked = tiny_server.ask("POST", "/v1/completions", {**body, field: value})
    assert asked.status == 200 and field in asked.headers["warning"]
    assert "injection" not in asked.headers["warning"]
    assert prompt_tokens(asked) == prompt_tokens(plain)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_grammar", "root ::= ("),
        ("guided_grammar", 'other ::= "a"'),
        ("guided_regex", "[z-a]"),
        ("guided_json", {"type": "string", "pattern": "("}),
        ("guided_choice", [5]),
    ],
    ids=["ebnf", "ebnf-root", "regex", "pattern", "choice"],
)
def test_what_is_malformed(tiny_server: LiveApp, field: str, value: Any) -> None:
    for path, body in ((CHAT, chat_body()), ("/v1/completions", {"prompt": "hello"})):
        reply = tiny_server.ask("POST", path, {**body, field: value})
        assert reply.status == 400 and reply.error["param"].startswith(field), reply.body
        assert reply.error["type"] == "invalid_request_error"


def test_a_control_character_in_a_choice(tiny_server: LiveApp) -> None:
    """The reference gives up there; here it is enforced."""
    reply = tiny_server.chat(guided_choice=["a\x07b", "a\x07c"], max_tokens=9)
    assert "warning" not in reply.headers and reply.text in ("a\x07b", "a\x07c")


@pytest.mark.parametrize("value", ["off", "0"])
def test_the_switch_on_completions(tiny_folder: Path, value: str) -> None:
    with LiveApp(tiny_folder, grammar=value) as app:
        body = {"prompt": "hello", "max_tokens": 3}
        assert "warning" not in app.ask("POST", "/v1/completions", body).headers
        reply = app.ask("POST", "/v1/completions", {**body, "guided_regex": "a"})
        assert reply.status == 200 and "MLXLITE_GRAMMAR" in reply.headers["warning"]


# ------------------------------------------------------------------------------ ids, the end


def test_padded_logits(tmp_path: Path) -> None:
    """No id that the tokenizer lacks is drawn, however flat the distribution."""
    folder = tiny.make_model(tmp_path / "padded", vocab_size=VOCAB + 300)
    with LiveApp(folder) as app:
        reply = app.chat(
            guided_regex="(?s:.{200,})", max_tokens=150, temperature=5, logprobs=True, n=4, seed=1
        )
        assert reply.status == 200, reply.body
        drawn = [
            token["id"]
            for choice in reply.json()["choices"]
            for token in choice["logprobs"]["content"]
        ]
        free = app.chat(max_tokens=150, temperature=5, logprobs=True, n=4, seed=1)
        beyond = [t["id"] for c in free.json()["choices"] for t in c["logprobs"]["content"]]
    assert len(drawn) > 100 and max(drawn) < VOCAB
    assert max(beyond) >= VOCAB, "without a grammar they are drawn"


@pytest.mark.parametrize("most", [0, 1], ids=["exactly", "one-more"])
def test_complete_at_the_limit(tiny_server: LiveApp, most: int) -> None:
    text = '{"a":1}'
    size = len(TOKENIZER.encode(text, add_special_tokens=False))
    reply = tiny_server.chat(guided_json={"const": {"a": 1}}, max_tokens=size + most)
    (choice,) = reply.json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert reply.json()["usage"]["completion_tokens"] <= size


# ---------------------------------------------------------------------------------- disposal


@pytest.fixture
def matchers(monkeypatch: pytest.MonkeyPatch) -> Iterator[weakref.WeakSet[Matcher]]:
    """All matchers that exist from here on."""
    alive: weakref.WeakSet[Matcher] = weakref.WeakSet()
    original = Matcher.__init__

    def noted(self: Matcher, inner: Any) -> None:
        original(self, inner)
        alive.add(self)
        noted_ever.append(1)

    noted_ever: list[int] = []
    monkeypatch.setattr(Matcher, "__init__", noted)
    yield alive
    assert noted_ever, "there were some"


def assert_let_go(app: LiveApp, matchers: weakref.WeakSet[Matcher]) -> None:
    app.wait_batch(lambda stats: not stats["active_rows"] and not stats["pending_rows"])
    app.chat(max_tokens=2)  # what the engine keeps of its last step is of this row
    gc.collect()
    assert not list(matchers)


ENDLESS = {"guided_regex": "[a-z]{900,}", "max_tokens": 900, "stream": True}


def leave(sock: socket.socket) -> None:
    sock.close()


def test_matchers_of_whole_answers(tiny_folder: Path, matchers: weakref.WeakSet[Matcher]) -> None:
    with LiveApp(tiny_folder) as app:
        assert app.chat(guided_regex="[a-z]{3}", n=3).status == 200
        assert_let_go(app, matchers)


def test_matchers_of_those_who_leave(tiny_folder: Path, matchers: weakref.WeakSet[Matcher]) -> None:
    """In decode, and before the first token."""
    with LiveApp(tiny_folder) as app:
        sock = connect(app.address)
        sock.sendall(post_bytes(CHAT, chat_body(**ENDLESS)))
        read_until(sock, b'"content"')
        leave(sock)
        assert_let_go(app, matchers)
        brake = Brake(app.worker._loop, "advance")
        sock = connect(app.address)
        long = [{"role": "user", "content": "word12 " * 200}]
        sock.sendall(post_bytes(CHAT, chat_body(**ENDLESS, messages=long)))
        brake.wait()
        leave(sock)
        brake.free()
        assert_let_go(app, matchers)


def test_matchers_of_those_refused(tiny_folder: Path, matchers: weakref.WeakSet[Matcher]) -> None:
    """A prompt that is too long (400), and a queue that is full (429)."""
    with LiveApp(tiny_folder, batch="1", queue="0") as app:
        long = [{"role": "user", "content": "word12 " * 3000}]
        assert app.chat(guided_regex="a", messages=long).status == 400
        sock = connect(app.address)
        sock.sendall(post_bytes(CHAT, chat_body(**ENDLESS)))
        read_until(sock, b'"content"')
        statuses = {app.chat(guided_regex="[a-z]{30}").status for _ in range(3)}
        assert statuses == {429}
        leave(sock)
        assert_let_go(app, matchers)


# ---------------------------------------------------------------------------- the vocabulary


def test_ten_at_once_make_one_vocabulary(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = count_vocabularies(monkeypatch)
    found: list[str] = []
    with LiveApp(tiny_folder) as app:

        def ask(n: int) -> None:
            found.append(app.chat(guided_choice=[f"c{n}"]).text)

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    assert made == [1] and sorted(found) == sorted(f"c{n}" for n in range(10))


def test_it_is_made_while_nobody_asks(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while an answer is under way; and not at all if grammars are off."""
    monkeypatch.setattr("mlxlite.service._QUIET_S", 0.01)
    is_made = threading.Event()
    original = Grammars.prepare

    def told(self: Grammars) -> None:
        original(self)
        is_made.set()

    monkeypatch.setattr(Grammars, "prepare", told)
    with LiveApp(tiny_folder, wait=False) as app:
        sock = connect(app.address)
        sock.sendall(post_bytes(CHAT, chat_body(stream=True, max_tokens=900, logit_bias=NO_END)))
        read_until(sock, b'"content"')
        assert not is_made.is_set()
        leave(sock)
        assert is_made.wait(WAIT_S)
    is_made.clear()
    with LiveApp(tiny_folder, grammar="off") as app:
        assert app.chat().status == 200
    assert not is_made.is_set()


NO_END = {"0": -100, "2": -100}


# -------------------------------------------------------------------------------- the log


def test_debugging(tiny_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlxlite.text.grammar")
    with LiveApp(tiny_folder, grammar_debug="1") as app:
        assert app.chat(guided_choice=["yes"]).text == "yes"
        assert app.chat(guided_choice=["yes"]).text == "yes"
        assert app.chat(guided_regex="[a-z]{99}", max_tokens=3).status == 200
        app.chat(max_tokens=2)
        gc.collect()
    lines = [r.getMessage() for r in caplog.records if r.name == "mlxlite.text.grammar"]
    patterns = (
        r"grammar 1 \(guided_choice\): compiled in [\d.]+ ms, 7 characters",
        r"grammar 1 \(guided_choice\): was kept",
        r"grammar 1 \(guided_choice\): finished after \d+ tokens; \d+ masks took [\d.]+ ms",
        r"grammar 2 \(guided_regex\): left before its end after [23] tokens; \d+ masks took .*",
    )
    for pattern in patterns:
        assert any(re.fullmatch(pattern, line) for line in lines), (pattern, lines)


def test_nothing_is_logged_without_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlxlite.text.grammar")
    made = Grammars(TOKENIZER, VOCAB).compile(form("regex", "a"))
    del made
    gc.collect()
    assert not caplog.records


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ("json", {"type": "strin"}), ("json", {"allOf": [{"type": "string"}, {"type": "null"}]}),
        ("regex", "("), ("grammar", "start: ("), ("grammar", "root ::= ("),
    ],
)  # fmt: skip
def test_what_is_bad_in_itself_needs_no_vocabulary(wanted: Any, text: Any) -> None:
    """Making it stalls streams: nobody waits for that because of a form that is refused (F70)."""
    grammars = Grammars(TOKENIZER, VOCAB)
    with pytest.raises((BadRequest, grammar.Unsupported)) as first:
        grammars.compile(form(wanted, text))
    assert grammars._vocabulary is None
    grammars.open()
    with pytest.raises(type(first.value)) as later:
        grammars.compile(form(wanted, text))
    assert str(first.value) == str(later.value), "the same words as with the model's own tokens"


def test_a_bad_first_request_makes_none(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the server, before it had time to make one in quiet; a good one makes it."""
    monkeypatch.setattr("mlxlite.service._QUIET_S", 600)
    made = count_vocabularies(monkeypatch)
    with LiveApp(tiny_folder) as app:
        assert app.chat(guided_json={"type": "strin"}).status == 400
        assert app.chat(guided_regex="(").status == 400
        assert made == []
        assert app.chat(guided_choice=["yes"]).text == "yes"
        assert made == [1]


def test_a_grammar_that_names_a_special_token_is_judged_by_the_models_own() -> None:
    grammars = Grammars(TOKENIZER, VOCAB)
    made = grammars.compile(form("grammar", f'start: <[{TOKENIZER.bos_id}]> "a"'))
    assert made.matcher().forced()[0] == TOKENIZER.bos_id


def test_the_tree_is_cut_once_and_for_nobody_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    cut: list[int] = []
    original = vocabulary.sliced

    def counted(tree: Any) -> Any:
        cut.append(1)
        return original(tree)

    monkeypatch.setattr(vocabulary, "sliced", counted)
    grammars = Grammars(TOKENIZER, VOCAB)
    grammars.compile(form("json", {"type": "string"}))
    assert cut == []
    for _ in range(2):
        grammars.prepare()
    assert cut == [1]


def test_masks_are_the_same_before_the_tree_is_cut() -> None:
    """In parts or whole, what is allowed is."""
    wanted = form("json", {"type": "object", "properties": {"a": {"type": "string"}}})
    early, late = Grammars(TOKENIZER, VOCAB), Grammars(TOKENIZER, VOCAB)
    late.prepare()
    pair = early.compile(wanted).matcher(), late.compile(wanted).matcher()
    ids = TOKENIZER.encode('{"a":"one two, three"}', add_special_tokens=False)
    for token in ids:
        first, second = (list(each.mask()) for each in pair)
        assert first == second
        for each in pair:
            each.consume(token)
