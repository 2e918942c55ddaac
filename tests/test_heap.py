"""Large blocks that are freed go back to the system, whatever stays between them.

Nothing but the process's own size can tell. Where the system does not tell it, or the heap is not
glibc's, there is nothing to test.
"""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from mlxlite import heap
from tests import live
from tests.footprint import HAS_PROC

IS_GLIBC = platform.libc_ver()[0] == "glibc" and HAS_PROC

# Large blocks come and go while small ones stay between them, as requests do it. Prints whether the
# heap was settled, and what the process has grown by.
HOLES = """
import os
from mlxlite import heap
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


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_a_heap_that_the_user_tuned_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    assert not heap.settle()
