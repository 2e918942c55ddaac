"""Where chat templates run: a Jinja sandbox with a clock (floor 1, column "text").

A chat template is a program from the internet: it came with the weights. It must not reach the
machine, run for ever or eat the memory, and it runs in the middle of a server. So:

- Jinja's immutable sandbox keeps it away from Python (`__class__` and the like).
- Its syntax tree is changed before it is compiled so that each turn of a loop looks at the clock,
  as do calls, tests and filters applied to each element. No signal and no tracing is needed, so
  it works in any thread.
- Operations that can make something huge out of something small (repetition, powers, joining in a
  loop, padding) are checked before they run.

One operation between two looks at the clock is not interrupted; the size limits keep each short.

The dialect is that of transformers' `apply_chat_template`: blocks trimmed, loop controls, the
`generation` tag, `tojson` without HTML escaping, `raise_exception`, `strftime_now`.

State: the time left is kept per thread, for the render that runs in it.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

RENDER_LIMIT_S = 5.0  # a chat of 16,000 tokens takes a few milliseconds
OUTPUT_LIMIT_CHARS = 64 << 20  # twice the largest body that the server reads (D13)
_NUMBER_LIMIT_BITS = 1 << 16
# String methods and filters whose result grows with a number that they are given.
_PADDING = frozenset(
    ("batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "zfill")
)


Run = Callable[[Mapping[str, Any], float, int], str]
"""(variables, limit_s, limit_chars) -> text. Raises a TemplateFault and nothing else."""


class TemplateFault(Exception):
    """What went wrong in a template, in its own words; never Python's stack."""


class Refused(TemplateFault):
    """The template said no: `raise_exception`, or a value that it needs is not there."""


class OverLimit(TemplateFault):
    """The template ran too long or made too much."""


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that compiles and runs templates; `program` is the only door."""

    # Intercepted operators are also kept from being computed while compiling.
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
            extensions=[LoopControlExtension, _GenerationTag],
        )
        self._clock = threading.local()
        del self.globals["lipsum"]  # filler text of any length
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.filters["tojson"] = _tojson
        for name in ("batch", "center", "format", "indent", "join", "replace", "slice"):
            self.filters[name] = _sized(name, self.filters[name], self._check_size)

    # ------------------------------------------------------------------------------------ the door

    def program(self, source: str) -> Run:
        """Compiles a template. Raises TemplateFault if it is not one."""
        try:
            template = self.from_string(_add_ticks(self.parse(source)))
        except TemplateSyntaxError as exc:
            raise TemplateFault(f"line {exc.lineno}: {exc.message}") from None
        except Exception as exc:  # constants are computed while compiling, which can fail anyhow
            raise TemplateFault(f"{type(exc).__name__}: {exc}") from None

        def run(variables: Mapping[str, Any], limit_s: float, limit_chars: int) -> str:
            try:
                with self._deadline(limit_s, limit_chars):
                    return self._join_output(template.generate(variables))
            except OverLimit:
                raise
            except SecurityError as exc:
                raise TemplateFault(exc.message or "unsafe") from None
            except TemplateError as exc:
                raise Refused(exc.message or type(exc).__name__) from None
            except RecursionError:
                raise OverLimit("the template calls itself without end") from None
            except Exception as exc:  # the border to foreign code: a TypeError in it is its own
                raise TemplateFault(f"{type(exc).__name__}: {exc}") from None

        return run

    def _join_output(self, pieces: Iterator[str]) -> str:
        kept = []
        for piece in pieces:
            self._check_size(len(piece))
            self._clock.room_chars -= len(piece)
            kept.append(piece)
        return "".join(kept)

    @contextmanager
    def _deadline(self, limit_s: float, limit_chars: int) -> Iterator[None]:
        clock = self._clock
        clock.end_s, clock.room_chars = time.monotonic() + limit_s, limit_chars
        try:
            yield
        finally:
            del clock.end_s, clock.room_chars

    # ---------------------------------------------------------------------------------- the limits

    def tick(self) -> bool:
        """Looks at the clock. True, so that it can stand in a condition."""
        # While a template is compiled constants are folded, outside any render.
        end_s = getattr(self._clock, "end_s", None)
        if end_s is not None and time.monotonic() > end_s:
            raise OverLimit("the template ran too long")
        return True

    def _check_size(self, chars: int) -> None:
        if chars > getattr(self._clock, "room_chars", OUTPUT_LIMIT_CHARS):
            raise OverLimit("the template made too much text")

    def concat(self, pieces: Any) -> str:
        """Joins what a macro or a set block wrote; Jinja calls it with a list of strings."""
        pieces = list(pieces)
        self._check_size(sum(map(len, pieces)))
        return "".join(pieces)

    def join_text(self, *values: Any) -> str:
        """The operator `~`."""
        texts = [str(value) for value in values]
        self._check_size(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            self._check_size(_chars(left) + _chars(right))
        elif operator == "*":
            for one, many in ((left, right), (right, left)):
                if isinstance(many, int):
                    self._check_size(_chars(one) * many)
            if isinstance(left, int) and isinstance(right, int):
                self._check_bits(left.bit_length() + right.bit_length())
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._check_bits(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str):
            values = list(right) if isinstance(right, tuple) else [right]
            self._check_size(_grown_chars("format", left, values))
        return super().call_binop(context, operator, left, right)

    def _check_bits(self, bits: int) -> None:
        if bits > _NUMBER_LIMIT_BITS:
            raise OverLimit("the template made too large a number")

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # Odd names as in Jinja: a template may pass keywords called `self` or `context`.
        __self.tick()
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps `format`
        subject = getattr(method, "__self__", None)
        if isinstance(subject, str):
            grown = _grown_chars(method.__name__, subject, [*args, *kwargs.values()])
            __self._check_size(grown)
        value = super().call(__context, __obj, *args, **kwargs)
        if isinstance(value, str):
            __self._check_size(len(value))
        return value

    def call_filter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.tick()  # `map` calls this for each element
        return super().call_filter(name, *args, **kwargs)

    def call_test(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.tick()  # so do `select` and `reject`
        return super().call_test(name, *args, **kwargs)


def _add_ticks(tree: nodes.Template) -> nodes.Template:
    """Makes every loop turn look at the clock and every `~` look at the size, in place."""

    def method(name: str, args: list[nodes.Expr], lineno: int) -> nodes.Call:
        # An attribute of the environment: no variable of the template can stand before it.
        function = nodes.EnvironmentAttribute(name, lineno=lineno)
        return nodes.Call(function, args, [], None, None, lineno=lineno)

    for loop in list(tree.find_all(nodes.For)):
        loop.body.insert(0, nodes.ExprStmt(method("tick", [], loop.lineno), lineno=loop.lineno))
        if loop.test is not None:  # `for x in xs if ...`: turns that never reach the body
            loop.test = nodes.And(method("tick", [], loop.lineno), loop.test, lineno=loop.lineno)
    _replace_concats(tree, lambda node: method("join_text", node.nodes, node.lineno))
    tree.set_environment(tree.environment)  # type: ignore[arg-type]
    return tree


def _replace_concats(node: nodes.Node, make: Callable[[nodes.Concat], nodes.Expr]) -> None:
    """Replaces each `~` below a node; children first, so that nested ones are replaced too."""
    for name, value in list(node.iter_fields()):
        items = value if isinstance(value, list) else [value]
        for n, child in enumerate(items):
            if not isinstance(child, nodes.Node):
                continue
            _replace_concats(child, make)
            if isinstance(child, nodes.Concat):
                if isinstance(value, list):
                    value[n] = make(child)
                else:
                    setattr(node, name, make(child))


def _chars(value: Any) -> int:
    """What a string or a list takes, in characters; a list's entry takes a pointer of eight."""
    if isinstance(value, list | tuple):
        return 8 * len(value)
    return len(value) if isinstance(value, str) else 0


