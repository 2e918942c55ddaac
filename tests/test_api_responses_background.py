"""Responses in the background: jobs that nobody waits for, asked for, followed, cancelled."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxlite import background
from mlxlite.errors import EngineFault
from mlxlite.types import Finish
from tests.live import WAIT_S, Brake, connect, post_bytes, read_until
from tests.responses import (
    _RESPONSE,
    BROKEN,
    QUEUED,
    RESPONSES,
    plain,
    post,
    read,
    shape,
    streamed,
    words,
)
from tests.scripted import QWEN, ScriptedApp

pytestmark = pytest.mark.slow


@pytest.fixture
def app(tiny_folder: Path, tmp_path: Path) -> Iterator[ScriptedApp]:
    with ScriptedApp(tiny_folder, QWEN, home=str(tmp_path)) as app:
        yield app


def get(app: ScriptedApp, path: str, method: str = "GET") -> dict[str, Any]:
    reply = app.ask(method, f"{RESPONSES}/{path}")
    assert reply.status == 200, reply.body
    found: dict[str, Any] = reply.json()
    return found


def wait_for(app: ScriptedApp, response_id: str, *statuses: str) -> dict[str, Any]:
    """Ask until it is so."""
    deadline_s = time.monotonic() + WAIT_S
    while (found := get(app, response_id))["status"] not in statuses:
        assert time.monotonic() < deadline_s, found
    _RESPONSE.validate_python(found)
    return found


def entries(app: ScriptedApp) -> int:
    found: int = app.ask("GET", "/stats").json()["response_store"]["entries"]
    return found


def test_a_job(app: ScriptedApp) -> None:
    """At once an id, in time the answer, then it is stored like any other."""
    app.engine.says("the quick brown fox")
    submits = Brake(app.engine, "_deliver")
    job = plain(app, background=True)
    assert (job["status"], job["output"], job["background"]) == ("queued", [], True)
    submits.wait()
    assert get(app, job["id"])["status"] == "queued"
    assert get(app, f"{job['id']}/input_items")["data"][0]["content"][0]["text"] == "hello world"
    assert post(app, previous_response_id=job["id"]).status == 404  # there is nothing yet
    submits.free()
    found = wait_for(app, job["id"], "completed")
    assert found["output"][0]["content"][0]["text"] == "the quick brown fox"
    assert {name: found[name] for name in ("id", "created_at", "model")} == {
        name: job[name] for name in ("id", "created_at", "model")
    }
    assert entries(app) == 1
    assert plain(app, previous_response_id=job["id"])["status"] == "completed"
    assert get(app, f"{job['id']}/cancel", "POST")["status"] == "completed"  # too late
    assert app.ask("GET", f"{RESPONSES}/{job['id']}?stream=true").status == 400


def test_cancel(app: ScriptedApp) -> None:
    app.engine.says("never ending")
    app.engine.is_endless = True
    job = plain(app, background=True)
    wait_for(app, job["id"], "in_progress")
    assert entries(app) == 0
    for _ in range(2):  # a second time changes nothing
        found = get(app, f"{job['id']}/cancel", "POST")
        assert found["status"] == "cancelled"
    assert app.engine.cancelled == [41]
    assert get(app, job["id"]) == found and found["output"][0]["status"] == "incomplete"
    assert entries(app) == 0
    assert post(app, previous_response_id=job["id"]).status == 404


def test_cancel_in_the_queue(app: ScriptedApp) -> None:
    app.engine.is_endless = True
    job = plain(app, background=True)
    assert app.client.responses.cancel(job["id"]).status == "cancelled"
    assert app.client.responses.retrieve(job["id"]).output == []
    assert app.engine.cancelled == [41]


def test_delete(app: ScriptedApp) -> None:
    app.engine.is_endless = True
    job = plain(app, background=True)
    assert get(app, job["id"], "DELETE")["deleted"] is True
    assert app.engine.cancelled == [41]
    assert app.ask("GET", f"{RESPONSES}/{job['id']}").status == 404


def test_a_failure(app: ScriptedApp) -> None:
    app.engine.says("half", 1, Finish.ERROR)
    app.engine.error = EngineFault("the step failed")
    job = plain(app, background=True)
    found = wait_for(app, job["id"], "failed")
    assert found["error"] == {"code": "server_error", "message": "the step failed"}
    assert [shape(item) for item in found["output"]] == [("message", "half")]
    assert get(app, f"{job['id']}/cancel", "POST") == found
    assert entries(app) == 0


def test_its_stream(app: ScriptedApp) -> None:
    app.engine.says("one two")
    events = streamed(app, background=True)
    assert QUEUED.fullmatch(words(events)), words(events)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["response"]["status"] for event in events[:3]] == [
        "queued",
        "queued",
        "in_progress",
    ]
    assert get(app, events[-1]["response"]["id"]) == events[-1]["response"]


def test_the_job_goes_on_without_its_reader(app: ScriptedApp) -> None:
    """And another one may follow it, from any event on."""
    app.engine.says("one two three")
    ends = Brake(app.engine, "_done")
    sock = connect(app.address)
    sock.sendall(post_bytes(RESPONSES, {"input": "x", "background": True, "stream": True}))
    data = read_until(sock, b"event: response.output_text.delta").decode()
    sock.close()
    response_id = "resp_" + data.partition('"id":"resp_')[2][:24]
    ends.wait()
    first = connect(app.address)
    head = f"GET {RESPONSES}/{response_id}?stream=true&starting_after=1 HTTP/1.1\r\nHost: localhost"
    first.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode())
    read_until(first, b"event: response.output_text.delta")
    reply = app.ask("GET", f"{RESPONSES}/{response_id}?stream=true&starting_after=x")
    assert reply.status == 400 and reply.error["param"] == "starting_after"
    ends.free()
    read_until(first, b"event: response.completed")
    first.close()
    found = wait_for(app, response_id, "completed")
    assert found["output"][0]["content"][0]["text"] == "one two three"
    assert app.engine.cancelled == []


def test_the_stream_of_a_cancelled_job(app: ScriptedApp) -> None:
    """It has an end that no client takes for success."""
    app.engine.says("one")
    app.engine.is_endless = True
    job = plain(app, background=True)
    wait_for(app, job["id"], "in_progress")
    get(app, f"{job['id']}/cancel", "POST")
    events = read(app.ask("GET", f"{RESPONSES}/{job['id']}?stream=true").body)
    assert BROKEN.fullmatch(words(events).replace("queued ", "")), words(events)
    assert events[-1]["response"]["status"] == "cancelled"
    assert events[-1]["response"]["error"]["message"] == "the response was cancelled"
    tail = read(app.ask("GET", f"{RESPONSES}/{job['id']}?stream=true&starting_after=2").body)
    assert tail == events[3:]


def test_jobs_that_failed_are_forgotten_in_time(
    app: ScriptedApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "MOST_ENDED", 2)
    app.engine.is_endless = True
    running = plain(app, background=True)["id"]
    ended = [plain(app, background=True)["id"] for _ in range(4)]
    for response_id in ended:
        get(app, f"{response_id}/cancel", "POST")
    statuses = [app.ask("GET", f"{RESPONSES}/{response_id}").status for response_id in ended]
    assert statuses == [404, 404, 200, 200]
    assert get(app, running)["status"] == "queued"


def test_the_server_stops(app: ScriptedApp) -> None:
    """A job does not hold it; `close` fails if anything escaped."""
    app.engine.is_endless = True
    plain(app, background=True)
    app.close()
