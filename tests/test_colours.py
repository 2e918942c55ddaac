"""colours: every listed language is one, every colour can be read, nothing takes long."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser

import pytest

from mlxlite import colours
from mlxlite.colours import LANGUAGES, MOST_CHARS, MOST_LINE, PALETTE, STYLE_SHEET, colour

needs_pygments = pytest.mark.skipif(not colours.is_installed, reason="needs the extra web")


def luminance(colour: str) -> float:
    """WCAG 2.2, relative luminance."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("kind", [kind for kind in PALETTE if kind])
def test_contrast(kind: str, theme: int) -> None:
    back, front = luminance(PALETTE[None][theme]), luminance(PALETTE[kind][theme])
    assert (max(back, front) + 0.05) / (min(back, front) + 0.05) >= 4.5


def test_the_style_sheet() -> None:
    assert STYLE_SHEET.count("{") == STYLE_SHEET.count("}")
    assert not re.search(r"url\(|@import|expression", STYLE_SHEET)
    for kind, pair in PALETTE.items():
        assert all(f"--hl-{kind or 'back'}: {value};" in STYLE_SHEET for value in pair)
        assert f".hl-{kind} {{" in STYLE_SHEET or kind in (None, "text")


@needs_pygments
def test_python() -> None:
    assert colour('def f(): return "<b>"  # c', "Python") == (
        '<span class="hl-keyword">def</span> <span class="hl-function">f</span>(): '
        '<span class="hl-keyword">return</span> '
        '<span class="hl-string">&quot;&lt;b&gt;&quot;</span>  <span class="hl-comment"># c</span>'
    )


class Text(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.feed(html)
        self.close()

    def handle_data(self, data: str) -> None:
        self.text += data


SAMPLE = "\n\n  a = 'x' // <b> &amp; \"\n\t# \\ {1.5} @f() -->\r\n\u2028ß🙂\n\n"


@needs_pygments
@pytest.mark.parametrize("language", sorted(LANGUAGES))
def test_each_language(language: str) -> None:
    """It is known to Pygments, and no character of the code is lost or added."""
    from pygments.lexers import get_lexer_by_name  # part of the extra

    assert get_lexer_by_name(language)
    html = colour(SAMPLE, language)
    assert Text(html).text == SAMPLE.replace("\r\n", "\n")
    assert set(re.findall(r"<[^>]*>", html)) <= {
        "</span>",
        *(f'<span class="hl-{kind}">' for kind in PALETTE if kind),
    }


def test_what_stays_black_and_white(monkeypatch: pytest.MonkeyPatch) -> None:
    for code, language in (
        ("def", "klingon"),
        ("def", ""),
        ("def ", "__init__"),
        ("def\n" * (MOST_CHARS // 4 + 1), "python"),
        ("def " * (MOST_LINE // 4 + 1), "python"),
    ):
        assert colour(code, language) == code
    monkeypatch.setattr(colours, "MOST_S", -1.0)
    assert colour("def slow", "python") == "def slow"
    monkeypatch.setattr(colours, "is_installed", False)
    assert colour("def <x>", "python") == "def &lt;x&gt;"


@needs_pygments
@pytest.mark.slow
@pytest.mark.parametrize(
    "piece", ["(", '"', "\\", "a ", "<a ", "/*", "${", "a.", "\n ", "\n", "<a><"]
)
def test_nothing_takes_long(piece: str) -> None:
    code = "\n".join([piece * (1900 // len(piece))] * 25)
    for language in (
        "python",
        "js",
        "html",
        "bash",
        "cpp",
        "sql",
        "markdown",
        "rust",
        "yaml",
        "c",
        "ruby",
    ):
        began_s = time.perf_counter()
        colour(code, language)
        assert time.perf_counter() - began_s < 5, language
