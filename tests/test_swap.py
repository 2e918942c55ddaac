"""The served model is changed while answers are under way: nothing is lost, and all that is told is
so. Two tiny models that answer differently."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxlite import launch
from mlxlite import swap as swap_module
from mlxlite.config import Settings
from mlxlite.errors import BadRequest
from mlxlite.models import fit, library
from mlxlite.types import EngineState, ModelFacts
from tests import tiny
from tests.live import (
    CHAT,
    WAIT_S,
    Brake,
    LiveApp,
    chat_body,
    connect,
    frames,
    post_bytes,
    read_until,
    stream_text,
)

pytestmark = pytest.mark.slow

STREAMS = 3
LONG: dict[str, Any] = {"max_tokens": 60, "logit_bias": {"0": -100, "2": -100}}  # never ends early


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the models one and two, and two that cannot be loaded."""
    home = tmp_path_factory.mktemp("swap") / "home"
    models = home / "models"
    tiny.make_model(models / "one", seed=7)
    tiny.make_model(models / "two", seed=8)
    cut = tiny.make_model(models / "cut", seed=9) / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1000])
    odd = tiny.make_model(models / "odd", seed=9) / "config.json"
    odd.write_text(json.dumps({**json.loads(odd.read_text()), "model_type": "nobody_has_it"}))
    return home


@pytest.fixture
def server(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveApp]:
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "hub"))
    with LiveApp(home / "models" / "one", home=str(home)) as running:
        yield running


@pytest.fixture(scope="module")
def texts(home: Path) -> dict[str, str]:
    """What each model answers when nothing happens to it."""
    found = {}
    for name in ("one", "two"):
        with LiveApp(home / "models" / name, home=str(home)) as alone:
            found[name] = alone.chat(**LONG).text
    assert found["one"] != found["two"]
    return found


def swap_to(server: LiveApp, model: str, status: int = 202) -> Any:
    reply = server.ask("POST", "/api/models/serve", {"model": model})
    assert reply.status == status, reply.body
    return reply


def serve_row(server: LiveApp) -> dict[str, Any]:
    row: dict[str, Any] = server.ask("GET", "/api/models/serve").json()["serve"]
    return row


def wait_swap(server: LiveApp, *states: str) -> dict[str, Any]:
    deadline_s = time.monotonic() + WAIT_S
    while (row := serve_row(server))["swap"]["state"] not in states:
        assert time.monotonic() < deadline_s, row
        time.sleep(0.01)  # each look is a request; engines load meanwhile
    return row


class Streams:
    """Streams that have begun and are held by the engine in the middle of an answer."""

    def __init__(self, server: LiveApp) -> None:
        self.brake = Brake(server.worker._loop, "advance", after=12)
        self._pool = ThreadPoolExecutor(STREAMS)
        self._begun = threading.Barrier(STREAMS + 1)
        self._futures = [self._pool.submit(self._read, server) for _ in range(STREAMS)]
        self._begun.wait(WAIT_S)
        self.brake.wait()

    def _read(self, server: LiveApp) -> tuple[str, set[str]]:
        with connect(server.address) as sock:
            sock.sendall(post_bytes(CHAT, chat_body(stream=True, **LONG)))
            data = read_until(sock, b'"content"')
            self._begun.wait(WAIT_S)
            while not data.endswith(b"0\r\n\r\n"):
                part = sock.recv(65536)
                assert part, data
                data += part
        found = frames(unchunked(data.partition(b"\r\n\r\n")[2]))
        assert found[-1] == "[DONE]"
        return stream_text(found), {frame["model"] for frame in found[:-1]}

    def finish(self) -> list[tuple[str, set[str]]]:
        self.brake.free()
        return [future.result(WAIT_S) for future in self._futures]


def unchunked(data: bytes) -> bytes:
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        body, data = body + data[: int(size, 16)], data[int(size, 16) + 2 :]
    return body


