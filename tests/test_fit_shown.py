"""A fit as users see it: `mlxlite fit`, `GET /fit`, the budget at start, the model nobody named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlxlite import cli
from mlxlite.models import fit, library
from mlxlite.models.catalogue import DEFAULT
from mlxlite.models.library import NoLocalModel
from tests.live import LiveApp
from tests.tiny import CONFIG

pytestmark = pytest.mark.slow

PER_TOKEN = 2 * 2 * 2 * 16 * 4  # of the tiny model: layers, keys and values, heads, their size, f32


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home and an empty hub cache."""
    monkeypatch.setenv("MLXLITE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "home"


def weight_bytes(folder: Path) -> int:
    specs = fit.check_safetensors(folder / "model.safetensors")
    return sum(spec.n_bytes for spec in specs.values())


# --------------------------------------------------------------------------------- the command


def test_the_command_shows_a_table(
    tiny_folder: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["fit", str(tiny_folder), "--context", "500"]) == 0
    name, *rows = capsys.readouterr().out.splitlines()
    shown = {row[2:30].strip(): row[30:] for row in rows}
    assert name == tiny_folder.name
    assert shown["cache of a token"] == f"{PER_TOKEN} B"
    assert shown["cache of 500 tokens"] == f"{PER_TOKEN * 500 / 1e3:.2f} kB"
    assert shown["weights"] == f"{weight_bytes(tiny_folder) / 1e3:.2f} kB float32"
    assert shown["longest context that fits"] == "1,024 of 1,024"
    assert (shown["fits"], shown["decode"]) == ("yes", "unknown")
    assert shown["usable"].endswith("(75 % of the memory)")


def test_the_command_shows_json(
    tiny_folder: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["fit", "--model", str(tiny_folder), "--json", "--memory-budget", "0.01"]
    assert cli.main(given) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["machine"]["memory_budget_bytes"] == shown["usable_bytes"] == 10_000_000
    assert (shown["context_tokens"], shown["kv_bytes"]) == (1024, 1024 * PER_TOKEN)
    assert shown["fits"] == (shown["total_bytes"] <= 10_000_000)
    assert {row["sku"] for row in shown["sku_matrix"]} == set(fit.SKUS)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--context", "0"], "--context must be a whole number of tokens, not '0'"),
        (["--context", "many"], "--context must be a whole number of tokens, not 'many'"),
        (["--context", "9" * 30], "--context must be a whole number"),
        (["--memory-budget", "0"], "--memory-budget must be at least 0.01, not 0"),
        (["--memory-budget", "nan"], "--memory-budget must be at least 0.01, not nan"),
        (["--memory-budget", "much"], "--memory-budget must be a number, not 'much'"),
        (["--port", "1"], "unknown flag --port"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_flags(
    flags: list[str], says: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["fit", *flags]) == 2
    assert says in capsys.readouterr().err


def test_a_damaged_model_is_one_line(
    tiny_folder: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(tiny_folder, home / "models" / "broken")
    (folder / "model.safetensors").write_bytes(b"\1")
    assert cli.main(["fit", "broken"]) == 1
    assert "model.safetensors: damaged safetensors file" in capsys.readouterr().err


def test_a_budget_that_leaves_no_room_refuses_to_serve(
    tiny_folder: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(tiny_folder, home / "models" / "large")
    config = json.loads((folder / "config.json").read_text())
    wide = {**config, "num_key_value_heads": 1 << 20}  # so that one slab exceeds any small budget
    (folder / "config.json").write_text(json.dumps(wide))
    assert cli.main(["large", "--port", "0", "--memory-budget", "0.5"]) == 1
    assert "a memory budget of 0.5 GB leaves no room" in capsys.readouterr().err


# ----------------------------------------------------------------------------------- the route


def test_the_route_shows_the_served_model(tiny_server: LiveApp, tiny_folder: Path) -> None:
    shown = tiny_server.ask("GET", "/fit").json()
    assert (shown["model"], shown["context_tokens"]) == (tiny_server.name, 1024)
    assert shown["machine"]["backend"] == "cpu"
    assert shown["machine"]["memory_bytes"] == fit.ram_bytes()
    report = shown["report"]
    assert report["weights_bytes"] == weight_bytes(tiny_folder)
    assert report["kv_per_token_bytes"] == PER_TOKEN
    assert report["kv_bytes"] == 1024 * PER_TOKEN
    assert (report["fits"], report["max_safe_context"]) == (True, 1024)
    assert shown["sku_matrix_ctx"] == 1024  # the model's own, where 32,768 is beyond it
    assert {row["sku"] for row in shown["sku_matrix"]} == set(fit.SKUS)
    named = tiny_server.ask("GET", f"/fit?model={tiny_server.name}&context=8").json()
    assert (named["context_tokens"], named["report"]["kv_bytes"]) == (8, 8 * PER_TOKEN)


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ("model=nobody", 404, "model"),
        ("model=../tiny", 404, "model"),
        ("model=%2Ftmp", 404, "model"),
        ("context=0", 400, "context"),
        ("context=1025", 400, "context"),
        ("context=-1", 400, "context"),
        ("context=9999999999999", 400, "context"),
        ("context=many", 400, "context"),
        ("context=%D9%A3", 400, "context"),
    ],
)
def test_the_route_refuses(tiny_server: LiveApp, query: str, status: int, param: str) -> None:
    reply = tiny_server.ask("GET", f"/fit?{query}")
    assert (reply.status, reply.error["param"]) == (status, param)


def test_the_route_shows_other_local_models(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    served = shutil.copytree(tiny_folder, tmp_path / "served")
    other = shutil.copytree(tiny_folder, tmp_path / "home" / "models" / "other")
    (other / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 4}))
    broken = shutil.copytree(tiny_folder, tmp_path / "home" / "models" / "broken")
    (broken / "config.json").write_text('{"model_type": "llama"}')
    with LiveApp(served, memory_budget="2") as server:
        report = server.ask("GET", "/fit?model=other").json()["report"]
        assert report["kv_per_token_bytes"] == 2 * PER_TOKEN
        assert report["usable_bytes"] == 2_000_000_000
        reply = server.ask("GET", "/fit?model=broken")
        assert (reply.status, reply.error["param"]) == (400, "model")
        assert str(tmp_path) not in reply.error["message"]


# ----------------------------------------------------------------------- the model nobody named


def keep(home: Path, name: str, tiny_folder: Path, **config: Any) -> library.LocalModel:
    folder = shutil.copytree(tiny_folder, home / "models" / name)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return library.describe(folder, name)


def needed(model: library.LocalModel) -> int:
    return library.fit_of(model, fit.guessed_machine()).total_bytes(1024)


def test_the_largest_that_leaves_room_is_chosen(
    tiny_folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = keep(home, "small", tiny_folder)
    needs = needed(small)
    # As large a file, and a larger cache: only the fit tells them apart.
    keep(home, "large", tiny_folder, num_key_value_heads=512)
    for share, name in ((0.6, "small"), (0.7, "small")):  # the second: the largest that fits
        monkeypatch.setattr(fit, "ram_bytes", lambda share=share: int(needs / share) + 1)
        assert library.choose(home).name == name
    monkeypatch.setattr(fit, "ram_bytes", lambda: int(needs / 0.75) - 1)
    with pytest.raises(NoLocalModel, match="no model is on this machine that fits it"):
        library.choose(home)


def test_the_default_must_fit_too(
    tiny_folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = keep(home, "small", tiny_folder)
    keep(home, DEFAULT, tiny_folder, num_key_value_heads=512)
    assert library.choose(home).name == DEFAULT
    limit = int(needed(small) / 0.75) + 1
    monkeypatch.setattr(fit, "ram_bytes", lambda: limit)
    assert library.choose(home).name == "small"


def test_weights_are_opened_only_where_it_is_close(
    tiny_folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = keep(home, "small", tiny_folder)
    close = int(needed(small) / 0.6) + 1
    opened: list[Path] = []
    check = fit.check_safetensors
    monkeypatch.setattr(fit, "check_safetensors", lambda path: opened.append(path) or check(path))
    assert library.choose(home).name == "small"
    assert opened == []
    monkeypatch.setattr(fit, "ram_bytes", lambda: close)
    assert library.choose(home).name == "small"
    assert opened == [home / "models" / "small" / "model.safetensors"]
