"""Small tokenizers made on the spot, one for each way that vocabularies spell bytes.

Each is a real `tokenizers` object of a few hundred tokens and takes a few milliseconds to make.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. the the then there\n",
    "안녕하세요 세계 한국어 텍스트, 감사합니다\n",
    "naïve café — “quotes” 🙂👍🏽 👨‍👩‍👧‍👦 ok\n",
    "def f(x):\n    return x + 1\n\n\tif a < b: pass  # 12345\n",
] * 3

# GPT-2's splitting rule in its simplest working form.
_WORDS = r"'s|'t| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_level(vocab_size: int = 400) -> tokenizers.Tokenizer:
    """Like GPT-2, SmolLM and Qwen: BPE over a printable alphabet of bytes."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    # Not special: Qwen marks its think and tool tags so. The last one holds a space and letters
    # outside of the byte alphabet.
    made.add_tokens(["<think>", "</think>", AddedToken("<café au lait>", normalized=False)])
    return made


def tekken(has_decoder: bool = True) -> tokenizers.Tokenizer:
    """Like Mistral's Tekken: a split by regular expression before the byte alphabet, control
    tokens first; without a decoder, the spelling of the pieces is all there is (F26)."""
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if has_decoder:
        made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<unk>", "<s>", "</s>", "[INST]", "[/INST]"],
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def sentencepiece(strips: bool = True) -> tokenizers.Tokenizer:
    """Like Llama 2 (strips one leading space of a whole text) or Gemma (does not).

    Pieces with a block for the space, single bytes as <0xNN>, no pre-tokenizer.
    """
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "h", "e", "l", "o", "w", "r", "d", "T", "i", "s", "한", "é", ",", "."]
    merges = [("▁", "h"), ("▁h", "e"), ("l", "l"), ("▁he", "ll"), ("▁hell", "o"), ("▁", "w")]
    merges += [("▁w", "o"), ("r", "l"), ("rl", "d"), ("▁wo", "rld"), ("i", "s"), ("▁", "▁")]
    vocab = {piece: n for n, piece in enumerate(pieces)}
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    made = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    replace = normalizers.Replace(" ", "▁")
    if strips:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        made.normalizer = replace
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.add_tokens([AddedToken("▁▁▁", normalized=False), AddedToken("<table>", normalized=False)])
    return made


def word_piece() -> tokenizers.Tokenizer:
    """Like BERT: spaces are not spelled, so a token's text depends on its neighbours."""
    pieces = ["[UNK]", "[CLS]", "[SEP]", "hello", "world", "##ing", "##s", "play", ",", "."]
    vocab = {piece: n for n, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return made


def save(made: tokenizers.Tokenizer, folder: Path, **files: dict[str, Any]) -> Path:
    """Writes a model folder's tokenizer files; `config={...}` becomes `config.json`."""
    made.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
