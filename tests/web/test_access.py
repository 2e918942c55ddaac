"""People who use a keyboard, a screen reader, a small screen, other colours, less motion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser import Page
from tests.web.acts import ANSWERS, READY, button, converse, open_chat, wait_answer, wait_saved
from tests.web.stage import Stage
from tests.web.test_chat import ARTICLE

pytestmark = pytest.mark.web

CHECKS = (Path(__file__).parent / "access.js").read_text(encoding="utf-8").rstrip().rstrip(";")
CONTROLS = {"button", "link", "textbox", "searchbox", "combobox", "checkbox", "radio", "spinbutton"}
CONTROLS |= {"DisclosureTriangle", "dialog", "article", "meter", "navigation", "region", "log"}
NAME = "(({ ariaLabel, innerText }) => ariaLabel || innerText)(document.activeElement)"
Shoot = Callable[[str], None]


def complaints(page: Page) -> list[str]:
    """Of our own checks, and of names as the browser itself computes them."""
    found: list[str] = page.call(CHECKS)
    for node in page.send("Accessibility.getFullAXTree")["nodes"]:
        role = node.get("role", {}).get("value")
        if role in CONTROLS and not node["ignored"] and not node.get("name", {}).get("value"):
            found.append(f"{role} without a name")
    return found


def views(stage: Stage) -> dict[str, tuple[str, str]]:
    """Of each view: its address, and what is there once it is ready."""
    chat = stage.store("How do I sort?", ARTICLE, "And then?", "Then **that**.", title="Sorting")
    return {
        "new": ("#/chat", READY),
        "chat": (f"#/chat/{chat}", "document.querySelectorAll('.prose:not(.plain)').length === 2"),
        "sessions": ("#/sessions", "document.querySelector('.session')"),
        "search": ("#/sessions?q=that", "document.querySelector('.hit mark')"),
        "status": ("#/status", "document.querySelector('.facts dd')"),
    }


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 360])
def test_views(page: Page, stage: Stage, scheme: str, width: int, shoot: Shoot) -> None:
    page.resize(width, 800)
    page.prefer(color_scheme=scheme)
    for name, (fragment, ready) in views(stage).items():
        page.goto(f"{stage.url}/?{name}{fragment}")
        page.wait(ready)
        assert complaints(page) == [], name
        shoot(f"view-{name}-{width}-{scheme}")


@pytest.mark.parametrize("width", [1200, 360])
def test_dialogs(page: Page, stage: Stage, width: int, shoot: Shoot) -> None:
    page.resize(width, 740)
    open_chat(page, stage.url)
    for key, name in (("s", "settings"), ("?", "keys")):
        page.run("document.activeElement.blur()")
        page.press(key)
        page.wait("document.querySelector('dialog[open]')")
        assert complaints(page) == [], name
        assert page.run("document.querySelector('dialog').contains(document.activeElement)")
        shoot(f"dialog-{name}-{width}")
        page.press("Escape")
        page.wait("!document.querySelector('dialog')")
    if width == 360:
        page.click("#menu")
        page.wait("document.querySelector('#menu').getAttribute('aria-expanded') === 'true'")
        page.wait("document.activeElement.id === 'new-chat'")
        page.run("Promise.all(document.getAnimations().map((one) => one.finished))")
        assert complaints(page) == []
        shoot("menu")
        page.press("Escape")
        page.wait("document.activeElement.id === 'menu'")


def test_errors_are_readable(page: Page, stage: Stage, shoot: Shoot) -> None:
    """What is shown when things go wrong keeps to the same rules."""
    for scheme in ("light", "dark"):
        page.prefer(color_scheme=scheme)
        open_chat(page, stage.url, "#/chat/s_0000")
        page.wait("document.querySelector('.notice')?.innerText")
        assert complaints(page) == []
        shoot(f"notice-{scheme}")
        page.goto("about:blank#" + scheme)
    page.troubles.clear()  # the browser notes each 404


def leave_field(page: Page) -> None:
    """A chat that was just opened takes the focus into its field; shortcuts are for outside."""
    page.wait("document.activeElement.id === 'composer'")
    page.press("Escape")
    page.wait("document.activeElement === document.body")


def step(page: Page, key: str, until: str) -> None:
    """Presses a shortcut outside of the field."""
    leave_field(page)
    page.press(key)
    page.wait(until)


def test_keyboard_alone(page: Page, stage: Stage) -> None:
    """A whole visit without a mouse."""
    page.goto(stage.url)
    page.wait(READY)
    page.wait("document.activeElement.id === 'composer'")
    page.type("What is the capital of France?")
    page.press("Enter")
    wait_answer(page, 1)
    first = wait_saved(page)
    page.press("ArrowUp")  # in the empty field: edit the last message
    page.wait("document.activeElement.classList.contains('edit-field')")
    page.type(" And of Italy?")
    page.press("Enter", "Control")
    page.wait("document.querySelector('.branch-at')?.innerText === '2 / 2'")
    wait_answer(page, 1)
    page.run("document.activeElement.blur()")
    page.press("n")
    page.wait("document.querySelector('.welcome:not([hidden])')")
    page.wait("document.activeElement.id === 'composer'")
    page.type("Another")
    page.press("Enter")
    wait_answer(page, 1)
    assert wait_saved(page) != first
    step(page, "]", f"location.hash === '#/chat/{first}'")
    page.wait("document.querySelectorAll('.message').length === 2")
    step(page, "[", f"location.hash !== '#/chat/{first}'")
    leave_field(page)
    page.press("/")
    page.wait("document.activeElement.id === 'search'")
    page.type("Italy")
    page.wait("document.querySelector('.hit mark')")
    page.press("ArrowDown")
    page.press("Enter")
    page.wait("document.activeElement.classList.contains('message')")
    page.press("i")
    page.wait("document.activeElement.id === 'composer'")


def test_stepping_right_after_an_answer(page: Page, stage: Stage) -> None:
    """A shortcut waits for the list of chats that it moves in, however late that comes."""
    open_chat(page, stage.url)
    page.run("""(() => {
        const fetch = window.fetch;
        window.fetch = async (path, ...rest) => {
            if (path.startsWith("/api/sessions?")) await new Promise((go) => setTimeout(go, 400));
            return fetch(path, ...rest);
        };
    })()""")
    converse(page, "First")
    first = wait_saved(page)
    leave_field(page)
    page.press("n")
    page.wait("document.querySelector('.welcome:not([hidden])')")
    converse(page, "Second")
    second = wait_saved(page)
    step(page, "]", f"location.hash === '#/chat/{first}'")
    step(page, "[", f"location.hash === '#/chat/{second}'")
    leave_field(page)
    page.press("]")
    page.press("[")
    page.press("]")
    page.wait(f"location.hash === '#/chat/{first}'")
    page.wait("document.querySelector('.chat-title').innerText === 'First'")


def test_single_letters_can_be_switched_off(page: Page, stage: Stage) -> None:
    open_chat(page, stage.url)
    page.run("document.activeElement.blur()")
    page.press("?")
    page.wait("document.querySelector('dialog[open] #keys-on')")
    page.click("#keys-on")
    page.press("Escape")
    page.wait("!document.querySelector('dialog')")
    page.run("document.activeElement.blur()")
    page.press("s")
    page.run("new Promise((resolve) => setTimeout(resolve, 100))")  # for what must not come
    assert page.run("document.querySelector('dialog')") is None


def test_order_of_focus(page: Page, stage: Stage) -> None:
    """Tab goes the way that one reads; the first stop skips to the content."""
    open_chat(page, stage.url)
    converse(page, "Hello")
    page.run("document.activeElement.blur(); window.getSelection().removeAllRanges()")
    page.run("document.querySelector('#skip').focus()")
    seen = []
    for _ in range(24):
        seen.append(page.run(NAME))
        page.press("Tab")
    assert seen[0] == "Skip to the content"
    order = [
        "New chat",
        "Chats",
        "Models",
        "Status",
        "Settings of this chat",
        "Conversation",
        "Copy",
        "Edit",
        "Message",
        "Send",
    ]
    places = [seen.index(name) for name in order]
    assert places == sorted(places), seen
    page.run("document.querySelector('#skip').focus()")
    page.press("Enter")
    page.wait("document.activeElement.id === 'main'")


def test_visible_focus(page: Page, stage: Stage) -> None:
    open_chat(page, stage.url)
    page.run("document.querySelector('#new-chat').focus()")
    page.press("Tab")
    style = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.run(style) == "solid"


def test_less_motion(page: Page, stage: Stage) -> None:
    page.prefer(reduced_motion="reduce")
    page.resize(360, 740)
    open_chat(page, stage.url)
    assert page.run("getComputedStyle(document.querySelector('.side')).transitionDuration") == "0s"


def test_nothing_of_a_message_is_cut_off(page: Page, stage: Stage) -> None:
    """A message paints nothing outside of its box (content-visibility), rings of the focus too."""
    page.resize(360, 740)
    stage.engine.says(" ".join(["word"] * 40))
    open_chat(page, stage.url)
    converse(page, "Hello")
    assert page.text("#topbar-title") == "Hello"
    page.click(button("Edit"))
    page.wait("document.querySelector('.edit-field')")
    outside = """[...document.querySelectorAll('.message *')].filter((one) => {
        const box = one.getBoundingClientRect();
        const room = one.closest('.message').getBoundingClientRect();
        return box.width && (box.left < room.left || box.right > room.right);
    }).map((one) => one.className)"""
    assert page.run(outside) == []
    around = """(() => {
        const field = document.querySelector('.edit-field').getBoundingClientRect();
        const room = document.querySelector('.message').getBoundingClientRect();
        return [field.left - room.left, room.right - field.right];
    })()"""
    assert min(page.run(around)) >= 4, "the ring of the focus"
    page.goto(stage.url + "/?again" + page.run("location.hash"))
    page.wait("document.querySelector('#topbar-title').innerText === 'Hello'")


def test_tables_keep_their_words_on_a_small_screen(page: Page, stage: Stage, shoot: Shoot) -> None:
    """They scroll in their box; the page does not."""
    page.resize(360, 740)
    open_chat(page, stage.url)
    converse(page, "Hello")
    page.goto(stage.url + "/#/status")
    page.wait("document.querySelector('.table-box tbody tr td:nth-child(8)')")
    lines = (
        "[...document.querySelectorAll('.table-box :is(th, td)')].map((one) => one.offsetHeight)"
    )
    assert max(page.run(lines)) < 45, "a line and what is around it"
    box = "(({ scrollWidth, clientWidth }) => scrollWidth > clientWidth)"
    assert page.run(f"{box}(document.querySelector('.table-box'))")
    assert not page.run(f"{box}(document.querySelector('.page'))")
    page.run("document.querySelector('.table-box').scrollIntoView()")
    shoot("narrow-table")


def test_long_words_and_code_on_a_small_screen(page: Page, stage: Stage, shoot: Shoot) -> None:
    """Nothing makes the page itself scroll sideways."""
    long = "x" * 400
    table = f"|{'|'.join('abcdefgh')}|\n|{'---|' * 8}\n|{'|'.join([long[:30]] * 8)}|\n"
    chat = stage.store(long, f"{long}\n\n```\n{long}\n```\n\n{table}")
    page.resize(360, 740)
    open_chat(page, stage.url, f"#/chat/{chat}")
    page.wait(f"document.querySelector('{ANSWERS} .prose:not(.plain)')")
    assert complaints(page) == []
    assert page.run("document.documentElement.scrollWidth") <= 360
    assert page.run(
        "document.querySelector('.log').scrollWidth <= document.querySelector('.log').clientWidth"
    )
    shoot("narrow-long")
