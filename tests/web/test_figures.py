"""How fast the page is, as Lighthouse would have it: first paint, bytes, long tasks, long chats."""

from __future__ import annotations

import statistics

import pytest

from tests.browser import Browser, Page
from tests.web.acts import READY, open_chat
from tests.web.stage import Stage

pytestmark = pytest.mark.web

FIRST_PAINT_MS = 150
MOST_BYTES = 120_000
MESSAGES = 2_000
TURN = "Tell me more about *this* and `that`, and how the two of them go together in practice."

PAINT = """new Promise((resolve) => {
    const found = () => performance.getEntriesByName("first-contentful-paint")[0]?.startTime;
    const ask = () => (found() ? resolve(found()) : setTimeout(ask, 10));
    ask();
})"""

# Scrolls from the end to the beginning and back; milliseconds between frames, and of long tasks.
SCROLL = """async () => {
    const log = document.querySelector(".log");
    const long = [];
    const observer = new PerformanceObserver((list) => {
        long.push(...list.getEntries().map((one) => one.duration));
    });
    observer.observe({ type: "longtask" });
    const frames = [];
    let last = performance.now();
    const frame = () => new Promise(requestAnimationFrame);
    for (const by of [...Array(120).fill(-150), ...Array(120).fill(150)]) {
        log.scrollTop += by;
        await frame();
        const now = performance.now();
        frames.push(now - last);
        last = now;
    }
    log.scrollTop = 0;
    for (let n = 0; n < 5; n += 1) await frame();
    const top = document.elementFromPoint(innerWidth / 2, 200).closest(".message") !== null;
    log.scrollTop = log.scrollHeight;
    observer.disconnect();
    return { frames, long, top };
}"""

# Each key to the next frame after it, in milliseconds.
TYPING = """async () => {
    const field = document.querySelector("#composer");
    field.focus();
    const found = [];
    for (const letter of "the quick brown fox jumps over the lazy dog and types on ".repeat(2)) {
        const begun = performance.now();
        document.execCommand("insertText", false, letter);
        await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
        found.push(performance.now() - begun);
    }
    return found;
}"""


def test_first_paint_and_bytes(browser: Browser, stage: Stage) -> None:
    """Each time in a fresh profile: nothing cached, no worker yet. The fastest counts: the others
    tell what else the machine was doing; a busy one is given some more tries."""
    paints: list[float] = []
    sizes: list[int] = []
    while len(paints) < 5 or (min(paints) >= FIRST_PAINT_MS and len(paints) < 20):
        page = browser.page()
        page.goto(stage.url)
        paints.append(page.run(PAINT))
        page.wait(READY)
        own = [one for one in page.loaded.values() if one["url"].startswith(stage.url)]
        sizes.append(sum(one["bytes"] for one in own))
        page.close()
    print(f"first paint {sorted(round(paint) for paint in paints)} ms, {max(sizes)} bytes")
    assert min(paints) < FIRST_PAINT_MS
    assert 10_000 < max(sizes) < MOST_BYTES


def test_long_chat(page: Page, stage: Stage) -> None:
    """2,000 messages: there at once, scrolled and typed below without a hitch."""
    turns = [f"{n}: {TURN}\n\n- one\n- two\n\n```python\nx = {n}\n```" for n in range(MESSAGES)]
    session = stage.store(*turns)
    open_chat(page, stage.url, f"#/chat/{session}")
    page.wait("document.querySelector('.message')")
    shown_ms = page.run("performance.now()")
    page.wait(f"document.querySelectorAll('.message').length === {MESSAGES}", 60)
    # The best of three: what else the machine does can stop a page for a while.
    scrolled = min((page.call(SCROLL) for _ in range(3)), key=lambda one: sum(one["long"]))
    typed = page.call(TYPING)
    frames = sorted(scrolled["frames"])
    print(
        f"shown after {shown_ms:.0f} ms; frames median {statistics.median(frames):.1f}, "
        f"95 % {frames[int(len(frames) * 0.95)]:.1f}, worst {frames[-1]:.1f} ms; "
        f"long tasks {[round(one) for one in scrolled['long']]}; "
        f"keys median {statistics.median(typed):.1f}, worst {max(typed):.1f} ms"
    )
    assert scrolled["top"]
    assert statistics.median(frames) < 34  # thirty frames a second without a graphics card
    # None on an idle machine; this leaves room for a busy one.
    assert sum(scrolled["long"]) < 1500
    assert statistics.median(typed) < 34
