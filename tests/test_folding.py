"""folding: matches regardless of case, with ranges that are right when folding changes lengths."""

from __future__ import annotations

import random

import pytest

from mlxlite.folding import AROUND, CUT, Snippet, fold, matches, origins, snippet


@pytest.mark.parametrize(
    ("text", "wanted", "found"),
    [
        ("Hello hello", "HELLO", ["Hello", "hello"]),
        ("Straße, STRASSE", "strasse", ["Straße", "STRASSE"]),
        ("Straße", "ß", ["ß"]),
        ("Straße", "s", ["S", "ß"]),  # half of what it folds to counts as the whole
        ("ßß", "sss", ["ßß"]),
        ("İstanbul", "i\u0307stanbul", ["İstanbul"]),
        ("İstanbul", "stan", ["stan"]),
        ("xİİy", "Y", ["y"]),
        ("ﬁne oﬃce", "fi", ["ﬁ", "ﬃ"]),
        ("ΣΊΣΥΦΟΣ σίσυφος", "σίσυφος", ["ΣΊΣΥΦΟΣ", "σίσυφος"]),
        ("Å \u212b", "å", ["Å", "\u212b"]),  # the sign of the unit
        ("K\u212a", "k", ["K", "\u212a"]),
        ("aaaa", "aa", ["aa", "aa"]),
        ("🙂Hi🙂", "🙂", ["🙂", "🙂"]),
        ("Привет", "ПРИВЕТ", ["Привет"]),
        ("a\0B", "\0b", ["\0B"]),
        ("100%_x", "%_", ["%_"]),
        ("abc", "d", []),
        ("", "a", []),
    ],
)
def test_matches(text: str, wanted: str, found: list[str]) -> None:
    assert [text[start:end] for start, end in matches(text, fold(wanted))] == found


def test_where_a_folded_character_comes_from() -> None:
    assert list(origins("aßİb")) == [0, 1, 1, 2, 2, 3]
    assert origins("abc") == range(3)


def test_against_looking_at_every_place() -> None:
    """Each match is one, whatever the characters; none is missed between two of them."""
    draw = random.Random(7)
    for _ in range(2000):
        text = "".join(draw.choices("aAsSßİiﬁf\u0307🙂", k=draw.randrange(12)))
        wanted = fold("".join(draw.choices("asßiİf", k=draw.randint(1, 3))))
        found = matches(text, wanted)
        assert all(wanted in fold(text[start:end]) for start, end in found)
        assert bool(found) == (wanted in fold(text))
        assert all(left[1] <= right[0] for left, right in zip(found, found[1:], strict=False))
        gaps = zip([0, *(end for _, end in found)], [*(start for start, _ in found), len(text)],
                   strict=True)  # fmt: skip
        assert all(wanted not in fold(text[start:end]) for start, end in gaps)


def marked(found: Snippet) -> list[str]:
    """What a page would mark: JavaScript's strings are UTF-16."""
    units = found.text.encode("utf-16-le")
    return [units[2 * start : 2 * end].decode("utf-16-le") for start, end in found.ranges]


def test_a_short_text_is_whole() -> None:
    assert snippet("Say HI, hi!", "hi") == Snippet("Say HI, hi!", ((4, 6), (8, 10)))
    assert snippet("nothing", "x") is None


def test_what_is_cut() -> None:
    text = "a" * 100 + "Maße" + "b" * 100
    found = snippet(text, "masse")
    assert found is not None
    assert found.text == CUT + "a" * AROUND + "Maße" + "b" * AROUND + CUT
    assert marked(found) == ["Maße"]
    begins = snippet("Maße" + "b" * 61, "masse")
    assert begins is not None and begins.text == "Maße" + "b" * 60 + CUT
    ends = snippet("a" * 61 + "Maße", "masse")
    assert ends is not None and ends.text == CUT + "a" * 60 + "Maße"


def test_ranges_count_as_javascript_does() -> None:
    found = snippet("🙂" * 70 + "ß🙂SS" + "x" * 80, "ss")
    assert found is not None and marked(found) == ["ß", "SS"]
    assert found.ranges[0] == (1 + 2 * AROUND, 2 + 2 * AROUND)


def test_further_matches_are_marked_if_they_are_whole() -> None:
    text = "hit" + "." * 55 + "hit" + "." * 50 + "hit"
    found = snippet(text, "hit")
    assert found is not None and marked(found) == ["hit", "hit"]
    cut = snippet("hit" + "." * 58 + "hit", "hit")
    assert cut is not None and cut.text.endswith(".hi" + CUT) and marked(cut) == ["hit"]


def test_line_breaks_are_blanks() -> None:
    found = snippet("one\r\ntwo\u2028three", "two")
    assert found == Snippet("one  two three", ((5, 8),))
