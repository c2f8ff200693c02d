"""Takes the files of an adapter out of a tar or zip archive, and nothing else."""

from __future__ import annotations

import gzip
import io
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Protocol, TypeVar

from loramux.adapters.remotes.remote import (
    ADAPTER_FILES,
    CHUNK_BYTES,
    RemoteMissing,
    RemoteUnfit,
    choose,
)
from loramux.adapters.report import printable

_NAME = re.compile(r"\.(tar|tar\.gz|tgz|zip)$", re.IGNORECASE)
_MAX_MEMBERS = 10_000
_MAX_READ = 2 * 2**20
"""Of one read. Headers say how long they are and are read in one go; data come in small parts."""
_MAX_GROWTH = 50
"""Weights shrink little; what unpacks to more than this was made to fill a disk."""
_SLACK = 64 * 2**20

T = TypeVar("T")


class _Seekable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...
    def seek(self, offset: int, whence: int = 0, /) -> int: ...
    def tell(self) -> int: ...


Write = Callable[[str, Iterator[bytes]], None]


def archive_name(path: str) -> str | None:
    """``archive`` with its suffix, when a path is an archive's; None otherwise."""
    match = _NAME.search(path)
    return None if match is None else f"archive.{match[1].lower()}"


def unpack(archive: Path, kind: str, write: Write) -> None:
    """Hand each file of the one adapter in an archive to ``write``, by its bare name.

    ``kind`` is a name made by ``archive_name``. The adapter may lie in a folder. Raises
    RemoteUnfit, RemoteMissing and whatever ``write`` raises.
    """
    limit = archive.stat().st_size * _MAX_GROWTH + _SLACK
    with _problems(), archive.open("rb") as file:
        (_unpack_zip if kind.endswith(".zip") else _unpack_tar)(file, limit, write)


def _unpack_tar(file: _Seekable, limit: int, write: Write) -> None:
    """Two passes: which member is which file of the adapter is known only at the end."""
    compressed = file.read(2) == b"\x1f\x8b"
    file.seek(0)

    def opened() -> tarfile.TarFile:
        file.seek(0)
        plain = gzip.GzipFile(fileobj=file) if compressed else file
        return tarfile.open(fileobj=_Bounded(plain, limit), mode="r:")

    with opened() as tar:
        taken = _take([member.name for member in _counted(tar)])
    with opened() as tar:
        for member in _counted(tar):
            name = taken.get(member.name)
            if name is None:
                continue
            # A link would lead to another member; a sparse file has bytes that were never sent.
            data = None if member.issparse() or not member.isfile() else tar.extractfile(member)
            if data is None:
                raise RemoteUnfit(f"{name} in the archive is no regular file")
            write(name, _chunks(data))


def _counted(members: Iterable[T]) -> Iterator[T]:
    for count, member in enumerate(members):
        if count >= _MAX_MEMBERS:
            raise RemoteUnfit(f"the archive has more than {_MAX_MEMBERS} members")
        yield member


def _unpack_zip(file: _Seekable, limit: int, write: Write) -> None:
    with zipfile.ZipFile(_Bounded(file, None)) as opened:
        members = list(_counted(opened.infolist()))
        taken = _take([member.filename for member in members])
        for member in members:
            name = taken.get(member.filename)
            if name is None:
                continue
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise RemoteUnfit(f"{name} in the archive is packed in an odd way: use deflate")
            with opened.open(member) as data:
                write(name, _chunks(_Bounded(data, limit)))


def _take(paths: list[str]) -> dict[str, str]:
    """Which members are the adapter's, with the bare name of each."""
    folders: dict[str, dict[str, str]] = {}
    for path in paths:
        pure = PurePosixPath(path)
        if pure.name in ADAPTER_FILES and "__MACOSX" not in pure.parts:
            names = folders.setdefault(str(pure.parent), {})
            if pure.name in names:
                raise RemoteUnfit(f"the archive holds {pure.name} twice")
            names[pure.name] = path
    adapters = {folder: names for folder, names in folders.items() if _is_adapter(names)}
    if not adapters:
        raise RemoteMissing("the archive holds no adapter_config.json and no weights")
    if len(adapters) > 1:
        shown = ", ".join(printable(folder) for folder in sorted(adapters)[:4])
        raise RemoteUnfit(f"the archive holds {len(adapters)} adapters ({shown}): pack one alone")
    [names] = adapters.values()
    return {names[name]: name for name in choose(names)}


def _is_adapter(names: dict[str, str]) -> bool:
    try:
        choose(names)
    except RemoteMissing:
        return False
    return True


def _chunks(data: _Seekable) -> Iterator[bytes]:
    while chunk := data.read(CHUNK_BYTES):
        yield chunk


class _Bounded(io.RawIOBase):
    """A file that refuses reads in one go, and positions, beyond what an archive needs."""

    def __init__(self, inner: _Seekable, limit: int | None) -> None:
        self._inner = inner
        self._limit = limit

    def read(self, size: int = -1, /) -> bytes:
        data = self._inner.read(size if 0 <= size <= _MAX_READ else _MAX_READ + 1)
        if len(data) > _MAX_READ:
            raise RemoteUnfit("the archive is damaged: a header has no sensible length")
        self._check(self._inner.tell())
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence == io.SEEK_SET:
            if offset < 0:
                raise RemoteUnfit("the archive is damaged: a header points before its beginning")
            self._check(offset)
        return self._inner.seek(offset, whence)

    def tell(self) -> int:
        return self._inner.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def _check(self, position: int) -> None:
        if self._limit is not None and position > self._limit:
            raise RemoteUnfit(f"the archive unpacks to more than {_MAX_GROWTH} times its size")


@contextmanager
def _problems() -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, gzip.BadGzipFile, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise RemoteUnfit(f"the archive is damaged: {error}") from None
    except (RuntimeError, ValueError, OverflowError, struct.error) as error:  # encrypted, and so on
        raise RemoteUnfit(f"the archive cannot be unpacked: {error}") from None
