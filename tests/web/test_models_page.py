"""The view of models in a browser: fetch, stop, resume, import, serve, clean up, at any width.

The server is whole: a real engine on tiny models, children that fetch from a hub on loopback.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlxlite import launch
from mlxlite.config import Settings
from mlxlite.engine.worker import Worker
from mlxlite.models.library import LocalModel
from tests import tiny
from tests.browser import Browser, Page
from tests.gguf_writer import tiny_gguf
from tests.hub_stub import HubStub, model_files
from tests.live import LiveApp
from tests.test_gc import Cache
from tests.web.test_access import complaints

pytestmark = pytest.mark.web

NAME = "org/tiny-model"
FILES = ("a.Q4_K_M.gguf", "b-IQ4_XS.gguf")
HELD = 300_000
WAIT_S = 40.0  # a child imports the hub's client, beside a browser
Shoot = Callable[[str], None]
SERVED = "document.querySelector('.models-served').textContent"
ROWS = ".models-list .models-row"


@pytest.fixture
def hub(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    stub = HubStub()
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for name, value in stub.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
    stub.repositories[NAME] = model_files(tiny_folder)
    stub.repositories["org/tiny-files"] = dict.fromkeys(FILES, b"x")
    yield stub
    stub.close()


@pytest.fixture
def server(tmp_path: Path, hub: HubStub) -> Iterator[LiveApp]:
    models = tmp_path / "home" / "models"
    one = tiny.make_model(models / "one", seed=7)
    tiny.make_model(models / "two", seed=8)
    with LiveApp(one, home=str(tmp_path / "home")) as running:
        yield running


@pytest.fixture
def page(browser: Browser, server: LiveApp) -> Iterator[Page]:
    page = browser.page()
    page.goto(f"{server.url}/#/models")
    page.wait(f"{SERVED} === 'one is served.' && document.querySelectorAll('{ROWS}').length >= 3")
    yield page
    page.close()
    assert page.troubles == []
    assert [url for url in page.requests if not url.startswith((server.url, "about:"))] == []


def button(name: str) -> str:
    return f'button[aria-label="{name}"]'


def press(page: Page, text: str) -> None:
    """The button with this text."""
    found = "[...document.querySelectorAll('button')].find((one) => one.textContent === text)"
    page.call(f"(text) => {found}.click()", text)


def shown(selector: str) -> str:
    return f"document.querySelector('{selector}')?.checkVisibility()"


def test_search_fetch_stop_resume(page: Page, hub: HubStub, shoot: Shoot) -> None:
    hub.hold_after = HELD
    page.click("[role=search] input")
    page.type("tiny")
    page.press("Enter")
    page.wait(shown(button(f"Fetch {NAME}")), WAIT_S)
    assert "2 found" in page.text(".models")
    options = "[aria-label='GGUF file of org/tiny-files'] option"
    assert page.texts(options) == [FILES[0], f"{FILES[1]} (IQ: cannot be imported)"]
    assert page.texts(f"{options}:disabled") == page.texts(options)[1:]
    page.click(button(f"Fetch {NAME}"))
    is_told = "document.body.innerText.includes('kB of')"
    page.wait(f"{shown(button(f'Stop {NAME}'))} && {is_told}", WAIT_S)
    shoot("models-fetching")
    page.click(button(f"Stop {NAME}"))
    page.wait(shown(button(f"Resume {NAME}")), WAIT_S)
    assert "Stopped" in page.text(".models")
    hub.go_on.set()
    page.click(button(f"Resume {NAME}"))
    page.wait(shown(button(f"Serve {NAME}")), WAIT_S)
    page.wait(shown(button(f"Take {NAME} off the list")), WAIT_S)
    page.click(button(f"Take {NAME} off the list"))
    page.wait("!document.body.innerText.includes('On the way')")


def test_what_would_start_over_says_so(page: Page) -> None:
    """A wheel from an index that serves no parts of files."""
    row = {
        "id": "dl_1", "repo_id": "smollm2-135m", "file": None, "kind": "download",
        "state": "running", "stage": "download", "received_bytes": 5_000_000,
        "total_bytes": 93_000_000, "resumes": False, "files_done": 0, "files_total": 1,
        "bytes_per_sec": 0, "error": None, "model": None,
    }  # fmt: skip
    page.call(
        """(row) => {
        const fetch = window.fetch;
        window.fetch = async (path, ...rest) => path === "/downloads"
            ? Response.json({ downloads: [row], uploads: [] }) : fetch(path, ...rest);
    }""",
        row,
    )
    press(page, "Look again")
    page.wait("document.body.innerText.includes('5.0 MB of 93.0 MB · would start over')", WAIT_S)


def test_serve_another(page: Page, server: LiveApp, shoot: Shoot) -> None:
    page.click(button("Serve two"))
    page.wait(f"{SERVED} === 'two is served.'", WAIT_S)
    page.wait(f"{shown(button('Serve one'))} && !{shown(button('Serve two'))}")
    assert server.chat().json()["model"] == "two"
    assert "takes" in page.text(f"{ROWS} .row") and "at 1,024 tokens" in page.text(f"{ROWS} .row")
    shoot("models-served")


def test_a_change_is_cancelled(
    page: Page, server: LiveApp, monkeypatch: pytest.MonkeyPatch, shoot: Shoot
) -> None:
    go_on = threading.Event()
    start = launch.start_engine

    def slow(settings: Settings, model: LocalModel) -> Worker:
        assert go_on.wait(WAIT_S)
        return start(settings, model)

    monkeypatch.setattr(launch, "start_engine", slow)
    page.click(button("Serve two"))
    page.wait(f"{SERVED} === 'Loading two. one answers until it is there.'")
    shoot("models-changing")
    press(page, "Cancel the change")
    page.wait(f"{SERVED} === 'Going back to one. one answers meanwhile.'")
    go_on.set()
    page.wait(f"{SERVED} === 'one is served.' && {shown(button('Serve two'))}", WAIT_S)
    page.wait("!document.body.innerText.includes('Cancel the change')")
    assert server.chat().json()["model"] == "one"


def test_import_a_file(page: Page, tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "Picked.gguf", "llama", "Q4_1")[0]
    page.attach("input[type=file]", path)
    page.wait(shown(button("Serve picked")), WAIT_S)
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"PK" + b"\0" * 1000)
    page.attach("input[type=file]", wrong)
    page.wait("document.querySelector('.trouble:not([hidden])')?.textContent.includes('GGUF')")
    page.troubles.clear()  # the browser notes each answer that is no success


def test_clean_up_and_token(page: Page, tmp_path: Path, server: LiveApp) -> None:
    cache = Cache(tmp_path / "hub")
    cache.add("new", {"model.safetensors": "b1"})
    old = cache.add("old", {"model.safetensors": "b0"})
    cache.ref("new")
    cache.age()
    press(page, "See what can go")
    page.wait("document.body.innerText.includes('200 B can be freed')")
    assert old.exists()
    page.click(".button.danger")
    page.click("dialog .button:not(.danger)")  # thought better of
    assert old.exists()
    page.click(".button.danger")
    page.click("dialog .button.danger")
    page.wait("document.body.innerText.includes('200 B are free again')")
    assert not old.exists()
    assert "There is no token." in page.text(".models")
    page.click("input[type=password]")
    page.type("hf_secret")
    page.press("Enter")
    page.wait("document.body.innerText.includes('A token is kept.')")
    assert page.run("document.querySelector('input[type=password]').value") == ""
    assert "hf_secret" not in page.run("document.documentElement.outerHTML")
    press(page, "Forget the token")
    page.wait("document.body.innerText.includes('There is no token.')")


def test_tools_that_are_always_allowed(page: Page, server: LiveApp) -> None:
    """Shown if there are any; a name is text, whatever is in it."""
    tool = "<img src=x onerror=alert(1)> & ?tool=b"
    assert "always allowed" not in page.text(".models")
    for name in (tool, "read_file"):
        server.ask("POST", "/api/settings/tool-approvals", {"tool": name})
    page.run("location.reload()")
    page.wait("document.body.innerText.includes('read_file')")
    assert tool in page.text(".models")
    press(page, "Ask again")
    page.wait("!document.body.innerText.includes('onerror')")
    found = server.ask("GET", "/api/settings/tool-approvals").json()["alwaysAllow"]
    assert found == ["read_file"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 360])
def test_anybody_can_use_it(
    page: Page, hub: HubStub, server: LiveApp, scheme: str, width: int, shoot: Shoot
) -> None:
    hub.hold_after = HELD
    for tool in ("read_file", "x" * 256):
        server.ask("POST", "/api/settings/tool-approvals", {"tool": tool})
    page.run("location.reload()")
    page.wait("document.body.innerText.includes('read_file')")
    page.resize(width, 800)
    page.prefer(color_scheme=scheme)
    page.run(f"fetch('/downloads', {{method: 'POST', body: JSON.stringify({{model: '{NAME}'}})}})")
    page.wait(shown(button(f"Stop {NAME}")), WAIT_S)
    page.click("[role=search] input")
    page.type("tiny")
    page.press("Enter")
    page.wait(shown(button(f"Fetch {NAME}")), WAIT_S)
    assert complaints(page) == []
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    wide = "(({ scrollWidth, clientWidth }) => scrollWidth - clientWidth)"
    assert page.run(f"{wide}(document.querySelector('main'))") <= 0
    outside = """[...document.querySelectorAll('.models *')].filter((one) => {
        const room = document.querySelector('.models').getBoundingClientRect();
        return one.checkVisibility() && one.getBoundingClientRect().right > room.right;
    }).map((one) => one.outerHTML)"""
    assert page.run(outside) == []
    shoot(f"view-models-{width}-{scheme}")
    page.run("[...document.querySelectorAll('.models-section')].at(-1).scrollIntoView(false)")
    shoot(f"view-models-end-{width}-{scheme}")
    hub.go_on.set()
