"""What may come next, by a grammar: the adapter around `llguidance` (floor 1, column "text"; D7).

    Grammars   of a model: its vocabulary as llguidance wants it, made once, at first use
    Grammar    one compiled form; compiling takes milliseconds to seconds, off the event loop
    Matcher    where one row stands in it: bits of the ids allowed next, 0.05 to 0.2 ms each

Beside `vocabulary` the only file that imports `llguidance` (extra `grammar`). Its objects keep an
error to themselves until they are asked; here every error is raised. Compiling frees the GIL and
cannot be stopped: its size is bounded here, its time by who waits for it (`service`).
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
import re
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlxlite.errors import BadRequest, EngineFault
from mlxlite.text import vocabulary
from mlxlite.text.json_schema import (
    JSON_OPTIONS,
    MOST_LEVELS,
    MOST_REACH,
    closed,
    doubts,
    endless,
    is_open,
    levels,
    reach,
    separated,
)
from mlxlite.text.tokenizer import Kind, Tokenizer
from mlxlite.types import JSON, Constraint

if TYPE_CHECKING:
    import llguidance

log = logging.getLogger(__name__)

MOST_BYTES = 1_000_000  # of a schema, an expression, a grammar, all choices
_MOST_KEPT = 64  # compiled grammars; a kept one saves its compile, and an agent asks for few
_LARGEST_KEPT = 64 * 1024  # characters; what is larger may take much memory, compiled
_MOST_QUOTED = 300  # characters of llguidance's own words
_BLANKS = r"[ \n\r\t]{0,8}"  # a model that falls into blanks gets out of them again (F69)
_MOST_RULES = 500  # of a grammar that a client wrote; 5,000 in a row end the process
_PLAIN = ("json", "regex", "choice")  # forms that name no token
_RULE = re.compile(r"::=|^[ \t]*[?!]?\w+[^:\"'/\n]*:", re.MULTILINE)
_EMBEDDED = re.compile(r"%json\b")
_CONTROL = re.compile(r"\\u00(?:[01].|7f)")  # in JSON: what cannot be written without `\\u`
# Of errors that no schema would mend: the compiler does not know it, so it is for the degrade path.
_UNKNOWN_WORDS = (
    "not supported", "unsupported", "not implemented", "unimplemented", "not present in a registry",
    "failed to generate regex", "are not disjoint", "too many digits",
)  # fmt: skip


class Unsupported(Exception):
    """The form cannot be enforced here, however well it is written. The text says why."""


class Matcher:
    """Where one row stands. Used by one thread at a time."""

    def __init__(self, inner: llguidance.LLMatcher) -> None:
        self._inner = inner

    def mask(self) -> Sequence[int]:
        """Packed words of the ids allowed next, EOS among them where the form may end. Raises
        EngineFault where nothing is."""
        words = memoryview(self._inner.compute_bitmask()).cast("I")
        self._check()
        return words

    def consume(self, token_id: int) -> None:
        """Step over an id. Raises EngineFault if it is not allowed."""
        if not self._inner.consume_token(token_id):
            self._check()
            raise EngineFault("the grammar refused a token that it had allowed")

    def forced(self) -> list[int]:
        """The ids that spell what comes next, as far as the form leaves no choice of text; each is
        allowed. 0.05 to 0.1 ms."""
        found = list(self._inner.compute_ff_tokens())
        self._check()
        return found

    def masks_along(self, ids: Sequence[int]) -> list[Sequence[int]]:
        """The masks after each of these ids, as copies; the matcher stays where it is. Raises
        EngineFault if one is not allowed."""
        found: list[Sequence[int]] = []
        for token_id in ids:
            self.consume(token_id)
            found.append(array("I", self.mask()))
        self._inner.rollback(len(ids))
        self._check()
        return found

    @property
    def is_finished(self) -> bool:
        """Whether the form is complete and nothing can follow."""
        return self._inner.is_stopped()

    @property
    def is_accepting(self) -> bool:
        """Whether the answer may end here."""
        return self._inner.is_accepting()

    def _check(self) -> None:
        if self._inner.is_error():
            raise EngineFault(f"the grammar failed: {_plain(self._inner.get_error())}")


class _Watched(Matcher):
    """A matcher that logs, once its row lets go of it, what it did (spec 40 section 8)."""

    def __init__(self, inner: llguidance.LLMatcher, name: str) -> None:
        super().__init__(inner)
        self._name = name
        self._masks, self._mask_s, self._taken = 0, 0.0, 0

    def mask(self) -> Sequence[int]:
        began = time.perf_counter()
        try:
            return super().mask()
        finally:
            self._masks += 1
            self._mask_s += time.perf_counter() - began

    def consume(self, token_id: int) -> None:
        super().consume(token_id)
        self._taken += 1

    def masks_along(self, ids: Sequence[int]) -> list[Sequence[int]]:
        found = super().masks_along(ids)
        self._taken -= len(ids)  # it went back
        return found

    def __del__(self) -> None:
        if self._inner.is_error():
            end = "failed"
        elif self.is_finished:
            end = "finished"
        else:
            end = "could have ended" if self.is_accepting else "left before its end"
        log.info(
            "%s: %s after %d tokens; %d masks took %.2f ms",
            self._name, end, self._taken, self._masks, self._mask_s * 1000,
        )  # fmt: skip


class Grammar:
    """A compiled form. notes: what of it is not enforced, in llguidance's words. name: in the log,
    if its matchers are to tell what they did."""

    def __init__(self, inner: llguidance.LLMatcher, notes: tuple[str, ...], name: str = "") -> None:
        self._inner = inner
        self.notes = notes
        self.name = name

    def matcher(self) -> Matcher:
        """A matcher at the start, for one row."""
        copy = self._inner.deep_copy()
        return _Watched(copy, self.name) if self.name else Matcher(copy)


class Grammars:
    """The grammars of one model. vocab_size: width of its logits. is_logged: tell of each compile
    and of each row. Safe from any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, *, is_logged: bool = False) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._is_logged = is_logged
        self._numbers = itertools.count(1)
        self._opening = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._is_cut = False
        self._keeping = threading.Lock()
        self._kept: OrderedDict[tuple[Any, ...], Grammar] = OrderedDict()
        self._holding: dict[bytes, list[tuple[bytes, int]]] = {}  # ids by a byte within them

    @property
    def can_open(self) -> bool:
        """Whether `open` would do; nothing is imported for it."""
        knows_bytes = self._tokenizer.kind is not Kind.OTHER
        return is_installed() and knows_bytes and bool(self._tokenizer.eos_ids)

    def open(self) -> llguidance.LLTokenizer:
        """Import llguidance and give it the vocabulary, once: 0.2 s of work, a quarter of it with
        the GIL. Raises Unsupported."""
        self._require()
        with self._opening:
            if self._vocabulary is None:
                self._vocabulary = vocabulary.whole(self._tokenizer, self.vocab_size)
            return self._vocabulary

    def _require(self) -> None:
        """Raises Unsupported if there can be no vocabulary."""
        if not is_installed():
            raise Unsupported("the extra is not installed (pip install 'mlxlite[grammar]')")
        if self._tokenizer.kind is Kind.OTHER:
            raise Unsupported("the bytes of this model's tokens are not known")
        if not self._tokenizer.eos_ids:
            raise Unsupported("this model names no token that ends an answer")

    def prepare(self) -> None:
        """`open`, ahead of the first compile; what it cannot do, that will say. And cut the tree
        for quick masks, once: 0.08 s more with the GIL, so not for a form that somebody waits for.
        """
        try:
            whole = self.open()
        except Unsupported:
            return
        if not self._is_cut:
            self._is_cut = True
            self._vocabulary = vocabulary.sliced(whole)

    def ids_past(self, text: bytes) -> list[int]:
        """The ids that spell a text and go on after it. 10 ms for a last character that is new,
        otherwise a tenth of one."""
        last = text[-1:]
        if last not in self._holding:
            ids = range(min(self.vocab_size, self._tokenizer.vocab_size))
            spelled = ((self._tokenizer.bytes_of(token), token) for token in ids)
            self._holding[last] = [pair for pair in spelled if last in pair[0][:-1]]
        return [token for spelled, token in self._holding[last] if spelled.startswith(text)
                and len(spelled) > len(text)]  # fmt: skip

    def compile(self, wanted: Constraint) -> Grammar:
        """A form as a grammar; those of late are kept. Raises BadRequest if it is malformed, allows
        no answer or is too large, Unsupported if llguidance lacks a feature that it needs."""
        text = _text(wanted)
        key = (wanted.kind, text, wanted.is_closed, wanted.any_whitespace)
        with self._keeping:
            known = self._kept.get(key)
            if known is not None:
                self._kept.move_to_end(key)
        if known is not None:
            if known.name:
                log.info("%s: was kept", known.name)
            return known
        self._require()
        if self._vocabulary is None and (wanted.kind in _PLAIN or "<" not in text):
            # A form that is bad in itself makes nobody wait for the vocabulary. Special tokens,
            # which a grammar may name, are in no other.
            self._compiled(wanted, text, vocabulary.letters())
        tree = self.open()
        began = time.perf_counter()
        made = self._compiled(wanted, text, tree)
        if self._is_logged:
            made.name = f"grammar {next(self._numbers)} ({wanted.label})"
            taken_ms = (time.perf_counter() - began) * 1000
            log.info("%s: compiled in %.1f ms, %d characters", made.name, taken_ms, len(text))
        if len(text) > _LARGEST_KEPT:
            return made
        with self._keeping:
            self._kept[key] = made
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return made

    def literal(self, text: str) -> str:
        """A text in a Lark grammar: the id, if it is one of the model's special tokens."""
        token_id = self._tokenizer.token_id(text)
        if token_id in self._tokenizer.special_ids and token_id < self.vocab_size:
            return f"<[{token_id}]>"
        return json.dumps(text)

    def _compiled(self, wanted: Constraint, text: str, on: llguidance.LLTokenizer) -> Grammar:
        if wanted.kind != "json":
            return _made(_lark(wanted, text), wanted.field, on)
        schema = json.loads(text)
        schema.pop("x-guidance", None)  # options that are ours to set
        unsure = doubts(schema)
        schema = separated(schema)
        if wanted.is_closed and (narrow := closed(schema)) != schema:
            try:
                return self._made_json(narrow, wanted, on, unsure)
            except (BadRequest, Unsupported):
                pass  # closed it may allow nothing: what is open then judges the schema itself
        return self._made_json(schema, wanted, on, unsure)

    def _made_json(
        self, schema: JSON, wanted: Constraint, on: llguidance.LLTokenizer, unsure: tuple[str, ...]
    ) -> Grammar:
        text = json.dumps(schema)
        has_controls = _CONTROL.search(text) is not None
        if has_controls and is_open(schema):
            unsure = (*unsure, "names of open objects beside control characters")
        return _made(_json_grammar(text, wanted, has_controls), wanted.field, on, unsure)


