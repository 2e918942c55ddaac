"""A model's output is hostile: nothing of it runs, loads, or looks like a part of the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.browser import Page
from tests.web.acts import ANSWERS, open_chat, wait_answer
from tests.web.attacks import HTML, MARKDOWN
from tests.web.stage import Stage

pytestmark = pytest.mark.web

LIVE = (Path(__file__).parent / "live.js").read_text(encoding="utf-8").strip().rstrip(";")


def test_enough() -> None:
    assert len(MARKDOWN) >= 40 and len(HTML) >= 30
    assert len(set(MARKDOWN)) == len(MARKDOWN)


def test_stored_messages(page: Page, stage: Stage) -> None:
    """Every attack as an answer of the model, shown by the page: all of them at once."""
    turns = [text for attack in MARKDOWN for text in ("Hello", attack)]
    session = stage.store(*turns, title="<img src=x onerror=window.hit=1>")
    open_chat(page, stage.url, f"#/chat/{session}")
    page.wait(f"document.querySelectorAll('{ANSWERS}').length === {len(MARKDOWN)}")
    page.run("document.querySelectorAll('.message').forEach((one) => one.view.near())")
    page.wait(
        f"document.querySelectorAll('{ANSWERS} .prose:not(.plain)').length === {len(MARKDOWN)}"
    )
    assert page.call(LIVE, ".message-body .prose") == []
    assert page.run("document.querySelectorAll('main').length") == 1
    assert page.text(".chat-title") == "<img src=x onerror=window.hit=1>"


@pytest.mark.parametrize("attack", MARKDOWN[:8])
def test_written_messages(page: Page, stage: Stage, attack: str) -> None:
    """The same while it is written, as thinking too."""
    stage.engine.says(f"<think>\n{attack}\n</think>\n\n{attack}")
    open_chat(page, stage.url)
    page.click("#composer")
    page.type(attack)
    page.press("Enter")
    wait_answer(page, 1)
    page.click(".thinking summary")
    page.wait("document.querySelector('.thinking .prose:not(.plain)')")
    assert page.call(LIVE, ".message-body .prose") == []
    assert page.text(".typed").strip() == attack.strip()
    assert page.run("document.querySelector('.typed').children.length") == 0


def test_hostile_html(page: Page, stage: Stage) -> None:
    """HTML that no server of ours would send is taken apart by the page itself."""
    open_chat(page, stage.url)
    page.call(
        """async (attacks) => {
            const { safeNodes } = await import("/assets/sanitise.js");
            for (const attack of attacks) {
                const box = document.createElement("div");
                box.className = "tried";
                box.append(safeNodes(attack));
                document.querySelector("main").append(box);
            }
        }""",
        list(HTML),
    )
    page.run("new Promise((resolve) => setTimeout(resolve, 200))")  # for what would fire late
    assert page.call(LIVE, ".tried") == []
    assert page.run("document.querySelectorAll('.tried').length") == len(HTML)
    assert page.run("document.querySelectorAll('#main').length") == 1
    # What was said is still there to read.
    assert "deep" in page.text(".tried:last-child")
    # The parser met handlers and styles; the policy tells that it would not have run them.
    assert all("Content Security Policy" in trouble for trouble in page.troubles), page.troubles
    page.troubles.clear()


def test_search_and_titles(page: Page, stage: Stage) -> None:
    """Snippets, titles and file names are text."""
    attack = "<b onclick=window.hit=1>needle</b><img src=x onerror=window.hit=1>"
    stage.store(attack, attack, title=attack)
    page.goto(stage.url + "/#/sessions?q=needle")
    page.wait("document.querySelectorAll('.hit mark').length === 2")
    assert page.texts(".hit mark") == ["needle", "needle"]
    assert page.run("document.querySelectorAll('.hit img, .hit b').length") == 0
    assert attack[:40] in page.text(".hit")


def test_policy(page: Page, stage: Stage) -> None:
    """The page's policy lets no inline script run and no stranger be asked, whatever is in it."""
    open_chat(page, stage.url)
    page.call(
        """() => {
        const script = document.createElement("script");
        script.textContent = "window.hit = 1";
        const image = document.createElement("img");
        image.src = "https://evil.test/pixel.png";
        document.body.append(script, image);
    }"""
    )
    page.wait_for(lambda: len(page.troubles) >= 2, "two refusals")
    assert page.run("window.hit") is None
    assert all("Content Security Policy" in trouble for trouble in page.troubles), json.dumps(
        page.troubles
    )
    page.troubles.clear()
    page.requests[:] = [url for url in page.requests if "evil.test" not in url]
