"""docs: the README names every setting, route and request field; the help names every setting."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from mlxlite import app, cli, config
from mlxlite import fields as request_fields
from mlxlite.config import Settings

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
SETTINGS = [pytest.param(setting, id=setting.name) for setting in fields(Settings)]
FIELDS = [field.name for field in request_fields.CHAT] + ["stop", "include_usage"]


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings(setting: object) -> None:
    assert f"`{config.flag(setting)}" in README  # type: ignore[arg-type]
    assert f"`{config.knob(setting).env}`" in README  # type: ignore[arg-type]


@pytest.mark.parametrize("setting", SETTINGS)
def test_help(setting: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert config.flag(setting) in shown and f"[{config.knob(setting).env}]" in shown  # type: ignore[arg-type]


@pytest.mark.parametrize(("method", "path"), [(method, path) for method, path, _ in app.ROUTES])
def test_routes(method: str, path: str) -> None:
    shown = path.replace("{id:path}", "{id}")
    assert f"{method} {shown}" in README


@pytest.mark.parametrize("name", FIELDS)
def test_request_fields(name: str) -> None:
    assert f"`{name}`" in README
