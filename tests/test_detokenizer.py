"""Streamed text equals whole text, for every way to cut the ids (F23, F25, F26, F27)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import pytest
import tokenizers

from mlxlite.text.detokenizer import WINDOW_TOKENS, Detokenizer
from mlxlite.text.tokenizer import Kind, Tokenizer
from tests import tokenizers_made as made

KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level": made.byte_level,
    "tekken": made.tekken,
    "tekken without decoder": lambda: made.tekken(has_decoder=False),
    "llama": made.sentencepiece,
    "gemma": lambda: made.sentencepiece(strips=False),
    "wordpiece": made.word_piece,
}
EXACT = [name for name in KINDS if name != "wordpiece"]
UNICODE = [
    "한국어",
    "안녕하세요, 세계! 감사합니다.",
    "🙂",
    "👨‍👩‍👧‍👦👍🏽🇰🇷❤️",
    "e\u0301 ñ \u200d\u200f עברית",
    "𝔘𝔫𝔦 \U0010ffff",
]


@pytest.fixture(scope="module")
def all_kinds() -> dict[str, Tokenizer]:
    return {name: Tokenizer(make()) for name, make in KINDS.items()}


def stream(tokenizer: Tokenizer, portions: Sequence[Sequence[int]], keep: bool = False) -> str:
    detokenizer = Detokenizer(tokenizer, keep)
    deltas = [detokenizer.push(portion) for portion in portions]
    return "".join(deltas) + detokenizer.flush()


def cut(rng: random.Random, ids: Sequence[int]) -> list[Sequence[int]]:
    portions = []
    at = 0
    while at < len(ids):
        size = rng.choice([0, 1, 1, 2, 5])
        portions.append(ids[at : at + size])
        at += size
    return portions


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("keep", [False, True])
def test_random_ids_at_random_cuts(all_kinds: dict[str, Tokenizer], name: str, keep: bool) -> None:
    tokenizer = all_kinds[name]
    rng = random.Random(7)
    top = tokenizer.vocab_size + 8  # padded rows too
    for _ in range(800):
        ids = rng.choices(range(top), k=rng.randrange(40))
        whole = tokenizer.decode(ids, keep_special=keep)
        assert stream(tokenizer, [(i,) for i in ids], keep) == whole
        assert stream(tokenizer, [ids], keep) == whole
        assert stream(tokenizer, cut(rng, ids), keep) == whole


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("text", UNICODE)
def test_no_delta_breaks_a_character(all_kinds: dict[str, Tokenizer], name: str, text: str) -> None:
    tokenizer = all_kinds[name]
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer)
    deltas = [detokenizer.push((i,)) for i in ids]
    assert not any("\ufffd" in delta for delta in deltas)
    assert "".join(deltas).lstrip(" ") == text
    assert detokenizer.flush() == ""


def test_an_emoji_split_over_tokens_comes_at_once(all_kinds: dict[str, Tokenizer]) -> None:
    tokenizer = all_kinds["gemma"]  # spells it in four byte pieces
    ids = tokenizer.encode("🙂")
    assert len(ids) == 4
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push((i,)) for i in ids] == ["", "", "", "🙂"]


def test_a_character_without_its_end_is_flushed(all_kinds: dict[str, Tokenizer]) -> None:
    tokenizer = all_kinds["gemma"]
    ids = tokenizer.encode("a🙂")[:-1]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids) == "a"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""
    assert detokenizer.push(tokenizer.encode("b")) == "b"  # as new


def test_a_character_broken_off_is_replaced_and_the_rest_goes_on(
    all_kinds: dict[str, Tokenizer],
) -> None:
    tokenizer = all_kinds["gemma"]
    half = tokenizer.encode("🙂")[:2]
    assert stream(tokenizer, [half, tokenizer.encode("ok")]) == "\ufffdok"


@pytest.mark.parametrize("name", EXACT)
def test_the_first_space_stays(all_kinds: dict[str, Tokenizer], name: str) -> None:
    tokenizer = all_kinds[name]
    ids = tokenizer.encode(" hello world")
    assert stream(tokenizer, [ids]).startswith(" ")
    assert "Ġ" not in stream(tokenizer, [ids])


def test_trailing_spaces_stay(all_kinds: dict[str, Tokenizer]) -> None:
    tokenizer = all_kinds["byte-level"]
    assert stream(tokenizer, [(i,) for i in tokenizer.encode("a   ")]) == "a   "


def test_special_and_added_tokens(all_kinds: dict[str, Tokenizer]) -> None:
    tokenizer = all_kinds["byte-level"]
    ids = tokenizer.encode("<|im_start|><think>x</think><|im_end|>")
    assert stream(tokenizer, [ids]) == "<think>x</think>"
    assert stream(tokenizer, [ids], keep=True) == "<|im_start|><think>x</think><|im_end|>"


def test_word_pieces_join_as_the_library_joins_them(all_kinds: dict[str, Tokenizer]) -> None:
    tokenizer = all_kinds["wordpiece"]
    assert tokenizer.kind is Kind.OTHER
    ids = tokenizer.encode("hello playing worlds, hello.")
    detokenizer = Detokenizer(tokenizer)
    deltas = [detokenizer.push((i,)) for i in ids]
    assert deltas == ["hello", " play", "ing", " world", "s", ",", " hello", "."]
    assert detokenizer.flush() == ""


def test_the_window_stays_bounded(all_kinds: dict[str, Tokenizer]) -> None:
    tokenizer = all_kinds["wordpiece"]
    ids = tokenizer.encode("hello playing worlds, " * 100)
    nothing = [10**6] * 500
    detokenizer = Detokenizer(tokenizer)
    text = detokenizer.push(ids) + detokenizer.push(nothing) + detokenizer.push(ids)
    assert len(detokenizer._window) <= 2 * WINDOW_TOKENS
    assert text + detokenizer.flush() == tokenizer.decode(ids + ids)


def test_an_endless_replacement_character_is_let_go() -> None:
    from tokenizers import models

    backend = tokenizers.Tokenizer(models.WordLevel(vocab={"\ufffd": 0, "a": 1}, unk_token="a"))
    tokenizer = Tokenizer(backend)
    assert tokenizer.kind is Kind.OTHER
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([0]) == ""
    assert detokenizer.push([0] * (2 * WINDOW_TOKENS)).count("\ufffd") >= WINDOW_TOKENS
    assert detokenizer.push([1]).endswith("a")


@pytest.mark.parametrize("name", KINDS)
def test_the_cost_is_linear(all_kinds: dict[str, Tokenizer], name: str) -> None:
    tokenizer = all_kinds[name]
    rng = random.Random(3)
    ids = rng.choices(range(tokenizer.vocab_size), k=16_000)
    stream(tokenizer, [ids[:1000]])  # fills the tables

    def cost_s(count: int) -> float:
        best = 9.9
        for _ in range(3):
            detokenizer = Detokenizer(tokenizer)
            start = time.perf_counter()
            for token_id in ids[:count]:
                detokenizer.push((token_id,))
            best = min(best, time.perf_counter() - start)
        return best

    # Loose, as the machine may be busy: quadratic work would be 16 times dearer per token.
    assert cost_s(16_000) < 16 * 5 * cost_s(1000)
