"""grammar: what llguidance allows, step by step, and what is refused (decision D7)."""

from __future__ import annotations

import importlib.util
import json
import re
import threading
import time
from typing import Any

import pytest

from mlxlite.errors import BadRequest, EngineFault
from mlxlite.text.grammar import Grammars, Unsupported
from mlxlite.text.json_schema import MOST_LEVELS, closed, separated
from tests import schema_table as table
from tests.grammars import EOS, VOCAB, allowed, count_vocabularies, form, takes, walk
from tests.prepared import TOKENIZER
from tests.validity import validate


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, VOCAB)


# ------------------------------------------------------------------------------------ schemas


def test_a_schema_may_come_as_text(grammars: Grammars) -> None:
    made = grammars.compile(form("json", json.dumps(table.SCHEMAS["enum-strings"])))
    assert json.loads(walk(made.matcher(), 1)) in ("red", "green", "blue")
    for text in ("", "{", "[]", "5", '"a"', "[" * 5000):
        with pytest.raises(BadRequest, match="field must be a JSON schema"):
            grammars.compile(form("json", text))


def test_blanks(grammars: Grammars) -> None:
    """Bounded, so that a weak model gets out of them again (F69)."""
    schema = table.obj(a=table.I)
    made = grammars.compile(form("json", schema, any_whitespace=True))
    texts = {walk(made.matcher(), seed) for seed in range(40)}
    assert any(re.search(r"\s", text) for text in texts)
    assert not any(re.search(r"\s{9}", text) for text in texts)
    for text in texts:
        validate(text, schema)


OBJECT = {"type": "object", "properties": {"a": table.I}}


@pytest.mark.parametrize(
    ("schema", "is_open"),
    [
        (OBJECT, False),
        ({**OBJECT, "additionalProperties": True}, True),
        ({**OBJECT, "required": ["a", "b"]}, True),
        ({**OBJECT, "patternProperties": {"^x": {}}}, True),
        ({"type": "object"}, True),
        ({"type": "object", "properties": {}}, True),
        ({"allOf": [OBJECT]}, True),
        ({"$defs": {"o": OBJECT}, "$ref": "#/$defs/o"}, False),
        ({"anyOf": [OBJECT]}, False),
        ({"const": OBJECT}, True),
    ],
    ids=str,
)
def test_objects_are_closed_unless_they_say_otherwise(schema: Any, is_open: bool) -> None:
    before = json.dumps(schema)
    assert ('"additionalProperties": false' in json.dumps(closed(schema))) is not is_open
    assert json.dumps(schema) == before


def test_open_if_asked(grammars: Grammars) -> None:
    for is_closed in (True, False):
        matcher = grammars.compile(form("json", OBJECT, is_closed=is_closed)).matcher()
        for token in TOKENIZER.encode('{"', add_special_tokens=False):
            matcher.consume(token)
        (b,) = TOKENIZER.encode("b", add_special_tokens=False)
        assert (b in allowed(matcher)) is not is_closed


@pytest.mark.parametrize("name", ["oneOf-tagged", "oneOf-discriminated"])
def test_a_tag_tells_branches_apart(name: str) -> None:
    assert "oneOf" not in json.dumps(separated(table.SCHEMAS[name]))


@pytest.mark.parametrize("name", ["oneOf-overlap", "oneOf-tag-shared"])
def test_branches_without_a_tag_stay(name: str) -> None:
    assert separated(table.UNSUPPORTED[name]) == table.UNSUPPORTED[name]


# -------------------------------------------------------------------------------- other forms


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("[0-9]{3}", ["123"]),
        ("^ab?$", ["a", "ab"]),
        ("yes|no", ["yes", "no"]),
        ("a/b", ["a/b"]),
        ("(?i)ok", ["ok", "OK", "oK"]),
        ("a\nb", ["a\nb"]),
        (r"\$\d\.\d{2}", ["$1.50"]),
        ("é|東", ["é", "東"]),
    ],
)
def test_expressions(grammars: Grammars, pattern: str, texts: list[str]) -> None:
    made = grammars.compile(form("regex", pattern))
    for text in texts:
        assert takes(made.matcher(), text)
        assert not takes(made.matcher(), text + "x") and not takes(made.matcher(), "x" + text)
    for seed in range(10):
        assert re.fullmatch(pattern, walk(made.matcher(), seed))


