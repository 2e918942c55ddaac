"""Compiled plans, kept (spec 50 section 4.9).

A plan depends on the render options and the tools' names and schemas alone, so one compile serves
all conversations. Threads of the prepare pool share the cache; who comes while a plan is being
compiled waits for it.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from mlxlite.text.fill.plan import StrictPlan
from mlxlite.types import JSON

MOST_PLANS = 64


def plan_key(options: Mapping[str, JSON], tools: Sequence[Mapping[str, JSON]]) -> str:
    """What a plan depends on. options: of the render. tools: in OpenAI's shape."""
    signature = []
    for tool in tools:
        function = tool["function"]
        schema = function.get("parameters")
        schema = schema if isinstance(schema, Mapping) else {}
        properties = schema.get("properties")
        signature.append(
            [
                function["name"],
                list(properties) if isinstance(properties, Mapping) else None,
                *(schema.get(k) for k in ("required", "additionalProperties", "patternProperties")),
            ]
        )
    return json.dumps([sorted(options.items()), signature])


class Plans:
    """The last used plans. most: of them."""

    def __init__(self, most: int = MOST_PLANS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Future[StrictPlan]] = OrderedDict()

    def get(self, key: str, make: Callable[[], StrictPlan]) -> StrictPlan:
        """The plan of a key, made if it is not here. Raises what `make` raises, to all who wait for
        it; it is tried again after that."""
        with self._lock:
            known = self._kept.get(key)
            plan: Future[StrictPlan] = known or Future()
            self._kept[key] = plan
            self._kept.move_to_end(key)
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        if known is None:
            try:
                plan.set_result(make())
            except BaseException as error:
                with self._lock:
                    if self._kept.get(key) is plan:
                        del self._kept[key]
                plan.set_exception(error)
        return plan.result()
