"""`mlxlite fit`: what a model takes on this machine, as a table or JSON (floor 4, spec 80)."""

from __future__ import annotations

import json
import sys
from typing import Any

from mlxlite.config import Settings
from mlxlite.errors import BackendMissing
from mlxlite.models import fit, library
from mlxlite.models.fit_report import report, sku_rows


def run(name: str | None, context: int | None, as_json: bool, settings: Settings) -> int:
    """Print the report; 0 whether the model fits or not. Raises ModelError, one line."""
    machine = _machine(settings)
    model = library.resolve(name, settings.home)
    found = library.fit_of(model, machine, settings.memory_budget)
    context = context or min(fit.TYPICAL_CONTEXT, found.max_context)
    shown = {"model": model.name, **report(found, context)}
    if as_json:
        on_a_mac = library.fit_of(model, fit.machine("metal", 0, settings.dtype))
        shown["sku_matrix"] = sku_rows(on_a_mac, context)
        json.dump(shown, sys.stdout, indent=2)
        print()
        return 0
    print(model.name)
    for name, value in _rows(shown):
        print(f"  {name:28}{value}")
    return 0


def _machine(settings: Settings) -> fit.Machine:
    """What MLX says of this machine; without MLX, what the system says."""
    try:
        from mlxlite.engine import backend
    except BackendMissing:
        return fit.guessed_machine(settings.dtype)
    found = backend.start(settings.home / "kernels")
    return fit.machine(found.kind, found.memory_bytes, settings.dtype)


def _rows(shown: dict[str, Any]) -> list[tuple[str, str]]:
    context, most = shown["context_tokens"], shown["max_context"]
    cause = "75 % of the memory"
    if shown["machine"]["memory_budget_bytes"] is not None:
        cause = "--memory-budget"
    speed = shown["decode_tps"]
    caches = {1000: "kv_per_1k_bytes", context: "kv_bytes", most: "kv_at_max_context_bytes"}
    return [
        ("weights", f"{_size(shown['weights_bytes'])} {shown['dtype']}{_packing(shown)}"),
        ("cache of a token", _size(shown["kv_per_token_bytes"])),
        *((f"cache of {n:,} tokens", _size(shown[key])) for n, key in caches.items()),
        ("for a moment in a prefill", _size(shown["transient_bytes"])),
        ("together", f"{_size(shown['total_bytes'])} at {context:,} tokens"),
        ("usable", f"{_size(shown['usable_bytes'])} ({cause})"),
        ("fits", "yes" if shown["fits"] else "no"),
        ("longest context that fits", f"{shown['max_safe_context']:,} of {most:,}"),
        ("rows that fit together", f"{shown['rows']} of {context:,} tokens"),
        ("decode", "unknown" if speed is None else f"about {speed:.0f} tok/s"),
    ]


def _packing(shown: dict[str, Any]) -> str:
    return ", unpacked" if shown["is_unpacked"] else ""


def _size(n_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= size:
            return f"{n_bytes / size:.2f} {unit}"
    return f"{n_bytes} B"
