"""The registry alone: what it keeps, who may share it, and what it says when it cannot be used."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loramux.adapters.registry import Record, Registry
from loramux.errors import AdapterExists, RegistryUnusable
from loramux.types import AdapterId, SourceRules

RECORD = Record(
    name="org/naïve 日本,\n\0",
    adapter_id=AdapterId("0" * 64),
    source="https://me:secret@host/a?b#c",
    rules=SourceRules(root="/adapters", prefixes=("hf:org", "https://host/")),
    pinned=True,
    num_bytes=2**40,
    max_rank=16,
    vocab_size=50_000,
    warnings=("one", "two"),
)
PLAIN = replace(RECORD, name="plain", rules=None, pinned=False, vocab_size=None, warnings=())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "names with ?#% in.db"


def test_what_is_put_is_there_when_the_file_is_opened_again(path: Path) -> None:
    registry = Registry(path)
    assert registry.put(RECORD) is None
    assert registry.put(PLAIN) is None
    assert Registry(path).records() == [RECORD, PLAIN]
    assert Registry(path).find(RECORD.name) == RECORD
    assert Registry(path).find("nobody") is None


def test_only_the_owner_may_read_it(path: Path) -> None:
    Registry(path).put(RECORD)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_taken_name_is_replaced_only_when_asked_to(path: Path) -> None:
    registry = Registry(path)
    registry.put(PLAIN)
    registry.put(RECORD)
    new = replace(PLAIN, source="/elsewhere")
    with pytest.raises(AdapterExists, match="shares"):
        registry.put(new)
    assert registry.find("plain") == PLAIN
    assert registry.put(new, replace=True) == PLAIN
    assert registry.records() == [new, RECORD]


def test_changes_can_be_undone(path: Path) -> None:
    registry = Registry(path)
    registry.put(PLAIN)
    assert registry.set_pinned("plain", True) == PLAIN
    assert registry.find("plain") == replace(PLAIN, pinned=True)
    registry.put_back("plain", PLAIN)
    assert registry.find("plain") == PLAIN
    assert registry.remove("plain") == PLAIN
    assert registry.remove("plain") is None
    assert registry.set_pinned("plain", True) is None
    registry.put_back("plain", PLAIN)
    registry.put(RECORD)
    registry.put_back(RECORD.name, None)
    assert registry.records() == [PLAIN]


def test_it_is_for_one_base(path: Path) -> None:
    Registry(path).bind("llama float32")
    Registry(path).bind("llama float32")
    with pytest.raises(RegistryUnusable, match=r"another base \(llama float32\) than.*bfloat16"):
        Registry(path).bind("llama bfloat16")


def test_garbage_is_refused_by_its_name(path: Path) -> None:
    path.write_bytes(b"no database " * 100)
    with pytest.raises(RegistryUnusable, match=r"names with .* in\.db .*not a database"):
        Registry(path)
    assert path.read_bytes() == b"no database " * 100


def test_a_database_of_another_program_is_refused_and_left_alone(path: Path) -> None:
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE adapters (name TEXT)")
    other.commit()
    other.close()
    with pytest.raises(RegistryUnusable, match="another program"):
        Registry(path)
    schema = sqlite3.connect(path).execute("SELECT sql FROM sqlite_schema").fetchall()
    assert schema == [("CREATE TABLE adapters (name TEXT)",)]


def test_another_version_is_refused(path: Path) -> None:
    Registry(path)
    execute(path, "PRAGMA user_version = 2")
    with pytest.raises(RegistryUnusable, match="version 2"):
        Registry(path)


def test_a_torn_file_is_refused(path: Path) -> None:
    registry = Registry(path)
    for i in range(200):
        registry.put(replace(PLAIN, name=f"name-{i}", source="x" * 500))
    data = path.read_bytes()
    path.write_bytes(data[:8192] + b"\xa5" * (len(data) - 8192))
    with pytest.raises(RegistryUnusable, match="damaged"):
        Registry(path).records()


@pytest.mark.parametrize(
    "change",
    [
        "pinned = 0, num_bytes = 'many'",
        "num_bytes = -1",
        "adapter_id = ''",
        "source = x'ff'",
        "rules = '[]'",
        'rules = \'{"root": 1, "prefixes": []}\'',
        "rules = 'no json'",
        "warnings = '{}'",
        "vocab_size = 0.5",
    ],
)
def test_a_record_that_nobody_has_written_is_refused(path: Path, change: str) -> None:
    Registry(path).put(PLAIN)
    execute(path, f"UPDATE adapters SET {change}")
    with pytest.raises(RegistryUnusable, match="record of 'plain' is damaged"):
        Registry(path).records()


def test_places_that_cannot_be_one_are_refused(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "missing" / "file"):
        with pytest.raises(RegistryUnusable, match=str(place)):
            Registry(place)


def test_a_file_that_has_gone_is_not_made_anew(path: Path) -> None:
    registry = Registry(path)
    path.unlink()
    with pytest.raises(RegistryUnusable):
        registry.put(PLAIN)
    assert not path.exists()


def test_a_lock_that_is_held_too_long_is_told(path: Path) -> None:
    registry = Registry(path, busy_seconds=0.05)
    registry.put(PLAIN)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    for change in (lambda: registry.put(RECORD), lambda: registry.remove("plain")):
        with pytest.raises(RegistryUnusable, match="another process holds it"):
            change()
    assert registry.records() == [PLAIN]  # reading waits for nobody
    other.execute("ROLLBACK")
    other.close()
    registry.put(RECORD)


class FullRegistry(Registry):
    """On a disk without room for one page more."""

    def _connect(self) -> sqlite3.Connection:
        connection = super()._connect()
        connection.execute("PRAGMA max_page_count = 1")  # as few as there are now
        return connection


def test_a_full_disk_is_told_and_changes_nothing(path: Path) -> None:
    Registry(path).put(PLAIN)
    full = FullRegistry(path)
    with pytest.raises(RegistryUnusable, match="no room"):
        full.put(replace(RECORD, source="x" * 100_000))
    assert full.records() == Registry(path).records() == [PLAIN]


PROGRAM = """
import sys
from dataclasses import replace
from loramux.adapters.registry import Record, Registry
registry = Registry(sys.argv[1])
registry.bind("base")
for i in range(30):
    record = Record(name=f"{sys.argv[2]}-{i}", adapter_id="id", source="/a", rules=None,
                    pinned=False, num_bytes=1, max_rank=8, vocab_size=None, warnings=())
    registry.put(record)
    if i % 3 == 0:
        registry.remove(record.name)
"""


def test_processes_that_share_it_from_its_first_moment_lose_nothing(path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(path)]
    processes = [
        subprocess.Popen([*command, name], stderr=subprocess.PIPE, text=True) for name in "abc"
    ]
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    names = {record.name for record in Registry(path).records()}
    assert names == {f"{name}-{i}" for name in "abc" for i in range(30) if i % 3}


def execute(path: Path, statement: str, *values: Any) -> None:
    connection = sqlite3.connect(path)
    connection.execute(statement, values)
    connection.commit()
    connection.close()
