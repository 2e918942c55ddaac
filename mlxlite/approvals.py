"""Tools that the user always allows, by name: a list in the home (floor 2; spec 70 section 9).

The server runs no tool. Who does, an agent or a page that answers a model's calls on this machine,
asks here before it asks the user, and all of them know what was allowed in one.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from mlxlite import private_file
from mlxlite.errors import BadRequest, Conflict

FILE = "tool-approvals.json"
MOST_TOOLS = 1000
MOST_CHARS = 256  # of a name; those that models call have 64 at most


class Approvals:
    """home: the folder that has the file, readable by its owner alone. Safe from any thread, not
    from other processes: the last to write wins."""

    def __init__(self, home: Path) -> None:
        self._path = home / FILE
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """In order of the alphabet; what is no list of names is none."""
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return []
        if not isinstance(found, list):
            return []
        return sorted({name for name in found if isinstance(name, str)})

    def allow(self, tool: Any) -> list[str]:
        """Add a tool; the names then. Raises BadRequest, Conflict for too many, and OSError."""
        name = _name(tool)
        with self._lock:
            names = self.names()
            if name not in names:
                if len(names) >= MOST_TOOLS:
                    raise Conflict(f"{MOST_TOOLS} tools are allowed already", param="tool")
                names = sorted([*names, name])
                private_file.write(self._path, json.dumps(names))
        return names

    def forget(self, tool: Any) -> list[str]:
        """Ask again before this tool; the names then. Raises BadRequest and OSError."""
        name = _name(tool)
        with self._lock:
            names = self.names()
            if name in names:
                names.remove(name)
                private_file.write(self._path, json.dumps(names))
        return names


def _name(tool: Any) -> str:
    if not isinstance(tool, str) or not tool.strip():
        raise BadRequest("tool required", param="tool")
    if len(tool) > MOST_CHARS:
        raise BadRequest(f"tool must be a name of at most {MOST_CHARS} characters", param="tool")
    return tool.strip()
