"""Leases: a host resource that is tied to one answer, from dispatch to its last byte (floor 2).

Whoever wants to replace or stop what answers depend on (a model, the engine) waits until no lease
is held (spec 70 section 14). A lease is released exactly once: when the body ends, fails or is
cancelled; at once if there is no body.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from mlxlite.http.routing import EventStream, Request, Response

S = TypeVar("S")


class Leases:
    """Counts the answers under way. Owned by the event loop."""

    def __init__(self) -> None:
        self.held = 0
        self._is_free = asyncio.Event()
        self._is_free.set()

    def acquire(self) -> Lease:
        self.held += 1
        self._is_free.clear()
        return Lease(self)

    async def drained(self) -> None:
        """Wait until none is held."""
        while self.held:  # one may have come between the waking and this task's turn
            await self._is_free.wait()

    def _released(self) -> None:
        self.held -= 1
        if self.held == 0:
            self._is_free.set()


class Lease:
    def __init__(self, leases: Leases) -> None:
        self._leases: Leases | None = leases

    def release(self) -> None:
        """Give it back; later calls do nothing."""
        leases, self._leases = self._leases, None
        if leases is not None:
            leases._released()


class _Body:
    """Frames passed on one by one, unbuffered; then the lease is given back."""

    def __init__(self, stream: EventStream, lease: Lease) -> None:
        self._stream = stream
        self._lease = lease

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            await self._stream.open()
            return await anext(self._stream)
        except BaseException:  # the end, a fault or a cancellation: no frame comes after it
            await self.aclose()
            raise

    async def aclose(self) -> None:
        try:
            await self._stream.close()
        finally:  # even if closing the inner body fails
            self._lease.release()


def leased(
    leases: Leases, handler: Callable[[S, Request], Awaitable[Response | EventStream]]
) -> Callable[[S, Request], Awaitable[Response | EventStream]]:
    """The handler, with a lease held from before it runs to the end of what it answers."""

    async def hold(service: S, request: Request) -> Response | EventStream:
        lease = leases.acquire()
        try:
            result = await handler(service, request)
        except BaseException:
            lease.release()
            raise
        if not isinstance(result, EventStream):
            lease.release()
            return result
        return result.over(_Body(result, lease))

    return hold
