"""The library, imports by upload, and gc, over HTTP."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxlite import uploads
from mlxlite.models import catalogue, download
from mlxlite.models.gguf_file import read_gguf
from tests import tiny
from tests.gguf_writer import tiny_gguf
from tests.live import LiveApp, Reply
from tests.test_gc import Cache

pytestmark = pytest.mark.slow

WAIT_S = 30.0


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "home"


@pytest.fixture
def server(tiny_folder: Path, home: Path) -> Iterator[LiveApp]:
    with LiveApp(tiny_folder, home=str(home)) as running:
        yield running


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return tiny_gguf(tmp_path / "Tiny Chat.Q4_1.gguf", "llama", "Q4_1")[0]


# ----------------------------------------------------------------------------------- library


def test_library(home: Path, tiny_folder: Path) -> None:
    """Whole models alone, each with what fits; a broken folder hides no other."""
    models = home / "models"
    small = tiny.make_model(models / "small")
    broken = {
        "no-config": lambda f: (f / "config.json").unlink(),
        "bad-config": lambda f: (f / "config.json").write_text("{"),
        "list-config": lambda f: (f / "config.json").write_text("[]"),
        "no-weights": lambda f: (f / "model.safetensors").unlink(),
        "no-shard": lambda f: (f / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": "../../x.safetensors"}})
        ),
    }
    for name, breaks in broken.items():
        shutil.copytree(small, models / name)
        breaks(models / name)
    shutil.copytree(small, models / "no-sizes")
    (models / "no-sizes" / "config.json").write_text('{"model_type": "strange"}')
    (models / "file").write_text("x")
    (models / ".partial").mkdir()
    with LiveApp(small, home=str(home)) as server:
        found = server.ask("GET", "/library").json()
        rows = {row["repo_id"]: row for row in found["models"]}
        assert sorted(rows) == ["no-sizes", "small"]
        row = rows["small"]
        assert row["serving"] and not rows["no-sizes"]["serving"]
        assert (row["model_type"], row["quant_bits"], row["supported"]) == ("llama", None, True)
        assert row["size_bytes"] == (small / "model.safetensors").stat().st_size
        assert (row["max_context"], row["chat"], row["vision"]) == (1024, True, False)
        fits = row["assessment"]
        assert fits["fits"] and fits["max_safe_context"] == 1024
        assert fits["total_bytes"] < fits["usable_bytes"]
        assert not rows["no-sizes"]["supported"]
        names = [entry["name"] for entry in found["catalogue"]]
        assert names == list(catalogue.CATALOGUE) and not found["catalogue"][0]["local"]
        assert found["disk_free_bytes"] > 0
        assert str(home) not in json.dumps(found), "no path of this machine"
        # Remembered, until somebody asks for a fresh look.
        tiny.make_model(models / "later")
        for path, shown in (("/library", False), ("/api/hub/local?refresh=1", True)):
            listed = server.ask("GET", path).json()["models"]
            assert ("later" in {row["repo_id"] for row in listed}) is shown


# ----------------------------------------------------------------------------------- imports


def begin(server: LiveApp, path: Path, **other: Any) -> Reply:
    body = {"name": path.name, "size": path.stat().st_size, "modified": 1_700_000_000_000}
    return server.ask("POST", "/api/imports", {**body, **other})


def put(server: LiveApp, upload_id: str, offset: Any, piece: bytes) -> Reply:
    return server.ask("PUT", f"/api/imports/{upload_id}?offset={offset}", piece)


def wait_done(server: LiveApp) -> dict[str, Any]:
    deadline_s = time.monotonic() + WAIT_S
    while (row := server.ask("GET", "/downloads").json()["downloads"][0])["state"] == "running":
        assert time.monotonic() < deadline_s, row
        time.sleep(0.05)  # each look is a request; the child must get the processor
    found: dict[str, Any] = row
    return found


def test_import_in_pieces(server: LiveApp, gguf: Path, home: Path) -> None:
    """Sent in pieces, over a break, imported, listed, served."""
    content = gguf.read_bytes()
    upload = begin(server, gguf).json()["upload"]
    assert (upload["offset"], upload["size"]) == (0, len(content))
    third = len(content) // 3
    assert put(server, upload["id"], 0, content[:third]).json()["upload"]["offset"] == third
    again = begin(server, gguf).json()["upload"]
    assert (again["id"], again["offset"]) == (upload["id"], third)
    wrong = put(server, upload["id"], 5, content[5:])
    assert (wrong.status, wrong.error["code"]) == (409, "wrong_offset")
    assert str(third) in wrong.error["message"]
    listed = server.ask("GET", "/downloads").json()["uploads"]
    assert [(row["name"], row["offset"]) for row in listed] == [(gguf.name, third)]
    last = put(server, upload["id"], third, content[third:]).json()
    assert last["download"]["kind"] == "import"
    row = wait_done(server)
    assert (row["state"], row["model"]) == ("done", "tiny-chat.q4_1")
    assert list((home / "uploads").iterdir()) == []
    (model,) = [
        m
        for m in server.ask("GET", "/library").json()["models"]
        if m["repo_id"] == "tiny-chat.q4_1"
    ]
    assert (model["source"], model["quant_bits"]) == (f"upload:{gguf.name}", 4)
    assert server.ask("POST", "/api/models/serve", {"model": "tiny-chat.q4_1"}).status == 202
    deadline_s = time.monotonic() + WAIT_S
    while server.chat().json()["model"] != "tiny-chat.q4_1":
        assert time.monotonic() < deadline_s
    # Other bytes of the same name get a name of their own.
    (gguf.parent / "b").mkdir()
    other = tiny_gguf(gguf.parent / "b" / gguf.name, "qwen2", "Q4_0")[0]
    upload = begin(server, other).json()["upload"]
    put(server, upload["id"], 0, other.read_bytes())
    row = wait_done(server)
    assert row["state"] == "done" and row["model"].startswith("tiny-chat.q4_1-")


def test_an_upload_outlives_the_server(tiny_folder: Path, home: Path, gguf: Path) -> None:
    content = gguf.read_bytes()
    with LiveApp(tiny_folder, home=str(home)) as server:
        upload = begin(server, gguf).json()["upload"]
        put(server, upload["id"], 0, content[:1000])
    with LiveApp(tiny_folder, home=str(home)) as server:
        assert put(server, upload["id"], 1000, b"x").status == 404  # not begun here
        assert begin(server, gguf).json()["upload"]["offset"] == 1000
        assert server.ask("DELETE", f"/api/imports/{upload['id']}").status == 200
        assert begin(server, gguf).json()["upload"]["offset"] == 0
    stale = home / "uploads" / ("0" * 24 + ".gguf")
    stale.write_bytes(b"x")
    os.utime(stale, (0, 0))
    with LiveApp(tiny_folder, home=str(home)) as server:
        begin(server, gguf)
        assert not stale.exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"MZ" + b"\0" * 5000, "not a GGUF file"),
        (b"GGUF" + b"\xff" * 5000, "version"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 5000, ""),
        (b"\0" * 5000, "not a GGUF file"),
    ],
)
def test_what_is_no_gguf_is_refused(
    server: LiveApp, tmp_path: Path, home: Path, content: bytes, reason: str
) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    upload = begin(server, path).json()["upload"]
    reply = put(server, upload["id"], 0, content)
    assert (reply.status, reply.error["param"]) == (400, "file")
    assert reason in reply.error["message"] and str(home) not in reply.error["message"]
    assert list((home / "uploads").iterdir()) == []
    assert server.ask("GET", "/downloads").json() == {"ok": True, "downloads": [], "uploads": []}


def test_refused_after_its_first_bytes(server: LiveApp, gguf: Path) -> None:
    """Not after gigabytes: a wrong beginning at once, what cannot be imported by its header."""
    upload = begin(server, gguf, size=10**9).json()["upload"]
    reply = put(server, upload["id"], 0, b"PK\x03\x04" + b"\0" * 100)
    assert reply.status == 400 and "does not begin with GGUF" in reply.error["message"]
    assert server.ask("DELETE", f"/api/imports/{upload['id']}").status == 404


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"a kind": ""}, "'blk.0.attn_v.weight' is stored as IQ4_NL, which is not supported"),
        ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken' is not supported"),
    ],
)
def test_refused_by_its_header(
    server: LiveApp, tmp_path: Path, home: Path, changes: dict[str, str], reason: str
) -> None:
    """As soon as the header is whole and not before; a good one is not, though weights that its
    plan looks at (rope_freqs, the last ones here) are still to come."""
    path = tiny_gguf(tmp_path / "m.gguf", "llama", "Q4_0", changes, rope_freqs=[1.0] * 32)[0]
    with read_gguf(path) as file:
        header_bytes = min(entry.start for entry in file.tensors.values())
    content = path.read_bytes()
    if "a kind" in changes:  # Q4_0 and IQ4_NL have blocks of the same size
        at = content.index(b"blk.0.attn_v.weight") + 19 + 4 + 16
        content = content[:at] + b"\x14" + content[at + 1 :]
    upload = begin(server, path).json()["upload"]
    for start, stop in ((0, 3), (3, 1000), (1000, header_bytes - 40)):
        assert put(server, upload["id"], start, content[start:stop]).status == 200
    reply = put(server, upload["id"], stop, content[stop:header_bytes])
    if not reason:
        assert reply.status == 200
        assert put(server, upload["id"], header_bytes, content[header_bytes:]).status == 200
        return
    assert (reply.status, reply.error["param"]) == (400, "file")
    assert reason in reply.error["message"] and str(home) not in reply.error["message"]
    assert list((home / "uploads").iterdir()) == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"name": "../x.gguf"}, "name"),
        ({"name": "/etc/x.gguf"}, "name"),
        ({"name": "a\\b.gguf"}, "name"),
        ({"name": "x.bin"}, "name"),
        ({"name": ".gguf"}, "name"),
        ({"name": None}, "name"),
        ({"name": "a\n.gguf"}, "name"),
        ({"size": -1}, "size"),
        ({"size": True}, "size"),
        ({"size": 1 << 50}, "size"),
        ({"size": "9"}, "size"),
        ({"modified": "now"}, "modified"),
    ],
)
def test_bad_uploads(server: LiveApp, gguf: Path, body: dict[str, Any], param: str) -> None:
    reply = begin(server, gguf, **body)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_bad_pieces(server: LiveApp, gguf: Path) -> None:
    upload = begin(server, gguf).json()["upload"]
    for offset in ("", "-1", "x", "1e3", "9" * 20):
        assert put(server, upload["id"], offset, b"x").error["param"] == "offset"
    assert put(server, upload["id"], 0, b"").status == 400
    assert put(server, upload["id"], 0, gguf.read_bytes() + b"x").error["param"] == "size"
    assert put(server, "..%2f..%2fx", 0, b"x").status == 404
    assert server.ask("DELETE", "/api/imports/nobody").status == 404


def test_a_full_disk(
    server: LiveApp, gguf: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clear message, nothing lost; it goes on when there is room."""
    content = gguf.read_bytes()
    usage = shutil.disk_usage
    with monkeypatch.context() as patch:
        patch.setattr(download.shutil, "disk_usage", lambda path: usage(path)._replace(free=10))
        reply = begin(server, gguf)
        assert (reply.status, reply.error["code"]) == (507, "disk_full")
        assert "needed" in reply.error["message"] and str(home) not in reply.error["message"]
    upload = begin(server, gguf).json()["upload"]
    put(server, upload["id"], 0, content[:1000])
    with monkeypatch.context() as patch:

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(uploads.os, "truncate", lambda path, size: None)
        patch.setattr(uploads, "open", full, raising=False)
        reply = put(server, upload["id"], 1000, content[1000:])
        assert (reply.status, reply.error["code"]) == (507, "disk_full")
        assert "No space left" in reply.error["message"]
    assert begin(server, gguf).json()["upload"]["offset"] == 1000
    put(server, upload["id"], 1000, content[1000:])
    assert wait_done(server)["state"] == "done"


