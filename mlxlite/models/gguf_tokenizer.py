"""Builds tokenizer.json and tokenizer_config.json from a GGUF file's metadata.

GGUF keeps a vocabulary, its scores or merges, a type for each token and a name for the way text is
cut before merging (`tokenizer.ggml.pre`); the rules behind the name are code in llama.cpp
(llama-vocab.cpp). Here they are written as the Hugging Face `tokenizers` pipeline that the original
model was published with. Two kinds exist:

- `gpt2`: byte-level BPE with a list of merges. `PRE_TOKENIZERS` lists the known ways to cut.
- `llama`: SentencePiece BPE. Merges are derived from the scores (`_merges_from_scores`).

The JSON is built as plain data; the `tokenizers` package is not needed to write it.
"""

from __future__ import annotations

from typing import Any, NoReturn

from mlxlite.errors import ModelError
from mlxlite.models.gguf_file import GgufFile

# llama.cpp's token types (`enum llama_token_type`).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

SPACE = "\u2581"  # SentencePiece writes a space as this block character

# OpenAI's cl100k pattern as Llama 3 uses it; `{digits}` is where its relatives differ.
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|{digits}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,  # true: cut by GPT-2's pattern
    }


def _split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


_GPT2 = _byte_level(use_regex=True)
_SMOLLM = _sequence({"type": "Digits", "individual_digits": True}, _GPT2)
_LLAMA3 = _sequence(
    _split(_CL100K.replace("{digits}", r"\p{N}{1,3}")), _byte_level(use_regex=False)
)
_QWEN2 = _sequence(_split(_CL100K.replace("{digits}", r"\p{N}")), _byte_level(use_regex=False))

# `tokenizer.ggml.pre` -> pre-tokenizer; names in one row are synonyms in llama.cpp too.
PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
_LLAMA3_KINDS = ("llama-bpe", "llama-v3", "llama3")
_QWEN2_KINDS = ("qwen2", "deepseek-r1-qwen")


