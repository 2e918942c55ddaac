"""POST /signal and /generate: what the Curve Designer asks (spec 20 section 7)."""

from __future__ import annotations

import math
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxlite.api import curves
from mlxlite.engine import backend, load
from mlxlite.errors import Busy, EngineFault
from mlxlite.fields import KIND_NAMES
from mlxlite.text.tokenizer import Tokenizer
from tests import tiny
from tests.live import LiveApp, Reply

import mlx.core as mx  # isort: skip

DIAGONAL = [(0.001, 0.001), (3, 3), (100, 100)]
SHARP = [(0.01, 0.0001), (1, 0.01), (100, 100)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveApp]:
    folder = tiny.make_model(tmp_path_factory.mktemp("models") / "tiny")
    with LiveApp(folder) as server:
        yield server


def curve(*points: tuple[float, float]) -> dict[str, Any]:
    shown = [{"x_pct": x, "y_pct": y} for x, y in points]
    return {"space": "logprob", "points": shown, "monotonic": True}


def signal(server: LiveApp, body: Any) -> Reply:
    return server.ask("POST", "/signal", body)


def generate(server: LiveApp, **body: Any) -> Any:
    reply = server.ask("POST", "/generate", {"prompt": "hello", "max_tokens": 8, "seed": 7, **body})
    assert reply.status == 200, reply.body
    return reply.json()


def texts(found: Any) -> list[str]:
    return [sample["text"] for sample in found["samples"]]


# ------------------------------------------------------------------------------------ signal


def slow_bins(logits: np.ndarray) -> list[int]:
    """As the spec has it, in float64."""
    logits = logits.astype(np.float64)
    logprobs = logits - logits.max()
    logprobs -= math.log(np.exp(logprobs).sum())
    low = math.log(1e-6)
    shares = np.clip((logprobs - low) / -low, 0, 1)
    places = np.minimum(79, np.floor(80 * shares)).astype(int)
    return np.bincount(places, minlength=80).tolist()


def test_signal_is_the_last_position_of_the_chat_prompt(server: LiveApp) -> None:
    found = signal(server, {"prompt": "hello world"}).json()
    assert set(found) == {"bins", "vocab"}
    assert len(found["bins"]) == 80 and sum(found["bins"]) == found["vocab"] == 512
    folder = server.worker.folder
    ids = Tokenizer.load(folder).encode(
        "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n"
    )
    model = load.load(folder, backend.start(folder), "auto", folder / "dense").model
    right = slow_bins(np.array(model(mx.array([ids])))[0, -1])
    moved = sum(abs(a - b) for a, b in zip(found["bins"], right, strict=True))
    assert moved <= 4, "two tokens at an edge of a bin may lie on its other side"
    assert signal(server, {"prompt": "hello"}).json()["bins"] != found["bins"]


def test_bins_against_the_plain_formula() -> None:
    """Far tails, one certain token, equal tokens, and more tokens than a portion holds."""
    rng = np.random.default_rng(3)
    for size, spread in ((1, 1.0), (7, 50.0), (512, 3.0), (20_000, 4.0)):
        logits = rng.normal(20, spread, size).astype(np.float32)
        assert curves.bins_of(logits.tolist()) == slow_bins(logits)
    assert curves.bins_of([500.0, -500.0]) == [1] + [0] * 78 + [1]
    flat = curves.bins_of([3.0] * 1000)
    assert max(flat) == 1000 and flat.index(1000) == int(80 * (1 - math.log(1000) / math.log(1e6)))


@pytest.mark.parametrize("body", [{}, {"prompt": None}, {"prompt": ""}, {"prompt": "", "more": 1}])
def test_no_prompt_is_an_empty_one(server: LiveApp, body: Any) -> None:
    assert sum(signal(server, body).json()["bins"]) == 512


def test_signal_and_generate_share_the_engine_with_chats(server: LiveApp) -> None:
    """Neither stops what runs (decision D6), and what they say does not depend on it."""
    alone = signal(server, {"prompt": "again"}).json(), texts(generate(server, n=3))
    found: list[Any] = []
    chat = threading.Thread(target=lambda: found.append(server.chat(max_tokens=300, n=4)))
    chat.start()
    server.wait_batch(lambda stats: stats["active_rows"] > 0)
    together = signal(server, {"prompt": "again"}).json(), texts(generate(server, n=3))
    chat.join()
    assert found[0].status == 200 and together == alone


