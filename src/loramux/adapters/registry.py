"""Names of adapters that outlive the server: one SQLite file, which several servers may share."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from loramux.errors import AdapterExists, RegistryUnusable
from loramux.types import AdapterId, SourceRules

_APPLICATION_ID = 0x6C6D7578  # "lmux", in the header of the file
_VERSION = 1
_BUSY_SECONDS = 5.0
_TABLES = (
    "CREATE TABLE about (base TEXT NOT NULL)",
    """
    CREATE TABLE adapters (
        name TEXT PRIMARY KEY,
        adapter_id TEXT NOT NULL,
        source TEXT NOT NULL,
        rules TEXT,
        pinned INTEGER NOT NULL,
        num_bytes INTEGER NOT NULL,
        max_rank INTEGER NOT NULL,
        vocab_size INTEGER,
        warnings TEXT NOT NULL
    )
    """,
)
_COLUMNS = "name, adapter_id, source, rules, pinned, num_bytes, max_rank, vocab_size, warnings"


@dataclass(frozen=True, kw_only=True)
class Record:
    """All that must be known of an adapter to serve it without having read it."""

    name: str
    adapter_id: AdapterId
    source: str
    """With its secrets, where it has any."""
    rules: SourceRules | None
    pinned: bool
    num_bytes: int
    max_rank: int
    vocab_size: int | None
    warnings: tuple[str, ...]


class Registry:
    """Records by name, for adapters of one base.

    Each call is one short transaction on a connection of its own, so any thread may make it. It
    waits for other processes, up to ``busy_seconds``. All raise RegistryUnusable, and then the file
    is as before.
    """

    def __init__(self, path: str | Path, *, busy_seconds: float = _BUSY_SECONDS) -> None:
        """Open the file; where there is none, make one that only its owner may read."""
        self.path = Path(path).expanduser().absolute()
        self._busy_seconds = busy_seconds
        try:
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_NONBLOCK, 0o600))
        except OSError as error:
            raise self._unusable(f"it cannot be opened ({error.strerror})") from error
        if not self.path.is_file():
            raise self._unusable("it is no file")
        with self._connection() as connection:
            self._set_up(connection)

    def bind(self, base: str) -> None:
        """Let the file be for adapters of ``base`` alone, whose sizes they have."""
        with self._writing() as connection:
            found = connection.execute("SELECT base FROM about").fetchone()
            if found is None:
                connection.execute("INSERT INTO about VALUES (?)", [base])
            elif found[0] != base:
                raise self._unusable(
                    f"it is for adapters of another base ({found[0]}) than this one ({base}); "
                    "name another file with --registry"
                )

    def records(self) -> list[Record]:
        """All, in the order in which their names were first given."""
        with self._connection() as connection:
            rows = connection.execute(f"SELECT {_COLUMNS} FROM adapters ORDER BY rowid")
            return [self._record(row) for row in rows]

    def find(self, name: str) -> Record | None:
        with self._connection() as connection:
            return self._find(connection, name)

    def put(self, record: Record, *, replace: bool = False) -> Record | None:
        """Write a record; the one that it replaces. Raises AdapterExists for a name that is taken
        unless ``replace``."""
        with self._writing() as connection:
            before = self._find(connection, record.name)
            if before is not None and not replace:
                raise AdapterExists(
                    record.name,
                    f"the registry {self.path} has the name, from another server that shares it; "
                    "unload it first, or load with load_inplace to replace it",
                )
            self._write(connection, record)
            return before

    def set_pinned(self, name: str, pinned: bool) -> Record | None:
        """The record before; None where there is none, and then nothing is written."""
        with self._writing() as connection:
            before = self._find(connection, name)
            connection.execute("UPDATE adapters SET pinned = ? WHERE name = ?", [pinned, name])
            return before

    def remove(self, name: str) -> Record | None:
        """The record that is gone now; None where there was none."""
        with self._writing() as connection:
            before = self._find(connection, name)
            connection.execute("DELETE FROM adapters WHERE name = ?", [name])
            return before

    def put_back(self, name: str, before: Record | None) -> None:
        """Undo a change of a name."""
        if before is None:
            self.remove(name)
        else:
            self.put(before, replace=True)

    def _set_up(self, connection: sqlite3.Connection) -> None:
        self._use_wal(connection)
        with _transaction(connection):
            [application_id] = connection.execute("PRAGMA application_id").fetchone()
            [version] = connection.execute("PRAGMA user_version").fetchone()
            [num_tables] = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            if not (application_id or version or num_tables):
                for statement in _TABLES:
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {_VERSION}")
                return
        if application_id != _APPLICATION_ID:
            raise self._unusable("it is a database of another program; name another file")
        if version != _VERSION:
            raise self._unusable(
                f"it has version {version} of the format, this loramux reads {_VERSION}; "
                "name another file"
            )
        [verdict] = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise self._unusable(f"it is damaged ({verdict}); restore it or name another file")

    def _use_wal(self, connection: sqlite3.Connection) -> None:
        """Readers and a writer do not wait for each other then; the file remembers it."""
        until = time.monotonic() + self._busy_seconds
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL").fetchone()
            except sqlite3.OperationalError as error:
                # Who else switches at this moment makes this fail at once, without the wait.
                if "locked" not in str(error) or time.monotonic() > until:
                    raise
                time.sleep(0.01)
            else:
                return

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """Raises RegistryUnusable for whatever SQLite has to say."""
        try:
            with closing(self._connect()) as connection:
                yield connection
        except sqlite3.Error as error:
            raise self._unusable(_reason(error)) from error
        except UnicodeEncodeError as error:
            raise self._unusable(
                "it takes whole characters, and a name or a source has others"
            ) from error

    def _connect(self) -> sqlite3.Connection:
        # Never made anew: a file that has gone is not one without adapters.
        url = f"file:{quote(str(self.path))}?mode=rw"
        return sqlite3.connect(url, uri=True, timeout=self._busy_seconds, isolation_level=None)

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._connection() as connection, _transaction(connection):
            yield connection

    def _find(self, connection: sqlite3.Connection, name: str) -> Record | None:
        query = f"SELECT {_COLUMNS} FROM adapters WHERE name = ?"
        row = connection.execute(query, [name]).fetchone()
        return None if row is None else self._record(row)

    def _write(self, connection: sqlite3.Connection, record: Record) -> None:
        values = asdict(record) | {
            "rules": None if record.rules is None else json.dumps(asdict(record.rules)),
            "warnings": json.dumps(record.warnings),
        }
        columns = _COLUMNS.split(", ")
        changes = ", ".join(f"{column} = excluded.{column}" for column in columns[1:])
        connection.execute(
            f"INSERT INTO adapters ({_COLUMNS}) VALUES ({', '.join('?' * len(columns))}) "
            f"ON CONFLICT (name) DO UPDATE SET {changes}",
            [values[column] for column in columns],
        )

    def _record(self, row: tuple[Any, ...]) -> Record:
        try:
            return _as_record(row)
        except (TypeError, ValueError, KeyError) as error:
            raise self._unusable(
                f"the record of {row[0]!a} is damaged; restore the file or name another one"
            ) from error

    def _unusable(self, reason: str) -> RegistryUnusable:
        return RegistryUnusable(str(self.path), reason)


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All or nothing; takes the right to write at once, so that nobody waits in the middle."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _as_record(row: tuple[Any, ...]) -> Record:
    """Raises TypeError, ValueError or KeyError for what no registry has written."""
    name, adapter_id, source, rules, pinned, num_bytes, max_rank, vocab_size, warnings = row
    if not all(isinstance(text, str) and text for text in (name, adapter_id, source)):
        raise TypeError("no text")
    counts = (num_bytes, max_rank, *(() if vocab_size is None else (vocab_size,)))
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        raise TypeError("no count")
    return Record(
        name=name,
        adapter_id=AdapterId(adapter_id),
        source=source,
        rules=None if rules is None else _as_rules(json.loads(rules)),
        pinned=bool(pinned),
        num_bytes=num_bytes,
        max_rank=max_rank,
        vocab_size=vocab_size,
        warnings=tuple(_texts(json.loads(warnings))),
    )


def _as_rules(value: dict[str, Any]) -> SourceRules:
    root, prefixes = value["root"], _texts(value["prefixes"])
    return SourceRules(None if root is None else _texts([root])[0], tuple(prefixes))


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise TypeError("no list of texts")
    return value


def _reason(error: sqlite3.Error) -> str:
    text = str(error)
    if "locked" in text or "busy" in text:
        return f"another process holds it ({text}); try again"
    if "full" in text:
        return f"there is no room for the change ({text}); make some and try again"
    if "not a database" in text or "malformed" in text:
        return f"it is damaged, or no registry ({text}); restore it or name another file"
    return text
