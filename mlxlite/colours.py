"""Code in colours: classes by what a token is, and their style sheet (decision D17).

    colour("x = 1  # one", "python") -> 'x <span class="hl-operator">…'

Pygments finds the tokens, if the extra `web` is installed; its many kinds come down to the few of
PALETTE, so that a page needs one small sheet, whose colours are readable on its own backgrounds
(a contrast of 4.5, WCAG 1.4.3; a test computes it). Only languages listed here are coloured: code
comes from a model, and a lexer is a set of expressions that such code could make slow. These were
tried with 45 kinds of endless repetition; Matlab's took 7 s for 10,000 line breaks and is left out.
"""

from __future__ import annotations

import time
from functools import cache, lru_cache
from html import escape
from importlib.util import find_spec
from typing import Any

is_installed = find_spec("pygments") is not None

MOST_CHARS = 30_000  # of a block; a longer one, or one with a longer line, stays black and white
MOST_LINE = 2_000
MOST_S = 0.5
# The aliases of Pygments that models write after a fence.
LANGUAGES = frozenset(
    "asm awk bash c c# c++ clojure cmake console cpp cs csharp css dart diff docker dockerfile "
    "elixir erlang f# fortran fsharp go golang graphql groovy haskell hcl html http ini java "
    "javascript js json json5 jsx julia kotlin latex lua make makefile md markdown "
    "nasm nginx nix objc objective-c ocaml perl php powershell prolog proto protobuf ps1 "
    "pycon pytb python python3 py r rb rs ruby rust scala scheme scss sh shell sql swift "
    "terraform tex toml ts tsx typescript vim xml yaml yml zig zsh".split()
)

# Kind -> (on light, on dark); None is the background.
PALETTE: dict[str | None, tuple[str, str]] = {
    None: ("#f5f6f8", "#171a21"),
    "text": ("#1d2129", "#e4e7ec"),
    "comment": ("#5b6472", "#98a1b0"),
    "keyword": ("#a3154a", "#ff8fa8"),
    "string": ("#0b5a3c", "#8fd9a8"),
    "number": ("#0a4fa8", "#8cc2ff"),
    "function": ("#5f2fa8", "#cfb0ff"),
    "builtin": ("#8a3d00", "#ffb877"),
    "tag": ("#0d5c63", "#7fd6dd"),
    "deleted": ("#a01818", "#ff9d94"),
    "inserted": ("#14602a", "#86dd9a"),
}
# Pygments' kinds and all that is below them; what is not here has the colour of text.
_KINDS = {
    "Comment": "comment",
    "Generic.Prompt": "comment",
    "Generic.Output": "comment",
    "Keyword": "keyword",
    "Operator.Word": "keyword",
    "Literal.String": "string",
    "Literal.Number": "number",
    "Literal.Date": "number",
    "Keyword.Constant": "number",
    "Name.Function": "function",
    "Name.Class": "function",
    "Name.Decorator": "function",
    "Name.Builtin": "builtin",
    "Name.Exception": "builtin",
    "Keyword.Type": "builtin",
    "Name.Variable": "builtin",
    "Name.Tag": "tag",
    "Name.Attribute": "tag",
    "Generic.Heading": "function",
    "Generic.Subheading": "function",
    "Generic.Deleted": "deleted",
    "Generic.Error": "deleted",
    "Generic.Traceback": "deleted",
    "Generic.Inserted": "inserted",
}


def _style_sheet() -> str:
    """Light by itself, dark as the system or `data-theme` on the root element has it."""

    def variables(place: int) -> str:
        pairs = ((kind or "back", colours[place]) for kind, colours in PALETTE.items())
        return " ".join(f"--hl-{kind}: {colour};" for kind, colour in pairs)

    rules = [
        f":root {{ {variables(0)} }}",
        "@media (prefers-color-scheme: dark) {",
        f'  :root:not([data-theme="light"]) {{ {variables(1)} }}',
        "}",
        f':root[data-theme="dark"] {{ {variables(1)} }}',
        ".hl { background: var(--hl-back); color: var(--hl-text); }",
    ]
    kinds = [kind for kind in PALETTE if kind not in (None, "text")]
    rules += [f".hl-{kind} {{ color: var(--hl-{kind}); }}" for kind in kinds]
    return "\n".join(rules) + "\n"


STYLE_SHEET = _style_sheet()


@lru_cache(maxsize=128)  # of a growing message, the blocks that are whole are asked for again
def colour(code: str, language: str) -> str:
    """The code as HTML, at least escaped."""
    plain = escape(code)
    if not is_installed or language.lower() not in LANGUAGES or len(code) > MOST_CHARS:
        return plain
    if max(map(len, code.split("\n"))) > MOST_LINE:
        return plain
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        lexer = get_lexer_by_name(language.lower(), stripnl=False, ensurenl=False)
    except ClassNotFound:  # an older Pygments
        return plain
    end_s = time.monotonic() + MOST_S
    parts: list[str] = []
    last: str | None = None
    for token, text in lexer.get_tokens(code):
        kind = _kind(token)
        if kind != last or kind is None:
            parts.append("</span>" if last else "")
            parts.append(f'<span class="hl-{kind}">' if kind else "")
            last = kind
        parts.append(escape(text))
        if time.monotonic() > end_s:
            return plain
    return "".join(parts) + ("</span>" if last else "")


@cache  # as many as Pygments has kinds of tokens
def _kind(token: Any) -> str | None:
    while token is not None:
        found = _KINDS.get(".".join(token))
        if found is not None:
            return found
        token = token.parent
    return None
