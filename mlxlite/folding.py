"""Search without regard to case: a folded copy, and where its parts come from (spec 70 section 10).

    "Maße" -> "masse"        find "SS" -> "Ma" "ß" "e": one character of the text

Folding is Unicode's full case folding, character by character; it may make a text longer (ß, İ, ﬁ)
and never shorter, so a place in the folded copy has to be carried back. Pure, no state.
"""

from __future__ import annotations

from dataclasses import dataclass

AROUND = 60  # characters of the text on either side of a match, from the spec
CUT = "…"


@dataclass(frozen=True, slots=True)
class Snippet:
    """text: a match and what is around it, `…` where it was cut. ranges: every match in it, as
    (start, end) in UTF-16 code units, which is how a page's JavaScript counts."""

    text: str
    ranges: tuple[tuple[int, int], ...]


def fold(text: str) -> str:
    return text.casefold()


def origins(text: str) -> list[int] | range:
    """For each character of the folded text, the place of the one that it comes from."""
    if len(fold(text)) == len(text):  # no character got longer, and none gets shorter
        return range(len(text))
    return [place for place, char in enumerate(text) for _ in fold(char)]


def matches(text: str, wanted: str) -> list[tuple[int, int]]:
    """Where the folded `wanted` (not empty) is in the text: (start, end) in characters of it.

    From left to right, none begins inside another; of a character that folds to several, a part
    counts as the whole.
    """
    folded, back = fold(text), origins(text)
    found: list[tuple[int, int]] = []
    place = folded.find(wanted)
    while place >= 0:
        after = place + len(wanted)
        start, end = back[place], back[after - 1] + 1
        found.append((start, end))
        while after < len(back) and back[after] < end:  # the rest of its last character
            after += 1
        place = folded.find(wanted, after)
    return found


def snippet(text: str, wanted: str) -> Snippet | None:
    """The first match with AROUND characters on either side; None if there is none.

    Matches further on are marked where they are whole in it. Line breaks become blanks.
    """
    found = matches(text, wanted)
    if not found:
        return None
    first, last = found[0]
    low, high = max(0, first - AROUND), min(len(text), last + AROUND)
    before = CUT if low > 0 else ""
    after = CUT if high < len(text) else ""
    shown = before + text[low:high].translate(_BLANKS) + after
    shift = len(before) - low
    return Snippet(
        shown,
        tuple(
            (_utf16_length(shown[: start + shift]), _utf16_length(shown[: end + shift]))
            for start, end in found
            if end <= high
        ),
    )


_BLANKS = {ord(char): " " for char in "\n\r\t\v\f\u2028\u2029\x85"}


def _utf16_length(text: str) -> int:
    return len(text) + sum(char > "\uffff" for char in text)
