"""mlxlite beside `python -m mlx_lm server`: same weights, same run (decision D25).

Each server runs as a process of its own and is asked over HTTP, so that what is measured is what a
user gets. mlx_lm.server runs as pip installs it and once more with the BLAS that mlxlite preloads.
A leg that does not finish within its budget is noted as such, and the ratio is a lower bound.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from mlxlite.engine import backend
from mlxlite.models import library

PROMPT = "What is the capital of France? Answer in one sentence."  # 42 tokens with its template
LONG_ANSWER = "Write a long story about a lighthouse keeper and the sea."


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


def compare(model: library.LocalModel, tokens: int, budget_s: float, is_alone: bool) -> list[Leg]:
    """All legs, mlxlite's first. is_alone: only that one."""
    own = [sys.executable, "-m", "mlxlite", "serve", "--model", str(model.folder)]
    measure("warm-up", own, "/ready", 2, budget_s, {})  # the dense copy is made now
    legs = [measure("mlxlite", own, "/ready", tokens, budget_s, {})]
    if is_alone:
        return legs
    peer = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model.folder)]
    variants: list[tuple[str, dict[str, str]]] = [("mlx_lm.server", {})]
    if backend.blas:
        variants.append(("mlx_lm.server, same BLAS", {"LD_PRELOAD": backend.blas}))
    for name, environ in variants:
        leg = measure(name, peer, "/health", tokens, budget_s, environ)
        if leg.decode_tps is None:
            measure_decode_alone(leg, peer, "/health", budget_s)
        legs.append(leg)
    return legs
