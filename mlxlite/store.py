"""Responses kept for an hour, in SQLite, so that they outlive the process (floor 1, column "side").

    POST /v1/responses -> keep(Entry)        previous_response_id -> find(id)

One thread owns the connection; every method hands it a task and returns a Future with the result or
the exception, so that an event loop can wait without being blocked. Nothing here knows what a
request is: an entry is an id and two JSON values (spec 70 section 6.4, decision D15).

Invariants:
- An entry is gone `ttl_s` after it was made, however often it is read; every access purges.
- The entries' JSON is never above `max_bytes`; who was read longest ago goes first, and an entry
  above the cap alone is not kept.
- What was kept is there after SIGKILL: it was committed to the write-ahead log before the Future
  ended. (After a power cut the last ones may be missing: no fsync a commit.)
- A file that is no database, or a damaged one, is moved aside with a warning. A folder that cannot
  be written means a store in memory. The server starts in any case.
- Several servers may share the file; each statement sees what the others did.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mlxlite.database import Database, Migration, StoreFault, Task, connected, is_damage
from mlxlite.types import JSON

log = logging.getLogger(__name__)

TTL_S = 3600.0  # both from spec 70 section 6.4
MAX_BYTES = 32 << 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """A finished response. input: all that its model saw, history included, each item with an id.

    response: the object as its client got it; `output` in it holds the items of the answer.
    """

    id: str
    input: list[JSON]
    response: dict[str, JSON]


# ---------------------------------------------------------------------------------- migrations

MIGRATIONS: list[Migration] = []


def migration(step: Migration) -> Migration:
    MIGRATIONS.append(step)
    return step


@migration
def m001_responses(connection: sqlite3.Connection) -> None:
    # The short columns come first: a sum over them does not read the long ones. `used` counts up.
    connection.execute(
        "CREATE TABLE responses (id TEXT PRIMARY KEY, created_s REAL NOT NULL, "
        "used INTEGER NOT NULL, bytes INTEGER NOT NULL, "
        "input BLOB NOT NULL, output BLOB NOT NULL, response BLOB NOT NULL)"
    )
    connection.execute("CREATE INDEX responses_by_age ON responses (created_s)")
    connection.execute("CREATE INDEX responses_by_use ON responses (used, bytes)")


@migration
def m002_items(connection: sqlite3.Connection) -> None:
    connection.execute(
        "CREATE TABLE items (id TEXT PRIMARY KEY, response_id TEXT NOT NULL "
        "REFERENCES responses (id) ON DELETE CASCADE)"
    )
    connection.execute("CREATE INDEX items_by_response ON items (response_id)")


# --------------------------------------------------------------------------------------- store


class ResponseStore(Database):
    """path: of the database file; it and its folder are made. clock: seconds since 1970.

    Opening is the thread's first task, so neither it nor a damaged file delays a start.
    """

    name = "response store"
    migrations = MIGRATIONS

    def __init__(
        self,
        path: Path,
        *,
        ttl_s: float = TTL_S,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(path)
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._writer.submit(self._open)

    # ------------------------------------------------------------------------- for any thread

    def keep(self, entry: Entry) -> Future[bool]:
        """Store an entry; False if it alone is above the cap."""

        def task(connection: sqlite3.Connection) -> bool:
            output = _encoded(entry.response["output"])
            given = _encoded(entry.input)
            rest = _encoded({**entry.response, "output": []})
            size_bytes = len(given) + len(output)
            if size_bytes > self._max_bytes:
                return False
            connection.execute(
                "INSERT OR REPLACE INTO responses VALUES "
                "(?, ?, (SELECT coalesce(max(used), 0) + 1 FROM responses), ?, ?, ?, ?)",
                (entry.id, self._clock(), size_bytes, given, output, rest),
            )
            connection.executemany(
                "INSERT OR REPLACE INTO items VALUES (?, ?)",
                [(item["id"], entry.id) for item in entry.response["output"]],
            )
            self._evict(connection)
            return True

        return self.ask(task)

    def find(self, response_id: str) -> Future[Entry | None]:
        """The entry, or None if it is unknown or expired. It counts as used."""

        def task(connection: sqlite3.Connection) -> Entry | None:
            row = connection.execute(
                "SELECT input, output, response FROM responses WHERE id = ?", (response_id,)
            ).fetchone()
            if row is None:
                return None
            connection.execute(
                "UPDATE responses SET used = (SELECT max(used) + 1 FROM responses) WHERE id = ?",
                (response_id,),
            )
            given, output, response = map(json.loads, row)
            return Entry(response_id, given, {**response, "output": output})

        return self.ask(task)

    def find_items(self, ids: Sequence[str]) -> Future[dict[str, JSON]]:
        """Those of the items, by id, that are part of an answer that is kept."""

        def task(connection: sqlite3.Connection) -> dict[str, JSON]:
            found: dict[str, JSON] = {}
            for item_id in ids:
                if item_id in found:
                    continue
                row = connection.execute(
                    "SELECT output FROM responses JOIN items ON responses.id = response_id "
                    "WHERE items.id = ?",
                    (item_id,),
                ).fetchone()
                if row is not None:
                    found.update({item["id"]: item for item in json.loads(row[0])})
            return {item_id: found[item_id] for item_id in ids if item_id in found}

        return self.ask(task)

    def delete(self, response_id: str) -> Future[bool]:
        """Forget an entry; False if it is unknown or expired."""

        def task(connection: sqlite3.Connection) -> bool:
            done = connection.execute("DELETE FROM responses WHERE id = ?", (response_id,))
            return done.rowcount > 0

        return self.ask(task)

    def statistics(self) -> Future[dict[str, int]]:
        """For `/stats` (spec 70 section 6.5)."""

        def task(connection: sqlite3.Connection) -> dict[str, int]:
            entries, size_bytes = _totals(connection)
            return {
                "entries": entries,
                "bytes": size_bytes,
                "max_bytes": self._max_bytes,
                "ttl_ms": int(self._ttl_s * 1000),
            }

        return self.ask(task)

    # ------------------------------------------------------------------------- on the thread

    def _run(self, task: Task[T], writes: bool) -> T:
        """If the file turns out damaged, once more on a new one."""
        try:
            return super()._run(task, writes)
        except StoreFault as fault:
            error = fault.__cause__
            if not isinstance(error, sqlite3.Error) or not is_damage(error):
                raise
            self._set_aside(error)
            return super()._run(task, writes)

    def _attempt(self, task: Task[T], writes: bool) -> T:
        def purged(connection: sqlite3.Connection) -> T:
            oldest_s = self._clock() - self._ttl_s
            connection.execute("DELETE FROM responses WHERE created_s <= ?", (oldest_s,))
            return task(connection)

        return super()._attempt(purged, writes)

    def _evict(self, connection: sqlite3.Connection) -> None:
        over_bytes = _totals(connection)[1] - self._max_bytes
        by_use = connection.execute("SELECT id, bytes FROM responses ORDER BY used")
        gone = []
        while over_bytes > 0:
            response_id, size_bytes = by_use.fetchone()
            gone.append((response_id,))
            over_bytes -= size_bytes
        by_use.close()
        connection.executemany("DELETE FROM responses WHERE id = ?", gone)

    def _open(self) -> None:
        """Never raises: what cannot be opened is replaced."""
        try:
            try:
                super()._open()
            except sqlite3.DatabaseError as error:
                if not is_damage(error):
                    raise
                self._set_aside(error)
                super()._open()
        except (OSError, sqlite3.Error) as error:
            log.warning("%s cannot be used (%s): responses live in memory", self.path, error)
            self._connection = connected(":memory:", MIGRATIONS)

    def _set_aside(self, error: Exception) -> None:
        self._shut()
        aside = self.path.with_name(f"{self.path.name}.damaged-{time.time_ns()}")
        self.path.replace(aside)
        for suffix in ("-wal", "-shm"):  # they belong to the damaged file, and mean nothing alone
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        log.warning("%s is damaged (%s): moved to %s", self.path, error, aside.name)


def _totals(connection: sqlite3.Connection) -> tuple[int, int]:
    """Entries and their bytes, from the index alone."""
    row: tuple[int, int] = connection.execute(
        "SELECT count(*), coalesce(sum(bytes), 0) FROM responses INDEXED BY responses_by_use"
    ).fetchone()
    return row


def _encoded(value: JSON) -> bytes:
    """Compact JSON. Half a surrogate pair, which a model may write, survives both ways."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")
