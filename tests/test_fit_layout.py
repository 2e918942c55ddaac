"""The plan of a model's caches equals what mlx-lm's caches really hold, for every model type."""

from __future__ import annotations

import copy
import dataclasses
import importlib
from typing import Any

import pytest

from mlxlite.engine import load  # first: it picks the BLAS
from mlxlite.errors import ModelError
from mlxlite.kvplan import Const, Full, KVPlan, Window
from mlxlite.models.kv_config import DEFAULTS, NAMES, SAME_AS
from mlxlite.models.kv_layout import kv_plan, resolve
from tests.kv_configs import UNRUNNABLE, WINDOW, config_of, model_files

import mlx.core as mx  # isort: skip

pytestmark = pytest.mark.slow

TYPES = [kind for kind in model_files() if kind not in UNRUNNABLE]
# Their own cache is counted as if it compressed nothing.
AT_MOST = {"deepseek_v41"}


ALWAYS = {"model_type", *(name for key in ("layers", "hidden", "heads") for name in NAMES[key])}


@pytest.fixture(autouse=True)
def uncompiled() -> None:
    mx.disable_compile()  # as the engine does on a CPU


def build(kind: str, dtype: mx.Dtype = mx.float32) -> tuple[Any, dict[str, Any]]:
    config = config_of(kind)
    file = importlib.import_module(f"mlx_lm.models.{kind}")
    mx.random.seed(1)
    model = file.Model(file.ModelArgs.from_dict(copy.deepcopy(config)))
    model.set_dtype(dtype)
    return model, config


def caches_after(model: Any, tokens: int) -> list[Any]:
    """The caches of a row whose last token was decoded and whose others came in one prefill."""
    cache = importlib.import_module("mlx_lm.models.cache").make_prompt_cache(model)
    ids = [token % 60 for token in range(tokens)]
    for piece in (ids[:-1], ids[-1:]):
        model(mx.array([piece]), cache=cache)
    return list(cache)


def parts_of(caches: list[Any]) -> list[Any]:
    found = []
    for cache in caches:
        found += parts_of(cache.caches) if hasattr(cache, "caches") else [cache]
    return found


def held_bytes(cache: Any) -> int:
    """Bytes of the tokens that a cache holds, without the rest of its newest slab."""
    if type(cache).__name__ not in ("KVCache", "RotatingKVCache"):
        return int(cache.nbytes)
    columns = cache.keys.shape[2]
    return int(cache.nbytes // columns * min(cache.offset, getattr(cache, "max_size", columns)))


@pytest.mark.parametrize("kind", TYPES)
def test_the_plan_is_what_the_caches_hold(kind: str) -> None:
    model, config = build(kind)
    plan = kv_plan(config, 4)
    for tokens in (WINDOW - 3, WINDOW, 2 * WINDOW + 4):
        caches = caches_after(model, tokens)
        parts = parts_of(caches)
        held, allocated = sum(map(held_bytes, parts)), sum(part.nbytes for part in parts)
        if kind in AT_MOST:
            assert held <= plan.row_bytes(tokens)
            continue
        assert plan.row_bytes_allocated(tokens) == allocated
        assert plan.row_bytes_peak(tokens, tokens) >= allocated
        assert len(plan.layers) == len(caches)
        if kind != "llama4":  # its chunks are counted with the slab that follows them
            assert plan.row_bytes(tokens) == held


def test_chunked_attention_keeps_a_chunk_and_a_slab() -> None:
    model, config = build("llama4")  # chunks of 256 tokens
    cache = caches_after(model, 300)
    for _ in range(2):
        model(mx.array([[1]]), cache=cache)
    assert kv_plan(config, 4).row_bytes_allocated(302) == sum(part.nbytes for part in cache)


# In 16 bits too; states are float32 in some of them.
@pytest.mark.parametrize(
    "kind", ["llama", "gemma3_text", "deepseek_v3", "mamba2", "qwen3_next", "rwkv7", "lfm2"]
)
def test_sixteen_bits(kind: str) -> None:
    model, config = build(kind, mx.bfloat16)
    held = sum(map(held_bytes, parts_of(caches_after(model, 20))))
    assert kv_plan(config, 2).row_bytes(20) == held


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "falcon_h1", "deepseek_v32"])
def test_slabs_are_counted_as_they_are_allocated(kind: str) -> None:
    model, config = build(kind)
    plan = kv_plan(config, 4)
    for tokens in (256, 257, 513):
        caches = caches_after(model, tokens)
        allocated = sum(part.nbytes for part in parts_of(caches))
        assert plan.row_bytes_allocated(tokens) == allocated


