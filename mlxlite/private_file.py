"""Small files of the home that only its owner reads (floor 0)."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write(path: Path, text: str) -> None:
    """A whole file in place of the one that is there, of mode 0600; of several at once the last one
    stays. Raises OSError, and leaves no draft."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, draft = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(number, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