# ---------------------------------------------------------------------------------- generate


def test_the_default_recipe_is_the_chats(server: LiveApp) -> None:
    found = generate(server, n=2)
    assert {key: found[key] for key in ("mode", "n", "seed")} == {
        "mode": "default", "n": 2, "seed": 7,
    }  # fmt: skip
    assert found["recipe"] == {"temperature": 0.7, "topP": 0, "topK": 0}
    for i, text in enumerate(texts(found)):
        body = {"messages": [{"role": "user", "content": "hello"}], "seed": 7 + i, "max_tokens": 8}
        reply = server.ask("POST", "/v1/chat/completions", body)
        assert reply.text.strip() == text


def test_points_on_the_diagonal_draw_as_temperature_1(server: LiveApp) -> None:
    found = generate(server, n=8, curve=curve(*DIAGONAL), max_tokens=20)
    assert found["mode"] == "curve" and "recipe" not in found
    for i, text in enumerate(texts(found)):
        reply = server.chat(
            messages=[{"role": "user", "content": "hello"}],
            temperature=1,
            seed=7 + i,
            max_tokens=20,
        )
        assert reply.text.strip() == text


def test_a_curve_bends_the_draw(server: LiveApp) -> None:
    """A steep curve draws what is likely: samples differ less from the greedy answer's start."""
    steep = generate(server, n=8, curve=curve((0.9, 1e-9), (1, 0.001), (100, 100)), max_tokens=1)
    plain = generate(server, n=8, curve=curve(*DIAGONAL), max_tokens=1)
    assert len(set(texts(steep))) < len(set(texts(plain)))


def test_seeds_repeat(server: LiveApp) -> None:
    first = generate(server, n=3, curve=curve(*SHARP))
    assert generate(server, n=3, curve=curve(*SHARP)) == first
    shifted = generate(server, n=3, curve=curve(*SHARP), seed=8)
    assert texts(shifted)[:2] == texts(first)[1:], "sample i has seed + i"
    assert generate(server, seed=2**32 + 7)["seed"] == 7
    assert generate(server, seed=-1)["seed"] == 2**32 - 1
    fresh = {generate(server, seed=None, n=1)["seed"] for _ in range(3)}
    assert all(0 <= seed < 2**32 for seed in fresh)


@pytest.mark.parametrize(("given", "n"), [
    (None, 3), (2.9, 2), (0, 1), (-5, 1), (8, 8), (1e300, 8), (10**30, 8),
])  # fmt: skip
def test_n_is_brought_into_its_range(server: LiveApp, given: Any, n: int) -> None:
    found = generate(server, n=given, max_tokens=1)
    assert found["n"] == n == len(found["samples"])