def _made(
    grammar: str, field: str, on: llguidance.LLTokenizer, unsure: tuple[str, ...] = ()
) -> Grammar:
    import llguidance

    limits = llguidance.LLParserLimits(
        step_lexer_fuel=100_000, step_max_items=20_000, verbose_errors=False
    )
    inner = llguidance.LLMatcher(on, grammar, log_level=0, limits=limits)
    if not inner.is_error():
        # The first steps tell what allows no answer at all, such as an object that holds
        # itself, and what is too complex to be followed.
        probe = inner.deep_copy()
        probe.compute_bitmask()
        if not probe.is_error() and (forced := probe.compute_ff_tokens()):
            probe.consume_token(forced[0])
            if not probe.is_stopped():
                probe.compute_bitmask()
        error = probe.get_error() if probe.is_error() else ""
    else:
        error = inner.get_error()
    if error:
        if any(words in error.lower() for words in _UNKNOWN_WORDS):
            raise Unsupported(_plain(error))
        raise BadRequest(f"{field} cannot be used: {_plain(error)}", param=field)
    notes = tuple(_plain(note) for note in inner.get_grammar_warnings())
    return Grammar(inner, (*notes, *unsure))


def is_installed() -> bool:
    """Whether the extra `grammar` is there; nothing is imported."""
    return importlib.util.find_spec("llguidance") is not None


