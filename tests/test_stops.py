"""Stop strings: never a fragment shown, the same result at every cut, linear cost (F29)."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from mlxlite.errors import BadRequest
from mlxlite.text.guides import TextGuide
from mlxlite.text.sink import Sink
from mlxlite.text.stops import MAX_STOP_CHARS, MAX_STOPS, StopMatcher, normalise_stops
from mlxlite.text.tokenizer import Tokenizer
from mlxlite.types import Guide, Verdict
from tests import tokenizers_made as made


def run(stops: Sequence[str], portions: Sequence[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(portion)[0] for portion in portions)
    return shown + matcher.flush(), matcher.matched


def obvious(stops: Sequence[str], text: str) -> tuple[str, str | None]:
    """The oracle: look after each character whether the text ends with a stop string."""
    for end in range(len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            longest = max(done, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_a_stop_across_portions() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert matcher.push("Hello.\nUs") == ("Hello.", None)
    assert matcher.push("er") == ("", None)
    assert matcher.push(": more") == ("", "\nUser:")
    assert matcher.push("ignored") == ("", "\nUser:")
    assert matcher.flush() == ""


def test_only_what_could_grow_is_held() -> None:
    matcher = StopMatcher(["abab!"])
    assert matcher.push("xaba") == ("x", None)
    assert matcher.push("bab") == ("ab", None)  # "abab" is still a beginning
    assert matcher.push("c") == ("ababc", None)


def test_flush_releases_a_beginning() -> None:
    assert run(["</end>"], ["text </e"]) == ("text </e", None)


@pytest.mark.parametrize(
    ("stops", "text", "shown", "stop"),
    [
        (["world", "hello"], "say hello world", "say ", "hello"),  # by place, not by list
        (["b", "ab"], "xab", "x", "ab"),  # completed together: began first
        (["abc", "ab"], "abc", "", "ab"),  # completed first
        (["END"], "END", "", "END"),
        (["aa"], "baaa", "b", "aa"),
        (["한국"], "나는 한국", "나는 ", "한국"),
        ([], "anything", "anything", None),
        (["\n\n"], "a\nb\n\nc", "a\nb", "\n\n"),
    ],
)
def test_which_stop_wins(stops: list[str], text: str, shown: str, stop: str | None) -> None:
    assert run(stops, [text]) == (shown, stop)
    assert run(stops, list(text)) == (shown, stop)


def test_every_cut_gives_what_the_oracle_gives() -> None:
    rng = random.Random(5)
    for _ in range(4000):
        stops = ["".join(rng.choices("ab\n", k=rng.randrange(1, 6))) for _ in range(3)]
        text = "".join(rng.choices("ab\nc", weights=[4, 4, 2, 1], k=rng.randrange(25)))
        expected = obvious(stops, text)
        assert run(stops, list(text)) == expected
        assert run(stops, [text]) == expected
        at = sorted(rng.choices(range(len(text) + 1), k=3))
        portions = [text[: at[0]], text[at[0] : at[1]], text[at[1] : at[2]], text[at[2] :]]
        assert run(stops, portions) == expected


def test_nothing_shown_is_ever_part_of_a_stop_in_growth() -> None:
    rng = random.Random(6)
    for _ in range(500):
        stop = "".join(rng.choices("ab", k=4))
        text = "".join(rng.choices("ab", k=30))
        shown, found = obvious([stop], text)
        matcher = StopMatcher([stop])
        seen = ""
        for n, char in enumerate(text, 1):
            seen += matcher.push(char)[0]
            assert shown.startswith(seen)
            if matcher.matched is None:  # and no more than needed is held
                held = text[len(seen) : n]
                assert stop.startswith(held) and len(held) < len(stop)
        assert matcher.matched == found


def test_the_worst_stops_are_linear() -> None:
    stops = ["a" * MAX_STOP_CHARS, *("a" * n + "b" for n in range(1, MAX_STOPS))]
    start = time.perf_counter()
    matcher = StopMatcher(stops)
    for _ in range(500):
        matcher.push("aaaa")
    assert time.perf_counter() - start < 2.0  # 2000 characters, 64 automata
    text = "x" * 1_000_000
    start = time.perf_counter()
    assert run(["abc", "\nUser:"], [text]) == (text, None)
    assert time.perf_counter() - start < 0.5


# ---------------------------------------------------------------------------------------- the field


@pytest.mark.parametrize(
    ("value", "stops"),
    [
        (None, ()),
        ("", ()),
        ([], ()),
        ("x", ("x",)),
        (["a", "", "b", "a"], ("a", "b")),
        (("a",), ("a",)),
        ([" ", "\n"], (" ", "\n")),
        (["x" * MAX_STOP_CHARS], ("x" * MAX_STOP_CHARS,)),
    ],
)
def test_normalise_stops(value: Any, stops: tuple[str, ...]) -> None:
    assert normalise_stops(value) == stops


@pytest.mark.parametrize(
    ("value", "param"),
    [
        (5, "stop"),
        (True, "stop"),
        ({}, "stop"),
        ([1], "stop[0]"),
        (["a", None], "stop[1]"),
        ([["a"]], "stop[0]"),
        ("x" * (MAX_STOP_CHARS + 1), "stop"),
        ([str(n) for n in range(MAX_STOPS + 1)], "stop"),
    ],
)
def test_wrong_stops_are_refused(value: Any, param: str) -> None:
    with pytest.raises(BadRequest, match="stop") as caught:
        normalise_stops(value)
    assert caught.value.param == param


def test_the_field_may_have_another_name() -> None:
    with pytest.raises(BadRequest, match="stop_sequences must be") as caught:
        normalise_stops(3, "stop_sequences")
    assert caught.value.param == "stop_sequences"


# ---------------------------------------------------------------------------------------- the guide


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(made.byte_level())


def stop_guide(tokenizer: Tokenizer, stops: list[str]) -> TextGuide:
    return TextGuide(Sink(tokenizer, stops=stops))


def test_the_guide_stops_at_the_id_that_completes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello world\nUser: go on")
    end = next(
        n for n in range(len(ids) + 1) if "\nUser:" in tokenizer.decode(ids[:n])
    )  # the oracle
    guide: Guide = stop_guide(tokenizer, ["\nUser:"])
    assert not guide.may_steer
    assert guide.observe(ids) == Verdict(keep=end, stop=True)

    guide = stop_guide(tokenizer, ["\nUser:"])
    verdicts = [guide.observe([token_id]) for token_id in ids[:end]]
    assert verdicts == [Verdict(keep=1)] * (end - 1) + [Verdict(keep=1, stop=True)]


def test_the_guide_lets_all_pass_without_a_match(tokenizer: Tokenizer) -> None:
    guide = stop_guide(tokenizer, ["never"])
    assert guide.observe([]) == Verdict(keep=0)
    assert guide.observe(tokenizer.encode("nev er")) == Verdict(
        keep=len(tokenizer.encode("nev er"))
    )


def test_a_stop_of_split_characters(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a한국b")
    verdict = stop_guide(tokenizer, ["한국"]).observe(ids)
    assert verdict.stop
    assert tokenizer.decode(ids[: verdict.keep]).endswith("한국")


def test_guide_and_renderer_agree(tokenizer: Tokenizer) -> None:
    rng = random.Random(11)
    for _ in range(300):
        ids = rng.choices(range(tokenizer.vocab_size), k=20)
        stops = [tokenizer.decode(rng.choices(ids, k=2))[:3] for _ in range(2)]
        guide = stop_guide(tokenizer, stops)
        verdict = guide.observe(ids)
        shown, found = run(stops, [tokenizer.decode(ids[: verdict.keep])])
        assert verdict.stop is (found is not None) or "\ufffd" in "".join(stops)
        assert not any(stop and stop in shown for stop in stops)
