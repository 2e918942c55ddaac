"""The list of chats: search, rename, delete and take back, export and import."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser import Page
from tests.web.acts import open_chat
from tests.web.stage import Stage

pytestmark = pytest.mark.web

TURNS = (
    "\U0001f6e3 Where is the Straße?",
    "The STRASSE is in Köln.",
    "And the cathedral?",
    "Also there.",
)


def open_list(page: Page, stage: Stage) -> None:
    page.goto(stage.url + "/#/sessions")
    page.wait("document.querySelector('.session')")


def test_search(page: Page, stage: Stage, shoot: Callable[[str], None]) -> None:
    """Matches are marked whatever their case; one leads to its message."""
    stage.store(*TURNS, title="A town")
    stage.store("Nothing here", "No.", title="Other")
    open_list(page, stage)
    shoot("sessions")
    page.type("strasse")
    page.wait("document.querySelectorAll('.hit mark').length === 2")
    assert page.texts(".hit mark") == ["Straße", "STRASSE"]
    assert page.text("[role=status].muted") == "2 matches in 1 chat"
    shoot("search")
    page.press("ArrowDown")
    page.press("Enter")
    page.wait("document.activeElement?.classList.contains('message')")
    assert "Straße" in page.run("document.activeElement.innerText")
    page.run("history.back()")
    page.wait("document.querySelectorAll('.hit mark').length === 2")
    page.type("zzz")
    page.wait("document.querySelector('.page').innerText.includes('Nothing found.')")


def test_rename_and_delete(page: Page, stage: Stage, shoot: Callable[[str], None]) -> None:
    first = stage.store(*TURNS, title="First")
    stage.store(*TURNS, title="Second")
    open_list(page, stage)
    page.click('button[aria-label="Rename First"]')
    page.wait("document.querySelector('dialog input') === document.activeElement")
    page.run("document.querySelector('dialog input').select()")
    page.type("Renamed")
    shoot("rename")
    page.press("Enter")
    page.wait("document.querySelector('.session-list').innerText.includes('Renamed')")
    assert stage.session(first)["title"] == "Renamed"
    # Taken back in time.
    page.click('button[aria-label="Delete Second"]')
    page.wait("document.querySelector('.toast')")
    assert page.texts(".session-title") == ["Renamed"]
    shoot("deleted")
    page.click(".toast .button")
    page.wait("document.querySelectorAll('.session').length === 2")
    assert len(stage.sessions()) == 2
    # Not taken back: leaving the page carries it out.
    page.click('button[aria-label="Delete Second"]')
    page.wait("document.querySelectorAll('.session').length === 1")
    page.reload()
    page.wait_for(lambda: [one["id"] for one in stage.sessions()] == [first], "the delete")


def test_out_and_in(page: Page, stage: Stage, tmp_path: Path) -> None:
    """An exported chat comes back as it was; broken lines are counted, a broken file is told."""
    stage.store(*TURNS, title="A town")
    open_list(page, stage)
    page.keep_downloads(tmp_path)
    page.click('button[aria-label="Export A town"]')
    kept = tmp_path / "A town.jsonl"
    page.wait_for(lambda: kept.exists() and kept.read_text(encoding="utf-8"), "the file")
    lines = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]
    said = [line["content"] for line in lines if line["type"] == "message"]
    assert said == list(TURNS)
    broken = tmp_path / "again.jsonl"
    broken.write_text(kept.read_text(encoding="utf-8") + "{not json\n", encoding="utf-8")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("hello\n")
    page.attach("input[type=file]", broken, empty)
    page.wait("document.querySelector('.toasts').innerText.includes('1 broken line')")
    page.wait("document.querySelector('.toasts').innerText.includes('no message in this file')")
    page.wait("document.querySelectorAll('.session').length === 2")
    page.troubles.clear()  # the browser notes the 400
    page.click(".session-link")
    page.wait("document.querySelectorAll('.message').length === 4")
    assert page.texts(".typed") == [TURNS[0], TURNS[2]]


def test_a_chat_that_is_gone(page: Page, stage: Stage, shoot: Callable[[str], None]) -> None:
    open_chat(page, stage.url, "#/chat/s_0000")
    page.wait("document.querySelector('.notice')?.innerText.includes('does not exist')")
    shoot("gone")
    page.troubles.clear()  # the browser notes the 404
