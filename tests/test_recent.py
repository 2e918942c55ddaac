"""recent: the last requests in figures, over HTTP and by itself; never a text of them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mlxlite.errors import EngineFault
from mlxlite.recent import MOST, Recent, Running, decode_rate
from mlxlite.types import Done, Finish
from tests.live import CHAT, Brake, LiveApp, chat_body, connect, post_bytes, read_until


def done(finish: Finish = Finish.EOS, generated: int = 9, decode_s: float = 0.5) -> Done:
    error = EngineFault("x") if finish is Finish.ERROR else None
    return Done(finish, 10, 4, generated, 0.02, 0.3, decode_s, error)


def end(recent: Recent, label: str, began_s: float, how: Done | None) -> None:
    running = Running(label, began_s, 10)
    recent.began(running)
    recent.ended(running, how)


def test_rates() -> None:
    assert decode_rate(done()) == 16.0
    assert decode_rate(done(generated=7)) is None and decode_rate(done(decode_s=0.0)) is None


def test_how_rows_end() -> None:
    recent = Recent()
    for finish in Finish:
        end(recent, "req_1 chat", 1000.12345, done(finish))
    end(recent, "req_2 messages", 1001.0, None)
    end(recent, "req_3 completions", 1002.0, done(generated=0))
    rows = recent.newest_first()[::-1]
    assert [(row["finish"], row["status"]) for row in rows] == [
        ("eos", 200), ("stop", 200), ("length", 200), ("cancelled", 499), ("error", 500),
        ("left", 499), ("eos", 200),
    ]  # fmt: skip
    assert rows[0] == {
        "id": "req_1", "surface": "chat", "started": 1000.123, "status": 200, "prompt_tokens": 10,
        "cached_tokens": 4, "completion_tokens": 9, "ttft_s": 0.32, "decode_tok_s": 16.0,
        "finish": "eos",
    }  # fmt: skip
    assert all(row.keys() == rows[0].keys() for row in rows)
    assert rows[5]["cached_tokens"] is rows[5]["ttft_s"] is rows[6]["ttft_s"] is None
    assert (rows[5]["prompt_tokens"], rows[5]["completion_tokens"]) == (10, 0)


def test_rows_under_way_come_first() -> None:
    """With what came so far; that stays if their client leaves."""
    recent = Recent()
    end(recent, "req_1 chat", 1000.0, done())
    first, second = (Running(f"req_{n} chat", time.time(), 7) for n in (2, 3))
    recent.began(first)
    recent.began(second)
    first.came(1)
    first.came(3)
    rows = recent.newest_first()
    names = ("id", "finish", "status", "completion_tokens")
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("req_3", None, None, 0), ("req_2", None, None, 4), ("req_1", "eos", 200, 9),
    ]  # fmt: skip
    assert rows[0].keys() == rows[2].keys()
    assert rows[0]["ttft_s"] is None and 0 <= rows[1]["ttft_s"] < 1
    recent.ended(first, None)
    recent.ended(second, done())
    rows = recent.newest_first()
    assert [row["id"] for row in rows] == ["req_3", "req_2", "req_1"]
    assert (rows[1]["finish"], rows[1]["completion_tokens"]) == ("left", 4)


def test_a_refusal_is_noted_once() -> None:
    recent = Recent()
    end(recent, "req_1 chat", 1.0, done(Finish.ERROR))
    recent.refused("req_1 chat", 500)
    recent.refused("req_2 chat", 400)
    assert [(row["id"], row["status"]) for row in recent.newest_first()] == [
        ("req_2", 400),
        ("req_1", 500),
    ]


def test_there_are_never_more(monkeypatch: pytest.MonkeyPatch) -> None:
    recent = Recent()
    for n in range(MOST + 50):
        end(recent, f"req_{n} chat", float(n), done())
    rows = recent.newest_first()
    assert len(rows) == MOST == 100 and rows[0]["id"] == f"req_{MOST + 49}"


def test_served(tiny_folder: Path) -> None:
    with LiveApp(tiny_folder) as server:
        assert server.ask("GET", "/api/requests").json() == {"ok": True, "requests": []}
        first = server.chat(messages=[{"role": "user", "content": "a secret"}], max_tokens=9)
        server.chat(n=2, temperature=1)
        refused = server.chat(temperature=-1)
        server.ask("POST", "/v1/chat/completions", b"{")
        server.ask("POST", "/v1/embeddings", {"input": "secret"})
        server.ask("POST", "/tokenize", {})  # asks the model nothing
        reply = server.ask("GET", "/api/requests")
        rows = reply.json()["requests"]
        assert [(row["surface"], row["status"]) for row in rows] == [
            ("embeddings", 400), ("chat", 400), ("chat", 400),
            ("chat", 200), ("chat", 200), ("chat", 200),
        ]  # fmt: skip
        usage = first.json()["usage"]
        assert rows[5]["id"] == first.headers["x-request-id"]
        assert rows[2]["id"] == refused.headers["x-request-id"]
        assert rows[5]["prompt_tokens"] == usage["prompt_tokens"]
        assert rows[5]["completion_tokens"] == usage["completion_tokens"]
        assert rows[5]["started"] > 1e9 and rows[3]["id"] == rows[4]["id"]
        assert b"secret" not in reply.body


def test_vectors(tiny_folder: Path) -> None:
    with LiveApp(tiny_folder, embedding_pooling="mean") as server:
        usage = server.ask("POST", "/v1/embeddings", {"input": ["a", "b c"]}).json()["usage"]
        (row,) = server.ask("GET", "/api/requests").json()["requests"]
        assert (row["surface"], row["status"], row["finish"]) == ("embeddings", 200, "done")
        assert row["prompt_tokens"] == usage["prompt_tokens"]


def test_a_client_that_left(tiny_folder: Path) -> None:
    with LiveApp(tiny_folder) as server:
        brake = Brake(server.worker._loop.batch, "step", after=3)
        sock = connect(server.address)
        sock.sendall(post_bytes(CHAT, chat_body(stream=True, max_tokens=900)))
        read_until(sock, b"data: ")
        brake.wait()
        sock.close()
        brake.free()
        server.wait_batch(lambda stats: stats["cancelled_rows"] == 1)
        (row,) = server.ask("GET", "/api/requests").json()["requests"]
        assert (row["status"], row["finish"]) == (499, "left")