# ----------------------------------------------------------------------------- the forms as text


def _text(wanted: Constraint) -> str:
    """What is compiled, as text, checked for its size. Raises BadRequest."""
    value = wanted.value
    if wanted.kind == "json":
        return schema_text(value, wanted.field)
    if wanted.kind == "choice":
        value = json.dumps(value)
    _check_size(value, wanted.field)
    text: str = value
    return text


def schema_text(value: JSON, field: str) -> str:
    """A schema, or the text of one, as text, checked for size and depth. Raises BadRequest."""
    if isinstance(value, str):
        _check_size(value, field)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise BadRequest(f"{field} must be a JSON schema: an object, or its text", param=field)
    if levels(value) > MOST_LEVELS:
        raise BadRequest(f"{field} is nested deeper than {MOST_LEVELS} levels", param=field)
    if reach(value) > MOST_REACH:
        raise BadRequest(
            f"{field} is nested deeper than {MOST_REACH} levels by its references", param=field
        )
    if endless(value):
        raise BadRequest(
            f"{field} cannot be used: a part of it refers to itself without an end", param=field
        )
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:  # 1e999 is read as infinity
        raise BadRequest(f"{field} holds a number that is too large", param=field) from None
    _check_size(text, field)
    return text


def _check_size(text: str, field: str) -> None:
    if len(text) > MOST_BYTES or len(text.encode("utf-8", "replace")) > MOST_BYTES:
        raise BadRequest(f"{field} is larger than {MOST_BYTES:,} bytes", param=field)


