"""Runs the legs on the servers: interleaved, bounded in time, one failure a note (decision D25).

All servers of a group are up together and one is asked at a time: the first round on each of them,
then the second. A leg has a budget on each server; what does not finish in it is noted, and the
server, which may still be busy with it, is started again. A slow server repeats less.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from mlxlite.bench.client import RequestFailed
from mlxlite.bench.figures import Results
from mlxlite.bench.legs import PROMPT_TOKENS, Kit, Leg, calibrate, short
from mlxlite.bench.servers import Server

Say = Callable[[str], None]
# A leg is not repeated on a server after a round of so many seconds, or after so many in all; and a
# server other than ours gets no further leg after so many: the whole is to end in 12 minutes.
_SLOW_ROUND_S = 15.0
_ENOUGH_S = 60.0
_MOST_S = 300.0


class Matrix:
    """budget_s: of a leg on a server, in all. say: told of progress, a line at a time."""

    def __init__(
        self, results: Results, legs: Sequence[Leg], budget_s: float, say: Say, salt: str
    ) -> None:
        self._results = results
        self._legs = legs
        self._budget_s = budget_s
        self._say = say
        self._salt = salt
        self._kit: Kit | None = None
        self._spent_s: dict[tuple[str, str], float] = {}  # by leg and server
        self._slow: set[tuple[str, str]] = set()  # legs that did not finish
        self._dead: set[str] = set()  # servers that do not start

    async def run(self, servers: Sequence[Server]) -> None:
        """All legs on servers that may be up together; those of ours are down afterwards."""
        try:
            for leg in self._legs:
                await self._run(
                    leg, [server for server in servers if server.is_ours or not leg.owns]
                )
        finally:
            for server in servers:
                server.stop()
                if server.peak_bytes is not None:
                    self._results.add(server.name, {"peak_bytes": [server.peak_bytes]})

    async def _run(self, leg: Leg, servers: Sequence[Server]) -> None:
        going = [server for server in servers if not self._is_hopeless(leg, server)]
        began = time.monotonic()
        for turn in range(leg.rounds):
            for server in list(going):
                if not await self._round(leg, server, turn):
                    going.remove(server)
        self._say(f"{leg.name}: {time.monotonic() - began:.0f} s")

    async def _round(self, leg: Leg, server: Server, turn: int) -> bool:
        """One round on one server; whether there may be another one."""
        key = leg.name, server.name
        spent_s = self._spent_s.get(key, 0.0)
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._budget_s - spent_s):
                if leg.name != "start":
                    await self._prepare(server)
                    began = time.monotonic()
                found = await leg.run(server, turn, self._kit or Kit(0.75, self._salt))
        except TimeoutError:
            had = "" if turn == 0 else f"; {turn} of {leg.rounds} rounds were measured"
            self._note(server, f"{leg.name} did not finish within {self._budget_s:.0f} s{had}")
            self._slow.add((leg.name, server.name))
            self._spent_s[key] = self._budget_s
            server.stop()
            return False
        except RequestFailed as error:
            self._note(server, f"{leg.name}: {error}")
            if leg.owns and not server.is_up:
                self._dead.add(server.name)
            return False
        seconds = time.monotonic() - began
        self._spent_s[key] = spent_s + seconds
        self._results.add(server.name, found.values)
        self._results.say(server.name, found.texts)
        for note in found.notes:
            self._note(server, note)
        if seconds <= _SLOW_ROUND_S and spent_s + seconds <= _ENOUGH_S:
            return True
        if turn + 1 < leg.rounds:
            self._note(server, f"{leg.name}: {turn + 1} of {leg.rounds} rounds, as it is slow")
        return False

    async def _prepare(self, server: Server) -> None:
        """Have it up and warm, and prompts of the right length; not counted, but for the budget."""
        if not server.is_up:
            self._dead.add(server.name)  # unless it comes up
            server.spawn()
            await server.wait_ready()
            await short(server, Kit(1.0, self._salt), "warm-up")
            self._dead.discard(server.name)
        if self._kit is None:
            self._kit = await calibrate(server, self._salt)

    def _is_hopeless(self, leg: Leg, server: Server) -> bool:
        """Whether it cannot start, or its speed on the 1k prompt says that the leg's budget would
        be spent in vain."""
        if server.name in self._dead:
            return True
        if server.name == self._results.own:
            return False  # it shares prompts, and its figures are what all this is for
        total_s = sum(s for (_, name), s in self._spent_s.items() if name == server.name)
        if total_s > _MOST_S:
            self._note(server, f"{leg.name} was not run: {total_s:.0f} s were spent on it already")
            return True
        cold_s = self._results.median("cold_s", server.name)
        if leg.prompt_tokens and ("prompt", server.name) in self._slow:
            self._note(server, f"{leg.name} was not run: the 1k prompt took too long already")
            return True
        needed_s = (cold_s or 0.0) * leg.prompt_tokens / PROMPT_TOKENS
        if needed_s <= self._budget_s:
            return False
        self._note(server, f"{leg.name} was not run: its prompts would take some {needed_s:.0f} s")
        return True

    def _note(self, server: Server, text: str) -> None:
        self._results.notes.append(f"{server.name}: {text}")
        self._say(f"  {server.name}: {text}")


def run(matrix: Matrix, groups: Sequence[Sequence[Server]]) -> None:
    """Run the groups, one after the other, on an event loop of its own."""

    async def all_groups() -> None:
        for group in groups:
            await matrix.run(group)

    asyncio.run(all_groups())
