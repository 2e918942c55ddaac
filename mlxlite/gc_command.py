"""`mlxlite gc`: what superseded files of the hub's cache take; deletes them (floor 4, spec 80)."""

from __future__ import annotations

from mlxlite.models import gc
from mlxlite.models.library import hub_cache


def run(is_agreed: bool) -> int:
    """Print what could go; with the user's yes, delete it and print what went."""
    found = gc.execute(hub_cache(), ()) if is_agreed else gc.plan(hub_cache(), ())
    for each in found:
        counts = f"{len(each.snapshots)} superseded snapshots, {len(each.blobs)} dead blobs"
        print(f"{each.repository}: {counts}, {each.n_bytes / 1e6:.1f} MB")
        for path in each.skipped:
            print(f"  kept, it has files of its own: {path}")
    total = f"{sum(each.n_bytes for each in found) / 1e6:.1f} MB"
    if is_agreed:
        print(f"freed {total}")
    elif any(each.snapshots or each.blobs for each in found):
        print(f"{total} could be freed: mlxlite gc --yes")
    else:
        print("nothing to delete")
    return 0
