"""The process's memory: the C library's heap and Python's garbage collections (floor 0).

Large blocks are given back to the system. glibc learns: once a large block is freed, blocks up to
its size (at most 32 MiB) have no more pages of their own but places in a heap, and every heap keeps
twice as much free at its end. In a server clients choose these sizes, and what is small and stays
lies down between blocks that go: the heaps, one a thread, fill with holes. A threshold that is set
is never moved again. And all threads share one heap: what one of them freed, all can use, and they
seldom meet there, as most of what allocates holds the GIL (steps of 1, 4 and 16 rows and prompts
take as long as before).

Measured: a hundred blocks of 700 kB that were freed left 71 MB, and leave 1; so do bodies. An
answer of the default model on a CPU takes 13 MB more of fresh pages per 512 tokens of its prompt, a
few milliseconds. Eighty thousand broken requests end 5 MB lower with one heap.
"""

from __future__ import annotations

import ctypes
import gc
import os

# A block from this size on has pages of its own; no heap keeps more free at its end. A decode step
# of one row has no array as large.
LARGE_BYTES = 256 << 10
# malloc.h of glibc
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


def settle() -> bool:
    """Set glibc's thresholds and the number of heaps for good; True if that was done. Where the
    environment tunes the heap, or it is none of glibc's, nothing happens. Call it before there are
    threads."""
    if any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    done = [mallopt(kind, LARGE_BYTES) for kind in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD)]
    return all(done) and bool(mallopt(_M_ARENA_MAX, 1))


def keep() -> None:
    """Leave all objects that there are now out of later garbage collections.

    One that looks at everything that was imported and loaded takes 45 ms and holds the GIL, so that
    every stream waits; rendering a first message used to bring one about. For a process that is
    ready, and once more when a large part of it was replaced: what was left out before is looked at
    first. Takes as long as one such collection.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
