"""What the server says about itself, and how every route behaves: methods, paths, keys, guards.

Also the engine's ends: not loaded yet, stopping, dead. Each of those takes a server of its own.
"""

from __future__ import annotations

import gc
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mlxlite import __version__, app
from mlxlite.engine import load
from mlxlite.engine import loop as loop_module
from mlxlite.errors import MlxliteError, ModelError
from mlxlite.http.listen import bind_unix
from mlxlite.types import EngineState
from tests.live import (
    CHAT,
    WAIT_S,
    Brake,
    LiveApp,
    ask,
    chat_body,
    connect,
    frames,
    read_until,
    stream_text,
)

pytestmark = pytest.mark.slow

GETS = ["/health", "/ready", "/stats", "/v1", "/v1/models"]


# ------------------------------------------------------------------------------ what it says


def test_health_and_ready(tiny_server: LiveApp) -> None:
    health = tiny_server.ask("GET", "/health")
    assert (health.status, health.body) == (200, b'{"status":"ok"}')
    assert tiny_server.ask("GET", "/ready").status == 200


def test_models(tiny_server: LiveApp) -> None:
    listed = tiny_server.ask("GET", "/v1/models").json()
    assert listed["object"] == "list"
    (row,) = listed["data"]
    assert (row["id"], row["object"], row["owned_by"]) == (tiny_server.name, "model", "mlxlite")
    assert (row["context_window"], row["model_type"], row["dtype"]) == (1024, "llama", "float32")
    assert tiny_server.ask("GET", f"/v1/models/{tiny_server.name}").json() == row


@pytest.mark.parametrize("wanted", ["gpt-4", "org/name", "tiny/x", "TINY", "%2e%2e%2fetc"])
def test_unknown_models(tiny_server: LiveApp, wanted: str) -> None:
    reply = tiny_server.ask("GET", f"/v1/models/{wanted}")
    assert reply.status == 404
    assert (reply.error["code"], reply.error["type"]) == (
        "model_not_found",
        "invalid_request_error",
    )


def test_served_name_with_slashes(tiny_folder: Path) -> None:
    with LiveApp(tiny_folder, served_name="org/name:4b") as server:
        (row,) = server.ask("GET", "/v1/models").json()["data"]
        assert row["id"] == "org/name:4b"
        for path in ("/v1/models/org/name:4b", "/v1/models/org%2Fname%3A4b"):
            assert server.ask("GET", path).json() == row
        assert server.chat(model="x").json()["model"] == "org/name:4b"


def test_model_row(tiny_server: LiveApp, tiny_folder: Path) -> None:
    (row,) = tiny_server.ask("GET", "/v1/models").json()["data"]
    assert row["context_window"] == 1024 and row["batch_mode"] == "batch"
    names = ("reasoning", "tools", "vision", "audio", "structured_output", "embeddings", "rerank")
    assert row["capabilities"] == {**dict.fromkeys(names, False), "structured_output": True}
    assert row["gen_defaults"] == {"temperature": 0.7, "top_p": None, "top_k": None}
    template = tiny_folder.parent / "able.jinja"
    template.write_text("{{ tools }}<think>{{ messages }}</think>")
    flags = {"chat_template": str(template), "temperature": "0.3", "top_k": "9"}
    with LiveApp(tiny_folder, **flags, grammar="off") as server:
        row = server.ask("GET", f"/v1/models/{server.name}").json()
        assert not row["structured_output"]
        assert row["reasoning"] and row["tools"] and not row["vision"]
        assert row["gen_defaults"] == {"temperature": 0.3, "top_p": None, "top_k": 9}


