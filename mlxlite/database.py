"""A SQLite file on a thread of its own: what its users have in common (floor 1, column "side").

    task(connection) -> ask -> Future        the event loop waits for it without being blocked

One thread owns the connection; a task runs there in a transaction of its own, all of it or nothing.
The file is opened by the first task, so that a start waits for nothing. What goes wrong comes back
to who asked, as a StoreFault that says what happened; the next task is served.

What was committed is there after SIGKILL: it was in the write-ahead log before the Future ended.
(After a power cut the last commits may be missing: no fsync a commit.)
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from mlxlite.errors import MlxliteError

_CACHE_KIB = 512  # of a file's pages
_BUSY_S = 5.0  # how long to wait for another process's write
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

T = TypeVar("T")
Task = Callable[[sqlite3.Connection], T]
Migration = Callable[[sqlite3.Connection], object]


class StoreFault(MlxliteError):
    """The file cannot do it: the disk is full, it is damaged, or another process holds it."""

    status = 500
    code = "store_fault"


class StoreFull(StoreFault):
    """No room on the disk; nothing was changed."""

    status = 507


class StoreBusy(StoreFault):
    """Another process holds the file; nothing was changed."""

    status = 503
    retry_after_s = 1


class Database:
    """path: of the file; it and its folder are made. A subclass says what is in it.

    `name` is what messages call it. `migrations` are in the order of their registration; the names
    of those applied are in the file itself, and one that was released is never edited.
    """

    name = "database"
    migrations: Sequence[Migration] = ()

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection: sqlite3.Connection | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="mlxlite-store")

    # ------------------------------------------------------------------------- for any thread

    def ask(self, task: Task[T], *, writes: bool = True) -> Future[T]:
        """Run a task on the thread. Raises StoreFault once it is closed; so may the Future.

        writes: False for a task that only reads, which then waits for no other program's write.
        """
        try:
            return self._writer.submit(self._run, task, writes)
        except RuntimeError:  # the server stops
            raise StoreFault(f"the {self.name} is closed") from None

    def close(self) -> None:
        """Finish what was asked for, then close the file. Waits; a second call does nothing."""
        try:
            self._writer.submit(self._shut)
        except RuntimeError:
            return  # closed before
        self._writer.shutdown(wait=True)

    # ------------------------------------------------------------------------- on the thread

    def _run(self, task: Task[T], writes: bool) -> T:
        try:
            return self._attempt(task, writes)
        except (OSError, sqlite3.Error) as error:
            raise self._fault(error) from error

    def _attempt(self, task: Task[T], writes: bool) -> T:
        if self._connection is None:
            self._open()
        connection = self._connection
        assert connection is not None
        with transaction(connection, writes):
            return task(connection)

    def _open(self) -> None:
        """Raises OSError and sqlite3.Error; the next task tries again."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch(mode=0o600)  # conversations; the log beside it takes the same mode
        self._connection = connected(str(self.path), self.migrations)

    def _shut(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _fault(self, error: Exception) -> StoreFault:
        if isinstance(error, OSError):
            return StoreFault(f"the {self.name} cannot be opened: {error}")
        code = error_code(error)
        if code == sqlite3.SQLITE_FULL:
            return StoreFull(f"the disk is full: the {self.name} has changed nothing")
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StoreBusy(f"another program holds the {self.name}; try again later")
        return StoreFault(f"the {self.name} failed: {error}")


def connected(path: str, migrations: Sequence[Migration]) -> sqlite3.Connection:
    """An open, whole and migrated database. Raises sqlite3.DatabaseError."""
    # isolation_level None: transactions begin and end where `transaction` says so.
    connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")
        # The usual 2 MB are no faster: the system keeps the file's pages as well.
        connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        connection.execute("PRAGMA secure_delete = ON")  # a deleted conversation is gone for good
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            error = sqlite3.DatabaseError(verdict)
            error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise error
        migrate(connection, migrations)
    except BaseException:
        connection.close()
        raise
    return connection


def migrate(connection: sqlite3.Connection, steps: Sequence[Migration]) -> None:
    """Apply what this database has not seen yet, all of it or nothing."""
    with transaction(connection):  # two servers that start at once take turns
        connection.execute(
            "CREATE TABLE IF NOT EXISTS migrations (name TEXT PRIMARY KEY, applied_s REAL NOT NULL)"
        )
        applied = {name for (name,) in connection.execute("SELECT name FROM migrations")}
        for step in steps:
            if step.__name__ not in applied:
                step(connection)
                values = (step.__name__, time.time())
                connection.execute("INSERT INTO migrations VALUES (?, ?)", values)


@contextmanager
def transaction(connection: sqlite3.Connection, writes: bool = True) -> Iterator[None]:
    # IMMEDIATE: what is read first is still so when it is written.
    connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite itself may have rolled back
            connection.execute("ROLLBACK")
        raise


def error_code(error: Exception) -> int:
    """SQLite's primary code: extended ones keep the cause in their low byte."""
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF


def is_damage(error: Exception) -> bool:
    return error_code(error) in _DAMAGED
