"""docs: the README names every setting, route and request field; the help names every setting."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from mlxlite import app, cli, config
from mlxlite import fields as request_fields
from mlxlite.config import Settings
from mlxlite.text import stops

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
SETTINGS = [pytest.param(setting, id=setting.name) for setting in fields(Settings)]
FIELDS = [field.name for field in request_fields.CHAT] + ["stop", "include_usage"]
FIELDS += [field.name for field in request_fields.HLG_PARTS]
FIELDS += [field.name for field in (*request_fields.COMPLETIONS, *request_fields.TEXTS)]
FIELDS += [f.name for f in (*request_fields.EMBEDDINGS, *request_fields.RERANKS)]
FIELDS += [f.name for f in request_fields.SCORES]
FIELDS += [request_fields.TOKENS.name, request_fields.ADD_SPECIAL_TOKENS.name]
FIELDS += [request_fields.BUDGET_TOKENS.name, *request_fields.EFFORTS]


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


def rows(heading: str) -> dict[str, list[str]]:
    """The cells of the table under a heading, by each name in its first cell."""
    found: dict[str, list[str]] = {}
    table = README.partition(heading)[2].partition("\n\n")[0]
    for line in table.splitlines():
        first, *cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        for name in first.split(", "):
            found[name.strip("`")] = cells
    return found


HEADING = "| field | type | without it | |\n|---|---|---|---|\n"


def test_types_of_request_fields() -> None:
    """Type and default as the table in `fields` has them."""
    found = rows(HEADING)
    own = rows(f"thinking is not told apart.\n\n{HEADING}")
    of_completions = [f for f in request_fields.COMPLETIONS if f not in request_fields.CHAT]
    assert set(own) == {f.name for f in of_completions}
    for field in of_completions:
        assert own[field.name][:2] == [request_fields.KIND_NAMES[field.kind], field.absent]
    for field in request_fields.CHAT:
        kind, absent, *_ = found[field.name]
        assert kind == request_fields.KIND_NAMES[field.kind], field.name
        if field.name != "max_completion_tokens":  # shares the row of max_tokens
            assert absent.replace("`", "") == field.absent, field.name


# Limits that are no field's own range.
OTHER_LIMITS = {
    "stop": {stops.MAX_STOPS, stops.MAX_STOP_CHARS},
    "prompt": {request_fields.MOST_ANSWERS},
    "hlg": {part.high for part in request_fields.HLG_PARTS} - {None},
}
# A share ends at 1, and no logit is as large as the limit of penalties: nobody needs to be told.
UNTOLD_LIMITS = {None, 1, request_fields.PRESENCE_PENALTY.high}
NUMBER = r"(\d[\d,.]*)"
LIMIT = re.compile(rf"(?:\bat most|\bto) {NUMBER}(?: of {NUMBER})?|{NUMBER} at most")


@pytest.mark.parametrize(("heading", "table"), [
    (HEADING, request_fields.CHAT),
    (f"thinking is not told apart.\n\n{HEADING}", request_fields.COMPLETIONS),
], ids=["chat", "completions"])  # fmt: skip
def test_limits_of_request_fields(heading: str, table: tuple[request_fields.Field, ...]) -> None:
    """A row tells its fields' limits and no other, and calls no value off that is refused."""
    by_row: dict[str, list[request_fields.Field]] = {}
    found = rows(heading)
    for field in table:
        if field.name in found:
            by_row.setdefault(found[field.name][-1], []).append(field)
    assert by_row
    for text, row in by_row.items():
        told = {
            float(number.strip(".,").replace(",", ""))
            for match in LIMIT.finditer(text)
            for number in match.groups()
            if number
        }
        limits = {field.high for field in row} - UNTOLD_LIMITS
        assert told == limits.union(*(OTHER_LIMITS.get(field.name, set()) for field in row)), text
        for match in re.finditer(
            r"\b([\d.]+)(?: and ([\d.]+))? (?:is|are) |off at (\d) and (\d)", text
        ):
            for number in filter(None, match.groups()):
                for field in row:
                    body = {field.name: field.kind(number)}
                    assert request_fields.take(body, field) == field.kind(number), text


def test_fields_of_vectors_and_scores() -> None:
    found = rows("| field | of | type | without it | |\n|---|---|---|---|---|\n")
    given = (*request_fields.EMBEDDINGS, *request_fields.RERANKS, *request_fields.SCORES)
    assert set(found) == {f.name for f in given} - {"model"}
    for field in given:
        if field.name != "model":  # as everywhere
            assert found[field.name][1:3] == [request_fields.KIND_NAMES[field.kind], field.absent]


def test_files() -> None:
    """The map names every file of the package, and none that is gone."""
    package = Path(app.__file__).parent
    files = [path.stem for path in package.rglob("[!_]*.py")]  # names may be equal in two folders
    block = README.partition("```\nmlxlite/\n")[2].partition("```")[0]
    lines = [line.split() for line in block.splitlines()]
    named = [words[0][:-3] for words in lines if words and words[0].endswith(".py")]
    for words in lines:
        if words and words[0].endswith(","):  # families, several in a line
            named += [word.strip(",") for word in words]
    assert sorted(named) == sorted(files)


def test_the_readme_is_finished() -> None:
    assert "PLACEHOLDER" not in README and "TODO" not in README