def test_beside(server: LiveApp, texts: dict[str, str]) -> None:
    """New requests go to the new model at once, the old one ends what it began."""
    assert server.ask("GET", "/api/models/serve").json() == {
        "ok": True,
        "serve": {"model": "one", "ready": True, "swap": None},
    }
    streams = Streams(server)
    answer = swap_to(server, "two").json()
    assert answer["ok"] and answer["restart_required"] is False
    row = wait_swap(server, "draining")
    assert (row["model"], row["ready"], row["swap"]["way"]) == ("two", True, "beside")
    assert row["swap"]["answers_left"] == STREAMS
    assert server.ask("GET", "/ready").status == 200
    whole = server.chat(**LONG).json()
    assert whole["choices"][0]["message"]["content"] == texts["two"]
    assert whole["model"] == "two"
    assert server.ask("GET", "/v1/models").json()["data"][0]["id"] == "two"
    stats = server.ask("GET", "/stats").json()
    assert stats["server"]["model"] == "two"
    assert stats["leases"] == {"held": 1, "left": STREAMS}
    # Another change has to wait for this one.
    refused = swap_to(server, "one", 409)
    assert refused.error["code"] == "already_running"

    assert streams.finish() == [(texts["one"], {"one"})] * STREAMS
    row = wait_swap(server, "done")
    assert row["swap"]["answers_left"] == 0 and row["swap"]["finished_at"] is not None
    assert server.worker.state is EngineState.STOPPED
    served = {r["repo_id"]: r["serving"] for r in server.ask("GET", "/library").json()["models"]}
    assert served == {"one": False, "two": True, "cut": False, "odd": False}
    # The same once more is nothing to do; and back again.
    assert swap_to(server, "two").json()["serve"]["swap"]["state"] == "done"
    swap_to(server, "one")
    wait_swap(server, "done")
    assert server.chat(**LONG).text == texts["one"]


