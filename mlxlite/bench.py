"""`make bench`: mlxlite beside `python -m mlx_lm server`, same weights, same run (decision D25).

Each server runs as a process of its own and is asked over HTTP, so that what is measured is what a
user gets. mlx_lm.server runs as pip installs it and once more with the BLAS that mlxlite preloads.
A leg that does not finish within its budget is noted as such, and the ratio is a lower bound.

The cost of the server itself is measured apart, in one process: the same rows are run with and
without HTTP in turns, and the medians of the engine's own step clock are compared.

    python -m mlxlite.bench [--model NAME] [--tokens 64] [--budget 180] [--only mlxlite]
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import platform
import queue
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from mlxlite import app, config, launch
from mlxlite.config import Settings
from mlxlite.engine import backend
from mlxlite.models import library
from mlxlite.types import Ask, Event

PROMPT = "What is the capital of France? Answer in one sentence."  # 42 tokens with its template
LONG_ANSWER = "Write a long story about a lighthouse keeper and the sea."


_TAX_TURNS = 12
_TAX_TOKENS = 32


@dataclass(slots=True)
class Leg:
    """What one server did; None where it did not finish in its budget."""

    name: str
    ready_s: float | None = None
    first_answer_s: float | None = None  # from process start to the first token
    ttft_s: float | None = None
    decode_tps: float | None = None
    peak_bytes: int | None = None
    environ: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


# ------------------------------------------------------------------------------------- clients


def stream_times(
    port: int, prompt: str, max_tokens: int, deadline: float, raw: bool = False
) -> list[float]:
    """When each piece of a streamed answer came, seconds after the request was sent.

    raw: a plain completion, whose prompt can be shorter than any chat template.
    """
    path = "/v1/completions" if raw else "/v1/chat/completions"
    asked = {"prompt": prompt} if raw else {"messages": [{"role": "user", "content": prompt}]}
    body = {
        "model": "default_model",
        **asked,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    left = max(deadline - time.perf_counter(), 0.1)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=left)
    times: list[float] = []
    started = time.perf_counter()
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        while line := answer.readline():
            now = time.perf_counter()
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:]).get("choices") or [{}]
                if choices[0].get("delta", {}).get("content") or choices[0].get("text"):
                    times.append(now - started)
            if now > deadline:
                break
    except (OSError, http.client.HTTPException):
        pass  # out of time: what came until then counts
    finally:
        connection.close()
    return times


def answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def comes_up(child: subprocess.Popen[bytes], port: int, path: str, deadline: float) -> bool:
    """Wait until a server answers; False if it ends or takes too long."""
    while not answers(port, path):
        if time.perf_counter() > deadline or child.poll() is not None:
            return False
        time.sleep(0.01)  # a process of somebody else tells nobody that it is ready
    return True


# ---------------------------------------------------------------------------------------- legs


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: list[str], environ: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(
        command, env={**os.environ, **environ}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield child
    finally:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(10)
        child.kill()
        child.wait()


def peak_bytes(pid: int) -> int | None:
    """The most memory a process ever held (Linux; other systems keep no record of others)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    return next(int(row.split()[1]) * 1024 for row in status.splitlines() if "VmHWM" in row)


def measure(
    name: str, command: list[str], path: str, tokens: int, budget_s: float, environ: dict[str, str]
) -> Leg:
    """Run one server and ask it: ready, first answer, three short prompts, one long answer."""
    leg = Leg(name, environ=environ)
    port = free_port()
    started = time.perf_counter()
    deadline = started + budget_s
    with running([*command, "--port", str(port)], environ) as child:
        if not comes_up(child, port, path, deadline):
            leg.notes.append("did not start")
            return leg
        leg.ready_s = time.perf_counter() - started
        sent = time.perf_counter()
        first = stream_times(port, PROMPT, 1, deadline)
        if not first:
            leg.notes.append(f"no first token within {budget_s:.0f} s")
            leg.peak_bytes = peak_bytes(child.pid)
            return leg
        leg.first_answer_s = sent + first[0] - started
        # A slow server's first answer is its measure; a repeat would not fit into the budget.
        short = [first[0]] if first[0] > 20 else []
        while len(short) < 3 and first[0] <= 20 and time.perf_counter() < deadline:
            short += stream_times(port, f"{len(short)}: {PROMPT}"[-len(PROMPT) :], 1, deadline)[:1]
        leg.ttft_s = statistics.median(short)
        # A slow one decodes to its own, later deadline: the rate needs a few tokens only.
        times = stream_times(port, LONG_ANSWER, tokens, time.perf_counter() + budget_s)
        if len(times) > 1:
            leg.decode_tps = (len(times) - 1) / (times[-1] - times[0])
            if len(times) < tokens:
                leg.notes.append(f"decode from {len(times)} tokens")
        else:
            leg.notes.append(f"no second token within {budget_s:.0f} s")
        leg.peak_bytes = peak_bytes(child.pid)
    return leg


