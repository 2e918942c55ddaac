"""Without the server the page is still there; a new version is never mixed with an old one."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from mlxlite import service
from tests.browser import Page
from tests.web.acts import READY, converse, open_chat
from tests.web.stage import Stage

pytestmark = pytest.mark.web

KEPT = """async () => {
    const found = [];
    for (const name of await caches.keys()) {
        const requests = await (await caches.open(name)).keys();
        found.push(...requests.map(({ url }) => new URL(url).pathname));
    }
    return found;
}"""


def imported(name: str, found: set[str]) -> set[str]:
    """A module of the page and all that it imports, statically or later."""
    if name not in found and (service.WEB / f"{name}.js").exists():
        found.add(name)
        text = (service.WEB / f"{name}.js").read_text(encoding="utf-8")
        for other in re.findall(r"(?:from |import\()\"\./([a-z-]+)\.js\"", text):
            imported(other, found)
    return found


def test_the_worker_knows_all_modules() -> None:
    text = (service.WEB / "sw.js").read_text(encoding="utf-8")
    listed = set(
        re.findall(r"\"([a-z]+)\"", text.partition("const MODULES = [")[2].partition("]")[0])
    )
    used = imported("boot", set())
    assert {"chat", "status", "tree"} <= used and used <= listed
    # What is asked for at the start is what the first view is made of.
    text = (service.WEB / "boot.js").read_text(encoding="utf-8")
    first = set(
        re.findall(r"\"([a-z]+)\"", text.partition("const MODULES = [")[2].partition("]")[0])
    )
    later = {"boot", "sessions", "models", "status", "charts", "fetching", "rows", "upkeep"}
    assert first == used - later


def wait_worker(page: Page) -> None:
    page.wait("navigator.serviceWorker.ready.then((found) => found.active.state === 'activated')")
    page.wait("navigator.serviceWorker.controller")
    page.wait_for(
        lambda: any(path.endswith("/status.js") for path in page.call(KEPT)), "the shell to be kept"
    )


def test_offline_shell(
    tab: Page, tiny_folder: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The server goes: the shell opens and says so. It comes back: the page goes on by itself."""
    with Stage(tiny_folder, tmp_path / "home") as stage:
        stage.engine.says("Hello!")
        open_chat(tab, stage.url)
        converse(tab, "Hi")
        wait_worker(tab)
        tab.reload()  # now everything is asked for through the worker
        tab.wait(READY)
        url, port = stage.url, stage.address[1]
        kept = tab.call(KEPT)
    assert "/" in kept and any(path.endswith("/app.css") for path in kept)
    assert [
        path for path in kept if path != "/" and not path.startswith(("/assets/", "/manifest"))
    ] == []
    tab.reload()
    tab.wait("!document.querySelector('#banner').hidden")
    assert "cannot be reached" in tab.text("#banner")
    assert tab.text(".brand") == "mlxlite" and tab.run(
        "Boolean(document.querySelector('#composer'))"
    )
    tab.click('a[href="#/status"]')
    tab.wait(
        "document.querySelector('.trouble:not([hidden])')?.innerText.includes('cannot be reached')"
    )
    with Stage(tiny_folder, tmp_path / "home", port=str(port)) as stage:
        assert stage.url == url
        tab.wait("document.querySelector('#banner').hidden")
        tab.wait("document.querySelector('.recent-link')")
    tab.goto("about:blank#done")


@pytest.mark.parametrize("path", ["/curves", "/curve-terrain", "/dag"])
def test_a_page_that_was_opened_opens_without_the_server(
    tab: Page, tiny_folder: Path, tmp_path: Path, path: str
) -> None:
    with Stage(tiny_folder, tmp_path / "home") as stage:
        open_chat(tab, stage.url)
        wait_worker(tab)
        tab.reload()
        tab.wait(READY)
        assert path not in tab.call(KEPT)
        url = f"{stage.url}{path}"
        tab.goto(url)
        tab.wait(
            "document.querySelector('main, canvas, svg') && document.readyState === 'complete'"
        )
        tab.wait_for(lambda: path in tab.call(KEPT), "the page to be kept")
        title = tab.run("document.title")
    tab.goto("about:blank#away")
    tab.goto(url)
    tab.wait("document.querySelector('main, canvas, svg') && document.readyState === 'complete'")
    assert tab.run("document.title") == title != ""
    assert tab.run("[...document.styleSheets].some((sheet) => sheet.cssRules.length > 0)")
    tab.troubles.clear()  # the browser notes each question that nobody answers
    tab.goto("about:blank#done")


def test_update(
    tab: Page, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an update the first look shows the new files, all of them, and old ones are let go."""
    web = tmp_path / "web"
    shutil.copytree(service.WEB, web)
    monkeypatch.setattr(service, "WEB", web)
    with Stage(tiny_folder, tmp_path / "home") as stage:
        open_chat(tab, stage.url)
        wait_worker(tab)
        tab.reload()
        tab.wait(READY)
        port = stage.address[1]
        before = tab.run("caches.keys()")
    for name, old, new in (
        ("index.html", "<title>mlxlite</title>", "<title>mlxlite</title><meta name=x content=new>"),
        ("chat.js", '"New chat"', '"Newer chat"'),
        ("app.css", ":root {", ":root { --marker: new;"),
    ):
        text = (web / name).read_text(encoding="utf-8")
        assert old in text
        (web / name).write_text(text.replace(old, new), encoding="utf-8")
    with Stage(tiny_folder, tmp_path / "home", port=str(port)):
        tab.reload()
        tab.wait(READY)
        assert tab.run("Boolean(document.querySelector('meta[name=x]'))")
        assert tab.text(".chat-title") == "Newer chat"
        marker = "getComputedStyle(document.documentElement).getPropertyValue('--marker').trim()"
        assert tab.run(marker) == "new"
        tab.wait_for(
            lambda: set(tab.run("caches.keys()")).isdisjoint(before), "the old cache to go"
        )
        tab.goto("about:blank#done")


def test_installable(page: Page, stage: Stage) -> None:
    """What a browser wants of an app: a manifest that it can read, an icon, a worker."""
    open_chat(page, stage.url)
    found = page.send("Page.getAppManifest")
    assert found["errors"] == [] and found["url"].endswith("/manifest.webmanifest")
    errors = page.send("Page.getInstallabilityErrors")["installabilityErrors"]
    told = {error["errorId"] for error in errors} - {"in-incognito"}  # as every test's tab is
    assert told == set()
