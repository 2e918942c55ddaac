"""Large blocks that are freed go back to the system, whatever stays between them; what stays is not
collected.

Of the former, nothing but the process's own size can tell. Where the system does not tell it, or
the heap is not glibc's, there is nothing to test.
"""

from __future__ import annotations

import platform
import queue
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlxlite import app, heap
from mlxlite.service import Service
from tests import live
from tests.footprint import HAS_PROC

IS_GLIBC = platform.libc_ver()[0] == "glibc" and HAS_PROC

# Large blocks come and go while small ones stay between them, as requests do it. Prints whether the
# heap was settled, and what the process has grown by.
HOLES = """
import os
from mlxlite import app, heap
from mlxlite.service import Service
from tests.footprint import resident_bytes

is_settled = heap.settle()
largest = b"x" * (8 << 20)  # so far
del largest
before = resident_bytes(os.getpid())
passing, kept = [], []
for n in range(100):
    passing.append(b"x" * 700_000)
    kept.append(b"x" * 20_000)
del passing
print(is_settled, resident_bytes(os.getpid()) - before)
"""


@pytest.mark.skipif(not IS_GLIBC, reason="only glibc has this heap")
def test_large_blocks_leave_no_holes(tmp_path: Path) -> None:
    done = live.run(tmp_path, script=HOLES)
    assert done.stdout.startswith("True "), done.stderr
    assert int(done.stdout.split()[1]) < 8 << 20  # 2 MB stay; 70 MB do without the setting


# Threads that allocate at the same time, each from a heap of its own where that is allowed. Prints
# how many heaps there are (malloc_info(3)).
HEAPS = """
import ctypes, sys, threading
from mlxlite import heap

heap.settle()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
all_begun = threading.Barrier(6)

def allocate():
    all_begun.wait()
    for _ in range(50):
        libc.malloc(ctypes.c_size_t(50_000))
    all_begun.wait()

threads = [threading.Thread(target=allocate) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
print(open(sys.argv[1]).read().count("<heap nr="))
"""


@pytest.mark.skipif(not IS_GLIBC, reason="only glibc has this heap")
def test_all_threads_share_one_heap(tmp_path: Path) -> None:
    done = live.run(tmp_path, str(tmp_path / "heaps.xml"), script=HEAPS)
    assert done.stdout.strip() == "1", done.stderr


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_a_heap_that_the_user_tuned_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    assert not heap.settle()


COLLECTIONS = """
import gc, time
from mlxlite import app, heap

def whole():
    began_s = time.perf_counter()
    gc.collect()
    return time.perf_counter() - began_s

gc.collect()
before, _ = min(whole() for _ in range(5)), heap.keep()
kept = gc.get_freeze_count()
print(before / min(whole() for _ in range(5)), kept)
later = [[] for _ in range(9)]
later.append(later)
heap.keep()
print(gc.get_freeze_count() - kept)
"""


def test_what_is_kept_is_not_looked_at_again(tmp_path: Path) -> None:
    done = live.run(tmp_path, script=COLLECTIONS)
    times, kept, later = done.stdout.split()
    assert float(times) > 4 and int(kept) > 20_000 and int(later) >= 10, done


@pytest.mark.slow
def test_a_server_keeps_once_it_is_quiet(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the process is its own: there, after the start and after a change of the model."""
    kept: queue.Queue[bool] = queue.Queue()
    monkeypatch.setattr(heap, "keep", lambda: kept.put(True))
    shutil.copytree(tiny_folder, tmp_path / "models" / "other")
    with live.LiveApp(tiny_folder, home=str(tmp_path)) as server:
        server.chat()
    assert kept.empty(), "a process of others"

    class Owner(Service):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.owns_process = True

    monkeypatch.setattr(app, "Service", Owner)
    with live.LiveApp(tiny_folder, home=str(tmp_path)) as server:
        assert kept.get(timeout=live.WAIT_S)
        server.ask("POST", "/api/models/serve", {"model": "other"})
        assert kept.get(timeout=live.WAIT_S)
