"""The chat in a real browser with the real default model behind it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.browser import Browser, Page
from tests.test_real import MODEL, QUESTION
from tests.web.acts import ANSWERS, button, converse, open_chat, say, wait_answer, wait_saved

pytestmark = [pytest.mark.web, pytest.mark.real]

LONG = "Write a long story about a ship that sails around the world and meets many people."


@pytest.fixture
def url(real_url: str, tab: Page) -> Iterator[str]:
    yield real_url
    assert tab.troubles == []


def test_paris(tab: Page, url: str) -> None:
    open_chat(tab, url)
    assert MODEL in tab.text(".chat-model")
    assert "Paris" in converse(tab, QUESTION)
    assert "tokens/s" in tab.text(".figures")
    tab.click('a[href="#/sessions"]')
    tab.wait("document.activeElement.id === 'search'")
    tab.type("paris")
    tab.wait("document.querySelector('.hit mark')")
    tab.click('a[href="#/status"]')
    tab.wait("document.querySelector('.facts')?.innerText.includes('ready')")
    tab.wait("document.querySelectorAll('.table-box tbody tr td').length > 7")


def test_status_while_an_answer_comes(tab: Page, browser: Browser, url: str) -> None:
    """It is listed, its tokens are counted as they come, and it ends in the list as it was left."""
    open_chat(tab, url)
    status = browser.page()
    status.goto(url + "/#/status")
    status.wait("document.querySelector('.facts')?.innerText.includes('ready')")
    say(tab, LONG)
    status.wait("document.querySelector('tbody .badge')?.innerText === 'running'")
    row = "[...document.querySelector('tbody tr').cells].map((one) => one.innerText)"
    speed = "parseFloat(document.querySelector('.tile-value').innerText)"
    status.wait(f"{speed} > 0 && parseInt({row}[4]) > 8", 60)
    tab.press("Escape")
    status.wait(f"{row}[7] === 'client left' && parseInt({row}[2]) > 8 && parseInt({row}[4]) > 8")
    assert status.troubles == []
    status.close()


def test_stop_reload_and_go_on(tab: Page, url: str) -> None:
    open_chat(tab, url)
    say(tab, LONG)
    tab.wait(f"document.querySelector('{ANSWERS} .prose')?.innerText.length > 60", 60)
    tab.press("Escape")
    tab.wait("document.querySelector('.aside')?.innerText.includes('Stopped')")
    begun = tab.run(f"document.querySelector('{ANSWERS}').view.message.content")
    session = wait_saved(tab)
    tab.reload()
    tab.wait("document.querySelector('.aside .button')")
    assert tab.run("location.hash").endswith(session)
    assert tab.run(f"document.querySelector('{ANSWERS}').view.message.content") == begun
    tab.click(".aside .button")
    longer = f"document.querySelector('{ANSWERS}').view.message.content.length > {len(begun)} + 60"
    tab.wait(longer, 60)
    tab.reload()  # in the middle of it
    tab.wait("document.querySelector('.aside')?.innerText.includes('cut off')")
    text = tab.run(f"document.querySelector('{ANSWERS}').view.message.content")
    assert text.startswith(begun) and len(text) > len(begun)


def test_edit_and_branch(tab: Page, url: str) -> None:
    open_chat(tab, url)
    converse(tab, QUESTION)
    tab.click(button("Edit"))
    tab.wait("document.querySelector('.edit-field') === document.activeElement")
    tab.run("document.querySelector('.edit-field').select()")
    tab.type("What is the capital of Italy? Answer in one sentence.")
    tab.press("Enter", "Control")
    tab.wait("document.querySelector('.branch-at')?.innerText === '2 / 2'")
    assert "Rome" in wait_answer(tab, 1)
    assert "cached" in tab.text(f"{ANSWERS} .figures")
    tab.click(button("Previous branch"))
    tab.wait("document.querySelector('.log').innerText.includes('Paris')")


def test_schema(tab: Page, url: str) -> None:
    """A JSON schema in the settings forces the form of the answer."""
    open_chat(tab, url)
    tab.click(button("Settings of this chat"))
    tab.wait("document.querySelector('dialog .mono')")
    tab.run("document.querySelector('dialog .mono').focus()")
    number = {"type": "integer", "maximum": 9}
    tab.type(json.dumps({"type": "object", "properties": {"n": number}, "required": ["n"]}))
    tab.click("dialog .primary")
    tab.wait("!document.querySelector('dialog')")
    text = converse(tab, "How many legs has a dog?")
    assert tab.call("(text) => Number.isInteger(JSON.parse(text).n)", text)
