"""The lock that keeps two processes from building one model at the same time."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from mlxlite.models import install
from mlxlite.models.progress import Progress


def test_one_holder_of_a_lock_that_is_removed(tmp_path: Path) -> None:
    """Each holder removes the file under those that wait for it; still one holds it at a time."""
    path = tmp_path / ".a.lock"
    held, counts = [0], set()

    def take() -> None:
        for _ in range(100):
            with install._locked(path, "a", Progress()):
                held[0] += 1
                counts.add(held[0])
                time.sleep(0)  # lets another one run
                counts.add(held[0])
                held[0] -= 1

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert counts == {1} and list(tmp_path.iterdir()) == []
