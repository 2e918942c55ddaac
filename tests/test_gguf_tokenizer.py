"""Tokenizers built from GGUF metadata, loaded by the `tokenizers` package and checked against
slow references written from llama.cpp's rules."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from mlxlite.errors import ModelError
from mlxlite.models.gguf_file import read_gguf
from mlxlite.models.gguf_tokenizer import PRE_TOKENIZERS, build_tokenizer
from tests.gguf_writer import (
    byte_letters,
    byte_level_metadata,
    sentencepiece_metadata,
    write_gguf,
)

CONFIG = {"vocab_size": 400, "max_position_embeddings": 64}
TEXTS = [
    "hello world",
    " hello  hello\n\n\thello ",
    "in 2024 it's 12.5% more; I'll go",
    "Grüße — 東京 🙂 naïve",
    "if x:\n    return x[1234]  # done\r\n",
    "",
]


def built(folder: Path, metadata: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    with read_gguf(write_gguf(folder / "t.gguf", metadata, {})) as file:
        tokenizer, config = build_tokenizer(file, CONFIG)
    return Tokenizer.from_str(json.dumps(tokenizer)), config


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """How the pre-tokenizer cuts, in plain text."""
    letters = {letter: byte for byte, letter in enumerate(byte_letters())}
    cut = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [bytes(letters[c] for c in piece).decode() for piece, _ in cut]


# GPT-2's pattern in the words of `re`: [^\W\d_] for letters, \d for digits.
GPT2 = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")


def bpe(piece: str, ids: dict[str, int], ranks: dict[tuple[str, str], int]) -> list[int]:
    """Byte-level BPE as the textbook has it: merge the best-ranked neighbours until none is."""
    letters = byte_letters()
    parts = [letters[byte] for byte in piece.encode()]
    while len(parts) > 1:
        pairs = list(zip(parts, parts[1:], strict=False))
        best = min(pairs, key=lambda pair: ranks.get(pair, 1 << 60))
        if best not in ranks:
            break
        at = pairs.index(best)
        parts[at : at + 2] = ["".join(best)]
    return [ids[part] for part in parts]


def smollm_reference(text: str, metadata: dict[str, Any]) -> list[int]:
    """llama.cpp's rules for `smollm`: every digit alone, then GPT-2's pattern, then merges."""
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    lines = enumerate(metadata["tokenizer.ggml.merges"])
    ranks = {tuple(line.split(" ")): rank for rank, line in lines}
    out: list[int] = []
    for part in re.split(r"(\d)", text):
        for piece in GPT2.findall(part):
            out += bpe(piece, ids, ranks)  # type: ignore[arg-type]
    return out


@pytest.mark.parametrize("text", TEXTS)
def test_smollm_equals_the_reference(tmp_path: Path, text: str) -> None:
    metadata = byte_level_metadata("smollm")
    tokenizer, _ = built(tmp_path, metadata)
    ids = tokenizer.encode(text).ids
    assert ids == smollm_reference(text, metadata)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["a", "1", "2", "3", "4", " b", "'s", " ", " c", "!?"]),
        ("gpt-2", ["a", "1234", " b", "'s", " ", " c", "!?"]),
        ("llama-bpe", ["a", "123", "4", " b", "'s", " ", " c", "!?"]),
        ("qwen2", ["a", "1", "2", "3", "4", " b", "'s", " ", " c", "!?"]),
    ],
)
def test_each_kind_cuts_in_its_way(tmp_path: Path, pre: str, expected: list[str]) -> None:
    tokenizer, _ = built(tmp_path, byte_level_metadata(pre))
    expected = (
        expected if pre != "smollm" else ["a", "1", "2", "3", "4", " b", "'s", " ", " c", "!?"]
    )
    assert pieces(tokenizer, "a1234 b's  c!?") == expected


def test_kinds_differ_in_contractions_newlines_and_normal_form(tmp_path: Path) -> None:
    llama, _ = built(tmp_path, byte_level_metadata("llama-bpe"))
    assert pieces(llama, "I'LL go;\n\n  x") == ["I", "'LL", " go", ";\n\n", " ", " x"]
    gpt2, _ = built(tmp_path, byte_level_metadata("gpt-2"))
    assert pieces(gpt2, "I'LL go;\n\n  x") == ["I", "'", "LL", " go", ";", "\n\n ", " x"]
    qwen, _ = built(tmp_path, byte_level_metadata("qwen2"))
    assert qwen.decode(qwen.encode("e\u0301").ids) == "\u00e9"
    assert gpt2.decode(gpt2.encode("e\u0301").ids) == "e\u0301"


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_control_tokens_and_round_trips(tmp_path: Path, pre: str) -> None:
    tokenizer, config = built(tmp_path, byte_level_metadata(pre))
    ids = tokenizer.encode("<|im_start|>user\nhello<|im_end|><think>", add_special_tokens=False).ids
    assert ids[0] == 1 and ids[-2] == 2 and ids.count(1) == ids.count(2) == 1
    assert tokenizer.id_to_token(ids[-1]) == "<think>"  # user-defined: matched, but shown
    assert tokenizer.decode(ids) == "user\nhello<think>"
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert config["eos_token"] == "<|im_end|>" and config["model_max_length"] == 64


def test_beginning_of_sequence(tmp_path: Path) -> None:
    hello = {"smollm": False, "llama-bpe": True}
    for pre, is_added in hello.items():
        tokenizer, config = built(tmp_path, byte_level_metadata(pre))
        assert config["add_bos_token"] is is_added
        assert (tokenizer.encode("hello").ids[0] == 1) is is_added
        assert tokenizer.encode("hello", add_special_tokens=False).ids[0] != 1
    both = byte_level_metadata() | {
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }
    tokenizer, _ = built(tmp_path, both)
    assert tokenizer.encode("hello").tokens == ["<|im_start|>", "hello", "<|im_end|>"]
    assert tokenizer.encode("h", "e").tokens == ["<|im_start|>", "h", "<|im_end|>"] + [
        "<|im_start|>", "e", "<|im_end|>"
    ]  # fmt: skip


def sentencepiece_reference(text: str, metadata: dict[str, Any]) -> list[str]:
    """SentencePiece: merge the neighbours whose union scores best; bytes for what is no token."""
    scores = dict(
        zip(
            metadata["tokenizer.ggml.tokens"][259:271],
            metadata["tokenizer.ggml.scores"][259:271],
            strict=True,
        )
    )
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = enumerate(zip(parts, parts[1:], strict=False))
        found = [(-scores[a + b], at) for at, (a, b) in pairs if a + b in scores]
        if not found:
            break
        at = min(found)[1]
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    out: list[str] = []
    for part in parts:
        out += [part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()]
    return out


@pytest.mark.parametrize("text", ["hello", "hello hello", "hell he  lol", "ü hello\n", "olleh 東"])
@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentencepiece(tmp_path: Path, text: str, has_prefix: bool) -> None:
    metadata = sentencepiece_metadata() | {"tokenizer.ggml.add_space_prefix": has_prefix}
    tokenizer, config = built(tmp_path, metadata)
    encoded = tokenizer.encode(text)
    assert encoded.ids[0] == 1 and config["add_bos_token"]
    prefixed = " " + text if has_prefix else text
    assert encoded.tokens[1:] == sentencepiece_reference(prefixed, metadata)
    assert tokenizer.decode(encoded.ids) == text


def test_chat_templates(tmp_path: Path) -> None:
    _, config = built(tmp_path, byte_level_metadata())
    assert config["chat_template"].startswith("{% for m")
    named = byte_level_metadata() | {"tokenizer.chat_template.tool_use": "T"}
    _, config = built(tmp_path, named)
    assert [entry["name"] for entry in config["chat_template"]] == ["default", "tool_use"]
    none = byte_level_metadata()
    del none["tokenizer.chat_template"]
    assert "chat_template" not in built(tmp_path, none)[1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer kind 't5' is not supported"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken' is not supported"),
        ({"tokenizer.ggml.tokens": []}, "has 0 tokens"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "not a list of str"),
        ({"tokenizer.ggml.token_type": [1]}, "1 token types"),
        ({"tokenizer.ggml.merges": ["h zz"]}, "leads out of the vocabulary"),
        ({"tokenizer.ggml.merges": []}, "lacks 'tokenizer.ggml.merges'"),
        ({"tokenizer.ggml.model": "llama"}, "but 0 scores"),
    ],
)
def test_what_is_not_supported_is_one_line(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelError, match=reason) as caught:
        built(tmp_path, byte_level_metadata() | change)
    assert "t.gguf" in caught.value.message and "\n" not in caught.value.message
