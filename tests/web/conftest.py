"""A browser, a server for it to meet, and pages that complain of nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import browser as chromium
from tests.browser import Browser, Page
from tests.live import Child
from tests.web.stage import Stage


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if chromium.find() is None:
        pytest.skip("there is no Chromium on this machine")
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def shared_stage(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage(tiny_folder, tmp_path_factory.mktemp("home")) as stage:
        yield stage


@pytest.fixture
def stage(shared_stage: Stage) -> Stage:
    shared_stage.reset()
    return shared_stage


@pytest.fixture
def page(browser: Browser, stage: Stage) -> Iterator[Page]:
    """A fresh tab. Its test fails if a script or the console complained, or if anything but the
    server was asked for anything."""
    page = browser.page()
    yield page
    page.close()
    assert page.troubles == []
    own = (stage.url, "data:", f"blob:{stage.url}", "about:")
    assert [url for url in page.requests if not url.startswith(own)] == []


@pytest.fixture
def tab(browser: Browser) -> Iterator[Page]:
    """A fresh tab for a test that brings a server of its own."""
    page = browser.page()
    yield page
    page.close()


@pytest.fixture(scope="module")
def real_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a server of the real default model is, with chats of its own."""
    from tests.test_real import HOME, MODEL

    assert (HOME / "models" / MODEL).is_dir(), f"run `mlxlite get {MODEL}` first"
    home = tmp_path_factory.mktemp("home")
    (home / "models").symlink_to(HOME / "models")
    with Child(home, "serve", MODEL, "--port", "0", "--temperature", "0", deadline_s=400) as child:
        yield child.wait_ready().url
        child.signal(signal.SIGTERM)
        assert child.wait() == 0
        assert "Traceback" not in child.errors()


@pytest.fixture
def shoot(page: Page, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], None]:
    """Keeps a picture of the page, for people: in $MLXLITE_WEB_SHOTS, or with pytest's files."""
    given = os.environ.get("MLXLITE_WEB_SHOTS")
    folder = Path(given) if given else tmp_path_factory.getbasetemp() / "shots"

    def take(name: str) -> None:
        page.screenshot(folder / f"{name}.png")

    return take


@pytest.fixture
def browser_page_with_key(
    browser: Browser, tiny_folder: Path, tmp_path: Path
) -> Iterator[tuple[Page, Stage]]:
    with Stage(tiny_folder, tmp_path / "home", api_key="secret") as stage:
        page = browser.page()
        yield page, stage
        page.close()
