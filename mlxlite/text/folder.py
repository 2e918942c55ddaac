"""The small JSON files that lie beside a model's weights (floor 1, column "text").

Both the tokenizer and the chat template need facts from `tokenizer_config.json` and its
neighbours; this file alone reads them. Each read is whole and at start-up; nothing is kept.

A file that is absent is None. A file that is there but broken is a ModelError of one line that
names the file and the reason: half a download should stop the start, not garble answers later.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlxlite.errors import ModelError

SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)


def read_text(path: Path) -> str | None:
    """The text of a UTF-8 file, or None if there is no such file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as exc:
        raise ModelError(f"{path}: not UTF-8 text ({exc.reason} at byte {exc.start})") from None
    except OSError as exc:
        raise ModelError(f"{path}: cannot be read ({exc.strerror})") from None


def read_object(path: Path) -> dict[str, Any] | None:
    """The object that a JSON file holds, or None if there is no such file."""
    text = read_text(path)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ModelError(f"{path}: not valid JSON ({exc})") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds {type(value).__name__}, expected an object")
    return value


def special_tokens(folder: Path) -> dict[str, str]:
    """The texts of the named special tokens, e.g. {"bos_token": "<s>"}; unset ones are absent.

    `tokenizer_config.json` wins over `special_tokens_map.json`, also where it says null: Qwen
    writes `"bos_token": null` to say that there is none.
    """
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        table = read_object(folder / name) or {}
        for key in SPECIAL_NAMES:
            if key not in table:
                continue
            value = table[key]
            if isinstance(value, dict):  # an AddedToken written out: {"content": "<s>", ...}
                value = value.get("content")
            if isinstance(value, str):
                found[key] = value
            elif value is None:
                found.pop(key, None)
            else:
                raise ModelError(
                    f"{folder / name}: {key} is {type(value).__name__}, expected a string"
                )
    return found
