"""A fit as JSON: the same object for `mlxlite fit --json` and `GET /fit` (spec 70 section 8)."""

from __future__ import annotations

from typing import Any

from mlxlite.models.fit import SKUS, USABLE_SHARE, Fit

SKU_CONTEXT = 32_768


def report(fit: Fit, context: int) -> dict[str, Any]:
    """Everything about one row of `context` tokens; sizes in bytes."""
    plan, speed = fit.plan, fit.decode_tps(context)
    return {
        "machine": {
            "backend": fit.machine.kind,
            "memory_bytes": fit.machine.memory_bytes,
            "memory_budget_bytes": fit.budget_bytes,
            "bandwidth_gbps": fit.machine.bandwidth,
        },
        "context_tokens": context,
        "weights_bytes": fit.weights.n_bytes,
        "dtype": fit.weights.dtype,
        "is_unpacked": fit.weights.is_unpacked,
        "kv_per_token_bytes": plan.row_bytes(1) - plan.constant_bytes,
        "kv_per_1k_bytes": plan.row_bytes(1000),
        "kv_constant_bytes": plan.constant_bytes,
        "kv_windows": [
            {"tokens": tokens, "per_token_bytes": n_bytes} for tokens, n_bytes in plan.windows
        ],
        "kv_bytes": fit.kv_bytes(context),
        "kv_at_max_context_bytes": fit.kv_bytes(fit.max_context),
        "transient_bytes": fit.transient_bytes(context),
        "total_bytes": fit.total_bytes(context),
        "usable_bytes": fit.usable_bytes,
        "fits": fit.fits(context),
        "max_context": fit.max_context,
        "max_safe_context": fit.max_safe_context,
        "rows": fit.rows(context),
        "decode_tps": None if speed is None else round(speed, 1),
    }


def sku_rows(fit: Fit, context: int) -> list[dict[str, Any]]:
    """For each chip of Apple's, how fast it would decode and the memory it would need."""
    rows = []
    for name, bandwidth in SKUS.items():
        speed = fit.decode_tps(context, bandwidth)
        rows.append(
            {
                "sku": name,
                "bandwidth_gbps": bandwidth,
                "decode_tps": None if speed is None else round(speed, 1),
                "memory_needed_bytes": int(fit.total_bytes(context) / USABLE_SHARE),
            }
        )
    return rows
