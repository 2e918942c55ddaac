"""The pages beside the app: /curves, /curve-terrain and /dag, as files (the browser: tests/web)."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mlxlite import app
from mlxlite.api import curves
from mlxlite.http.static import filled
from tests.live import LiveApp

WEB = Path(app.__file__).parent / "web"
VERSION = "v-{{version}}/"  # of the files that a page loads, in their address
PAGES = ("curves", "curve-terrain", "dag")
IMPORT = re.compile(r'^(?:import|export)\b[^"]*?from "\./([\w.-]+)";|^import "\./([\w.-]+)";', re.M)


def read(name: str) -> bytes:
    return (WEB / name).read_bytes()


class Page(HTMLParser):
    """links: what a page loads. ids: its elements'. inline: what its policy would refuse."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.refers: list[str] = []
        self.inline: list[str] = []
        self.leads: list[tuple[str, str]] = []
        self.current: list[str] = []
        self._script = False
        body = filled(f"{name}.html", read(f"{name}.html"), read, b"{{version}}")
        self.feed(body.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if "id" in found:
            self.ids.append(found["id"])
        self.inline += [name for name in found if name == "style" or name.startswith("on")]
        if tag == "style" or (tag == "script" and "src" not in found):
            self.inline.append(tag)
        self._script = tag == "script"
        if tag in ("link", "script", "img"):
            link = found.get("href", found.get("src", ""))
            self.links.append(link.replace(VERSION, ""))
            # Of modules, each address must be the same everywhere, or they are there twice.
            assert VERSION in link or link == "/assets/icon.svg", link
        for name in ("for", "aria-labelledby", "aria-describedby"):
            self.refers += found.get(name, "").split()
        if found.get("aria-current") == "page":
            self.current.append(found["href"])
        if "data-to" in found:
            self.leads += [(found["id"], to) for to in found["data-to"].split()]

    def handle_data(self, data: str) -> None:
        if self._script and data.strip():
            self.inline.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._script = False


def imports(name: str) -> set[str]:
    """The modules that a module loads, all the way down."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        text = (WEB / waiting.pop()).read_text(encoding="utf-8")
        for match in IMPORT.finditer(text):
            module = match[1] or match[2]
            if module not in found:
                found.add(module)
                waiting.append(module)
    return found


@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_inline_and_all_that_is_named_is_there(name: str) -> None:
    page = Page(name)
    assert page.inline == [] and page.current == [f"/{name}"]
    assert len(set(page.ids)) == len(page.ids)
    assert set(page.refers) <= set(page.ids)
    assert page.links and all(link.startswith("/assets/") for link in page.links)
    for link in page.links:
        assert (WEB / link.removeprefix("/assets/")).is_file(), link


@pytest.mark.parametrize("name", PAGES)
def test_modules_are_loaded_at_once(name: str) -> None:
    """All that a page's module imports is preloaded, so no import waits for another."""
    page = Page(name)
    given = {link.removeprefix("/assets/") for link in page.links if link.endswith(".js")}
    assert imports(f"{name}.js") | {f"{name}.js", "theme.js"} == given


MODULES = sorted(
    path.name
    for pattern in ("curve*.js", "terrain*.js", "dag.js", "lab.js")
    for path in WEB.glob(pattern)
)


@pytest.mark.parametrize("name", MODULES)
def test_text_is_never_html(name: str) -> None:
    text = (WEB / name).read_text(encoding="utf-8")
    for wrong in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
                  "new Function", 'setAttribute("style"', "srcdoc"):  # fmt: skip
        assert wrong not in text
    assert text.count("\n") <= 500


def test_boxes_lead_somewhere() -> None:
    page = Page("dag")
    assert len(page.leads) > 20
    assert {to for _, to in page.leads} <= set(page.ids)


def test_the_page_has_the_servers_constants() -> None:
    maths = (WEB / "curve-maths.js").read_text(encoding="utf-8")
    assert f"BINS = {curves.BINS};" in maths and "U_MIN = Math.log(1e-6);" in maths


def test_pages_are_served_without_a_key(tiny_folder: Path) -> None:
    with LiveApp(tiny_folder, api_key="k") as server:
        for name in PAGES:
            reply = server.ask("GET", f"/{name}")
            assert reply.status == 200 and reply.headers["content-type"].startswith("text/html")
            assert "default-src 'none'" in reply.headers["content-security-policy"]
            versions = re.findall(rb"/assets/v-(\w+)/", reply.body)
            assert len(set(versions)) == 1 and len(versions[0]) == 12 and b"{{" not in reply.body
            for link in Page(name).links:
                assert server.ask("GET", link).status == 200, link
        assert server.ask("POST", "/signal", {}).status == 401
