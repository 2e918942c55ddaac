"""What was found out about a model by trying, kept for the next start (see `judge`, `turned`).

One small file a model beside the compiled kernels. Its name is a hash of all that the findings may
depend on: the model's config, dtype and device, MLX's version, the BLAS, mlx-lm's sources of the
model and of caches, and our own. A file that cannot be read or written costs the trying, a second
or two after the start, and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_CACHES = "mlx_lm.models.cache"
_REPLACED = ("mlx_lm.models.rope_utils", "mlx_lm.models.activations")  # see `rotary`, `gated`
_SOURCES = ("slots", "lanes", "judge", "rotary", "gated", "turned", "replay", "on_cpu")


class Verdicts:
    """folder: where they are kept. about: what they depend on besides sources."""

    def __init__(self, folder: Path, model: Any, about: Mapping[str, Any]) -> None:
        digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode())
        here = Path(__file__).parent
        theirs = [sys.modules[name] for name in (type(model).__module__, _CACHES)]
        theirs += [sys.modules[name] for name in _REPLACED if name in sys.modules]
        files = [str(module.__file__) for module in theirs]
        for path in (*(here / f"{name}.py" for name in _SOURCES), *map(Path, files)):
            digest.update(path.read_bytes())
        self._path = folder / f"judged-{digest.hexdigest()[:24]}.json"

    def read(self) -> dict[str, Any] | None:
        """What was found, an object, or None."""
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def write(self, found: Mapping[str, Any]) -> None:
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(dict(found)), encoding="utf-8")
            draft.replace(self._path)
        except OSError as error:
            log.debug("what was found out about the model is not kept: %s", error)