def _json_grammar(text: str, wanted: Constraint, has_controls: bool) -> str:
    import llguidance

    options: dict[str, Any] = {**JSON_OPTIONS, "whitespace_flexible": wanted.any_whitespace}
    if wanted.any_whitespace:
        options["whitespace_pattern"] = _BLANKS
    if has_controls:
        del options["json_allowed_escapes"]
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(
            text,
            overrides=options,  # type: ignore[arg-type]  # a TypedDict, of which these are keys
        )
    except ValueError as error:  # half a surrogate pair, which no text can hold
        why = f"{wanted.field} cannot be used: {_plain(str(error))}"
        raise BadRequest(why, param=wanted.field) from None


def _lark(wanted: Constraint, text: str) -> str:
    """An expression, a grammar or choices as llguidance's grammar. Raises BadRequest."""
    import llguidance

    if any("\ud800" <= char <= "\udfff" for char in text):
        raise BadRequest(f"{wanted.field} holds half a character", param=wanted.field)
    if wanted.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(text)
    if wanted.kind == "choice":
        alternatives = " | ".join(map(json.dumps, wanted.value))
        return llguidance.LLMatcher.grammar_from_lark(f"start: {alternatives}")
    if wanted.kind == "grammar":
        # Rules that refer to rules are followed by recursion, which ends the process if it is deep.
        if len(_RULE.findall(text)) > _MOST_RULES:
            raise BadRequest(
                f"{wanted.field} has more than {_MOST_RULES} rules", param=wanted.field
            )
        if "::=" in text:
            text = _from_gbnf(text, wanted.field)
        for at in _EMBEDDED.finditer(text):
            _check_embedded(text[at.end() :], wanted.field)
    return llguidance.LLMatcher.grammar_from_lark(text)


def _check_embedded(text: str, field: str) -> None:
    """The same bounds for a schema inside a grammar."""
    try:
        schema, _ = json.JSONDecoder().raw_decode(text.lstrip())
    except (ValueError, RecursionError):
        return  # the compiler will say what is wrong
    schema_text(schema, field)


def _from_gbnf(text: str, field: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        found: str = gbnf_to_lark(text)
    except Exception as error:  # it raises many kinds, RecursionError among them
        raise BadRequest(f"{field} cannot be used: {_plain(str(error))}", param=field) from None
    return found


def _plain(message: str) -> str:
    """llguidance's words on one line, without its drawings and hints to itself."""
    text = " ".join(message.replace("<non-verbose/>", "").split())
    return text[:_MOST_QUOTED]