@pytest.mark.parametrize(
    "choices",
    [["yes", "no"], ["a", "ab", "abc"], ["x", "x"], [""], ['say "hi"', "a\\b", "c/d"],
     ["line\nend", "tab\t", "bell\x07"], ["é", "東京", "😀"], ["one"]],
    ids=str,
)  # fmt: skip
def test_choices(grammars: Grammars, choices: list[str]) -> None:
    made = grammars.compile(form("choice", tuple(choices)))
    assert {walk(made.matcher(), seed) for seed in range(60)} == set(choices)


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        ('root ::= "a" | "b"', {"a", "b"}),
        ("root ::= x y?\nx ::= [0-1]\ny ::= \"!\"", {"0", "1", "0!", "1!"}),
        ('start: "a" | B\nB: /b{2}/', {"a", "bb"}),
        ('start: %json {"enum": [1, 2]}', {"1", "2"}),
    ],
    ids=["gbnf", "gbnf-rules", "lark", "lark-json"],
)  # fmt: skip
def test_grammars(grammars: Grammars, text: str, answers: set[str]) -> None:
    made = grammars.compile(form("grammar", text))
    assert {walk(made.matcher(), seed) for seed in range(40)} == answers


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("regex", "("),
        ("regex", "[z-a]"),
        ("regex", "a{5,1}"),
        ("regex", "\ud83d"),
        ("grammar", "root ::= x"),
        ("grammar", 'x ::= "a"'),
        ("grammar", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000),
        ("grammar", "start: ((("),
        ("grammar", 'begin: "a"'),
        ("grammar", "\x00"),
        ("choice", ("\ud83d",)),
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_malformed_forms_are_refused(grammars: Grammars, kind: str, value: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        grammars.compile(form(kind, value))
    assert caught.value.param == "field" and "\n" not in caught.value.message


# -------------------------------------------------------------------------------- the bounds


@pytest.mark.parametrize(
    ("kind", "value", "why"),
    [
        ("json", {"enum": ["x" * 500_000, "y" * 600_000]}, "larger than"),
        ("json", '{"const": "' + "x" * 1_000_001 + '"}', "larger than"),
        ("regex", "a" * 1_000_001, "larger than"),
        ("grammar", "é" * 600_000, "larger than"),
        ("choice", ("a" * 600_000, "b" * 600_000), "larger than"),
        ("json", table.nested(MOST_LEVELS), "nested deeper"),
        ("json", {"const": json.loads("[" * 500 + "]" * 500)}, "nested deeper"),
        ("json", {"minimum": float("inf")}, "too large"),
        ("json", table.unions(6, "anyOf"), "too large"),
    ],
    ids=["schema", "text", "regex", "grammar", "choices", "deep", "deep-data", "inf", "unions"],
)
def test_what_is_too_large_is_refused(grammars: Grammars, kind: str, value: Any, why: str) -> None:
    grammars.open()
    started = time.process_time()
    with pytest.raises(BadRequest, match=why):
        grammars.compile(form(kind, value))
    assert time.process_time() - started < 5


@pytest.mark.parametrize("length", [280, 5000])
def test_references_in_a_row(grammars: Grammars, length: int) -> None:
    """Followed by recursion; 5,000 of them ended the process."""
    parts: dict[str, Any] = {
        f"d{n}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{n + 1}"}}}
        for n in range(length)
    }
    schema = {"$defs": {**parts, f"d{length}": table.I}, "$ref": "#/$defs/d0"}
    if length < 300:
        assert grammars.compile(form("json", schema)).notes == ()
        return
    for kind, value in (("json", schema), ("grammar", f"start: %json {json.dumps(schema)}")):
        with pytest.raises(BadRequest, match="by its references"):
            grammars.compile(form(kind, value))


@pytest.mark.parametrize("sign", [":", "::="])
def test_rules_in_a_row(grammars: Grammars, sign: str) -> None:
    rules = [f"r{n} {sign} r{n + 1}" for n in range(5000)]
    text = "\n".join(
        [f"{'start' if sign == ':' else 'root'} {sign} r0", *rules, f'r5000 {sign} "a"']
    )
    with pytest.raises(BadRequest, match="more than 500 rules"):
        grammars.compile(form("grammar", text))


def test_what_is_just_small_enough_compiles(grammars: Grammars) -> None:
    for schema in (
        table.nested(45),
        table.unions(4, "anyOf"),
        {"enum": [f"x{n}" * 9 for n in range(9000)]},
    ):
        made = grammars.compile(form("json", schema))
        validate(walk(made.matcher(), 1, most=4000), schema)


def test_compiled_forms_are_kept_and_rows_are_apart(grammars: Grammars) -> None:
    wanted = form("regex", "[ab]{4}")
    made = grammars.compile(wanted)
    assert grammars.compile(form("regex", "[ab]{4}")) is made
    first, second = made.matcher(), made.matcher()
    for token in TOKENIZER.encode("abab", add_special_tokens=False):
        first.consume(token)
    assert first.is_finished and not second.is_accepting
    for n in range(70):
        grammars.compile(form("regex", f"x{n}"))
    assert grammars.compile(wanted) is not made


def test_a_refused_token_raises(grammars: Grammars) -> None:
    matcher = grammars.compile(form("regex", "[0-9]")).matcher()
    with pytest.raises(EngineFault):
        matcher.consume(TOKENIZER.encode("x", add_special_tokens=False)[0])
    with pytest.raises(EngineFault):
        matcher.mask()


# ---------------------------------------------------------------------------- the vocabulary


def test_the_vocabulary_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_vocabularies(monkeypatch)
    fresh = Grammars(TOKENIZER, VOCAB)
    threads = [
        threading.Thread(target=fresh.compile, args=(form("regex", f"a{n}"),)) for n in range(10)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]


def test_a_failed_vocabulary_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = Grammars(TOKENIZER, VOCAB)
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(Unsupported, match="mlxlite\\[grammar\\]"):
            fresh.compile(form("regex", "a"))
    assert fresh.compile(form("regex", "a")).notes == ()


@pytest.mark.parametrize("width", [VOCAB, VOCAB + 1, VOCAB + 64, 500])
def test_no_id_beyond_the_vocabulary(width: int) -> None:
    """Logits are often wider than the vocabulary, and sometimes narrower."""
    matcher = Grammars(TOKENIZER, width).compile(form("regex", "(?s:.*)")).matcher()
    words = matcher.mask()
    found = [n for n in range(len(words) * 32) if words[n >> 5] >> (n & 31) & 1]
    assert max(found) < min(width, VOCAB) and len(found) > 400
    assert not {*found} & (TOKENIZER.special_ids - EOS)
