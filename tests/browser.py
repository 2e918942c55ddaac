"""A real Chromium, driven over its DevTools protocol through two pipes.

With `--remote-debugging-pipe` the browser reads commands from descriptor 3 and writes answers and
events to descriptor 4, as JSON with a NUL after each; no port is open and no library is needed. A
thread reads; whoever sent a command waits for its answer, and events go to the page they are about.

    with Browser(profile) as browser:
        page = browser.page(width=360)
        page.goto("http://127.0.0.1:8080/")
        page.wait("document.querySelector('#composer')")
        page.click("#composer"); page.type("hello"); page.press("Enter")
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

WAIT_S = 20.0  # far more than anything here takes; only a failure waits for it
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")

# Nothing that a fresh browser does by itself: no updates, no first-run pages, no calls home.
FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--no-default-browser-check",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-domain-reliability", "--disable-gpu", "--disable-dev-shm-usage", "--mute-audio",
    "--disable-features=Translate,MediaRouter,OptimizationHints,HttpsUpgrades",
    "--force-color-profile=srgb", "--hide-scrollbars", "--lang=en-US",
)  # fmt: skip

# Key -> its code, its number on Windows, its text. Letters are themselves.
KEYS = {"Enter": ("Enter", 13, "\r"), "Escape": ("Escape", 27, ""), "Tab": ("Tab", 9, "")}
KEYS |= {"ArrowUp": ("ArrowUp", 38, ""), "ArrowDown": ("ArrowDown", 40, "")}
KEYS |= {"ArrowLeft": ("ArrowLeft", 37, ""), "ArrowRight": ("ArrowRight", 39, "")}
KEYS |= {" ": ("Space", 32, " "), "Backspace": ("Backspace", 8, ""), "End": ("End", 35, "")}
KEYS |= {"[": ("BracketLeft", 219, "["), "]": ("BracketRight", 221, "]")}
KEYS |= {"/": ("Slash", 191, "/"), "?": ("Slash", 191, "?")}
MODIFIERS = {"Alt": 1, "Control": 2, "Meta": 4, "Shift": 8}


def find() -> str | None:
    """The browser's command, if there is one; MLXLITE_CHROMIUM names another."""
    given = os.environ.get("MLXLITE_CHROMIUM")
    return given or next((path for name in NAMES if (path := shutil.which(name))), None)


class DevToolsError(Exception):
    """A command that the browser refused, or a script that raised."""


class Browser:
    """One browser process with a profile of its own."""

    def __init__(self, profile: Path, flags: Sequence[str] = ()) -> None:
        command = find()
        assert command is not None, "there is no Chromium on this machine"
        root = ("--no-sandbox",) if os.getuid() == 0 else ()  # Chromium refuses to be root with it
        to_browser, self._commands = os.pipe()
        self._answers, from_browser = os.pipe()
        # The shell gives the pipes the numbers that the browser expects.
        script = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "chromium", command, *FLAGS, *root, *flags,
             f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(profile), "LANG": "C.UTF-8"},
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._ids = itertools.count(1)
        self._waiting: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(DevToolsError, OSError):
            self.send("Browser.close")
        try:
            self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(WAIT_S)
        os.close(self._commands)
        os.close(self._answers)

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """A command and its result."""
        number = next(self._ids)
        inbox = self._waiting[number] = queue.Queue()
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        try:
            answer = inbox.get(timeout=WAIT_S)
        except queue.Empty:
            raise DevToolsError(f"no answer to {method} within {WAIT_S:g} s") from None
        finally:
            del self._waiting[number]
        if "error" in answer:
            raise DevToolsError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> None:
        rest = b""
        while part := os.read(self._answers, 1 << 16):
            *messages, rest = (rest + part).split(b"\0")
            for message in messages:
                self._take(json.loads(message))
        for inbox in list(self._waiting.values()):
            inbox.put({"error": {"message": "the browser is gone"}})

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            if (inbox := self._waiting.get(message["id"])) is not None:
                inbox.put(message)
        elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
            page.took(message["method"], message["params"])

    def page(self, width: int = 1200, height: int = 800, context: str | None = None) -> Page:
        """A tab with storage of its own, or with that of another page's context."""
        context = context or self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context)
        target_id = target["targetId"]
        session = self.send("Target.attachToTarget", targetId=target_id, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, target_id, context)
        page.begin(width, height)
        return page


