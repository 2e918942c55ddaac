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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mlxlite.errors import MlxliteError
from mlxlite.types import JSON

log = logging.getLogger(__name__)

TTL_S = 3600.0  # both from spec 70 section 6.4
MAX_BYTES = 32 << 20
_BUSY_S = 5.0  # how long to wait for another process's write
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

T = TypeVar("T")
Task = Callable[[sqlite3.Connection], T]


class StoreFault(MlxliteError):
    """The store cannot do it: the disk is full, or another process holds the file."""

    status = 500
    code = "store_fault"


@dataclass(frozen=True, slots=True)
class Entry:
    """A finished response. input: all that its model saw, history included, each item with an id.

    response: the object as its client got it; `output` in it holds the items of the answer.
    """

    id: str
    input: list[JSON]
    response: dict[str, JSON]


# ---------------------------------------------------------------------------------- migrations

Migration = Callable[[sqlite3.Connection], object]
MIGRATIONS: list[Migration] = []
"""In the order of their registration. The names of those applied are in the database itself; one
that was released is never edited (STYLE section 1.8)."""


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


def migrate(connection: sqlite3.Connection, steps: Sequence[Migration] = ()) -> None:
    """Apply what this database has not seen yet, all of it or nothing."""
    with _transaction(connection):  # two servers that start at once take turns
        connection.execute(
            "CREATE TABLE IF NOT EXISTS migrations (name TEXT PRIMARY KEY, applied_s REAL NOT NULL)"
        )
        applied = {name for (name,) in connection.execute("SELECT name FROM migrations")}
        for step in steps or MIGRATIONS:
            if step.__name__ not in applied:
                step(connection)
                values = (step.__name__, time.time())
                connection.execute("INSERT INTO migrations VALUES (?, ?)", values)


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        if connection.in_transaction:  # SQLite itself may have rolled back
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


# --------------------------------------------------------------------------------------- store


class ResponseStore:
    """path: of the database file; it and its folder are made. clock: seconds since 1970.

    Opening is the thread's first task, so neither it nor a damaged file delays a start.
    """

    def __init__(
        self,
        path: Path,
        *,
        ttl_s: float = TTL_S,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._connection: sqlite3.Connection | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="mlxlite-store")
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

        return self._ask(task)

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

        return self._ask(task)

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

        return self._ask(task)

    def delete(self, response_id: str) -> Future[bool]:
        """Forget an entry; False if it is unknown or expired."""

        def task(connection: sqlite3.Connection) -> bool:
            done = connection.execute("DELETE FROM responses WHERE id = ?", (response_id,))
            return done.rowcount > 0

        return self._ask(task)

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

        return self._ask(task)

    def close(self) -> None:
        """Finish what was asked for, then close the file. Waits; a second call does nothing."""

        def shut() -> None:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

        try:
            self._writer.submit(shut)
        except RuntimeError:
            return  # closed before
        self._writer.shutdown(wait=True)

    # ------------------------------------------------------------------------- on the thread

    def _ask(self, task: Task[T]) -> Future[T]:
        try:
            return self._writer.submit(self._run, task)
        except RuntimeError:  # the server stops
            raise StoreFault("the response store is closed") from None

    def _run(self, task: Task[T]) -> T:
        """A task in a transaction of its own. If the file turns out damaged, once more on a new
        one."""
        try:
            try:
                return self._attempt(task)
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                self._set_aside(error)
                self._open()
                return self._attempt(task)
        except sqlite3.Error as error:
            raise StoreFault(f"the response store failed: {error}") from error

    def _attempt(self, task: Task[T]) -> T:
        connection = self._connection
        if connection is None:
            raise StoreFault("the response store is closed")
        with _transaction(connection):
            oldest_s = self._clock() - self._ttl_s
            connection.execute("DELETE FROM responses WHERE created_s <= ?", (oldest_s,))
            return task(connection)

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
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch(mode=0o600)  # conversations; the log beside it takes the same mode
            try:
                self._connection = _connected(str(self.path))
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                self._set_aside(error)
                self.path.touch(mode=0o600)
                self._connection = _connected(str(self.path))
        except (OSError, sqlite3.Error) as error:
            log.warning("%s cannot be used (%s): responses live in memory", self.path, error)
            self._connection = _connected(":memory:")

    def _set_aside(self, error: Exception) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        aside = self.path.with_name(f"{self.path.name}.damaged-{time.time_ns()}")
        self.path.replace(aside)
        for suffix in ("-wal", "-shm"):  # they belong to the damaged file, and mean nothing alone
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        log.warning("%s is damaged (%s): moved to %s", self.path, error, aside.name)


def _connected(path: str) -> sqlite3.Connection:
    """An open, whole and migrated database. Raises sqlite3.DatabaseError."""
    # isolation_level None: transactions begin and end where `_transaction` says so.
    connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = ON")  # a deleted conversation is gone for good
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            error = sqlite3.DatabaseError(verdict)
            error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise error
        migrate(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _is_damage(error: sqlite3.Error) -> bool:
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF in _DAMAGED  # extended codes keep the cause in their low byte


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