# ---------------------------------------------------------------------------------------- gc


def test_gc(server: LiveApp, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "hub")
    cache.add("new", {"model.safetensors": "b1"})
    cache.add("old", {"model.safetensors": "b0"})
    cache.ref("new")
    cache.age()
    plan = server.ask("GET", "/api/gc/plan").json()
    assert plan == {
        "ok": True,
        "superseded": [
            {
                "repo_id": "org/a",
                "prune_snapshots": ["old"],
                "skipped_snapshots": [],
                "dead_blobs": 1,
                "reclaim_bytes": 200,
            }
        ],
        "reclaim_bytes": 200,
    }
    for body in ({}, {"yes": False}, {"yes": "true"}, {"yes": 1}):
        reply = server.ask("POST", "/api/gc/execute", body)
        assert (reply.status, reply.error["param"]) == (400, "yes")
    assert server.ask("GET", "/api/gc/plan").json() == plan
    done = server.ask("POST", "/api/gc/execute", {"yes": True}).json()
    assert done == {"ok": True, "snapshots": 1, "blobs": 1, "reclaimed_bytes": 200}
    assert server.ask("GET", "/api/gc/plan").json()["superseded"] == []


def test_the_key_guards_all_of_it(tiny_folder: Path, home: Path) -> None:
    with LiveApp(tiny_folder, home=str(home), api_key="k") as server:
        for method, path in (
            ("GET", "/library"), ("GET", "/downloads"), ("POST", "/downloads"),
            ("DELETE", "/downloads/dl_1"), ("POST", "/api/imports"), ("PUT", "/api/imports/x"),
            ("POST", "/api/hub/search"), ("POST", "/api/models/serve"), ("GET", "/api/gc/plan"),
            ("POST", "/api/gc/execute"), ("GET", "/api/settings/hf-token"),
        ):  # fmt: skip
            assert server.ask(method, path).status == 401