def check_kind(file: GgufFile) -> None:
    """ModelError for a kind of tokenizer that cannot be built. Looks at no token."""
    model, pre = (file.metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if model not in ("gpt2", "llama"):
        raise ModelError(
            f"{file.path}: tokenizer kind {model!r} is not supported (supported: gpt2, which is "
            f"byte-level BPE, and llama, which is SentencePiece BPE)"
        )
    if model == "gpt2" and pre is not None and str(pre) not in PRE_TOKENIZERS:
        raise ModelError(
            f"{file.path}: pre-tokenizer {str(pre)!r} is not supported "
            f"(supported: {', '.join(PRE_TOKENIZERS)})"
        )


def build_tokenizer(
    file: GgufFile, config: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of tokenizer.json and tokenizer_config.json; `config` is the model's."""
    check_kind(file)
    vocabulary = _Vocabulary(file, config["vocab_size"])
    is_byte_level = vocabulary.metadata["tokenizer.ggml.model"] == "gpt2"
    parts = vocabulary.byte_level() if is_byte_level else vocabulary.sentencepiece()
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added_tokens(),
        **parts,
        "post_processor": vocabulary.post_processor(),
    }
    return tokenizer, vocabulary.tokenizer_config(config)


class _Vocabulary:
    def __init__(self, file: GgufFile, n_rows: int) -> None:
        self.path = file.path
        self.metadata = file.metadata
        self.tokens: list[str] = self.list_of("tokens", str)
        if not self.tokens or len(self.tokens) > n_rows:
            self.fail(f"has {len(self.tokens)} tokens for {n_rows} rows of embeddings")
        self.types: list[int] = self.list_of("token_type", int) or [NORMAL] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            self.fail(f"has {len(self.tokens)} tokens but {len(self.types)} token types")
        # A text that occurs twice keeps its first id, as in llama.cpp's lookup.
        self.ids: dict[str, int] = {}
        for i, token in enumerate(self.tokens):
            self.ids.setdefault(token, i)

    def fail(self, reason: str) -> NoReturn:
        raise ModelError(f"{self.path}: {reason}")

    def list_of(self, key: str, kind: type) -> list[Any]:
        value = self.metadata.get(f"tokenizer.ggml.{key}", [])
        if not isinstance(value, list) or not all(type(entry) is kind for entry in value):
            self.fail(f"'tokenizer.ggml.{key}' is not a list of {kind.__name__}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        return value if isinstance(value, bool) else default

    @property
    def pre(self) -> str:
        # Files older than the key carry none; llama.cpp then warns and takes "default" too.
        return str(self.metadata.get("tokenizer.ggml.pre", "default"))

    @property
    def adds_bos(self) -> bool:
        # Where the key is absent llama.cpp decides by kind: yes for SentencePiece and Llama 3.
        is_sentencepiece = self.metadata.get("tokenizer.ggml.model") == "llama"
        return self.flag("add_bos_token", is_sentencepiece or self.pre in _LLAMA3_KINDS)

    def token(self, role: str) -> str | None:
        """The text of the bos, eos, unknown or padding token."""
        i = self.metadata.get(f"tokenizer.ggml.{role}_token_id")
        return self.tokens[i] if type(i) is int and 0 <= i < len(self.tokens) else None

    # --- the two kinds ---

    def byte_level(self) -> dict[str, Any]:
        merges = []
        for line in self.list_of("merges", str):
            left, _, right = line.partition(" ")
            # The tokenizers package refuses a file with a merge that leads out of the vocabulary.
            if left not in self.ids or right not in self.ids or left + right not in self.ids:
                self.fail(f"merge {line!r} leads out of the vocabulary")
            merges.append([left, right])
        if not merges:
            self.fail("lacks 'tokenizer.ggml.merges'")
        return {
            "normalizer": {"type": "NFC"} if self.pre in _QWEN2_KINDS else None,
            "pre_tokenizer": PRE_TOKENIZERS[self.pre],
            "decoder": _byte_level(use_regex=True),
            # Llama 3 takes a piece that is a token whole, without asking whether merges reach it.
            "model": self.bpe(merges, ignore_merges=self.pre in _LLAMA3_KINDS),
        }

    def sentencepiece(self) -> dict[str, Any]:
        to_block = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        from_block = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
        normalizers = [to_block]
        decoders = [from_block, {"type": "ByteFallback"}, {"type": "Fuse"}]
        if self.flag("add_space_prefix", True):
            normalizers = [{"type": "Prepend", "prepend": SPACE}, to_block]
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        return {
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": self.bpe(
                self._merges_from_scores(),
                unk_token=self.token("unknown"),
                fuse_unk=True,
                byte_fallback=True,
            ),
        }

    def bpe(self, merges: list[list[str]], **options: Any) -> dict[str, Any]:
        return {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            **options,
            "vocab": self.ids,
            "merges": merges,
        }

    def _merges_from_scores(self) -> list[list[str]]:
        """Every split of a token into two tokens, best score of the whole first.

        SentencePiece merges the neighbours whose union has the best score; ranking each possible
        split by that score gives `tokenizers` the same choice. Splits of one token are ordered by
        the ids of their parts, as transformers' converter does.
        """
        scores = self.list_of("scores", float)
        if len(scores) != len(self.tokens):
            self.fail(f"has {len(self.tokens)} tokens but {len(scores)} scores")
        mergeable = {
            token: i for token, i in self.ids.items() if self.types[i] in (NORMAL, USER_DEFINED)
        }
        ranked: list[tuple[float, int, int, int, str, str]] = []
        for token, i in mergeable.items():
            if self.types[i] != NORMAL:
                continue  # user-defined tokens are found in the text, never merged to
            for cut in range(1, len(token)):
                left = mergeable.get(token[:cut])
                if left is None:
                    continue
                right = mergeable.get(token[cut:])
                if right is not None:
                    ranked.append((-scores[i], i, left, right, token[:cut], token[cut:]))
        ranked.sort()
        return [[left, right] for *_, left, right in ranked]

    # --- around the model ---

    def added_tokens(self) -> list[dict[str, Any]]:
        """Tokens found in the text as they stand: control tokens and what a user defined."""
        return [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind != USER_DEFINED,
            }
            for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (UNKNOWN, CONTROL, USER_DEFINED) and self.ids[token] == i and token
        ]

    def post_processor(self) -> dict[str, Any] | None:
        before = self.token("bos") if self.adds_bos else None
        after = self.token("eos") if self.flag("add_eos_token", False) else None
        if before is None and after is None:
            return None

        def template(*sequences: str) -> list[dict[str, Any]]:
            steps: list[dict[str, Any]] = []
            for type_id, name in enumerate(sequences):
                if before is not None:
                    steps.append({"SpecialToken": {"id": before, "type_id": type_id}})
                steps.append({"Sequence": {"id": name, "type_id": type_id}})
                if after is not None:
                    steps.append({"SpecialToken": {"id": after, "type_id": type_id}})
            return steps

        return {
            "type": "TemplateProcessing",
            "single": template("A"),
            "pair": template("A", "B"),
            "special_tokens": {
                text: {"id": text, "ids": [self.ids[text]], "tokens": [text]}
                for text in (before, after)
                if text is not None
            },
        }

    def tokenizer_config(self, config: dict[str, Any]) -> dict[str, Any]:
        tokens = {
            "bos_token": self.token("bos"),
            "eos_token": self.token("eos"),
            "unk_token": self.token("unknown"),
            "pad_token": self.token("padding"),
        }
        out: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{name: text for name, text in tokens.items() if text is not None},
            "add_bos_token": self.adds_bos,
            "add_eos_token": self.flag("add_eos_token", False),
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
        }
        if (template := self.chat_template()) is not None:
            out["chat_template"] = template
        return out

    def chat_template(self) -> str | list[dict[str, str]] | None:
        """The template; a list of named ones, as Hugging Face writes it, when there are several."""
        prefix = "tokenizer.chat_template"
        default = self.metadata.get(prefix)
        named = {
            key.removeprefix(prefix + "."): text
            for key, text in self.metadata.items()
            if key.startswith(prefix + ".") and isinstance(text, str)
        }
        if not isinstance(default, str):
            default = None
        if not named:
            return default
        if default is not None:
            named = {"default": default, **named}
        return [{"name": name, "template": text} for name, text in named.items()]
