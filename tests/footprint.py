"""What a server process takes: memory, open files, and whether anything is left in it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from tests.live import WAIT_S, ask

HAS_PROC = Path("/proc/self/fd").exists()  # elsewhere nobody tells of other processes


def resident_bytes(pid: int) -> int:
    """Memory that a process holds; 0 where that is not told."""
    if not HAS_PROC:
        return 0
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(row.split()[1]) * 1024 for row in rows if row.startswith("VmRSS"))


def open_files(pid: int) -> int:
    """Files and sockets that a process has open; 0 where that is not told."""
    return len(os.listdir(f"/proc/{pid}/fd")) if HAS_PROC else 0


def settle(address: tuple[str, int]) -> dict[str, Any]:
    """Wait until the server has nothing left to do; its `/stats` then."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        stats: dict[str, Any] = ask(address, "GET", "/stats").json()
        batch, http = stats["batch"], stats["http"]
        rows = batch["active_rows"] + batch["pending_rows"]
        if rows == 0 and http["connections"] == http["requests_active"] == 1:  # the one that asks
            return stats
        assert time.monotonic() < deadline_s, stats
        time.sleep(0.01)  # a process tells nobody that it is idle
