"""Which vectors a model can give, and what it is fed for them (floor 2).

A folder tells what its model is for:

    embeddings   it has the layout of sentence-transformers (`modules.json`, `1_Pooling`), or its
                 architecture has no head for tokens, or its name holds "embed"
    reranking    a module's config names a `true_token_id` and a `false_token_id`, or its template
                 holds the judge's prompt of Qwen3-Reranker, or its name holds "rerank"; in the
                 latter cases "yes" and "no" must be single tokens

Any other model gives embeddings if `--embedding-pooling` says how. A reranker reads query and
document together and is asked for yes or no: the score is the probability of yes. A model that
gives embeddings scores by their cosine. Runs in the prepare pool; no array is touched.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxlite.config import Settings
from mlxlite.errors import BadRequest, ModelError, TooLong
from mlxlite.text.folder import read_object, read_text
from mlxlite.text.template import ChatTemplate
from mlxlite.text.tokenizer import Tokenizer
from mlxlite.types import JSON, EmbedSpec, ModelFacts

Input = str | tuple[int, ...]
Pair = tuple[str, str]  # query, document

_END_OF_DOCUMENT = "<|endoftext|>"  # Qwen3: 151643 (spec 70 section 7)
_WIDTH_KEYS = ("hidden_size", "n_embd", "d_model", "model_dim", "dim")

# The prompt that Qwen3-Reranker was trained on, to the letter.
_JUDGE = "Judge whether the Document meets the requirements"
_JUDGE_OPENING = (
    "<|im_start|>system\n" + _JUDGE + " based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_JUDGE_CLOSING = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_JUDGE_TASK = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True, slots=True)
class Traits:
    """What a folder says of its model. pooling: None if it is no embedding model.

    refusal: why its embeddings cannot be had. judge_ids: the tokens for yes and no of a reranker.
    most_tokens: of an input, if it is less than the context. width: numbers of a vector.
    """

    pooling: str | None = None
    refusal: str | None = None
    judge_ids: tuple[int, int] | None = None
    most_tokens: int | None = None
    width: int | None = None


def read_traits(folder: Path, name: str, tokenizer: Tokenizer, template: ChatTemplate) -> Traits:
    """name: of the model, as its user knows it. Raises ModelError for a damaged file."""
    config = read_object(folder / "config.json") or {}
    modules = _read_modules(folder / "modules.json")
    names = f"{name} {folder.name}".lower()
    judge_ids = _judge_ids(folder, modules, names, tokenizer, template)
    pooling, refusal = None, None
    if judge_ids is None and (modules or _lacks_head(config) or "embed" in names):
        pooling, refusal = _pooling(folder, modules)
        scopes = [config, config.get("text_config") or {}]
        if any(s.get("use_bidirectional_attention") or s.get("is_causal") is False for s in scopes):
            refusal = "it attends in both directions, which mlx-lm's model of it does not"
    limit = (read_object(folder / "sentence_bert_config.json") or {}).get("max_seq_length")
    return Traits(
        pooling=pooling,
        refusal=refusal,
        judge_ids=judge_ids,
        most_tokens=limit if isinstance(limit, int) and limit > 0 else None,
        width=_width(config),
    )


def _read_modules(path: Path) -> list[Mapping[str, JSON]]:
    try:
        value = json.loads(read_text(path) or "[]")
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, list) or not all(isinstance(module, dict) for module in value):
        raise ModelError(f"{path}: must hold a list of objects")
    return value


def _pooling(folder: Path, modules: Sequence[Mapping[str, JSON]]) -> tuple[str, str | None]:
    """How the folder pools, and what of it is not supported."""
    path = "1_Pooling"
    for module in modules:
        kind = str(module.get("type")).rpartition(".")[2]
        if kind == "Pooling":
            path = str(module.get("path"))
        elif kind not in ("Transformer", "Normalize"):
            return "last", f"its module {kind} is not supported"
    said = read_object(folder / path / "config.json") or {}
    on = [key for key, value in said.items() if key.startswith("pooling_mode_") and value is True]
    modes = {
        "pooling_mode_lasttoken": "last",
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_cls_token": "cls",
    }
    if mode := said.get("pooling_mode"):  # as sentence-transformers 6 writes it
        on = [str(name) for name in (mode if isinstance(mode, list) else [mode])]
        modes = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
    if not on:
        return "last", None
    if len(on) > 1 or on[0] not in modes:
        return "last", f"its pooling ({', '.join(on)}) is not supported"
    return modes[on[0]], None


def _judge_ids(
    folder: Path,
    modules: Sequence[Mapping[str, JSON]],
    names: str,
    tokenizer: Tokenizer,
    template: ChatTemplate,
) -> tuple[int, int] | None:
    for module in modules:
        said = read_object(folder / str(module.get("path")) / "config.json") or {}
        ids = said.get("true_token_id"), said.get("false_token_id")
        if isinstance(ids[0], int) and isinstance(ids[1], int):
            return ids[0], ids[1]
    if "rerank" not in names and _JUDGE not in template.all_source:
        return None
    yes, no = tokenizer.token_id("yes"), tokenizer.token_id("no")
    return None if yes is None or no is None else (yes, no)


def _lacks_head(config: Mapping[str, JSON]) -> bool:
    """True for an architecture like Qwen3Model; one with a head names it, as Qwen3ForCausalLM."""
    given = config.get("architectures")
    if not given or not isinstance(given, list):
        return False
    names = [str(name) for name in given]
    return all(n.endswith("Model") and "For" not in n and "LMHead" not in n for n in names)


def _width(config: Mapping[str, JSON]) -> int | None:
    for scope in (config, config.get("text_config") or {}):
        for key in _WIDTH_KEYS:
            if isinstance(value := scope.get(key), int) and value > 0:
                return value
    return None


class Embedding:
    """name: of the model, for error texts. pooling: None if the model gives no embeddings."""

    def __init__(
        self, settings: Settings, tokenizer: Tokenizer, facts: ModelFacts, traits: Traits, name: str
    ) -> None:
        self._tokenizer = tokenizer
        self._facts = facts
        self._traits = traits
        self._name = name
        flag = settings.embedding_pooling
        self.pooling = traits.pooling if flag == "none" else flag
        self._end_id: int | None = None
        if self.pooling == "last" and traits.pooling is not None:
            self._end_id = self._find_end_id()
        self._most = min(facts.max_context, traits.most_tokens or facts.max_context)

    @property
    def can_embed(self) -> bool:
        return self.pooling is not None and self._traits.refusal is None

    @property
    def can_score(self) -> bool:
        return self.can_embed or self._traits.judge_ids is not None

    def check_embeds(self, dimensions: int | None = None) -> None:
        """Raises BadRequest if the model gives no embeddings, or none with so many numbers."""
        if self._traits.refusal is not None:
            text = f"{self._name} gives no embeddings here: {self._traits.refusal}"
            raise BadRequest(text, param="model")
        if self.pooling is None:
            raise BadRequest(
                f"{self._name} is no embedding model; start the server with --embedding-pooling "
                "last or mean to get embeddings from it all the same",
                param="model",
            )
        self.check_width(self._traits.width, dimensions)

    def check_scores(self) -> None:
        """Raises BadRequest if the model can neither judge nor embed."""
        if not self.can_score:
            raise BadRequest(
                f"{self._name} is neither a reranker nor an embedding model; start the server with "
                "--embedding-pooling last or mean to score by the cosine of its embeddings",
                param="model",
            )

    @staticmethod
    def check_width(width: int | None, dimensions: int | None) -> None:
        if width is not None and dimensions is not None and dimensions > width:
            raise BadRequest(
                f"dimensions must be at most {width}, the length of this model's vectors; "
                f"it is {dimensions}",
                param="dimensions",
            )

    # -------------------------------------------------------------------------------- inputs

    def embed_spec(
        self, inputs: Sequence[tuple[str, Input]], instruction: str | None = None
    ) -> EmbedSpec:
        """inputs: each with the name of its field, for errors. Raises BadRequest or TooLong."""
        assert self.pooling is not None
        ids = tuple(self._ids(at, given, instruction) for at, given in inputs)
        return EmbedSpec(ids, self.pooling)

    def judge_spec(
        self, pairs: Sequence[tuple[str, Pair]], instruction: str | None = None
    ) -> EmbedSpec:
        """The prompts of a reranker; its vectors are the logits of yes and no."""
        assert self._traits.judge_ids is not None
        inputs = []
        for at, (query, document) in pairs:
            asked = f"<Instruct>: {instruction or _JUDGE_TASK}\n<Query>: {query}\n"
            text = f"{_JUDGE_OPENING}{asked}<Document>: {document}{_JUDGE_CLOSING}"
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            inputs.append(self._checked(at, tuple(ids)))
        return EmbedSpec(tuple(inputs), logit_ids=self._traits.judge_ids)

    @property
    def judges(self) -> bool:
        return self._traits.judge_ids is not None

    def _ids(self, at: str, given: Input, instruction: str | None) -> tuple[int, ...]:
        prefix = "" if not instruction else f"Instruct: {instruction}\nQuery:"
        if isinstance(given, str):
            ids = self._tokenizer.encode(prefix + given)
        else:
            ids = [*self._tokenizer.encode(prefix, add_special_tokens=False), *given]
        if self._end_id is not None and ids[-1:] != [self._end_id]:
            ids.append(self._end_id)
        if not ids:
            raise BadRequest(f"{at} has no tokens", param=at)
        return self._checked(at, tuple(ids))

    def _checked(self, at: str, ids: tuple[int, ...]) -> tuple[int, ...]:
        if len(ids) > self._most:
            raise TooLong(
                f"{at} has {len(ids)} tokens, the context holds {self._most}; shorten it", param=at
            )
        if (largest := max(ids)) >= self._facts.vocab_size:
            # MLX does not check bounds: such an id would read past the embedding.
            last = self._facts.vocab_size - 1
            raise BadRequest(f"{at} has token {largest}; the vocabulary ends at {last}", param=at)
        return ids

    def _find_end_id(self) -> int | None:
        """The token whose hidden state is pooled: it closes each input."""
        found = self._tokenizer.token_id(_END_OF_DOCUMENT)
        if found is None and self._tokenizer.eos_token is not None:
            found = self._tokenizer.token_id(self._tokenizer.eos_token)
        return found


# -------------------------------------------------------------------------------- vectors


def numbers(vector: bytes) -> array[float]:
    """The float32 numbers of a vector, as the engine gives it."""
    found = array("f")
    found.frombytes(vector)
    return found


def cut(vector: bytes, dimensions: int | None) -> bytes:
    """The first numbers of a vector, of length 1 again (Matryoshka)."""
    if dimensions is None or dimensions * 4 >= len(vector):
        return vector
    found = numbers(vector[: dimensions * 4])
    length = math.sqrt(math.fsum(x * x for x in found)) or 1.0
    return array("f", [x / length for x in found]).tobytes()


def cosine(one: bytes, other: bytes) -> float:
    """Of two vectors of length 1, or nearly so."""
    product = math.fsum(map(float.__mul__, numbers(one), numbers(other)))
    return min(max(product, -1.0), 1.0)


def probability(verdict: bytes) -> float:
    """Of yes, from the logits of yes and no."""
    yes, no = numbers(verdict)
    return 1 / (1 + math.exp(min(no - yes, 700.0)))