@pytest.mark.parametrize("chunks", [(100, 200, 1), (5, 1, 255, 1), (300, 300, 1, 1)], ids=str)
@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "recurrent_gemma"])
def test_odd_chunks_never_exceed_the_peak(kind: str, chunks: tuple[int, ...]) -> None:
    model, config = build(kind)
    plan = kv_plan(config, 4)
    cache = importlib.import_module("mlx_lm.models.cache").make_prompt_cache(model)
    done = 0
    for chunk in chunks:
        model(mx.zeros((1, chunk), dtype=mx.uint32), cache=cache)
        done += chunk
        allocated = sum(part.nbytes for part in parts_of(cache))
        assert plan.row_bytes(done) <= allocated <= plan.row_bytes_peak(done, max(chunks))


# ------------------------------------------------------------------------- tables and damage


def arguments_of(kind: str) -> list[Any]:
    file = importlib.import_module(f"mlx_lm.models.{kind}")
    names = ("ModelArgs", "TextArgs", "TextConfig", "TextModelArgs")
    return [getattr(file, name) for name in names if hasattr(file, name)]


@pytest.mark.parametrize("kind", sorted(set(DEFAULTS) - {"gemma3", "gemma4", "kimi_k3"}))
def test_defaults_are_mlx_lms(kind: str) -> None:
    found: dict[str, Any] = {}
    for arguments in arguments_of(kind):
        found |= {field.name: field.default for field in dataclasses.fields(arguments)}
    for key, value in DEFAULTS[kind].items():
        if key in found and found[key] is not None:
            assert found[key] == value, key
        else:  # the file's own, or a property
            assert key == "window_size" or key in found, key


@pytest.mark.parametrize("kind", TYPES)
def test_no_default_is_missing(kind: str) -> None:
    """A config that leaves out what mlx-lm has a default for is counted alike; only the numbers of
    layers and heads and the width are in every config."""
    config = config_of(kind)
    if "text_config" in config:
        pytest.skip("published configs of this type are complete inside")
    arguments = arguments_of(kind)[0]
    if not dataclasses.is_dataclass(arguments):
        pytest.skip("reads what it likes")
    optional = {
        field.name: field.default
        for field in dataclasses.fields(arguments)
        if field.default not in (dataclasses.MISSING, None) and field.name not in ALWAYS
    }
    sparse = {key: value for key, value in config.items() if key not in optional}
    assert kv_plan(sparse, 4) == kv_plan({**sparse, **optional}, 4)


def test_aliases_follow_the_loader() -> None:
    for kind, file in load.MODEL_FILES.items():
        text = {"text_config": {"model_type": "llama"}}
        assert resolve({"model_type": kind, **text}) == resolve({"model_type": file, **text}), kind
    assert set(SAME_AS) <= set(model_files()) | set(load.MODEL_FILES)
    (v3,) = load.MODEL_FILES_BY_ARCHITECTURE.items()
    assert resolve({"model_type": v3[0][0], "architectures": [v3[0][1]]}) == v3[1]


def test_an_unknown_type_is_full_attention() -> None:
    config = {"model_type": "novel", "num_hidden_layers": 3, "hidden_size": 64}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 16}
    assert kv_plan(config, 2).layers == ((Full(2 * 2 * 16 * 2),),) * 3


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({}, "'num_hidden_layers'"),
        ({"num_hidden_layers": -1}, "'num_hidden_layers' must be a whole number"),
        ({"num_hidden_layers": 2.5}, "'num_hidden_layers' must be a whole number"),
        ({"num_hidden_layers": True}, "'num_hidden_layers' must be a whole number"),
        ({"num_hidden_layers": 10**30}, "'num_hidden_layers' must be a whole number"),
        ({"num_hidden_layers": 20_000}, "20000 layers"),
        ({"num_hidden_layers": 2}, "'num_attention_heads'"),
        ({"num_hidden_layers": 2, "num_attention_heads": 0}, "'hidden_size'"),
        (
            {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8}
            | {"layer_types": ["sliding_attention"]},
            "'layer_types' must have an entry for each layer",
        ),
        (
            {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8}
            | {"layer_types": ["sliding_attention"]},
            "'sliding_window'",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_configs_are_named(broken: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        kv_plan({"model_type": "llama", **broken}, 4)


def test_a_plan_sums_its_parts() -> None:
    plan = KVPlan(((Full(10),), (Window(8, 3), Const(100)), (Window(4, 1),), (Window(8, 2),)))
    assert (plan.per_token_bytes, plan.constant_bytes) == (10, 100)
    assert plan.windows == ((4, 1), (8, 5))
    assert [plan.row_bytes(n) for n in (0, 4, 6, 9)] == [100, 164, 194, 234]
    assert plan.row_bytes_allocated(1, step=2) == plan.row_bytes(2)
    assert NAMES["layers"][0] == "num_hidden_layers"