@pytest.mark.parametrize(("given", "tokens"), [
    (None, 80), (3.9, 3), (0, 1), (-1, 1), (1e9, 256),
])  # fmt: skip
def test_max_tokens_is_brought_into_its_range(
    server: LiveApp, given: Any, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    submit = server.worker.submit

    def spy(spec: Any, sink: Any) -> int:
        seen.append(spec.max_tokens)
        return submit(spec, sink)

    monkeypatch.setattr(server.worker, "submit", spy)
    generate(server, n=1, max_tokens=given)
    assert seen == [tokens]


@pytest.mark.parametrize("points", [[], [(1, 5)]])
def test_less_than_two_points_are_no_curve(server: LiveApp, points: Any) -> None:
    assert generate(server, curve=curve(*points))["mode"] == "default"


def test_default_beats_the_curve(server: LiveApp) -> None:
    falling = curve((1, 5), (100, 1))
    assert generate(server, curve=falling, default=True)["mode"] == "default"
    assert generate(server, curve=curve(*SHARP), default=False)["mode"] == "curve"


def test_the_servers_flags_are_the_recipe(tiny_folder: Path) -> None:
    with LiveApp(tiny_folder, temperature="0", top_p="0.9", top_k="5") as server:
        found = generate(server, n=2)
        assert found["recipe"] == {"temperature": 0, "topP": 0.9, "topK": 5}
        assert len(set(texts(found))) == 1, "greedy"
        bent = generate(server, n=8, curve=curve(*DIAGONAL))
        assert len(set(texts(bent))) > 1, "a curve draws, whatever the temperature"


def test_thinking_stays_in_the_text(tmp_path: Path) -> None:
    """A curve is judged by all that the model writes."""
    template = (
        tiny.TEMPLATE + "{# <think> </think> #}{% if add_generation_prompt %}<think>\n{% endif %}"
    )
    folder = tiny.make_model(tmp_path / "tiny", template=template)
    with LiveApp(folder) as server:
        assert all(texts(generate(server, n=3)))
        # The same as a chat: all of it would be reasoning.
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
        message = server.chat(**body).json()["choices"][0]["message"]
        assert message["reasoning"] and not message["content"]


# -------------------------------------------------------------------------------------- junk


@pytest.mark.parametrize("text", [
    "", "plain text", "naïve café Ł", "1234 …!", "fullwidth ａｂｃ", "x" * 99 + "й", "<unused>",
])  # fmt: skip
def test_not_junk(text: str) -> None:
    assert not curves.is_junk(text)


@pytest.mark.parametrize("text", [
    "\ufffd", "half \ufffd", "so <unused12> it", "привет", "x" * 98 + "йй", "你", "x" * 49 + "й",
])  # fmt: skip
def test_junk(text: str) -> None:
    assert curves.is_junk(text)


def test_junk_is_told_of_each_sample(server: LiveApp) -> None:
    for sample in generate(server, n=8, max_tokens=30)["samples"]:
        assert sample["junk"] == curves.is_junk(sample["text"]) and set(sample) == {"text", "junk"}


# -------------------------------------------------------------------------------- bad input

WRONG = [
    ({"prompt": 5}, "prompt"),
    ({"prompt": ["a"]}, "prompt"),
    ({"n": "3"}, "n must be of type number"),
    ({"n": True}, "n must be"),
    ({"max_tokens": {}}, "max_tokens"),
    ({"seed": "x"}, "seed"),
    ({"seed": 10**400}, "seed must be a finite number"),
    ({"default": 1}, "default must be of type bool"),
    ({"curve": []}, "curve must be of type object"),
    ({"curve": {"space": "linear"}}, "curve.space must be one of logprob"),
    ({"curve": {"points": {}}}, "curve.points must be of type list"),
    ({"curve": {"monotonic": False}}, "curve.monotonic must be true"),
    ({"curve": {"points": [1, 2]}}, r"curve.points\[0\] must be of type object"),
    ({"curve": {"points": [{"x_pct": 1}]}}, r"curve.points\[0\] needs x_pct and y_pct"),
    ({"curve": curve((1, 1), ("2", 2))}, r"curve.points\[1\].x_pct must be of type number"),  # type: ignore[arg-type]  # on purpose
    ({"curve": curve((1, 1), (1, 2))}, "curve.points must differ in x_pct"),
    ({"curve": curve((1, 1), (1e-10, 1), (1e-12, 1))}, "two share one"),
    ({"curve": curve((1, 2), (100, 1))}, "all slopes must be >= 0"),
    ({"curve": curve((1, 1), (100, 1e31))}, "curve.points must be a number from"),
    ({"curve": curve(*[(n, n) for n in range(1, 258)])}, "at most 256"),
    ({"prompt": "word1 " * 2000}, "too long"),
]


@pytest.mark.parametrize(("body", "why"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_values_are_named_before_the_model_is_touched(
    server: LiveApp, body: Any, why: str
) -> None:
    before = server.batch()["submitted_rows"]
    reply = server.ask("POST", "/generate", body)
    assert reply.status == 400
    error: Any = reply.json()["error"]
    assert isinstance(error, str)
    assert re.search(why, error), error
    assert server.batch()["submitted_rows"] == before


@pytest.mark.parametrize("path", ["/signal", "/generate"])
@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b'{"n": NaN}', b"\xff"])
def test_what_is_no_object(server: LiveApp, path: str, body: bytes) -> None:
    reply = server.ask("POST", path, body)
    assert (reply.status, reply.json()) == (400, {"error": "invalid JSON"})


def test_a_wrong_prompt_of_a_signal(server: LiveApp) -> None:
    reply = signal(server, {"prompt": {"a": 1}})
    assert (reply.status, reply.json()) == (400, {"error": "prompt must be of type string"})
    reply = signal(server, {"prompt": "word1 " * 2000})
    assert reply.status == 400 and "too long" in reply.json()["error"]


def test_a_fault_says_what_failed(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LiveApp(tiny_folder) as server:

        def break_with(error: Exception) -> Any:
            def fail(*given: Any) -> Any:
                raise error

            return fail

        for name, path in (("embed", "/signal"), ("submit", "/generate")):
            what = {"/signal": "signal", "/generate": "generation"}[path]
            monkeypatch.setattr(server.worker, name, break_with(EngineFault("it is broken")))
            reply = server.ask("POST", path, {"prompt": "x"})
            assert (reply.status, reply.json()) == (500, {"error": f"{what} failed: it is broken"})
            monkeypatch.setattr(server.worker, name, break_with(KeyError("bug")))
            reply = server.ask("POST", path, {"prompt": "x"})
            assert (reply.status, reply.json()) == (
                500,
                {"error": f"{what} failed: internal error"},
            )
            monkeypatch.setattr(server.worker, name, break_with(Busy("queue is full")))
            reply = server.ask("POST", path, {"prompt": "x"})
            assert (reply.status, reply.json()) == (429, {"error": "queue is full"})
            assert reply.headers["retry-after"] == "1"


def test_the_guard_holds(tiny_folder: Path) -> None:
    """Decision D13 before the spec's open CORS."""
    with LiveApp(tiny_folder, api_key="k", cors_origin=["https://a.test"]) as server:
        for path in ("/signal", "/generate"):

            def status(**headers: str) -> Reply:
                named = {name.replace("_", "-"): value for name, value in headers.items()}
                return server.ask("POST", path, {"n": 1, "max_tokens": 1}, named)  # noqa: B023  (called within the same turn)

            assert status().status == 401
            assert status(authorization="Bearer k").status == 200
            assert status(authorization="Bearer k", origin="https://b.test").status == 403
            allowed = status(authorization="Bearer k", origin="https://a.test")
            assert allowed.headers["access-control-allow-origin"] == "https://a.test"
            assert "access-control-allow-origin" not in status(authorization="Bearer k").headers
            options = server.ask("OPTIONS", path, headers={"authorization": "Bearer k"})
            assert options.status == 204 and "POST" in options.headers["allow"]


def test_random_bodies_never_break_it(server: LiveApp) -> None:
    """Fuzz: any JSON is answered with 200 or 400, and the next request is served."""
    rng = random.Random(5)
    values: list[Any] = [None, True, 0, -1, 1.5, 1e300, "", "x", [], {}, [1], {"points": 1}]
    keys = ["prompt", "n", "max_tokens", "seed", "default", "curve"]
    for _ in range(60):
        body = {key: rng.choice(values) for key in rng.sample(keys, rng.randint(0, 6))}
        body.setdefault("max_tokens", 1)
        if rng.random() < 0.5:
            numbers = [rng.choice([0, 1, 50, 100, -1, 1e9, "a", None]) for _ in range(6)]
            body["curve"] = curve(*zip(numbers[::2], numbers[1::2], strict=True))  # type: ignore[arg-type]  # on purpose
        assert server.ask("POST", "/generate", body).status in (200, 400), body
    assert generate(server, n=1)["n"] == 1


def test_the_readme_lists_the_fields() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    table = readme.partition("instead of refusing them:\n\n")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    found = {name.strip("`"): (kind, absent) for name, kind, absent, *_ in rows}
    right = {f.name: (KIND_NAMES[f.kind], f.absent) for f in curves.GENERATE}
    assert found == right