def test_fingerprint(tiny_server: LiveApp, tiny_folder: Path) -> None:
    """Stable over requests and surfaces; another model name gives another."""
    first = tiny_server.chat().json()["system_fingerprint"]
    body = {"prompt": "a", "max_tokens": 1}
    assert tiny_server.ask("POST", "/v1/completions", body).json()["system_fingerprint"] == first
    with LiveApp(tiny_folder) as server:
        assert server.chat().json()["system_fingerprint"] == first
    with LiveApp(tiny_folder, served_name="other") as server:
        assert server.chat().json()["system_fingerprint"] != first


def test_about_and_stats(tiny_server: LiveApp) -> None:
    about = tiny_server.ask("GET", "/v1").json()
    assert (about["name"], about["version"]) == ("mlxlite", __version__)
    paths = [path.replace(":path", "") for _, path, _ in app.ROUTES]
    assert about["endpoints"] == list(dict.fromkeys(paths))

    before = tiny_server.batch()
    usage = tiny_server.chat().json()["usage"]
    stats = tiny_server.ask("GET", "/stats").json()
    batch = stats["batch"]
    assert batch["active_rows"] == batch["pending_rows"] == 0
    assert batch["completed_rows"] == before["completed_rows"] + 1
    assert batch["generated_tokens"] - before["generated_tokens"] == usage["completion_tokens"]
    assert stats["server"]["model"] == tiny_server.name
    assert stats["http"]["requests_total"] > 2
    assert (batch["mode"], batch["configured"]) == ("batch", 8)
    assert stats["prompt_cache"] == batch["prompt_cache"] and "hits" in stats["prompt_cache"]
    assert stats["admission"]["max_safe_context"] == 1024
    assert stats["admission"]["weights_bytes"] > 0 and stats["kv_quant"] == {"mode": "off"}


def test_start_lines(tiny_server: LiveApp) -> None:
    first, second = tiny_server.lines
    for word in (tiny_server.url + "/v1", tiny_server.name, "cpu", "float32", "context 1024"):
        assert word in first
    assert second.startswith(f"try: curl {tiny_server.url}/v1/chat/completions ")
    assert "all other addresses" not in first