def _grown_chars(name: str, subject: Any, args: list[Any]) -> int:
    """About how large a string method or filter of this name makes its result; 0 if it cannot."""
    numbers = [abs(arg) for arg in args if isinstance(arg, int)]
    texts = [arg for arg in args if isinstance(arg, str)]
    if name == "replace" and isinstance(subject, str) and len(texts) >= 2:
        return len(subject) + subject.count(texts[0]) * len(texts[1])
    if name == "join":
        other = args[0] if args else ""
        pieces, mark = (other, subject) if isinstance(subject, str) else (subject, other)
        if not isinstance(pieces, list | tuple):  # a generator: what it makes is ticked
            return 0
        return _text_chars(pieces) + len(pieces) * len(str(mark))
    if name in ("format", "format_map") and isinstance(subject, str):
        widths = [int(run) for run in re.findall(r"\d{7,}", subject[:65536])]
        fields = subject.count("{") + subject.count("%")
        return max([*widths, *numbers, 0]) if fields else 0
    if name in _PADDING and numbers:
        lines = subject.count("\n") + subject.count("\t") if isinstance(subject, str) else 0
        return max(numbers) * (1 + lines)
    return 0


def _text_chars(items: list[Any] | tuple[Any, ...]) -> int:
    return sum(len(item) for item in items if isinstance(item, str))


def _sized(
    name: str, apply: Callable[..., Any], check: Callable[[int], None]
) -> Callable[..., Any]:
    """A filter that checks how large its result would be before it makes it."""
    has_context = hasattr(apply, "jinja_pass_arg")  # then its first argument is Jinja's own

    @functools.wraps(apply)
    def filter_(*args: Any, **kwargs: Any) -> Any:
        subject, *rest = args[1:] if has_context else args
        check(_grown_chars(name, subject, [*rest, *kwargs.values()]))
        return apply(*args, **kwargs)

    return filter_


# ------------------------------------------------------------------------------------ the dialect


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the model's own text for training; here it
    only bounds a scope."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _raise_exception(message: Any = "") -> None:
    raise TemplateError(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it for templates: no HTML escapes, keys in their order."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
