"""What a folder says of its vectors, what the model is fed, what becomes of the numbers."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxlite import config
from mlxlite.embedding import Embedding, Traits, cosine, cut, probability, read_traits
from mlxlite.errors import BadRequest, ModelError, TooLong
from mlxlite.text.template import ChatTemplate
from mlxlite.text.tokenizer import Tokenizer
from mlxlite.types import ModelFacts
from tests import tiny

FACTS = ModelFacts("qwen3", "cpu", "float32", 1, 1024, 514)
END = 0  # <|endoftext|>


def traits_of(folder: Path, name: str = "m") -> Traits:
    return read_traits(folder, name, Tokenizer.load(folder), ChatTemplate.load(folder, None))


def opened(folder: Path, name: str = "m", **flags: str) -> Embedding:
    settings = config.build(flags, {})
    return Embedding(settings, Tokenizer.load(folder), FACTS, traits_of(folder, name), name)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_embedder(tmp_path_factory.mktemp("models") / "one")


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_reranker(tmp_path_factory.mktemp("models") / "Tiny-Reranker")


# ------------------------------------------------------------------------- what a folder says


def spoil(path: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / path
        file.parent.mkdir(exist_ok=True)
        value = change(json.loads(file.read_text()) if file.exists() else None)
        file.write_text(value if isinstance(value, str) else json.dumps(value))

    return apply


def config_with(**entries: Any) -> Callable[[Path], None]:
    return spoil("config.json", lambda value: {**value, **entries})


def pooling(**entries: Any) -> Callable[[Path], None]:
    return spoil("1_Pooling/config.json", lambda value: entries)


def module(kind: str, path: str = "3_More") -> Callable[[Path], None]:
    return spoil("modules.json", lambda value: [*value, {"type": f"a.b.{kind}", "path": path}])


@pytest.mark.parametrize(
    ("change", "right"),
    [
        pytest.param(lambda folder: None, Traits("last", width=64), id="as saved"),
        pytest.param(pooling(pooling_mode_mean_tokens=True), Traits("mean", width=64), id="mean"),
        pytest.param(pooling(pooling_mode_cls_token=True), Traits("cls", width=64), id="cls"),
        pytest.param(pooling(pooling_mode="mean"), Traits("mean", width=64), id="by one word"),
        pytest.param(pooling(), Traits("last", width=64), id="says nothing"),
        pytest.param(
            spoil("sentence_bert_config.json", lambda _: {"max_seq_length": 7}),
            Traits("last", most_tokens=7, width=64),
            id="shorter than the context",
        ),
        pytest.param(
            spoil("modules.json", lambda _: []), Traits("last", width=64), id="architecture"
        ),
        pytest.param(
            config_with(hidden_size=None, text_config={"hidden_size": 48}),
            Traits("last", width=48),
            id="wrapped",
        ),
    ],
)
def test_embedding_models(tmp_path: Path, change: Callable[[Path], None], right: Traits) -> None:
    folder = tiny.make_embedder(tmp_path / "m")
    change(folder)
    assert traits_of(folder) == right


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(pooling(pooling_mode_max_tokens=True), "pooling_mode_max_tokens", id="max"),
        pytest.param(
            pooling(pooling_mode_mean_tokens=True, pooling_mode_cls_token=True), "cls", id="two"
        ),
        pytest.param(pooling(pooling_mode="max"), "max", id="max by its word"),
        pytest.param(pooling(pooling_mode=["cls", "mean"]), "cls, mean", id="two words"),
        pytest.param(module("Dense"), "Dense", id="a module"),
        pytest.param(config_with(use_bidirectional_attention=True), "both", id="bidirectional"),
        pytest.param(config_with(is_causal=False), "both directions", id="not causal"),
    ],
)
def test_what_is_not_supported_is_said(
    tmp_path: Path, change: Callable[[Path], None], words: str
) -> None:
    folder = tiny.make_embedder(tmp_path / "m")
    change(folder)
    made = opened(folder, "some/model")
    assert not made.can_embed and not made.can_score
    with pytest.raises(BadRequest, match=f"some/model.*{words}"):
        made.check_embeds()


@pytest.mark.parametrize("text", ["[", "{}", "[1]"])
def test_a_damaged_file_stops_the_start(tmp_path: Path, text: str) -> None:
    folder = tiny.make_embedder(tmp_path / "m")
    spoil("modules.json", lambda _: text)(folder)
    with pytest.raises(ModelError, match=r"modules\.json"):
        traits_of(folder)


@pytest.mark.parametrize(
    ("name", "pooling", "can_embed"),
    [
        pytest.param("org/Qwen3-Embedding-0.6B-4bit", "last", True, id="by its name"),
        pytest.param("smollm2", None, False, id="a chat model"),
    ],
)
def test_a_model_without_a_layout(
    tiny_folder: Path, name: str, pooling: str | None, can_embed: bool
) -> None:
    assert traits_of(tiny_folder, name) == Traits(pooling, width=64)
    assert opened(tiny_folder, name).can_embed is can_embed


@pytest.mark.parametrize("flag", ["last", "mean"])
def test_the_flag_decides(tiny_folder: Path, embedder: Path, flag: str) -> None:
    for folder in (tiny_folder, embedder):
        made = opened(folder, embedding_pooling=flag)
        assert made.can_embed and made.embed_spec([("input", "hi")]).pooling == flag


def test_rerankers(tmp_path: Path, reranker: Path, tiny_folder: Path) -> None:
    assert traits_of(reranker).judge_ids == (512, 513)
    assert traits_of(tiny_folder, "some-reranker").judge_ids is None, "it has no yes and no"
    folder = tiny.make_reranker(tmp_path / "m")
    assert traits_of(folder).judge_ids is None, "nothing says so"
    module_said = {"true_token_id": 7, "false_token_id": 9}
    spoil("modules.json", lambda _: [{"type": "a.LogitScore", "path": "1_Score"}])(folder)
    spoil("1_Score/config.json", lambda _: module_said)(folder)
    assert traits_of(folder).judge_ids == (7, 9)
    folder = tiny.make_reranker(
        tmp_path / "n", template="Judge whether the Document meets the requirements {{ messages }}"
    )
    assert traits_of(folder).judge_ids == (512, 513)
    assert opened(folder).can_score and not opened(folder).can_embed


# ---------------------------------------------------------------------- what the model is fed


def test_inputs_end_with_the_end_of_document_once(embedder: Path) -> None:
    made, tokenizer = opened(embedder), Tokenizer.load(embedder)
    hello = tuple(tokenizer.encode("hello world"))
    asked = tuple(tokenizer.encode("Instruct: find it\nQuery:hello world"))
    named = [("a", "hello world"), ("b", hello), ("c", "hello world<|endoftext|>")]
    assert made.embed_spec(named).inputs == ((*hello, END),) * 3
    assert made.embed_spec(named[:1], "find it").inputs == ((*asked, END),)
    prefix = tuple(tokenizer.encode("Instruct: find it\nQuery:"))
    assert made.embed_spec(named[1:2], "find it").inputs == ((*prefix, *hello, END),)


def test_other_models_get_the_text_alone(tiny_folder: Path) -> None:
    made = opened(tiny_folder, embedding_pooling="last")
    hello = tuple(Tokenizer.load(tiny_folder).encode("hello world"))
    assert made.embed_spec([("input", "hello world")]).inputs == (hello,)


def test_a_judge_is_asked_as_it_was_trained(reranker: Path) -> None:
    made, tokenizer = opened(reranker), Tokenizer.load(reranker)
    spec = made.judge_spec([("documents[0]", ("the fox", "a lazy dog"))], "find dogs")
    assert spec.logit_ids == (512, 513)
    text = tokenizer.decode(spec.inputs[0], keep_special=True)
    assert text.startswith("<|im_start|>system\nJudge whether the Document meets the requirements")
    assert "<Instruct>: find dogs\n<Query>: the fox\n<Document>: a lazy dog<|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    plain = made.judge_spec([("documents[0]", ("the fox", "a lazy dog"))]).inputs[0]
    assert "retrieve relevant passages" in tokenizer.decode(plain)


def test_an_input_may_fill_the_context_and_no_more(embedder: Path) -> None:
    made = opened(embedder)
    assert len(made.embed_spec([("input", (5,) * 1023)]).inputs[0]) == 1024
    with pytest.raises(TooLong, match=r"input\[3\] has 1025 tokens.* 1024") as caught:
        made.embed_spec([("input[3]", (5,) * 1024)])
    assert caught.value.param == "input[3]"
    with pytest.raises(BadRequest, match="token 514; the vocabulary ends at 513"):
        made.embed_spec([("input", (514,))])


# ---------------------------------------------------------------------------------- vectors


def packed(*values: float) -> bytes:
    return array("f", values).tobytes()


def test_cut_vectors_have_length_one() -> None:
    vector = packed(0.6, 0.0, 0.8)
    assert cut(vector, None) == cut(vector, 3) == vector
    assert list(array("f", cut(vector, 2))) == [1.0, 0.0]
    assert list(array("f", cut(packed(0.0, 1.0), 1))) == [0.0], "nothing left is no fault"


def test_scores() -> None:
    assert cosine(packed(0.6, 0.8), packed(0.8, 0.6)) == pytest.approx(0.96)
    assert cosine(packed(1.0000001, 0.0), packed(1.0, 0.0)) == 1.0
    assert probability(packed(2.0, 2.0)) == 0.5
    assert probability(packed(3.0, 1.0)) == pytest.approx(1 / (1 + math.exp(-2)))
    assert 0 <= probability(packed(-3e38, 3e38)) < 1e-300
    assert probability(packed(3e38, -3e38)) == 1.0
