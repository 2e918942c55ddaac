"""Encoding, exact token bytes, EOS and BOS, and what broken files say."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, processors

from mlxlite.errors import ModelError
from mlxlite.text.tokenizer import BYTE_OF_CHAR, Kind, Tokenizer
from tests import tokenizers_made as made

TEXTS = [
    "",
    " leading and trailing ",
    "hello world",
    "안녕하세요 세계",
    "🙂 👨‍👩‍👧‍👦 👍🏽",
    "a\n\n  b\tc\r\n",
    "naïve café\u200b",
    "한hello, é world.",
]


@pytest.fixture(scope="module")
def smol() -> Tokenizer:
    return Tokenizer(made.byte_level(), bos_token="<|im_start|>", eos_token="<|im_end|>")


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (made.byte_level, Kind.BYTE_LEVEL),
        (made.tekken, Kind.BYTE_LEVEL),
        (lambda: made.tekken(has_decoder=False), Kind.BYTE_LEVEL),
        (made.sentencepiece, Kind.SENTENCEPIECE),
        (lambda: made.sentencepiece(strips=False), Kind.SENTENCEPIECE),
        (made.word_piece, Kind.OTHER),
    ],
)
def test_kind(make: Callable[[], tokenizers.Tokenizer], kind: Kind) -> None:
    assert Tokenizer(make()).kind is kind


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Sequence([decoders.Replace("</w>", " "), decoders.Fuse()]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Metaspace(replacement="_"),
    ],
)
def test_a_decoder_that_is_no_map_of_bytes_is_other(decoder: decoders.Decoder) -> None:
    backend = made.sentencepiece()
    backend.decoder = decoder
    assert Tokenizer(backend).kind is Kind.OTHER


def test_metaspace_decoder_is_sentencepiece_without_byte_pieces() -> None:
    backend = made.sentencepiece()
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend)
    assert tokenizer.kind is Kind.SENTENCEPIECE
    assert tokenizer.bytes_of(backend.token_to_id("<0x41>")) == b"<0x41>"


def test_the_byte_alphabet_is_whole() -> None:
    assert sorted(BYTE_OF_CHAR.values()) == list(range(256))
    assert BYTE_OF_CHAR["Ġ"] == 0x20
    assert BYTE_OF_CHAR["Ċ"] == 0x0A


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", [made.byte_level, made.tekken])
def test_decode_gives_the_text_back(make: Callable[[], tokenizers.Tokenizer], text: str) -> None:
    tokenizer = Tokenizer(make())
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_gives_the_text_back(text: str) -> None:
    gemma = Tokenizer(made.sentencepiece(strips=False))
    assert gemma.decode(gemma.encode(text)) == text
    llama = Tokenizer(made.sentencepiece())
    # Its normaliser puts a space before every text; the answer's first space must survive (F27).
    assert llama.decode(llama.encode(text)) == (" " + text if text else "")


def test_random_ids_decode_as_the_library_does(smol: Tokenizer) -> None:
    backend = made.byte_level()
    gemma_backend = made.sentencepiece(strips=False)
    gemma = Tokenizer(gemma_backend)
    no_bytes = [i for i in range(gemma.vocab_size) if not 3 <= i < 259]
    cafe = backend.token_to_id("<café au lait>")
    rng = random.Random(1)
    for _ in range(1000):
        ids = [i for i in rng.choices(range(smol.vocab_size), k=rng.randrange(30)) if i != cafe]
        assert smol.decode(ids) == backend.decode(ids)
        assert smol.decode(ids, keep_special=True) == backend.decode(ids, skip_special_tokens=False)
        # Bytes that are no UTF-8 are counted differently there, so only whole pieces here.
        pieces = rng.choices(no_bytes, k=rng.randrange(30))
        assert gemma.decode(pieces) == gemma_backend.decode(pieces)


def test_bytes_of(smol: Tokenizer) -> None:
    emoji = smol.encode("🙂")
    assert b"".join(map(smol.bytes_of, emoji)) == "🙂".encode()
    cafe = smol.token_id("<café au lait>")
    assert cafe is not None
    assert smol.bytes_of(cafe) == "<café au lait>".encode()  # literal, not the byte alphabet
    gemma = Tokenizer(made.sentencepiece(strips=False))
    for piece, spelled in [
        ("▁hello", b" hello"),
        ("<0xE2>", b"\xe2"),
        ("<0x0A>", b"\n"),
        ("▁▁▁", b"   "),
        ("<table>", b"<table>"),
        ("</s>", b"</s>"),
        ("한", "한".encode()),
    ]:
        token_id = gemma.token_id(piece)
        assert token_id is not None
        assert gemma.bytes_of(token_id) == spelled


@pytest.mark.parametrize("token_id", [-1, 10**6, 2**32, 2**70])
def test_ids_outside_the_vocabulary_have_no_text(smol: Tokenizer, token_id: int) -> None:
    for tokenizer in (smol, Tokenizer(made.sentencepiece()), Tokenizer(made.word_piece())):
        assert tokenizer.bytes_of(token_id) == b""
        assert tokenizer.token_text(token_id) == ""
        assert not tokenizer.is_special(token_id)


def test_special_is_not_the_same_as_added(smol: Tokenizer) -> None:
    end, think = smol.token_id("<|im_end|>"), smol.token_id("<think>")
    assert end is not None and think is not None
    assert smol.is_special(end) and not smol.is_special(think)
    assert smol.decode([end, think, end]) == "<think>"
    assert smol.decode([end, think], keep_special=True) == "<|im_end|><think>"


def test_vocab_size_counts_to_the_largest_id() -> None:
    holes = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 7}, merges=[]))
    assert Tokenizer(holes).vocab_size == 8
    assert Tokenizer(tokenizers.Tokenizer(models.BPE())).vocab_size == 0


def test_half_a_surrogate_pair_is_encoded_as_a_replacement(smol: Tokenizer) -> None:
    assert smol.decode(smol.encode("a\ud83db")) == "a\ufffdb"
    assert smol.decode(smol.encode("\ud83d\ude42")) == "🙂"


def test_special_text_in_a_prompt_is_one_id(smol: Tokenizer) -> None:
    assert smol.encode("<|im_end|>") == [smol.token_id("<|im_end|>")]


def test_truncation_and_padding_are_off(tmp_path: Path) -> None:
    backend = made.byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer.load(made.save(backend, tmp_path))
    text = "The quick brown fox " * 20
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("fox")) < 4


def test_add_special_tokens(tmp_path: Path) -> None:
    backend = made.sentencepiece()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    tokenizer = Tokenizer.load(made.save(backend, tmp_path, tokenizer_config={"bos_token": "<s>"}))
    assert tokenizer.bos_id == 1
    assert tokenizer.encode("hello")[0] == 1
    assert tokenizer.encode("hello", add_special_tokens=False) == tokenizer.encode("hello")[1:]


# ------------------------------------------------------------------------------------ EOS and BOS


def test_eos_is_the_union_of_every_source(tmp_path: Path) -> None:
    folder = made.save(
        made.byte_level(),
        tmp_path,
        config={"eos_token_id": 7},
        generation_config={"eos_token_id": [7, 9]},
        tokenizer_config={"eos_token": "<|im_end|>", "bos_token": None},
        special_tokens_map={"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"},
    )
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.eos_ids == {7, 9, tokenizer.token_id("<|im_end|>")}
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.bos_id is None and tokenizer.bos_token is None  # null wins over the map


def test_special_tokens_written_out_and_only_in_the_map(tmp_path: Path) -> None:
    token = {"content": "<|im_end|>", "lstrip": False, "special": True}
    folder = made.save(made.byte_level(), tmp_path, special_tokens_map={"eos_token": token})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.eos_ids == {tokenizer.token_id("<|im_end|>")}


def test_eos_of_a_nested_text_model(tmp_path: Path) -> None:
    nested = {"text_config": {"eos_token_id": [3, 4]}}
    assert Tokenizer.load(made.save(made.byte_level(), tmp_path, config=nested)).eos_ids == {3, 4}


def test_no_configuration_at_all(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(made.save(made.byte_level(), tmp_path))
    assert tokenizer.eos_ids == frozenset()
    assert tokenizer.bos_id is None
    assert tokenizer.eos_token is None


def test_tokens_that_only_the_configuration_declares(tmp_path: Path) -> None:
    backend = made.byte_level()
    size = backend.get_vocab_size()
    table = {
        str(size): {"content": "<|tool|>", "special": True},
        str(size + 1): {"content": "<|plain|>", "special": False},
        str(size + 9): {"content": "<|hole|>", "special": True},  # cannot be placed: left out
    }
    folder = made.save(backend, tmp_path, tokenizer_config={"added_tokens_decoder": table})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("<|tool|><|plain|>") == [size, size + 1]
    assert tokenizer.is_special(size) and not tokenizer.is_special(size + 1)
    assert tokenizer.token_id("<|hole|>") is None


def test_a_named_token_of_the_plain_vocabulary_becomes_special(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={"<": 0, "/": 1, "s": 2, ">": 3, "</s>": 4}, merges=[])
    )
    folder = made.save(backend, tmp_path, tokenizer_config={"eos_token": "</s>"})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("s</s>") == [2, 4]
    assert tokenizer.is_special(4)


# ---------------------------------------------------------------------------------- broken files


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b""),
        ("tokenizer.json", b'{"a": 1}'),
        ("tokenizer.json", b"version https://git-lfs.github.com/spec/v1"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"\xff\xfe"),
        ("tokenizer_config.json", b'{"eos_token": 5}'),
        ("special_tokens_map.json", b"nonsense"),
        ("config.json", b'{"eos_token_id": "two"}'),
        ("config.json", b'{"eos_token_id": [1, true]}'),
        ("config.json", b"[" * 100_000),
    ],
)
def test_a_broken_file_is_one_line_that_names_it(tmp_path: Path, name: str, content: bytes) -> None:
    made.save(made.byte_level(), tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path / name) in caught.value.message
    assert "\n" not in caught.value.message


def test_a_broken_generation_config_means_no_defaults(tmp_path: Path) -> None:
    made.save(made.byte_level(), tmp_path, config={"eos_token_id": 2})
    (tmp_path / "generation_config.json").write_text("{", encoding="utf-8")
    assert Tokenizer.load(tmp_path).eos_ids == {2}


def test_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        Tokenizer.load(tmp_path / "nowhere")


# -------------------------------------------------------------------------------- threads, imports


def test_encode_from_many_threads(smol: Tokenizer) -> None:
    expected = {text: smol.encode(text) for text in TEXTS}
    wrong: list[str] = []

    def work() -> None:
        for _ in range(50):
            wrong.extend(text for text in TEXTS if smol.encode(text) != expected[text])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_text_column_loads_neither_mlx_nor_transformers() -> None:
    code = (
        "import sys, mlxlite.text.guides, mlxlite.text.template\n"
        "assert not {'mlx', 'transformers', 'mlx_lm', 'asyncio', 'http'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_added_token_flags_survive(tmp_path: Path) -> None:
    backend = made.byte_level()
    backend.add_special_tokens([AddedToken("<|x|>", lstrip=True, special=True)])
    tokenizer = Tokenizer.load(made.save(backend, tmp_path))
    assert tokenizer.decode(tokenizer.encode("a <|x|>"), keep_special=True) == "a<|x|>"