def measure_decode_alone(leg: Leg, command: list[str], path: str, budget_s: float) -> None:
    """The decode rate of a server too slow for the prompt: a fresh one, asked one word."""
    port = free_port()
    deadline = time.perf_counter() + budget_s
    with running([*command, "--port", str(port)], leg.environ) as child:
        comes_up(child, port, path, deadline)
        times = stream_times(port, "Hello", 10, deadline, raw=True)
    if len(times) > 2:
        leg.decode_tps = (len(times) - 1) / (times[-1] - times[0])
        leg.notes.append(f"decode from {len(times)} tokens after a prompt of one word")


# ------------------------------------------------------------------------------ the server's tax


def server_tax(settings: Settings, model: library.LocalModel, tokens: int) -> tuple[float, float]:
    """Median seconds of a decode step without and with HTTP, measured in turns (D25).

    One process, one engine: a row submitted directly, then the same row through the server to a
    client in another process, in many short turns, so that both see the same noise.
    """
    sock = launch.listen(settings)
    port = int(sock.getsockname()[1])
    worker = launch.start_engine(settings, model)
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    ready = threading.Event()
    serving = app.serve(settings, model.name, worker, sock, lambda line: ready.set(), until=stop)
    thread = threading.Thread(target=loop.run_until_complete, args=(serving,))
    thread.start()
    ready.wait(120)
    prepared = app.open_model(settings, worker)(
        Ask(
            messages=({"role": "user", "content": LONG_ANSWER},), max_tokens=tokens, temperature=0.0
        )
    )
    client = [
        sys.executable,
        "-c",
        "import sys, time; from mlxlite.bench import stream_times; "
        f"stream_times({port}, {LONG_ANSWER!r}, {tokens}, time.perf_counter() + 300)",
    ]
    bare: list[float] = []
    served: list[float] = []
    for turn in range(_TAX_TURNS + 1):
        worker.take_step_times()
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        worker.submit(prepared.spec, events.put)
        while events.get().done is None:
            pass
        first = worker.take_step_times()
        subprocess.run(client, check=True)
        second = worker.take_step_times()
        if turn:  # the first turn warms up
            bare += first
            served += second
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()
    sock.close()
    return statistics.median(bare), statistics.median(served)


# --------------------------------------------------------------------------------------- report


def table(legs: list[Leg], budget_s: float) -> str:
    """A Markdown table; ratios are of the first leg to each other one, above 1 is better."""
    rows = [
        ("start to ready (s)", "ready_s", 2, False),
        ("start to first token (s)", "first_answer_s", 2, False),
        ("42-token prompt to first token (s)", "ttft_s", 3, False),
        ("decode (tok/s)", "decode_tps", 2, True),
        ("peak memory (MB)", "peak_bytes", 0, False),
    ]
    lines = ["| | " + " | ".join(leg.name for leg in legs) + " |", "|---" * (len(legs) + 1) + "|"]
    for title, name, digits, more_is_better in rows:
        own = getattr(legs[0], name)
        cells = [title]
        for index, leg in enumerate(legs):
            value = getattr(leg, name)
            shown = value / 1e6 if name == "peak_bytes" and value else value
            if value is None:
                text = f"over {budget_s:.0f} s" if name in ("first_answer_s", "ttft_s") else "–"
                bound = budget_s / own if own and name in ("first_answer_s", "ttft_s") else None
                cells.append(text + (f" (> {bound:.0f}×)" if bound and index else ""))
                continue
            cell = f"{shown:.{digits}f}"
            if index and own:
                cell += f" ({own / value if more_is_better else value / own:.1f}×)"
            cells.append(cell)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mlxlite.bench", description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--budget", type=float, default=180.0, help="seconds a leg may take")
    parser.add_argument("--only", choices=("mlxlite", "tax"), default=None)
    given = parser.parse_args(arguments)
    settings = config.build({"port": "0", "log_level": "error"})
    model = library.resolve(given.model, settings.home)

    own = [sys.executable, "-m", "mlxlite", "serve", "--model", str(model.folder)]
    legs = []
    if given.only != "tax":
        measure("warm-up", own, "/ready", 2, given.budget, {})  # the dense copy is made now
        legs.append(measure("mlxlite", own, "/ready", given.tokens, given.budget, {}))
    if given.only is None:
        peer = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model.folder)]
        variants: list[tuple[str, dict[str, str]]] = [("mlx_lm.server", {})]
        if backend.blas:
            variants.append(("mlx_lm.server, same BLAS", {"LD_PRELOAD": backend.blas}))
        for name, environ in variants:
            leg = measure(name, peer, "/health", given.tokens, given.budget, environ)
            if leg.decode_tps is None:
                measure_decode_alone(leg, peer, "/health", given.budget)
            legs.append(leg)
    print(
        f"{model.name}, {platform.machine()} with {os.cpu_count()} cores, mlx {version('mlx')}, "
        f"mlx-lm {version('mlx-lm')}, Python {platform.python_version()}\n"
    )
    if legs:
        print(table(legs, given.budget))
        for leg in legs:
            for note in leg.notes:
                print(f"\n{leg.name}: {note}")
    if given.only != "mlxlite":
        bare, served = server_tax(settings, model, _TAX_TOKENS)
        print(
            f"\ndecode step: {bare * 1000:.2f} ms alone, {served * 1000:.2f} ms through HTTP: "
            f"{bare / served:.1%} of the bare loop"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
