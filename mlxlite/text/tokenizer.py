"""Text to token ids, and the exact bytes behind each id (floor 1, column "text").

A request passes here once on its way in: `encode` turns its prompt into ids, in the prepare pool.
On its way out the detokenizer asks `bytes_of` for each new id. The only file that imports
`tokenizers`; transformers is loaded only for a model without `tokenizer.json` (decision D2).

Invariant: for the byte kinds the text of a sequence is the concatenation of `bytes_of` over its
ids, read as UTF-8. No id raises: weights often have more rows than the vocabulary has tokens
(padding), and a model may sample such a row; it stands for no bytes.

Threads: everything is safe from any thread. `encode` frees the GIL while it works. The per-token
tables fill themselves on first use; two threads that race write the same value.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from mlxlite.errors import ModelError
from mlxlite.text.folder import read_object, special_tokens

log = logging.getLogger(__name__)

SPACE_MARK = "\u2581"  # SentencePiece writes a space as this block


class Kind(Enum):
    """How a vocabulary spells bytes; read off the decoder in `tokenizer.json`."""

    BYTE_LEVEL = "byte-level"  # GPT-2 alphabet: one printable character a byte
    SENTENCEPIECE = "sentencepiece"  # a block for the space, <0xNN> for single bytes
    OTHER = "other"  # WordPiece and the like: text depends on the neighbours


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet, character -> byte.

    Bytes that print in Latin-1 stand for themselves; the other 68 follow from U+0100 in order, so
    that a vocabulary never holds a blank or a control character.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(256) if byte not in printable)
    alphabet.update((chr(0x100 + n), byte) for n, byte in enumerate(hidden))
    return alphabet


BYTE_OF_CHAR = _byte_alphabet()
# For `str.translate`; what is not in the alphabet becomes a character that Latin-1 lacks.
_SPELLED = {n: "\ufffd" for n in range(256)} | {ord(c): n for c, n in BYTE_OF_CHAR.items()}


class Tokenizer:
    """The tokenizer of one model. Made by `load`; immutable but for its lazy tables.

    eos_ids: every id that ends an answer. bos_id: the id that opens a text, or None.
    bos_token, eos_token: their texts, for the chat template. special_ids: control tokens, left out
    of an answer's text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int] = (),
        bos_token: str | None = None,
        eos_token: str | None = None,
    ) -> None:
        # A length limit or padding saved from training would cut or stretch prompts (F77).
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()  # id -> AddedToken
        self._bytes: dict[int, bytes] = {}
        self.kind, self._has_byte_pieces = _kind_of(backend)
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.bos_id = None if bos_token is None else self.token_id(bos_token)
        eos_id = None if eos_token is None else self.token_id(eos_token)
        self.eos_ids = frozenset(eos_ids) | (frozenset() if eos_id is None else {eos_id})

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """The tokenizer in a model folder. Raises ModelError, naming the file at fault."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        backend = _from_file(path) if path.is_file() else _from_transformers(folder)
        texts = special_tokens(folder)
        _add_missing(backend, folder, texts)
        return cls(
            backend,
            eos_ids=_configured_eos(folder),
            bos_token=texts.get("bos_token"),
            eos_token=texts.get("eos_token"),
        )

    # ------------------------------------------------------------------------------- text -> ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text; BOS and EOS as the model's own post-processor adds them."""
        try:
            # The batch call frees the GIL, `encode` holds it: 59 ms for 60 kB (STYLE 4.9).
            encodings = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except (UnicodeError, TypeError):
            # JSON can carry half a surrogate pair ("\ud83d"), which no UTF-8 text can.
            whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            encodings = self._backend.encode_batch_fast(
                [whole], add_special_tokens=add_special_tokens
            )
        ids: list[int] = encodings[0].ids
        return ids

    def token_id(self, text: str) -> int | None:
        """The id of the token that is spelled exactly so in the vocabulary, or None."""
        found: int | None = self._backend.token_to_id(text)
        return found

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus one, added tokens included (ids may have holes)."""
        size: int = self._backend.get_vocab_size(with_added_tokens=True)
        if all(self._backend.id_to_token(token_id) is not None for token_id in range(size)):
            return size
        # The whole table at once holds the GIL: 45 ms with 50,000 ids.
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    # ------------------------------------------------------------------------------- ids -> text

    def is_special(self, token_id: int) -> bool:
        """True for control tokens such as `<|im_end|>`."""
        return token_id in self.special_ids

    def bytes_of(self, token_id: int) -> bytes:
        """The exact bytes a token stands for; b"" for an id outside the vocabulary.

        For the kind OTHER this is the token decoded alone, which is only nearly what it adds to a
        text.
        """
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def all_bytes(self) -> list[bytes]:
        """`bytes_of` of the whole vocabulary, which is not kept: 1 us of work an id, of which none
        holds the GIL for long."""
        return [self._spell(token_id) for token_id in range(self.vocab_size)]

    def token_text(self, token_id: int) -> str:
        """A token as text for people; U+FFFD where it holds only a part of a character."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        """The text of a whole sequence. Nothing is trimmed, not even a leading space (D11)."""
        if self.kind is Kind.OTHER:
            text: str = self._backend.decode(ids, skip_special_tokens=not keep_special)
            return text
        skipped = frozenset() if keep_special else self.special_ids
        return b"".join(self.bytes_of(i) for i in ids if i not in skipped).decode(
            "utf-8", "replace"
        )

    def _spell(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        piece: str | None
        if added is not None:
            piece = added.content
            # Added tokens are literal text, with one exception: Gemma lists its runs of spaces
            # among them, spelled with the block.
            if self.kind is Kind.SENTENCEPIECE and not added.special:
                piece = piece.replace(SPACE_MARK, " ")
            return piece.encode("utf-8", "replace")
        try:
            piece = self._backend.id_to_token(token_id)
        except OverflowError:  # negative, or past 32 bits
            return b""
        if piece is None:
            return b""
        if self.kind is Kind.BYTE_LEVEL:
            try:
                return piece.translate(_SPELLED).encode("latin-1")
            except UnicodeEncodeError:  # not in the alphabet: literal, as the decoder takes it
                return piece.encode("utf-8", "replace")
        if self.kind is Kind.SENTENCEPIECE:
            byte = _byte_piece(piece) if self._has_byte_pieces else None
            if byte is not None:
                return byte
            return piece.replace(SPACE_MARK, " ").encode("utf-8", "replace")
        text: str = self._backend.decode([token_id], skip_special_tokens=False)
        return text.encode("utf-8", "replace")


def _byte_piece(piece: str) -> bytes | None:
    """The byte of a piece like `<0x0A>`, or None for any other piece."""
    if len(piece) != 6 or not piece.startswith("<0x") or piece[5] != ">":
        return None
    try:
        return bytes.fromhex(piece[3:5])
    except ValueError:
        return None


def _kind_of(backend: tokenizers.Tokenizer) -> tuple[Kind, bool]:
    """The kind, and whether `<0xNN>` pieces are bytes. OTHER unless the decoder proves better."""
    # Without a decoder the pieces would be shown as they are spelled; a byte-level pre-tokenizer
    # is proof enough of their alphabet (F26: marker letters where spaces should be).
    steps = _steps(backend.decoder)
    if not steps:
        is_byte_level = any(step["type"] == "ByteLevel" for step in _steps(backend.pre_tokenizer))
        return (Kind.BYTE_LEVEL if is_byte_level else Kind.OTHER), False
    names = [step["type"] for step in steps]
    if "ByteLevel" in names:
        ok = all(name in ("ByteLevel", "Fuse") for name in names)
        return (Kind.BYTE_LEVEL if ok else Kind.OTHER), False
    marks_space = False
    for n, step in enumerate(steps):
        name = step["type"]
        if name == "Replace":
            if step.get("pattern") != {"String": SPACE_MARK} or step.get("content") != " ":
                return Kind.OTHER, False
            marks_space = True
        elif name == "Metaspace":
            if step.get("replacement") != SPACE_MARK:
                return Kind.OTHER, False
            marks_space = True
        elif name == "Strip":
            # After Fuse it trims the text as a whole, which D11 forbids for answers; before Fuse
            # it would change single tokens.
            if "Fuse" not in names[:n]:
                return Kind.OTHER, False
        elif name not in ("ByteFallback", "Fuse"):
            return Kind.OTHER, False
    return (Kind.SENTENCEPIECE, "ByteFallback" in names) if marks_space else (Kind.OTHER, False)


def _steps(part: Any) -> list[dict[str, Any]]:
    """A decoder or pre-tokenizer as the flat list of its steps, each in its JSON form."""
    if part is None:
        return []
    steps: list[dict[str, Any]] = []
    waiting = [json.loads(part.__getstate__())]  # its pickled state is its JSON
    while waiting:
        step = waiting.pop(0)
        if step.get("type") == "Sequence":
            waiting[:0] = step.get("decoders") or step.get("pretokenizers") or []
        else:
            steps.append(step)
    return steps


# ------------------------------------------------------------------------------------- loading


def _from_file(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as exc:  # a panic in the library derives from BaseException
        reason = " ".join(str(exc).split())[:300]
        raise ModelError(f"{path}: not a usable tokenizer ({reason})") from None


def _from_transformers(folder: Path) -> tokenizers.Tokenizer:
    """Converts an older tokenizer (`tokenizer.model` and the like). Slow: seconds, once."""
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder")
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it remarks on what we do not need
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ModelError(f"{folder}: no tokenizer.json (install transformers to convert)") from None
    try:
        # Never code from a model folder: it would run with the server's rights.
        slow = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as exc:  # anything at all, from anywhere inside transformers
        reason = " ".join(str(exc).split())[:300]
        raise ModelError(f"{folder}: no tokenizer.json, and no other works ({reason})") from None
    backend = getattr(slow, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelError(f"{folder}: no tokenizer.json, and {type(slow).__name__} gives none")
    return backend


def _add_missing(backend: tokenizers.Tokenizer, folder: Path, texts: dict[str, str]) -> None:
    """Adds tokens that only `tokenizer_config.json` declares, as transformers does.

    Without it a template's `<|im_end|>` would be encoded letter by letter.
    """
    config = read_object(folder / "tokenizer_config.json") or {}
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    table = config.get("added_tokens_decoder")
    entries: list[tuple[int, dict[str, Any]]] = []
    for key, entry in (table if isinstance(table, dict) else {}).items():
        if key.isdecimal() and isinstance(entry, dict) and isinstance(entry.get("content"), str):
            entries.append((int(key), entry))
    for token_id, entry in sorted(entries, key=lambda pair: pair[0]):
        if entry["content"] in known or not entry["content"]:
            continue
        at = backend.token_to_id(entry["content"])
        if at is None and token_id != backend.get_vocab_size(with_added_tokens=True):
            log.warning("%s: token %d cannot be added at its place", folder.name, token_id)
            continue
        flags = {
            name: bool(entry.get(name, False))
            for name in ("lstrip", "rstrip", "single_word", "normalized", "special")
        }
        backend.add_tokens([tokenizers.AddedToken(entry["content"], **flags)])
        known.add(entry["content"])
    for text in texts.values():
        if text and text not in known and backend.token_to_id(text) is not None:
            backend.add_special_tokens([tokenizers.AddedToken(text, special=True)])


def _configured_eos(folder: Path) -> set[int]:
    """EOS ids of `config.json` and `generation_config.json` (spec 10 section 7).

    Both, because some models name the end of a turn only in one of them. A broken
    `generation_config.json` counts as absent (spec 10 section 2): it holds only defaults.
    """
    path = folder / "config.json"
    config = read_object(path) or {}
    value = config.get("eos_token_id")
    if value is None and isinstance(config.get("text_config"), dict):  # models of several modes
        value = config["text_config"].get("eos_token_id")
    ids = _id_set(value)
    if ids is None:
        raise ModelError(f"{path}: eos_token_id is {value!r}, expected an id or a list of ids")
    try:
        generation = read_object(folder / "generation_config.json") or {}
    except ModelError as exc:
        log.warning("ignored: %s", exc)
        generation = {}
    return ids | (_id_set(generation.get("eos_token_id")) or set())


def _id_set(value: Any) -> set[int] | None:
    """{} for null, the ids for an int or a list of ints, None for anything else."""
    if value is None:
        return set()
    values = value if isinstance(value, list) else [value]
    if not all(type(item) is int and item >= 0 for item in values):
        return None
    return set(values)


def largest_id(ids: Sequence[int]) -> int:
    """The largest of token ids, 0 of none. `max` of all would hold the GIL: 5 ms with 250,000."""
    slices = (ids[at : at + 4096] for at in range(0, len(ids), 4096))
    return max(map(max, slices), default=0)