class Page:
    """A tab. requests: addresses asked for. troubles: what its console and scripts complained of.

    loaded: what came of each request, by its id: {url, bytes, status}.
    """

    def __init__(self, browser: Browser, session: str, target: str, context: str) -> None:
        self.browser = browser
        self.context = context
        self.requests: list[str] = []
        self.troubles: list[str] = []
        self.loaded: dict[str, dict[str, Any]] = {}
        self._session = session
        self._target = target

    def begin(self, width: int, height: int) -> None:
        for domain in ("Page", "Runtime", "Network", "Log", "DOM"):
            self.send(f"{domain}.enable")
        self.resize(width, height)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.send(method, self._session, **params)

    def close(self) -> None:
        self.browser.send("Target.closeTarget", targetId=self._target)

    def took(self, method: str, params: dict[str, Any]) -> None:
        """An event, on the reader's thread."""
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
            self.loaded[params["requestId"]] = {"url": params["request"]["url"], "bytes": 0}
        elif method == "Network.responseReceived":
            found = self.loaded.setdefault(params["requestId"], {"url": "", "bytes": 0})
            found["status"] = params["response"]["status"]
        elif method == "Network.loadingFinished" and params["requestId"] in self.loaded:
            self.loaded[params["requestId"]]["bytes"] = params["encodedDataLength"]
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.troubles.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.troubles.append(str([one.get("value") for one in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            entry = params["entry"]
            self.troubles.append(f"{entry['text']} {entry.get('url', '')}")

    # ------------------------------------------------------------------------------ looking

    def call(self, function: str, *given: Any) -> Any:
        """What a function, as text, returns when it is called with what is given; awaited."""
        return self.run(f"({function})({', '.join(json.dumps(one) for one in given)})")

    def run(self, script: str) -> Any:
        """The value of an expression, awaited."""
        answer = self.send(
            "Runtime.evaluate",
            expression=script,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise DevToolsError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def wait(self, script: str, wait_s: float = WAIT_S) -> None:
        """Asks until the expression is true."""
        self.wait_for(lambda: self.run(f"(async () => Boolean({script}))()"), script, wait_s)

    def wait_for(self, ask: Callable[[], Any], what: str, wait_s: float = WAIT_S) -> Any:
        deadline_s = time.monotonic() + wait_s
        while True:
            try:
                if found := ask():
                    return found
            except DevToolsError as error:  # the page is just being replaced
                if time.monotonic() > deadline_s:
                    raise AssertionError(f"{what}: {error}") from None
            if time.monotonic() > deadline_s:
                shown = self.run("document.body.innerText.slice(0, 1500)")
                raise AssertionError(f"not within {wait_s:g} s: {what}\n{self.troubles}\n{shown}")
            time.sleep(0.03)  # between two looks at another process, which sends no event for this

    def text(self, selector: str) -> str:
        found = self.call("(s) => document.querySelector(s)?.innerText ?? ''", selector)
        assert isinstance(found, str)
        return found

    def texts(self, selector: str) -> list[str]:
        script = "(s) => [...document.querySelectorAll(s)].map((one) => one.innerText)"
        found: list[str] = self.call(script, selector)
        return found

    def screenshot(self, path: Path) -> None:
        data = self.send("Page.captureScreenshot", format="png")["data"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(data))

    # ------------------------------------------------------------------------------- acting

    def goto(self, url: str) -> None:
        """Waits for the new page, if it is one: another fragment is none."""
        self.run("window.isOld = true")
        if "loaderId" in self.send("Page.navigate", url=url):
            self.wait("!window.isOld && document.readyState === 'complete'")

    def reload(self) -> None:
        self.run("window.isOld = true")
        self.send("Page.reload")
        self.wait("!window.isOld && document.readyState === 'complete'")

    def click(self, selector: str) -> None:
        """A click with the mouse on the middle of the first element that is shown."""
        where = """(s) => {
            const found = [...document.querySelectorAll(s)].find((one) => one.checkVisibility());
            if (!found) return null;
            found.scrollIntoView({ block: "nearest" });
            const box = found.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        }"""
        x, y = self.wait_for(lambda: self.call(where, selector), f"{selector} to click")
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, *modifiers: str) -> None:
        """A key by its name, such as Enter, or a letter; modifiers: Control, Shift, …"""
        code, number, text = KEYS.get(key, (key, ord(key[0].upper()), key))
        mask = sum(MODIFIERS[name] for name in modifiers)
        if mask & ~MODIFIERS["Shift"]:
            text = ""
        same = {"key": key, "code": code, "windowsVirtualKeyCode": number, "modifiers": mask}
        kind = "keyDown" if text else "rawKeyDown"
        self.send("Input.dispatchKeyEvent", type=kind, text=text, **same)
        self.send("Input.dispatchKeyEvent", type="keyUp", **same)

    def type(self, text: str) -> None:
        """Puts text where the focus is, as a keyboard or a paste does."""
        self.send("Input.insertText", text=text)

    def resize(self, width: int, height: int) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, **media: str) -> None:
        """What the system of the user prefers: color_scheme="dark", reduced_motion="reduce"."""
        features = [
            {"name": f"prefers-{name.replace('_', '-')}", "value": value}
            for name, value in media.items()
        ]
        self.send("Emulation.setEmulatedMedia", features=features)

    def attach(self, selector: str, *paths: Path) -> None:
        """Chooses files for a file field."""
        root = self.send("DOM.getDocument")["root"]["nodeId"]
        node = self.send("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.send("DOM.setFileInputFiles", nodeId=node, files=[str(path) for path in paths])

    def keep_downloads(self, folder: Path) -> None:
        self.browser.send(
            "Browser.setDownloadBehavior",
            behavior="allow",
            browserContextId=self.context,
            downloadPath=str(folder),
        )