@pytest.mark.parametrize(("host", "shown"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]")])
def test_start_lines_of_all_addresses(tiny_folder: Path, host: str, shown: str) -> None:
    """A URL that a client can use, and that others can come in too."""
    try:
        running = LiveApp(tiny_folder, host=host)
    except MlxliteError:
        pytest.skip("no IPv6 here")
    with running:
        url = f"http://{shown}:{running.address[1]}/v1"
        first, second = running.lines
        assert f" at {url} and at all other addresses of this machine | model " in first
        assert second.startswith(f"try: curl {url}/chat/completions ")
        address = (shown.strip("[]"), running.address[1])
        assert ask(address, "GET", "/v1").status == 200


# -------------------------------------------------------------------------------- every route


@pytest.mark.parametrize("path", GETS)
def test_paths_and_methods(tiny_server: LiveApp, path: str) -> None:
    whole = tiny_server.ask("GET", path)
    assert whole.status == 200 and whole.headers["content-type"] == "application/json"
    for other in (path + "/", path + "?beta=true", path + "/?a=b&a=c"):
        assert tiny_server.ask("GET", other).status == 200
    head = tiny_server.ask("HEAD", path)
    assert (head.status, head.body) == (200, b"")
    assert int(head.headers["content-length"]) > 10
    options = tiny_server.ask("OPTIONS", path)
    assert (options.status, options.headers["allow"]) == (204, "GET, HEAD, OPTIONS")
    wrong = tiny_server.ask("POST", path, {})
    assert (wrong.status, wrong.headers["allow"]) == (405, "GET, HEAD, OPTIONS")
    assert wrong.error["type"] == "invalid_request_error"


def test_chat_path(tiny_server: LiveApp) -> None:
    text = tiny_server.chat().text
    for path in (CHAT + "?beta=true", CHAT + "/", CHAT + "/?x"):
        assert tiny_server.ask("POST", path, chat_body()).text == text
    for method in ("GET", "HEAD", "PUT", "DELETE"):
        reply = tiny_server.ask(method, CHAT)
        assert (reply.status, reply.headers["allow"]) == (405, "OPTIONS, POST")
    for path in ("/x", "/v1/chat", "/v2/models", "/v1/complete", "/tokenizer_info"):
        reply = tiny_server.ask("GET", path)
        assert reply.status == 404 and reply.error["message"] == f"no such path: {path}"


def test_every_answer_has_an_id(tiny_server: LiveApp) -> None:
    replies = [
        tiny_server.ask("GET", "/health"),
        tiny_server.ask("GET", "/nowhere"),
        tiny_server.ask("PUT", "/health"),
        tiny_server.ask("OPTIONS", CHAT),
        tiny_server.ask("POST", CHAT, b"{"),
        tiny_server.chat(temperature=-1),
        tiny_server.chat(),
        tiny_server.chat(stream=True),
        tiny_server.ask("GET", "/health", headers={"Host": "evil.test"}),
        tiny_server.ask("POST", CHAT, headers={"Content-Length": "99999999999"}),
    ]
    ids = [reply.headers["x-request-id"] for reply in replies]
    assert all(ids) and len(set(ids)) == len(ids)


def test_guards(tiny_server: LiveApp) -> None:
    """A page of another site gets nothing (F86, F87); programs pass."""

    def status(path: str = "/v1/models", **headers: str) -> int:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        reply = tiny_server.ask("GET", path, headers=named)
        assert not [name for name in reply.headers if name.startswith("access-control-")]
        return reply.status

    port = tiny_server.address[1]
    assert status(Host=f"a.test:{port}") == 403
    assert status("/health", Host="a.test") == 403
    assert status(Host=f"localhost:{port}") == status(Host="127.0.0.1") == 200
    assert status(Origin="https://a.test") == status(Origin="null") == 403
    assert status(Origin=f"http://127.0.0.1:{port}") == 200
    assert status(sec_fetch_mode="cors") == 200  # Node sends it without an Origin
    preflight = {"Origin": "https://a.test", "Access-Control-Request-Method": "POST"}
    assert tiny_server.ask("OPTIONS", CHAT, headers=preflight).status == 403
    assert tiny_server.chat().status == 200


def test_key_and_configured_guards(tiny_folder: Path) -> None:
    with LiveApp(
        tiny_folder, api_key="sécret", cors_origin=["https://a.test"], allow_host=["b.test"]
    ) as server:

        def status(method: str, path: str, body: Any = None, **headers: str) -> int:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return server.ask(method, path, body, named).status

        key = "sécret".encode().decode("latin-1")
        for path in ("/health", "/ready"):
            assert status("GET", path) == 200
        for path in ("/stats", "/v1", "/v1/models", "/v1/models/x", "/nowhere"):
            assert status("GET", path) == 401
            assert status("GET", path, x_api_key=key) in (200, 404)
        for path in (CHAT, CHAT + "/"):
            assert status("POST", path, chat_body()) == 401
            assert status("POST", path, chat_body(), Authorization="Bearer wrong") == 401
            assert status("POST", path, chat_body(), Authorization=f"Bearer {key}") == 200
        refused = server.ask("GET", "/v1/models")
        assert refused.error["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"
        assert "YOUR_KEY" in server.lines[1] and "cret" not in server.lines[1]

        preflight = {"Origin": "https://a.test", "Access-Control-Request-Method": "POST"}
        reply = server.ask("OPTIONS", CHAT, headers=preflight)  # needs no key (F82)
        assert reply.status == 204
        assert reply.headers["access-control-allow-origin"] == "https://a.test"
        assert status("GET", "/health", Host="b.test") == 200
        assert status("GET", "/health", Host="c.test") == 403


# ------------------------------------------------------------------------- before it is loaded


@pytest.fixture
def held_load(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Loading waits for this event."""
    go = threading.Event()
    original = load.load

    def held(*args: Any) -> Any:
        assert go.wait(WAIT_S)
        return original(*args)

    monkeypatch.setattr(loop_module.load, "load", held)
    return go


def test_early_requests_wait_for_the_model(
    tiny_server: LiveApp, tiny_folder: Path, held_load: threading.Event
) -> None:
    with LiveApp(tiny_folder, wait=False) as server, ThreadPoolExecutor(3) as pool:
        assert server.ask("GET", "/health").json() == {"status": "ok"}
        ready = server.ask("GET", "/ready")
        assert (ready.status, ready.json()) == (503, {"status": "loading"})
        assert server.batch()["state"] == "loading"
        plain = pool.submit(server.chat)
        streamed = pool.submit(server.chat, stream=True)
        models = pool.submit(server.ask, "GET", "/v1/models")
        # A wrong request need not wait, and a client that leaves is forgotten.
        assert server.chat(temperature=-1).status == 400
        connect(server.address).close()
        while server.ask("GET", "/stats").json()["http"]["requests_active"] < 4:
            pass
        assert not plain.done() and not streamed.done() and not models.done()
        held_load.set()
        assert plain.result().text == tiny_server.chat().text
        assert stream_text(frames(streamed.result().body)) == plain.result().text
        assert models.result().status == 200
        assert server.ask("GET", "/ready").status == 200


def test_a_model_that_does_not_load(
    tiny_folder: Path, held_load: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiters get an answer, and the reason is what `serve` raises."""

    def broken(*args: Any) -> Any:
        assert held_load.wait(WAIT_S)
        raise ModelError("weights.bin: is no model")

    monkeypatch.setattr(loop_module.load, "load", broken)
    server = LiveApp(tiny_folder, wait=False, shutdown_s="5")
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(server.chat, stream=is_stream) for is_stream in (False, True)]
        while server.ask("GET", "/stats").json()["http"]["requests_active"] < 3:
            pass
        held_load.set()
        for each in waiting:
            assert each.result().status >= 500
            assert "error" in each.result().json()
    server.join()
    with pytest.raises(ModelError, match="weights.bin: is no model"):
        server.close()


@pytest.mark.parametrize("fails", [False, True])
def test_stopping_while_loading(
    tiny_folder: Path,
    held_load: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fails: bool,
) -> None:
    """The waiter is told at once; loading goes on to its end, whatever that is."""
    if fails:
        monkeypatch.setattr(loop_module.load, "load", lambda *_: held_load.wait() and 1 / 0)
        caplog.set_level(logging.CRITICAL, "mlxlite")
    server = LiveApp(tiny_folder, wait=False)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.chat)
        while server.ask("GET", "/stats").json()["http"]["requests_active"] < 2:
            pass
        server.begin_stop()
        assert waiting.result().status == 503
        held_load.set()
    server.join()
    gc.collect()  # a future whose exception nobody took would speak up now
    server.close()
    assert not caplog.records


# ------------------------------------------------------------------------- when it is dead


def test_a_dead_engine(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine killed on purpose: all waiters get an error, then everything says 503."""
    with LiveApp(tiny_folder, batch="1") as server, ThreadPoolExecutor(3) as pool:
        brake = Brake(server.worker._loop.batch, "step")
        running = pool.submit(server.chat)
        brake.wait()
        waiting = [pool.submit(server.chat, stream=is_stream) for is_stream in (False, True)]
        server.wait_batch(lambda batch: batch["pending_rows"] == 2)

        def killed() -> Any:
            raise SystemError("killed on purpose")

        monkeypatch.setattr(server.worker, "_most_restarts", 0)
        monkeypatch.setattr(server.worker._loop.scheduler, "plan", killed)
        brake.free()
        assert running.result().status == 503
        plain, streamed = (each.result() for each in waiting)
        assert plain.status == 503 and plain.error["code"] == "engine_down"
        assert streamed.status == 503 or frames(streamed.body)[-1]["error"]["code"] == "engine_down"
        assert server.worker.state is EngineState.DOWN

        health = server.ask("GET", "/health")
        assert (health.status, health.json()) == (503, {"status": "down"})
        for path in ("/ready", "/v1/models"):
            assert server.ask("GET", path).status == 503
        assert server.ask("GET", "/stats").json()["batch"]["state"] == "down"
        for is_stream in (False, True):
            reply = server.chat(stream=is_stream)
            assert reply.status == 503 and reply.error["type"] == "server_error"
            assert reply.headers["retry-after"] == "1"


def test_an_engine_that_begins_again(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever was served gets an error, whoever comes later an answer; then all is as before."""
    with LiveApp(tiny_folder) as server, ThreadPoolExecutor(2) as pool:
        expected = server.chat(temperature=0).json()["choices"]
        brake = Brake(server.worker._loop.batch, "step", after=2)
        running = pool.submit(server.chat, stream=True)
        brake.wait()

        def killed() -> Any:
            raise SystemError("killed on purpose")

        monkeypatch.setattr(server.worker._loop.scheduler, "plan", killed)
        brake.free()
        assert frames(running.result().body)[-1]["error"]["code"] == "engine_fault"
        assert server.chat(temperature=0).json()["choices"] == expected
        assert server.ask("GET", "/health").json() == {"status": "ok"}
        assert server.ask("GET", "/ready").status == 200
        assert server.ask("GET", "/stats").json()["batch"]["restarts"] == 1


def test_stopping_while_answering(tiny_folder: Path) -> None:
    """Within the grace an answer is finished; after it the client sees an error, never an end."""
    with LiveApp(tiny_folder, shutdown_s="10") as server, ThreadPoolExecutor(1) as pool:
        brake = Brake(server.worker._loop.batch, "step", after=2)
        running = pool.submit(server.chat, stream=True)
        brake.wait()
        server.begin_stop()
        brake.free()
        assert frames(running.result().body)[-1] == "[DONE]"
        server.join()

    with LiveApp(tiny_folder, shutdown_s="0") as server:
        brake = Brake(server.worker._loop.batch, "step", after=2)
        sock = connect(server.address)
        sock.sendall(b"POST %b HTTP/1.0\r\n" % CHAT.encode())
        body = b'{"messages":[{"role":"user","content":"hi"}],"stream":true}'
        sock.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        brake.wait()
        read_until(sock, b"assistant")
        server.begin_stop()
        with pytest.raises(ConnectionResetError):
            while sock.recv(65536):
                pass
        sock.close()
        brake.free()
        server.join()


def test_a_stop_tells_the_streams_that_it_cuts_off(tiny_folder: Path) -> None:
    with LiveApp(tiny_folder, shutdown_s="0") as server, ThreadPoolExecutor(1) as pool:
        brake = Brake(server.worker._loop.batch, "step", after=2)
        running = pool.submit(server.chat, stream=True, max_tokens=None, temperature=0)
        brake.wait()
        server.begin_stop()
        brake.free()
        last = frames(running.result().body)[-1]
        assert last["error"]["message"] == "the server is stopping"
        server.join()


def test_a_socket_replaces_nothing_but_a_dead_socket(tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    with pytest.raises(MlxliteError, match="a file is there"):
        bind_unix(precious)
    assert precious.read_text() == "mine"
    dead = tmp_path / "dead.sock"
    bind_unix(dead).close()
    bind_unix(dead).close()


def test_a_unix_socket(tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with LiveApp(tiny_folder, unix=str(path)) as server:
        assert ask(path, "GET", "/health").status == 200
        assert f"--unix-socket {path}" in server.lines[1]
        assert ask(path, "POST", CHAT, chat_body()).status == 200
        assert ask(path, "GET", "/health", headers={"Host": "evil.test"}).status == 403
    assert not path.exists()
