"""Chats of the web page in SQLite, with full-text search (floor 1, column "side", decision D16).

A session is a tree of messages: one without a parent begins it, an edit or a second try is another
child of the same parent, and `leaf` is the last message of the branch that is shown. Sessions and
messages go in and out as the JSON objects that the page sees:

    {id, title, created, updated, settings, leaf, messages: [
        {id, parent, role, content, reasoning, tool_calls, usage, created}]}

Times are seconds since 1970. What users and models said is searchable: `folded` holds it in folded
case (see `folding`), and an index of its trigrams finds whatever has three characters.

Invariants:
- Nothing is ever given up: a file that is damaged or full stays as it is, and whoever asks is told.
  (A damaged index is none: it is made anew from the messages.)
- `updated` is different for each change, so that a list can go on below the last one seen.
- The index holds exactly `messages.folded`; triggers see to it.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from mlxlite.database import Database, Migration, StoreFault, Task, is_damage
from mlxlite.errors import BadRequest, NotFound
from mlxlite.folding import fold, snippet
from mlxlite.transcript import Transcript, title_of
from mlxlite.types import JSON

MOST_MATCHES = 50  # in all, and in a session; both from spec 70 section 10
MOST_A_SESSION = 10
_SEARCHED = ("user", "assistant")
_FEWEST_INDEXED = 3  # characters: the index holds trigrams
_MANY = 500  # messages

T = TypeVar("T")
MIGRATIONS: list[Migration] = []


def migration(step: Migration) -> Migration:
    MIGRATIONS.append(step)
    return step


@migration
def m001_chats(connection: sqlite3.Connection) -> None:
    # Short columns come first: to read them leaves the long ones alone.
    for statement in (
        "CREATE TABLE sessions (n INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, "
        "created REAL NOT NULL, updated REAL NOT NULL, leaf TEXT, title TEXT, "
        "settings TEXT NOT NULL)",
        "CREATE UNIQUE INDEX sessions_by_age ON sessions (updated)",
        "CREATE TABLE messages (n INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, "
        "session INTEGER NOT NULL REFERENCES sessions (n) ON DELETE CASCADE, "
        "created REAL NOT NULL, parent TEXT, role TEXT NOT NULL, usage TEXT, tool_calls TEXT, "
        "content TEXT NOT NULL, reasoning TEXT, folded TEXT)",
        "CREATE INDEX messages_by_session ON messages (session)",
        "CREATE VIRTUAL TABLE texts USING fts5 (folded, content='messages', content_rowid='n', "
        "tokenize='trigram case_sensitive 1')",
        "CREATE TRIGGER texts_added AFTER INSERT ON messages WHEN new.folded IS NOT NULL BEGIN "
        "INSERT INTO texts (rowid, folded) VALUES (new.n, new.folded); END",
        "CREATE TRIGGER texts_gone AFTER DELETE ON messages WHEN old.folded IS NOT NULL BEGIN "
        "INSERT INTO texts (texts, rowid, folded) VALUES ('delete', old.n, old.folded); END",
        "CREATE TRIGGER texts_changed AFTER UPDATE OF folded ON messages "
        "WHEN new.folded IS NOT old.folded BEGIN "
        "INSERT INTO texts (texts, rowid, folded) VALUES ('delete', old.n, old.folded); "
        "INSERT INTO texts (rowid, folded) VALUES (new.n, new.folded); END",
    ):
        connection.execute(statement)


class Chats(Database):
    """path: of the database file. clock: seconds since 1970. Nothing is made before it is asked.

    Every method returns a Future; NotFound and BadRequest come with it, and StoreFault.
    """

    name = "chat store"
    migrations = MIGRATIONS

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        super().__init__(path)
        self._clock = clock

    # ------------------------------------------------------------------------------ sessions

    def newest(self, limit: int, before: float | None = None) -> Future[list[dict[str, JSON]]]:
        """Newest change first, without messages; `messages` is their number. before: only what was
        changed earlier."""

        def task(connection: sqlite3.Connection) -> list[dict[str, JSON]]:
            rows = connection.execute(
                "SELECT id, title, created, updated, n, "
                "(SELECT count(*) FROM messages WHERE session = sessions.n) FROM sessions "
                "WHERE updated < ? ORDER BY updated DESC LIMIT ?",
                (1e300 if before is None else before, limit),
            ).fetchall()
            return [
                {
                    "id": session_id,
                    "title": _title(connection, number, title),
                    "created": created,
                    "updated": updated,
                    "messages": count,
                }
                for session_id, title, created, updated, number, count in rows
            ]

        return self.ask(task, writes=False)

    def create(self, title: str | None, settings: Mapping[str, JSON]) -> Future[dict[str, JSON]]:
        def task(connection: sqlite3.Connection) -> dict[str, JSON]:
            return _session(connection, self._begin(connection, title, settings))

        return self.ask(task)

    def read(self, session_id: str) -> Future[dict[str, JSON]]:
        """A whole session; messages in the order of their arrival."""

        def task(connection: sqlite3.Connection) -> dict[str, JSON]:
            return _session(connection, _number(connection, session_id))

        return self.ask(task, writes=False)

    def change(self, session_id: str, changes: Mapping[str, JSON]) -> Future[dict[str, JSON]]:
        """changes: any of title (None: by the first message), settings, leaf."""

        def task(connection: sqlite3.Connection) -> dict[str, JSON]:
            number = _number(connection, session_id)
            leaf = changes.get("leaf")
            if leaf is not None:
                _check_member(connection, number, leaf, "leaf")
            for name, value in changes.items():
                stored = _encoded(value) if name == "settings" else value
                connection.execute(
                    f"UPDATE sessions SET {_COLUMNS[name]} = ? WHERE n = ?", (stored, number)
                )
            self._touch(connection, number)
            return _session(connection, number, with_messages=False)

        return self.ask(task)

    def delete(self, session_id: str) -> Future[None]:
        def task(connection: sqlite3.Connection) -> None:
            number = _number(connection, session_id)
            connection.execute("DELETE FROM sessions WHERE n = ?", (number,))

        def swept(connection: sqlite3.Connection) -> None:
            # What left the index stays in its segments until they are merged: gone means gone.
            connection.execute("INSERT INTO texts (texts) VALUES ('optimize')")

        done = self.ask(task)
        self.ask(swept)  # nobody waits for it; the next one to come does
        return done

    def take_in(self, transcript: Transcript) -> Future[dict[str, JSON]]:
        """A new session from a file; its messages get ids of ours."""

        def task(connection: sqlite3.Connection) -> dict[str, JSON]:
            number = self._begin(connection, transcript.title, transcript.settings)
            ids: dict[str | None, str | None] = {None: None}
            for message in transcript.messages:
                given, parent = message["id"], ids[message["parent"]]
                ids[given] = self._insert(connection, number, {**message, "parent": parent})
            leaf = ids.get(transcript.leaf)
            connection.execute("UPDATE sessions SET leaf = ? WHERE n = ?", (leaf, number))
            return _session(connection, number, with_messages=False)

        return self.ask(task)

    # ------------------------------------------------------------------------------ messages

    def add(self, session_id: str, message: Mapping[str, JSON]) -> Future[dict[str, JSON]]:
        """A message with parent, role, content, reasoning, tool_calls, usage; it becomes the leaf.

        A parent that the session does not hold is a BadRequest.
        """

        def task(connection: sqlite3.Connection) -> dict[str, JSON]:
            number = _number(connection, session_id)
            if message["parent"] is not None:
                _check_member(connection, number, message["parent"], "parent")
            message_id = self._insert(connection, number, message)
            connection.execute("UPDATE sessions SET leaf = ? WHERE n = ?", (message_id, number))
            self._touch(connection, number)
            return _messages(connection, "messages.id = ?", message_id)[0]

        return self.ask(task)

    def edit(
        self, session_id: str, message_id: str, changes: Mapping[str, JSON]
    ) -> Future[dict[str, JSON]]:
        """changes: any of content, reasoning, tool_calls, usage."""

        def task(connection: sqlite3.Connection) -> dict[str, JSON]:
            number = _number(connection, session_id)
            row = connection.execute(
                "SELECT n, role FROM messages WHERE id = ? AND session = ?", (message_id, number)
            ).fetchone()
            if row is None:
                raise NotFound("message not found")
            values = {_COLUMNS[name]: _column(name, value) for name, value in changes.items()}
            if "content" in values:
                values["folded"] = _folded(row[1], changes["content"])
            for column, value in values.items():
                connection.execute(f"UPDATE messages SET {column} = ? WHERE n = ?", (value, row[0]))
            self._touch(connection, number)
            return _messages(connection, "messages.id = ?", message_id)[0]

        return self.ask(task)

    # -------------------------------------------------------------------------------- search

    def search(self, query: str) -> Future[list[dict[str, JSON]]]:
        """Sessions with what users and models said, in any case; the newest first.

        A match is a message: its role, its id, a snippet around the first place in it, ranges.
        """
        wanted = fold(query)

        def task(connection: sqlite3.Connection) -> list[dict[str, JSON]]:
            found: dict[int, dict[str, JSON]] = {}
            count = 0
            for session, message in _candidates(connection, wanted):
                if count >= MOST_MATCHES:
                    break
                matches = found[session]["matches"] if session in found else []
                if len(matches) >= MOST_A_SESSION:
                    continue
                text, role, message_id = connection.execute(
                    "SELECT content, role, id FROM messages WHERE n = ?", (message,)
                ).fetchone()
                cut = snippet(text, wanted)
                if cut is None:
                    continue
                if session not in found:
                    session_id, title = connection.execute(
                        "SELECT id, title FROM sessions WHERE n = ?", (session,)
                    ).fetchone()
                    shown = _title(connection, session, title)
                    found[session] = {"id": session_id, "title": shown, "matches": matches}
                ranges = [list(each) for each in cut.ranges]
                matches.append(
                    {"role": role, "snippet": cut.text, "ranges": ranges, "message": message_id}
                )
                count += 1
            return list(found.values())

        return self.ask(task, writes=False)

    # -------------------------------------------------------------------------- on the thread

    def _attempt(self, task: Task[T], writes: bool) -> T:
        try:
            return super()._attempt(task, writes)
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) != sqlite3.SQLITE_CORRUPT_VTAB:
                raise
            rebuild = "INSERT INTO texts (texts) VALUES ('rebuild')"
            super()._attempt(lambda connection: connection.execute(rebuild), True)
            return super()._attempt(task, writes)

    def _fault(self, error: Exception) -> StoreFault:
        if is_damage(error):
            self._shut()  # the next one looks again: somebody may have mended or moved it
            reason = " ".join(str(error).split())
            return StoreFault(
                f"{self.path} is damaged ({reason}). It is left as it is; `sqlite3 FILE .recover` "
                "may mend it, and once it is moved away, new chats are kept again"
            )
        return super()._fault(error)

    def _begin(
        self, connection: sqlite3.Connection, title: str | None, settings: Mapping[str, JSON]
    ) -> int:
        now_s = self._now(connection)
        done = connection.execute(
            "INSERT INTO sessions (id, created, updated, title, settings) VALUES (?, ?, ?, ?, ?)",
            ("s_" + secrets.token_hex(12), now_s, now_s, title, _encoded(settings)),
        )
        assert done.lastrowid is not None
        return done.lastrowid

    def _insert(
        self, connection: sqlite3.Connection, session: int, message: Mapping[str, JSON]
    ) -> str:
        message_id = "m_" + secrets.token_hex(12)
        given = {name: _column(name, message.get(name)) for name in _OPTIONAL}
        role, content = message["role"], message["content"]
        connection.execute(
            "INSERT INTO messages (id, session, created, parent, role, content, folded, reasoning, "
            "tool_calls, usage) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                message_id,
                session,
                message.get("created") or self._clock(),
                message["parent"],
                role,
                content,
                _folded(role, content),
                *given.values(),
            ),
        )
        return message_id

    def _touch(self, connection: sqlite3.Connection, session: int) -> None:
        values = (self._now(connection), session)
        connection.execute("UPDATE sessions SET updated = ? WHERE n = ?", values)

    def _now(self, connection: sqlite3.Connection) -> float:
        """The time, to the microsecond, after that of any change before."""
        row = connection.execute("SELECT coalesce(max(updated), 0) FROM sessions").fetchone()
        last_s: float = row[0]
        return round(max(self._clock(), last_s + 1e-6), 6)


_OPTIONAL = ("reasoning", "tool_calls", "usage")
# What a caller may change -> its column, so that no name of a request becomes SQL.
_COLUMNS = {name: name for name in ("title", "settings", "leaf", "content", *_OPTIONAL)}


def _number(connection: sqlite3.Connection, session_id: str) -> int:
    row = connection.execute("SELECT n FROM sessions WHERE id = ?", (session_id,)).fetchone()
    if row is None:
        raise NotFound("session not found")
    number: int = row[0]
    return number


def _check_member(
    connection: sqlite3.Connection, session: int, message_id: JSON, field: str
) -> None:
    row = connection.execute(
        "SELECT 1 FROM messages WHERE id = ? AND session = ?", (message_id, session)
    ).fetchone()
    if row is None:
        raise BadRequest(f"{field} {message_id!r} is no message of this session", param=field)


def _session(
    connection: sqlite3.Connection, number: int, *, with_messages: bool = True
) -> dict[str, JSON]:
    session_id, title, created, updated, settings, leaf = connection.execute(
        "SELECT id, title, created, updated, settings, leaf FROM sessions WHERE n = ?", (number,)
    ).fetchone()
    found: dict[str, JSON] = {
        "id": session_id,
        "title": _title(connection, number, title),
        "created": created,
        "updated": updated,
        "settings": json.loads(settings),
        "leaf": leaf,
    }
    if with_messages:
        found["messages"] = _messages(connection, "session = ? ORDER BY n", number)
    return found


def _messages(connection: sqlite3.Connection, which: str, value: JSON) -> list[dict[str, JSON]]:
    rows = connection.execute(
        "SELECT id, parent, role, content, reasoning, tool_calls, usage, created FROM messages "
        f"WHERE {which}",
        (value,),
    )
    return [
        {
            "id": message_id,
            "parent": parent,
            "role": role,
            "content": content,
            "reasoning": reasoning,
            "tool_calls": None if calls is None else json.loads(calls),
            "usage": None if usage is None else json.loads(usage),
            "created": created,
        }
        for message_id, parent, role, content, reasoning, calls, usage, created in rows
    ]


def _title(connection: sqlite3.Connection, session: int, name: str | None) -> str:
    if name is not None:
        return title_of(name, None)
    row = connection.execute(
        "SELECT substr(content, 1, 1000) FROM messages WHERE session = ? AND role = 'user' "
        "ORDER BY n LIMIT 1",
        (session,),
    ).fetchone()
    return title_of(None, row[0] if row is not None else None)


def _candidates(connection: sqlite3.Connection, wanted: str) -> Iterator[tuple[int, int]]:
    """(session, message) of all that hold the folded text, the newest session first.

    What many messages hold is soon found without the index, and what few hold with it.
    """
    if len(wanted) >= _FEWEST_INDEXED and "\0" not in wanted:  # a query of it ends at a NUL
        rows = connection.execute(
            "SELECT rowid FROM texts WHERE texts MATCH ? LIMIT ?",
            ('"' + wanted.replace('"', '""') + '"', _MANY),
        ).fetchall()
        if len(rows) < _MANY:
            yield from connection.execute(
                "SELECT session, messages.n FROM messages JOIN sessions ON sessions.n = session "
                f"WHERE messages.n IN ({','.join(str(number) for (number,) in rows)}) "
                "ORDER BY updated DESC, messages.n"
            )
            return
    # CROSS: session by session, so that whoever has enough can stop.
    yield from connection.execute(
        "SELECT session, messages.n FROM sessions CROSS JOIN messages ON session = sessions.n "
        "WHERE instr(folded, ?) ORDER BY updated DESC, messages.n",
        (wanted,),
    )


def _column(name: str, value: JSON) -> JSON:
    return _encoded(value) if name in ("tool_calls", "usage") and value is not None else value


def _folded(role: str, content: str) -> str | None:
    return fold(content) if role in _SEARCHED else None


def _encoded(value: JSON) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
