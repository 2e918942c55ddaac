"""Markdown as HTML that is safe to show, whoever wrote it (decision D17).

    "[a](https://b.test) <script>" -> '<p><a href="https://b.test" rel=… >a</a> &lt;script&gt;</p>'

What a model writes is hostile. Safe here means: only the tags and attributes of TAGS; no raw HTML;
links to http, https and mailto alone, which open elsewhere and tell nothing of us; pictures are
links, so nothing is fetched; no style, no id. markdown-it-py and Pygments do the work (extra
`web`); without them, and for a text that takes too long, paragraphs and fenced code are all there
is. Pure but for the clock, for any thread.
"""

from __future__ import annotations

import re
import time
from functools import cache, lru_cache
from html import escape
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mlxlite.colours import colour

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

is_installed = find_spec("markdown_it") is not None

MOST_CHARS = 100_000  # a longer text is shown plainly
MOST_S = 2.0
_MOST_KEPT = 4_000  # characters of a paragraph whose HTML is kept
# All tags that `render` writes, with their attributes.
TAGS: dict[str, frozenset[str]] = {
    **dict.fromkeys(
        "p h1 h2 h3 h4 h5 h6 ul li blockquote em strong s br hr table thead tbody tr".split(),
        frozenset(),
    ),
    "ol": frozenset({"start"}),
    "pre": frozenset({"class"}),
    "code": frozenset({"class"}),
    "span": frozenset({"class"}),
    "th": frozenset({"class"}),
    "td": frozenset({"class"}),
    "a": frozenset({"href", "title", "rel", "target"}),
}
_ALLOWED = re.compile(r"https?://[^/?#\s]|mailto:[^\s]", re.IGNORECASE)
_BARE = re.compile(r"\bhttps?://[^\s<>\"'`\x00-\x20\x7f]+", re.IGNORECASE)
_AFTER = ".,;:!?*_~"  # at the end of an address, they belong to the sentence
_LANGUAGE = re.compile(r"[A-Za-z0-9+#._-]{1,30}")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})\s*([^\s`]*)")


class TimeUp(Exception):
    """The text takes longer than it may."""


def render(text: str) -> str:
    """HTML of a message, whole or half-written."""
    if not is_installed or len(text) > MOST_CHARS:
        return plain(text)
    try:
        return _render(text)
    except (TimeUp, RecursionError):
        return plain(text)


def plain(text: str) -> str:
    """Paragraphs and fenced code, everything else as it was written."""
    parts: list[str] = []
    lines: list[str] = []
    fence = language = ""
    for line in [*text.replace("\r\n", "\n").split("\n"), None]:
        found = _FENCE.match(line) if line is not None else None
        if line is not None and fence and not (found and found[1].startswith(fence)):
            lines.append(line)
        elif line is None or fence or found or not line.strip():
            if fence:
                parts.append(_code_block("\n".join([*lines, ""]), language))
            elif lines:
                parts.append(f"<p>{'<br>'.join(map(escape, lines))}</p>\n")
            lines = []
            is_start = found is not None and not fence
            fence, language = (found[1], found[2]) if found and is_start else ("", "")
        else:
            lines.append(line)
    return "".join(parts)


def _code_block(code: str, language: str) -> str:
    """language: the first word after the fence; only what looks like a name is shown as one."""
    kind = f' class="language-{language}"' if _LANGUAGE.fullmatch(language) else ""
    return f'<pre class="hl"><code{kind}>{colour(code, language)}</code></pre>\n'


# -------------------------------------------------------------------------- markdown-it's side


@cache
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False, "xhtmlOut": False, "breaks": True})
    parser.enable(["table", "strikethrough"]).disable(["html_block", "html_inline"])
    parser.block.ruler.before("table", "clock", _check_clock)
    parser.inline.ruler.before("text", "clock", _check_clock)
    parser.add_render_rule("fence", _fence)
    parser.add_render_rule("code_block", _fence)
    parser.add_render_rule("ready", lambda self, tokens, index, *_: tokens[index].content)
    return parser


def _check_clock(state: Any, *_: Any) -> bool:
    """A rule that never matches: it is asked at each block and each place in a line."""
    if time.monotonic() > state.env["end_s"]:
        raise TimeUp
    return False


def _fence(self: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
    token = tokens[index]
    return _code_block(token.content, (token.info.split() or [""])[0])


def _render(text: str) -> str:
    """Blocks first, then each line of text in them by itself.

    A message that is being written is asked for several times a second. Its blocks are found anew
    each time; what is in them, three quarters of the work, only where something was added.
    """
    from markdown_it.token import Token

    parser = _parser()
    env: dict[str, Any] = {"end_s": time.monotonic() + MOST_S}
    tokens: list[Token] = []
    parser.block.parse(re.sub("\r\n?", "\n", text).replace("\0", "\ufffd"), parser, env, tokens)
    for token in tokens:
        if token.attrs.get("style"):  # of a table's cell: text-align
            side = str(token.attrs["style"]).rpartition(":")[2]
            token.attrs = {"class": f"align-{side}"}
        if token.type == "inline":
            is_alone = not env.get("references") and len(token.content) <= _MOST_KEPT
            content = token.content
            html = _inline_alone(content) if is_alone else _inline(content, env)
            token.children = [Token("ready", "", 0, content=html)]
            if time.monotonic() > env["end_s"]:
                raise TimeUp
    whole: str = parser.renderer.render(tokens, parser.options, env)
    return whole


@lru_cache(maxsize=1024)
def _inline_alone(content: str) -> str:
    """The same, of text that no definition elsewhere in the message has a say in."""
    return _inline(content, {"end_s": time.monotonic() + MOST_S})


def _inline(content: str, env: dict[str, Any]) -> str:
    parser = _parser()
    (token,) = parser.parseInline(content, env)
    renderer: Any = parser.renderer  # its protocol has only the method for blocks
    html: str = renderer.renderInline(_tamed(token.children or []), parser.options, env)
    return html


def _tamed(children: list[Token]) -> list[Token]:
    """Links checked, pictures as links, bare addresses as links. A link holds no other link."""
    found: list[Token] = []
    shown: list[bool] = []  # of the links that are open, from the outermost: whether it is one
    for token in children:
        if token.type == "link_open":
            href = str(token.attrs["href"])
            shown.append(not any(shown) and _ALLOWED.match(href) is not None)
            if shown[-1]:
                found.append(_link(href, token.attrs.get("title")))
        elif token.type == "link_close":
            if shown.pop():
                found.append(token)
        elif token.type == "image":
            source, label = str(token.attrs["src"]), token.content
            found += _linked(source, label or source) if not any(shown) else [_text(label)]
        elif token.type == "text" and not any(shown):
            found += _with_links(token.content)
        else:
            found.append(token)
    return found


def _with_links(text: str) -> list[Token]:
    found: list[Token] = []
    place = 0
    for match in _BARE.finditer(text):
        address = match[0].rstrip(_AFTER)
        # So does what closes the sentence's own parenthesis, as in (https://a.test).
        ends = len(address) - len(address.rstrip(")"))
        excess = min(ends, max(0, address.count(")") - address.count("(")))
        address = address[: len(address) - excess].rstrip(_AFTER)
        found += [_text(text[place : match.start()]), *_linked(address, address)]
        place = match.start() + len(address)
    return [*found, _text(text[place:])]


def _linked(href: str, label: str) -> list[Token]:
    from markdown_it.token import Token

    if _ALLOWED.match(href) is None:
        return [_text(label)]
    return [_link(href), _text(label), Token("link_close", "a", -1)]


def _link(href: str, title: Any = None) -> Token:
    from markdown_it.token import Token

    attrs = {"href": href} | ({"title": str(title)} if title else {})
    attrs |= {"rel": "noopener noreferrer", "target": "_blank"}
    return Token("link_open", "a", 1, attrs=dict(attrs))


def _text(content: str) -> Token:
    from markdown_it.token import Token

    return Token("text", "", 0, content=content)
