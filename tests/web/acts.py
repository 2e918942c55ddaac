"""What people do on the page."""

from __future__ import annotations

from tests.browser import Page

READY = "document.querySelector('#composer') && document.querySelector('.chat-model').textContent"
IDLE = "document.querySelector('.send') && !document.querySelector('.send.is-stop')"
ANSWERS = ".message.is-answer"


def open_chat(page: Page, url: str, fragment: str = "") -> None:
    page.goto(url + "/" + fragment)
    page.wait(READY)


def say(page: Page, text: str) -> None:
    """Sends a message, without waiting for its answer."""
    page.click("#composer")
    page.type(text)
    page.press("Enter")


def wait_answer(page: Page, count: int, wait_s: float = 20) -> str:
    """Waits until so many answers are there and none is coming; the text of the last one."""
    page.wait(f"document.querySelectorAll('{ANSWERS}').length === {count} && {IDLE}", wait_s)
    page.wait(f"[...document.querySelectorAll('{ANSWERS}')].at(-1).ariaBusy === 'false'")
    return page.texts(f"{ANSWERS} .message-body")[-1]


def converse(page: Page, text: str) -> str:
    """Sends a message; the answer."""
    before = page.run(f"document.querySelectorAll('{ANSWERS}').length")
    say(page, text)
    return wait_answer(page, before + 1)


def wait_saved(page: Page) -> str:
    """Waits until the chat has an address; its id."""
    page.wait("/^#\\/chat\\/./.test(location.hash)")
    found: str = page.run("decodeURIComponent(location.hash.split('/')[2])")
    return found


def button(name: str) -> str:
    """A selector for a button by its label."""
    return f'button[aria-label="{name}"]'
