"""The soak: a real server under random traffic for some time, then a look at what is left.

    python -m tests.soak --minutes 20 --seed 1

A tiny model of each kind of cache has its turn, one of them in little memory too. The prompt cache
is so small that it evicts all the time, the engine checks itself at each step, and more clients ask
than the queue holds. Requests must be answered, refused as they should be, or left by us; what is
asked again must say the same; in the end nothing may be left: no row, session, lease, connection,
descriptor or byte.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxlite.models import fit, library
from tests import tiny
from tests.live import Child, ask, post_bytes
from tests.soak_traffic import (
    CHAT,
    COMPLETIONS,
    Answer,
    Expect,
    Manner,
    Plan,
    Traffic,
    differs,
    read,
)

CLIENTS = 28  # with answers of several rows, more than 8 places and a queue of 16 take
FEW, TIDE_S = 2, 5.0  # so many of them ask all the time; the others pause every fourth tide
CONTEXT = 1024
CACHE_GIB = 0.001  # two thousand tokens, or some ten checkpoints
PATIENCE_S = 120.0  # for one answer, on a machine that does other things as well
# What may come on top after the first third. Freed memory stays with malloc's arenas, one a thread.
MOST_GROWTH_BYTES = 24 << 20
WARM_UP_BYTES = 64 << 20  # the same where there was no third to warm up in: 25 MB were seen
# MLX's memory of an idle engine is the weights, the prefixes, and what the last step left behind.
MOST_ACTIVE_GROWTH_BYTES = 256 << 10
TOKENS_PER_FLIP = 50_000  # of answers compared by text alone, where a tie cannot be shown

PLAIN = {"messages", "max_tokens", "temperature", "logprobs", "top_logprobs"}

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "little memory": {"model_type": "llama"},  # see `little`
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 48,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
        "rms_norm_eps": 1e-6,
    },
    "falcon_h1": {
        "head_dim": 16,
        "mamba_d_conv": 4,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 8,
        "mamba_expand": 1,
        "mamba_n_groups": 1,
        "mamba_n_heads": 4,
        "mamba_proj_bias": False,
        "mamba_rms_norm": False,
        "mamba_norm_before_gate": True,
        "mlp_bias": False,
        "projectors_bias": False,
        "attention_bias": False,
    },
}


@dataclass
class Figures:
    kind: str
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    marks: list[dict[str, int]] = field(default_factory=list)  # idle: start, a third, end
    stats: dict[str, Any] = field(default_factory=dict)
    compared_tokens: int = 0

    def fault(self, plan: Plan, what: object) -> None:
        self.faults.append(f"{plan.manner.value} {plan.path} {str(plan.body)[:300]}: {what}")

    def lines(self) -> Iterator[str]:
        batch, cache = self.stats["batch"], self.stats["batch"]["prompt_cache"]
        yield f"{self.kind}: {self.seconds:.0f} s, {dict(sorted(self.counts.items()))}"
        yield (
            f"  rows {batch['submitted_rows']}: {batch['completed_rows']} completed, "
            f"{batch['cancelled_rows']} cancelled, {batch['failed_rows']} failed, "
            f"{batch['retreats']} sent back; "
            f"tokens {batch['prompt_tokens']} in ({batch['cached_tokens']} cached), "
            f"{batch['generated_tokens']} out; {self.compared_tokens} compared"
        )
        yield f"  cache {cache['bytes']} of {cache['max_bytes']} B, {cache['evictions']} evicted"
        for mark in self.marks:
            yield f"  idle: {mark}"
        yield from (f"  FAULT {fault}" for fault in self.faults)


class Soak:
    """One model under traffic. is_short: there is no third to warm up in, and less to repeat."""

    def __init__(self, kind: str, child: Child, seed: int, is_short: bool) -> None:
        self.figures = Figures(kind)
        self._child = child
        self._traffic = Traffic(seed, 5, (0.5,)) if is_short else Traffic(seed)
        self._shares = (1.0,) if is_short else (1 / 3, 2 / 3)
        self._pause_s = 0.005 if is_short else 0.05  # of a slow reader, after each 4 KB
        self._known: dict[str, Answer] = {}
        self._began = self._ends_at = 0.0  # of this stretch of traffic

    async def run(self, seconds: float) -> None:
        began = time.monotonic()
        for plan in list(self._traffic.exact):  # alone: cold, to have something to compare with
            for _ in range(3):
                await self._ask(plan)
            if (longer := await self._continued(plan)) is not None:
                self._traffic.exact.append(longer)
                for _ in range(3):
                    await self._ask(longer)
        await self._mark()
        for share in self._shares:
            self._began = time.monotonic()
            self._ends_at = self._began + share * seconds
            await asyncio.gather(*(self._client(n) for n in range(CLIENTS)), self._watch())
            await self._mark()
        self.figures.seconds = time.monotonic() - began
        self._judge()

    async def _continued(self, plan: Plan) -> Plan | None:
        """A question whose prompt is a plain greedy answer so far: it goes on where that row's
        kept state ends, and writes behind it at once."""
        known = self._known.get(plan.key)
        is_plain = plan.path == CHAT and plan.body.keys() <= PLAIN and plan.body["temperature"] == 0
        if known is None or not is_plain or not known.tokens[0]:
            return None
        body = {"messages": plan.body["messages"]}
        reply = await asyncio.to_thread(ask, self._child.address, "POST", "/tokenize", body)
        ids = reply.json()["tokens"] + [token for token, *_ in known.tokens[0]]
        return Plan(COMPLETIONS, {"prompt": ids, "max_tokens": 30, "temperature": 0}, is_exact=True)

    # ------------------------------------------------------------------------------- clients

    async def _client(self, number: int) -> None:
        while time.monotonic() < self._ends_at and len(self.figures.faults) < 20:
            if number >= FEW and int((time.monotonic() - self._began) / TIDE_S) % 4 == 3:
                await asyncio.sleep(0.2)  # low tide: rows run alone now and then
                continue
            plan = self._traffic.next()
            for _ in range(plan.times):
                await self._ask(plan)

    async def _ask(self, plan: Plan) -> None:
        """One request to its end, also over a full queue."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while (wait_s := await self._try(plan)) is not None:
                    await asyncio.sleep(wait_s)
        except TimeoutError:
            self.figures.fault(plan, "no answer")
        except (AssertionError, KeyError, ValueError, OSError) as error:
            self.figures.fault(plan, repr(error)[:600])

    async def _try(self, plan: Plan) -> float | None:
        """Returns seconds to wait if the server was busy."""
        reply = await self._exchange(plan)
        self.figures.counts[plan.manner.value] += 1
        if reply is None:  # we left
            return None
        head, _, body = reply.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        headers = head.lower().decode()
        self.figures.counts[f"status {status}"] += 1
        if status == 429:
            return float(headers.split("retry-after: ")[1].split("\r\n")[0])
        if "transfer-encoding: chunked" in headers:
            body = unchunked(body)
        if plan.expect is Expect.ANSWER:
            assert status == 200, f"{status}: {body!r}"
            self._compare(plan, read(plan, body))
            return None
        assert status == 400, f"{status} to what is wrong: {body[:300]!r}"
        error = json.loads(body)["error"]
        assert error["type"] == "invalid_request_error" and error["message"]
        if plan.expect is Expect.TOO_LONG:
            assert str(CONTEXT) in error["message"] and " tokens" in error["message"]
            assert error.get("code", "context_length_exceeded") == "context_length_exceeded"
        return None

    async def _exchange(self, plan: Plan) -> bytes | None:
        """Send a request and read its answer in the plan's manner; None if we left."""
        sock = socket.socket()
        sock.setblocking(False)
        is_tight = 20 in (plan.body.get("top_logprobs"), plan.body.get("logprobs"))
        if is_tight:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.get_running_loop().sock_connect(sock, self._child.address)
        reader, writer = await asyncio.open_connection(sock=sock, limit=2048 if is_tight else 65536)
        try:
            data = post_bytes(plan.path, plan.body)
            writer.write(data.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
            if plan.manner is Manner.LEAVE:
                await self._leave(plan, reader, sock)
                return None
            if plan.manner is Manner.SILENT:
                await asyncio.sleep(plan.wait_s)
            found = b""
            while part := await reader.read(4096 if plan.manner is Manner.SLOW else 65536):
                found += part
                if plan.manner is Manner.SLOW:
                    await asyncio.sleep(self._pause_s)
            return found
        finally:
            writer.transport.abort() if plan.is_reset else writer.close()

    async def _leave(self, plan: Plan, reader: asyncio.StreamReader, sock: socket.socket) -> None:
        seen = 0
        while seen < plan.frames and (part := await reader.read(4096)):
            seen += part.count(b"data: ")
        if not plan.frames:
            await asyncio.sleep(plan.wait_s)
        if plan.is_reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _compare(self, plan: Plan, answer: Answer) -> None:
        if not plan.is_exact:
            return
        first = self._known.setdefault(plan.key, answer)
        if first is answer:
            return
        self.figures.counts["compared"] += 1
        limit = plan.body.get("max_tokens") or plan.body["max_output_tokens"]
        self.figures.compared_tokens += sum(map(len, answer.tokens)) or limit
        if (how := differs(plan, first, answer)) is None:
            return
        self.figures.counts[f"differs: {how}"] += 1
        if how != "tie":
            self.figures.counts["flips"] += 1
            print(f"DIFFERS {plan}\n {first}\n {answer}", file=sys.stderr)

    # ---------------------------------------------------------------------------- the server

    async def _stats(self) -> dict[str, Any]:
        reply = await asyncio.to_thread(ask, self._child.address, "GET", "/stats")
        found: dict[str, Any] = reply.json()
        return found

    async def _watch(self) -> None:
        """What must hold at any time."""
        while time.monotonic() < self._ends_at:
            batch = (await self._stats())["batch"]
            cache = batch["prompt_cache"]
            self.figures.counts["looks with held rows"] += batch["held_rows"] > 0
            if cache["bytes"] > cache["max_bytes"]:
                self.figures.faults.append(f"the prompt cache is over its cap: {cache}")
            await asyncio.sleep(0.5)

    async def _mark(self) -> None:
        """Wait until the server is idle and write down what it takes."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not is_idle(stats := await self._stats()):
            if time.monotonic() > deadline_s:
                self.figures.faults.append(f"something is left: {stats}")
                break
            await asyncio.sleep(0.05)
        self.figures.stats = stats
        batch = stats["batch"]
        cached = batch["prompt_cache"]["bytes"]
        self.figures.marks.append(
            {
                "rss": resident_bytes(self._child.process.pid),
                "active": batch["memory"]["active_bytes"],
                "active without prefixes": batch["memory"]["active_bytes"] - cached,
                "descriptors": descriptors(self._child.process.pid),
                "generated": batch["generated_tokens"],
            }
        )

    def _judge(self) -> None:
        found, faults = self.figures, self.figures.faults
        batch = found.stats["batch"]
        ended = batch["completed_rows"] + batch["cancelled_rows"] + batch["failed_rows"]
        if batch["submitted_rows"] != ended or batch["failed_rows"] or batch["restarts"]:
            faults.append(f"rows were lost or failed: {batch}")
        if found.counts["flips"] > found.compared_tokens // TOKENS_PER_FLIP:
            faults.append(f"{found.counts['flips']} answers changed")
        log = self._child.errors()
        if "Traceback" in log or "ERROR" in log or "Error" in log:
            faults.append(f"the log has errors: {log[-3000:]}")
        if self._child.process.poll() is not None:
            faults.append("the server ended")
        *_, before, end = found.marks
        for name, most in (
            ("rss", MOST_GROWTH_BYTES if len(found.marks) > 2 else WARM_UP_BYTES),
            ("active without prefixes", MOST_ACTIVE_GROWTH_BYTES),
            ("descriptors", 2),
        ):
            if end[name] - before[name] > most:
                faults.append(f"{name} grew from {before[name]} to {end[name]}")


def is_idle(stats: dict[str, Any]) -> bool:
    """Whether nothing is left; the question itself is one connection and one lease."""
    batch = stats["batch"]
    left = batch["active_rows"] + batch["pending_rows"] + batch["jobs"]["open"]
    left += stats["sessions"]["open"]
    return left == 0 and stats["leases"]["held"] == stats["http"]["connections"] == 1


def unchunked(data: bytes) -> bytes:
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            return body
        body, data = body + data[:length], data[length + 2 :]
    raise AssertionError("cut off within its chunks")


def resident_bytes(pid: int) -> int:
    shown = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, check=True)
    return int(shown.stdout) * 1024


def descriptors(pid: int) -> int:
    """Open files of a process; 0 where the system does not show them."""
    folder = Path(f"/proc/{pid}/fd")
    return len(os.listdir(folder)) if folder.is_dir() else 0


def little(folder: Path) -> str:
    """GB with room for three rows at their longest: others wait, and some have to go back."""
    found = library.fit_of(library.describe(folder, "model"), fit.guessed_machine("float32"), None)
    room = found.transient_bytes(CONTEXT) + 3 * found.plan.row_bytes(CONTEXT)
    return str((found.weights.n_bytes + room) / 1e9)


def soak(kind: str, home: Path, seconds: float, seed: int, is_short: bool = False) -> Figures:
    """Serve a tiny model of this kind under traffic. The figures say what went wrong."""
    folder = tiny.make_model(home / "model", **{"model_type": kind, **KINDS[kind]})
    flags = ["--port", "0", "--batch", "8", "--queue", "16", "--log-level", "warning"]
    flags += ["--prompt-cache", str(CACHE_GIB), "--embedding-pooling", "last"]
    flags += ["--dtype", "float32"]
    if kind == "little memory":
        flags += ["--memory-budget", little(folder)]
    own = {"MLXLITE_CHECK": "1", "MKL_NUM_THREADS": "1"}
    deadline_s = seconds + 5 * PATIENCE_S
    with Child(home / "home", "serve", str(folder), *flags, deadline_s=deadline_s, **own) as child:
        child.wait_ready()
        run = Soak(kind, child, seed, is_short)
        asyncio.run(run.run(seconds))
    return run.figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=KINDS, action="append", help="this kind of cache alone")
    given = parser.parse_args()
    kinds = given.only or list(KINDS)
    is_good = True
    for number, kind in enumerate(kinds):
        with tempfile.TemporaryDirectory() as home:
            seconds = given.minutes * 60 / len(kinds)
            found = soak(kind, Path(home), seconds, given.seed + number)
        print("\n".join(found.lines()), flush=True)
        is_good = is_good and not found.faults
    return 0 if is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
