"""Adapters in file systems of fsspec: memory stands for all."""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from loramux.errors import (
    AdapterRefused,
    AdapterSourceForbidden,
    AdapterSourceNotFound,
    AdapterSourceUnavailable,
)
from loramux.types import SourceRules
from tests.remote_places import CONFIG, WEIGHTS, adapter_bytes
from tests.unit.adapters.conftest import Fetch

FILES = adapter_bytes()


@pytest.fixture(autouse=True)
def memory() -> Iterator[MemoryFileSystem]:
    system = fsspec.filesystem("memory")
    put("/a", FILES)
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def put(folder: str, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        fsspec.filesystem("memory").pipe_file(f"{folder}/{name}", data)


def count_opens(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    opened: list[str] = []
    real = MemoryFileSystem._open

    def counting(self: MemoryFileSystem, path: str, *args: object, **how: object) -> object:
        opened.append(path.rpartition("/")[2])
        return real(self, path, *args, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(MemoryFileSystem, "_open", counting)
    return opened


def test_folder_gives_the_adapters_files_alone(fetch: Fetch, monkeypatch: pytest.MonkeyPatch):
    put("/a", {"optimizer.pt": b"x" * 99})
    put("/a/checkpoint-1", adapter_bytes(seed=7))
    opened = count_opens(monkeypatch)
    assert fetch("memory://a") == FILES
    assert sorted(opened) == [CONFIG, WEIGHTS]


def test_unchanged_files_are_not_read_again_and_changed_ones_are(
    fetch: Fetch, monkeypatch: pytest.MonkeyPatch
):
    fetch("memory://a")
    opened = count_opens(monkeypatch)
    assert fetch("memory://a") == FILES
    assert opened == []
    new = adapter_bytes(seed=2)
    put("/a", {WEIGHTS: new[WEIGHTS]})
    opened.clear()
    assert fetch("memory://a") == new
    assert opened == [WEIGHTS]


def test_archive_in_a_store(fetch: Fetch):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in FILES.items():
            archive.writestr(name, content)
    put("/packed", {"a.zip": data.getvalue()})
    assert fetch("memory://packed/a.zip") == FILES


@pytest.mark.parametrize("source", ["memory://nowhere", "memory://a/nowhere.zip"])
def test_nothing_there(fetch: Fetch, source: str):
    with pytest.raises(AdapterSourceNotFound, match="nothing at this place"):
        fetch(source)


def test_folder_without_an_adapter(fetch: Fetch):
    put("/b", {"x": b"x"})
    with pytest.raises(AdapterSourceNotFound, match="holds no adapter"):
        fetch("memory://b")


@pytest.mark.parametrize(("error", "text"), [
    (PermissionError("Access Denied"), "refused to this server"),
    (ConnectionError("no route"), "cannot be reached: no route"),
    (RuntimeError(), "cannot be reached: RuntimeError"),
])  # fmt: skip
def test_errors_of_a_store_are_typed(
    fetch: Fetch, monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
):
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(MemoryFileSystem, "ls", broken)
    with pytest.raises(AdapterSourceUnavailable, match=text):
        fetch("memory://a")


def test_transfer_that_breaks_goes_on_where_it_stopped(
    fetch: Fetch, monkeypatch: pytest.MonkeyPatch
):
    """Chunks of 1 MiB: the second one fails, until the line is mended."""
    weights = FILES[WEIGHTS] + b"\0" * (3 * 2**20)
    put("/a", {WEIGHTS: weights})
    reads: list[int] = []
    mended = False
    real = MemoryFileSystem._open

    class Breaking(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            if self.tell() > 0 and not mended:
                raise ConnectionError("gone")
            reads.append(self.tell())
            return super().read(size)

    def breaking(self: MemoryFileSystem, path: str, *args: object, **how: object) -> object:
        if path.endswith(WEIGHTS):
            return Breaking(weights)
        return real(self, path, *args, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(MemoryFileSystem, "_open", breaking)
    with pytest.raises(AdapterSourceUnavailable, match="broke off: gone"):
        fetch("memory://a")
    mended = True
    assert fetch("memory://a")[WEIGHTS] == weights
    assert reads.count(0) == 1


@pytest.mark.parametrize(("scheme", "extra", "module"), [
    ("s3", "s3", "s3fs"), ("gs", "gcs", "gcsfs"), ("gcs", "gcs", "gcsfs"),
])  # fmt: skip
def test_missing_extra_names_the_command(
    fetch: Fetch, monkeypatch: pytest.MonkeyPatch, scheme: str, extra: str, module: str
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(AdapterRefused, match=rf"pip install 'loramux\[{extra}\]'"):
        fetch(f"{scheme}://bucket/a")


def test_unknown_scheme(fetch: Fetch):
    with pytest.raises(AdapterRefused, match=r"fsspec cannot open it.*nonsense"):
        fetch("nonsense://x/y")


@pytest.mark.parametrize("source", ["simplecache::memory://a", "memory://a::file:///etc"])
def test_chains_are_no_way_around(fetch: Fetch, source: str):
    with pytest.raises((AdapterRefused, AdapterSourceNotFound)):
        fetch(source)


def test_rules_hold_for_stores(fetch: Fetch):
    assert fetch("memory://a", SourceRules(prefixes=("memory://a",))) == FILES
    with pytest.raises(AdapterSourceForbidden):
        fetch("memory://a", SourceRules(prefixes=("memory://b/",)))


def test_file_url_is_a_plain_path(fetch: Fetch, tmp_path: Path, cache: Path):
    folder = tmp_path / "my adapter"
    folder.mkdir()
    (folder / CONFIG).write_bytes(FILES[CONFIG])
    assert fetch(folder.as_uri()) == {CONFIG: FILES[CONFIG]}
    assert not cache.exists()
    with pytest.raises(AdapterSourceForbidden):
        fetch(folder.as_uri(), SourceRules(root=str(tmp_path)))
