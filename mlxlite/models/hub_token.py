"""The hub token that a user gave us: one file under the home, readable by its owner alone.

It goes to the hub's client and nowhere else. Without it the client uses what it finds by itself
(`HF_TOKEN`, its own token file).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mlxlite import private_file
from mlxlite.errors import BadRequest

FILE = "hub-token"

# The hub's begin with hf_ and are 37 characters long; other hubs have their own. What could end a
# header line, or is no token at all, is refused.
_TOKEN = re.compile(r"[\x21-\x7e]{1,1024}")


def read(home: Path) -> str | None:
    try:
        text = (home / FILE).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return text if _TOKEN.fullmatch(text) else None


def write(home: Path, token: str) -> None:
    """Keep it. Raises BadRequest for what is no token, without repeating it, and OSError."""
    if not _TOKEN.fullmatch(token):
        raise BadRequest("token must be 1 to 1,024 visible ASCII characters", param="token")
    private_file.write(home / FILE, token)


def forget(home: Path) -> None:
    (home / FILE).unlink(missing_ok=True)


def source(home: Path) -> str | None:
    """Where the token comes from that downloads use: "stored", "environment", or None."""
    if read(home) is not None:
        return "stored"
    if any(os.environ.get(name) for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")):
        return "environment"
    return None
