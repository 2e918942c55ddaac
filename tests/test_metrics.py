"""metrics: the text format by a reader written from its definition; what a server counts."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from mlxlite.metrics import Family, Histogram, Metrics, single
from mlxlite.types import Done, EngineState, Finish
from tests.live import CHAT, Brake, LiveApp, chat_body, connect, post_bytes, read_until

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

SAMPLE = re.compile(r"([a-z_:][a-z0-9_:]*)(?:\{(.*)\})? (\S+)")
LABEL = re.compile(r'([a-z_]+)="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')


def read(text: str) -> tuple[Samples, dict[str, str]]:
    """Samples and types; fails where Prometheus would (exposition format 0.0.4)."""
    assert text.endswith("\n")
    samples: Samples = {}
    types: dict[str, str] = {}
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            assert line.split(" ", 3)[2] not in types, "one group a name"
            continue
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in types and kind in ("counter", "gauge", "histogram")
            types[name] = kind
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        name, inside, value = match.groups()
        family = re.sub("_(bucket|sum|count)$", "", name)
        assert name in types or types.get(family) == "histogram", name
        labels = tuple(LABEL.findall(inside or ""))
        assert "".join(f'{n}="{v}",' for n, v in labels).rstrip(",") == (inside or "")
        assert (name, labels) not in samples, "one line a sample"
        samples[name, labels] = math.inf if value == "+Inf" else float(value)
    return samples, types


def done(generated: int = 5, finish: Finish = Finish.EOS) -> Done:
    return Done(finish, 10, 4, generated, 0.02, 0.3, 0.08)


def test_empty() -> None:
    samples, types = read(Metrics().render([]))
    assert types["mlxlite_answers_total"] == "counter"
    assert set(samples.values()) == {0.0}


def test_answers() -> None:
    metrics = Metrics()
    for finish in (Finish.EOS, Finish.EOS, Finish.LENGTH):
        metrics.ended("chat", done(finish=finish))
    metrics.ended("completions", None)
    metrics.ended("completions", done(generated=0, finish=Finish.ERROR))
    samples, _ = read(metrics.render([]))

    def answers(surface: str, outcome: str) -> float:
        key = (("surface", surface), ("outcome", outcome))
        return samples["mlxlite_answers_total", key]

    assert answers("chat", "eos") == 2 and answers("chat", "length") == 1
    assert answers("completions", "left") == answers("completions", "error") == 1
    assert samples["mlxlite_prompt_tokens_total", ()] == 40
    assert samples["mlxlite_cached_tokens_total", ()] == 16
    assert samples["mlxlite_generated_tokens_total", ()] == 15
    assert samples["mlxlite_queue_wait_seconds_count", ()] == 4
    first = "mlxlite_time_to_first_token_seconds"
    assert samples[first + "_count", ()] == 3, "an answer without a token has no first one"
    assert samples[first + "_sum", ()] == pytest.approx(0.96)
    assert samples[first + "_bucket", (("le", "0.25"),)] == 0
    assert samples[first + "_bucket", (("le", "0.5"),)] == 3
    between = "mlxlite_inter_token_seconds"
    assert samples[between + "_count", ()] == 12 and samples[between + "_sum", ()] == 0.24
    assert samples[between + "_bucket", (("le", "0.025"),)] == 12


def test_histogram() -> None:
    histogram = Histogram("h", "Doc.", (0.1, 1.0, 10.0))
    for value in (0.0, 0.1, 0.10001, 1.0, 9.9, 10.0, 11.0, 1e9):
        histogram.observe(value)
    histogram.observe(0.5, times=3)
    samples, _ = read("\n".join(histogram.lines()) + "\n")
    found = {le: samples["h_bucket", (("le", le),)] for le in ("0.1", "1", "10", "+Inf")}
    assert found == {"0.1": 2, "1": 7, "10": 9, "+Inf": 11} and samples["h_count", ()] == 11


def test_labels_and_numbers() -> None:
    rows = [({"a": 'q"\\\n'}, 1.5), ({"a": "b", "c": "d"}, 2**60), ({}, math.inf)]
    samples, types = read("\n".join(Family("f", "gauge", "Doc.", rows).lines()) + "\n")
    assert samples["f", (("a", '\\"'.join(["q", "\\\\\\n"])),)] == 1.5
    assert samples["f", (("a", "b"), ("c", "d"))] == 2**60
    assert samples["f", ()] == math.inf and types == {"f": "gauge"}
    assert single("n", "gauge", "Doc.", 3).lines()[-1] == "n 3"
    assert single("n", "gauge", "Doc.", math.nan).lines()[-1] == "n NaN"


# ----------------------------------------------------------------------------------- a server


def ask(server: LiveApp) -> Samples:
    reply = server.ask("GET", "/metrics")
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return read(reply.body.decode())[0]


def test_served(tiny_folder: Path) -> None:
    with LiveApp(tiny_folder) as server:
        usages = [server.chat(n=3, temperature=1).json()["usage"]]
        body = {"prompt": ["a", "b"], "max_tokens": 4, "temperature": 0}
        usages.append(server.ask("POST", "/v1/completions", body).json()["usage"])
        server.chat(temperature=-1)
        found = ask(server)
        answers = {
            key: value for (name, key), value in found.items() if name.endswith("answers_total")
        }
        by_surface = {"chat": 0.0, "completions": 0.0}
        for labels, value in answers.items():
            by_surface[dict(labels)["surface"]] += value
        assert by_surface == {"chat": 3, "completions": 2}
        generated = sum(usage["completion_tokens"] for usage in usages)
        assert found["mlxlite_generated_tokens_total", ()] == generated
        assert found["mlxlite_time_to_first_token_seconds_count", ()] == 5
        assert found["mlxlite_active_rows", ()] == found["mlxlite_pending_rows", ()] == 0
        assert found["mlxlite_connections", ()] == 1
        assert found["mlxlite_memory_bytes", (("kind", "active"),)] > 0
        peak = found["mlxlite_memory_bytes", (("kind", "peak"),)]
        assert peak >= found["mlxlite_memory_bytes", (("kind", "active"),)]
        states = {s: found["mlxlite_engine_state", (("state", s.value),)] for s in EngineState}
        assert states == {state: float(state is EngineState.READY) for state in EngineState}
        memory = server.batch()["memory"]
        assert set(memory) == {"active_bytes", "peak_bytes", "cache_bytes"}


def test_a_client_that_left(tiny_folder: Path) -> None:
    with LiveApp(tiny_folder) as server:
        brake = Brake(server.worker._loop.batch, "step", after=3)
        sock = connect(server.address)
        sock.sendall(post_bytes(CHAT, chat_body(stream=True, max_tokens=900)))
        read_until(sock, b"data: ")
        brake.wait()
        assert ask(server)["mlxlite_active_rows", ()] == 1
        sock.close()
        brake.free()
        server.wait_batch(lambda stats: stats["cancelled_rows"] == 1)
        key = (("surface", "chat"), ("outcome", "left"))
        assert ask(server)["mlxlite_answers_total", key] == 1


def test_it_needs_the_key(tiny_folder: Path) -> None:
    with LiveApp(tiny_folder, api_key="secret") as server:
        assert server.ask("GET", "/metrics").status == 401
        headers = {"Authorization": "Bearer secret"}
        assert server.ask("GET", "/metrics", headers=headers).status == 200