def test_in_turn(server: LiveApp, texts: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes meanwhile waits and is answered by the new model."""
    monkeypatch.setattr(swap_module, "_way", lambda model, old: "in turn")
    streams = Streams(server)
    swap_to(server, "two")
    row = wait_swap(server, "draining")
    assert (row["ready"], row["swap"]["answers_left"]) == (False, STREAMS)
    assert server.ask("GET", "/ready").json() == {"status": "loading"}
    assert server.ask("GET", "/health").status == 200
    assert server.batch()["active_rows"] == STREAMS
    assert server.ask("GET", "/metrics").status == 200
    with ThreadPoolExecutor(2) as pool:
        late = [pool.submit(server.chat, **LONG) for _ in range(2)]
        assert swap_to(server, "one", 409).error["code"] == "already_running"
        assert not any(each.done() for each in late)
        assert streams.finish() == [(texts["one"], {"one"})] * STREAMS
        for each in late:
            reply = each.result(WAIT_S).json()
            assert reply["choices"][0]["message"]["content"] == texts["two"]
            assert reply["model"] == "two"
    wait_swap(server, "done")
    assert server.ask("GET", "/ready").status == 200
    assert server.worker.state is EngineState.STOPPED


@pytest.mark.parametrize("way", ["beside", "in turn"])
@pytest.mark.parametrize("broken", ["cut", "odd"])
def test_a_model_that_does_not_load(
    server: LiveApp, texts: dict[str, str], monkeypatch: pytest.MonkeyPatch, way: str, broken: str
) -> None:
    """The old model stays or comes back, and whoever waits is answered by it."""
    monkeypatch.setattr(swap_module, "_way", lambda model, old: way)
    streams = Streams(server)
    swap_to(server, broken)
    with ThreadPoolExecutor(1) as pool:
        if way == "in turn":
            wait_swap(server, "draining")
        late = pool.submit(server.chat, **LONG)
        assert streams.finish() == [(texts["one"], {"one"})] * STREAMS
        row = wait_swap(server, "failed")
        assert late.result(WAIT_S).json()["model"] == "one"
        assert late.result().text == texts["one"]
    assert (row["model"], row["swap"]["model"]) == ("one", broken)
    assert row["swap"]["error"] and "/" not in row["swap"]["error"], "no path of this machine"
    deadline_s = time.monotonic() + WAIT_S
    while server.ask("GET", "/ready").status != 200:
        assert time.monotonic() < deadline_s
    assert server.ask("GET", "/v1/models").json()["data"][0]["id"] == "one"
    # It was no accident for good.
    swap_to(server, "two")
    wait_swap(server, "done")
    assert server.chat(**LONG).text == texts["two"]


def test_background_answers_are_waited_for(server: LiveApp) -> None:
    brake = Brake(server.worker._loop, "advance", after=6)
    body = {"input": "hello", "background": True, "max_output_tokens": 30, **LONG}
    made = server.ask("POST", "/v1/responses", body).json()
    brake.wait()
    swap_to(server, "two")
    assert wait_swap(server, "draining")["swap"]["answers_left"] == 1
    brake.free()
    wait_swap(server, "done")
    found = server.ask("GET", f"/v1/responses/{made['id']}").json()
    assert found["status"] in ("completed", "incomplete") and found["model"] == "one"


@pytest.mark.parametrize("way", ["beside", "in turn"])
def test_the_server_stops_meanwhile(home: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """In order: every engine ends, nobody hangs, nothing escapes into the loop."""
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(swap_module, "_way", lambda model, old: way)
    with LiveApp(home / "models" / "one", home=str(home)) as server:
        brake = Brake(server.worker._loop, "advance", after=6)
        with ThreadPoolExecutor(2) as pool:
            held = pool.submit(server.chat, **LONG)
            brake.wait()
            swap_to(server, "two")
            wait_swap(server, "draining")
            server.begin_stop()
            brake.free()
            assert held.result(WAIT_S).status in (200, 503)
        server.join()
    assert server.worker.state is EngineState.STOPPED


@pytest.mark.parametrize("name", ["three", "../models/two", "./two", "/etc", "", None, 3, "org/x"])
def test_names(server: LiveApp, name: Any) -> None:
    reply = server.ask("POST", "/api/models/serve", {"model": name})
    assert reply.status == (404 if name and isinstance(name, str) else 400)
    assert reply.error["param"] == "model"
    assert serve_row(server) == {"model": "one", "ready": True, "swap": None}


def test_served_name_belongs_to_the_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "hub"))
    with LiveApp(home / "models" / "one", home=str(home), served_name="mine") as server:
        for name, shown in (("two", "two"), ("one", "mine")):
            assert server.ask("POST", "/api/hub/serve", {"model": name}).status == 202
            wait_swap(server, "done")
            assert server.chat().json()["model"] == shown
            rows = server.ask("GET", "/v1/models").json()["data"]
            assert rows[0]["id"] == shown and len(rows) == 4


def test_a_model_from_outside_can_be_returned_to(
    tiny_folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "hub"))
    with LiveApp(tiny_folder, home=str(home)) as server:
        for name in ("two", "tiny"):
            swap_to(server, name)
            wait_swap(server, "done")
            assert server.chat().json()["model"] == name
        listed = server.ask("GET", "/library").json()["models"]
        assert {row["repo_id"]: row["serving"] for row in listed}["tiny"] is True
        assert str(tiny_folder) not in json.dumps(listed)


def test_a_model_that_came_by_a_link(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "hub"))
    link = tmp_path / "link"
    link.symlink_to(home / "models" / "one")
    with LiveApp(link, home=str(home), served_name="mine") as server:
        listed = server.ask("GET", "/library").json()["models"]
        assert [row["repo_id"] for row in listed if row["serving"]] == ["one"]
        assert [row["id"] for row in server.ask("GET", "/v1/models").json()["data"]] == [
            "mine", "cut", "odd", "two"
        ]  # fmt: skip
        swap_to(server, "one")
        assert serve_row(server) == {"model": "mine", "ready": True, "swap": None}


def test_the_way_is_chosen_by_arithmetic(home: Path) -> None:
    """Beside where both fit, with what the old one holds; else in turn; or never."""
    model = library.describe(home / "models" / "two", "two")
    found = library.fit_of(model, fit.machine("cpu"))
    needed = found.total_bytes(1024)
    held = 50_000_000
    facts = ModelFacts("llama", "cpu", "float32", held - 10_000_000, 1024, 512)
    admission = {"rows_bytes": 6_000_000, "kept_bytes": 4_000_000}
    engine = SimpleNamespace(facts=facts, stats=lambda: {"admission": admission})

    def way(budget_bytes: float, is_ready: bool = True) -> str:
        settings = Settings(memory_budget=budget_bytes / 1e9)
        old: Any = SimpleNamespace(engine=engine, settings=settings, is_ready=is_ready)
        return swap_module._way(model, old)

    assert way(held + needed + 10) == "beside"
    assert way(held + needed - 10) == "in turn"
    assert way(held + needed - 10, is_ready=False) == "beside"  # nothing is held
    with pytest.raises(BadRequest, match="GB at least"):
        way(found.least_bytes - 10)


def test_too_late_to_cancel(server: LiveApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the new model serves alone nothing goes back."""
    monkeypatch.setattr(swap_module, "_way", lambda model, old: "beside")
    held, go_on = threading.Event(), threading.Event()
    stop = swap_module.Swaps._stop

    async def slow(self: Any, engine: Any) -> None:
        held.set()
        assert await asyncio.to_thread(go_on.wait, WAIT_S)
        await stop(self, engine)

    monkeypatch.setattr(swap_module.Swaps, "_stop", slow)
    swap_to(server, "two")
    assert held.wait(WAIT_S)
    assert serve_row(server)["swap"]["state"] == "stopping"
    reply = server.ask("DELETE", "/api/hub/serve")
    assert (reply.status, reply.error["code"]) == (409, "too_late")
    go_on.set()
    assert wait_swap(server, "done")["model"] == "two"
    swap_to(server, "one")
    wait_swap(server, "done")


def count_engines() -> int:
    return sum(thread.name == "mlxlite-engine" for thread in threading.enumerate())


@pytest.mark.parametrize("way", ["beside", "in turn"])
@pytest.mark.parametrize("is_late", [False, True], ids=["while loading", "while draining"])
def test_cancelled(
    server: LiveApp, texts: dict[str, str], monkeypatch: pytest.MonkeyPatch, way: str, is_late: bool
) -> None:
    """The old model goes on and answers those that wait, too; nothing is cut off."""
    monkeypatch.setattr(swap_module, "_way", lambda model, old: way)
    assert server.ask("DELETE", "/api/models/serve").status == 404
    held, go_on = threading.Event(), threading.Event()
    start = launch.start_engine

    def slow(settings: Settings, model: Any) -> Any:
        engine = start(settings, model)
        if model.name == "two" and not is_late:
            held.set()
            assert go_on.wait(WAIT_S)
        return engine

    monkeypatch.setattr(launch, "start_engine", slow)
    n_engines = count_engines()
    streams = Streams(server)
    swap_to(server, "two")
    with ThreadPoolExecutor(1) as pool:
        if is_late or way == "in turn":
            wait_swap(server, "draining")
        late = pool.submit(server.chat, **LONG)
        if is_late:
            expected = "two" if way == "beside" else "one"  # whose turn it was when it came
            if way == "beside":
                late.result(WAIT_S)
            else:  # it waits; the look itself is another one
                deadline_s = time.monotonic() + WAIT_S
                while server.ask("GET", "/stats").json()["leases"]["held"] < 2:
                    assert time.monotonic() < deadline_s
                    time.sleep(0.01)  # a server on a thread of its own tells of no changes
        else:
            expected = "one"
            if way == "in turn":
                streams.brake.free()
            assert held.wait(WAIT_S)
        reply = server.ask("DELETE", "/api/models/serve")
        assert (reply.status, reply.json()["serve"]["swap"]["state"]) == (202, "cancelling")
        if not is_late:  # else it may be over by now
            assert swap_to(server, "two", 409).error["code"] == "already_running"
        go_on.set()
        assert streams.finish() == [(texts["one"], {"one"})] * STREAMS
        row = wait_swap(server, "cancelled")
        assert late.result(WAIT_S).json()["model"] == expected
        assert late.result().text == texts[expected]
    assert (row["model"], row["ready"], row["swap"]["error"]) == ("one", True, None)
    assert row["swap"]["finished_at"] is not None and row["swap"]["answers_left"] == 0
    assert count_engines() == n_engines
    assert server.chat(**LONG).text == texts["one"]
    assert server.ask("DELETE", "/api/models/serve").status == 404
    swap_to(server, "two")
    wait_swap(server, "done")
    assert server.chat(**LONG).text == texts["two"]
