"""Adapters that came from elsewhere, kept on disk by content within a budget of bytes.

    blobs/<sha256>               the content of files
    adapters/<source>-<version>/adapter.json   what one adapter once was; its time is the last use
    adapters/<source>-<version>/files/<name>   links to blobs: the directory that is read
    partial/<source>-<version>   the beginning of a file, for the next attempt
    locks/<source>               held while a source is fetched or its files are read
    lock                         held for a moment, by whoever moves, counts or removes things

Any number of threads and processes may share one cache. Whatever is under ``lock`` and belongs to
nothing is left over from a process that ended, and is removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loramux.adapters.remotes.download import digest
from loramux.adapters.remotes.http_files import without_secrets
from loramux.adapters.remotes.remote import RemoteFile, RemoteUnavailable, RemoteUnfit

_RECORD = "adapter.json"

Origin = list[list[str | int | None]]
"""Name, size, version and digest of each file, as the source described it."""


@dataclass(frozen=True)
class CachedAdapter:
    """One entry of the cache."""

    directory: Path
    origin: Origin
    blobs: Mapping[str, str]
    """File name to SHA-256."""
    sizes: Mapping[str, int]
    used_at: float


class DiskCache:
    """``budget`` bounds the bytes of blobs and beginnings together.

    Entries are removed in the order of their last use. What is being read or fetched is not.
    """

    def __init__(self, root: Path, budget: int) -> None:
        self.root = root
        self.budget = budget

    @contextmanager
    def lease(self, source: str) -> Iterator[Lease]:
        """Be the only one, of all processes, to fetch or read from ``source``."""
        import filelock

        key = hashlib.sha256(source.encode()).hexdigest()[:32]
        self._make_folders()
        with filelock.FileLock(self.root / "locks" / key):
            yield Lease(self, key, without_secrets(source))

    def adapters(self, source: str = "*") -> list[CachedAdapter]:
        """The entries of a source or of all, the one unused for the longest first."""
        found = [_read(path) for path in (self.root / "adapters").glob(f"{source}-*")]
        return sorted((a for a in found if a is not None), key=lambda a: a.used_at)

    def partials(self, source: str = "*") -> list[Path]:
        """The beginnings of files of a source or of all."""
        return list((self.root / "partial").glob(f"{source}-*"))

    def num_bytes(self) -> int:
        """Bytes on disk; a blob that is also the beginning of a file counts once."""
        sizes: dict[int, int] = {}
        for folder in ("blobs", "partial"):
            for path in (self.root / folder).iterdir():
                with contextlib.suppress(FileNotFoundError):
                    info = path.stat()
                    sizes[info.st_ino] = info.st_size
        return sum(sizes.values())

    def check(self) -> None:
        """Assert that each entry is whole and each blob belongs to one."""
        adapters = self.adapters()
        for adapter in adapters:
            for name, blob in adapter.blobs.items():
                file = adapter.directory / "files" / name
                assert file.stat().st_size == adapter.sizes[name], f"{name} has another size"
                assert digest(file) == blob, f"{name} has another content"
        held = {blob for adapter in adapters for blob in adapter.blobs.values()}
        assert {path.name for path in (self.root / "blobs").iterdir()} == held
        assert len(adapters) == len(list((self.root / "adapters").iterdir()))

    def make_room(self, num_bytes: int, owner: str, keep: Path | None = None) -> None:
        """Remove what was unused for the longest until ``num_bytes`` more fit.

        ``owner`` is the source for which room is made: older entries of its own may go, what it is
        fetching and the entry ``keep`` may not. Raises RemoteProblem.
        """
        with self.lock():
            needed = num_bytes + sum(_size(path) for path in self.partials(owner))
            if needed > self.budget:
                raise RemoteUnfit(
                    f"it needs {needed} bytes or more, the disk cache may hold {self.budget}: "
                    "raise --disk-cache-bytes"
                )
            if self._fits(num_bytes):
                return
            self._remove_leftovers()
            for path in self._removable(owner, keep):
                if self._fits(num_bytes):
                    return
                with self._unused(path.name.partition("-")[0], owner) as unused:
                    if unused:
                        self._remove(path)
            if not self._fits(num_bytes):
                raise RemoteUnavailable(
                    f"the disk cache of {self.budget} bytes has no room for {num_bytes} more while "
                    "others are being read: raise --disk-cache-bytes or try again later"
                )

    @contextmanager
    def lock(self) -> Iterator[None]:
        import filelock

        with filelock.FileLock(self.root / "lock"):
            yield

    def _make_folders(self) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in ("blobs", "adapters", "partial", "locks"):
            (self.root / folder).mkdir(exist_ok=True)

    def _fits(self, num_bytes: int) -> bool:
        return self.num_bytes() + num_bytes <= self.budget

    def _removable(self, owner: str, keep: Path | None) -> list[Path]:
        """Entries and beginnings, the one unused for the longest first."""
        found = [(a.used_at, a.directory) for a in self.adapters() if a.directory != keep]
        for path in self.partials():
            if not path.name.startswith(owner):
                found.append((path.stat().st_mtime, path))
        return [path for _, path in sorted(found)]

    @contextmanager
    def _unused(self, source: str, owner: str) -> Iterator[bool]:
        """Whether nobody else fetches or reads from a source, and nobody begins to meanwhile."""
        import filelock

        if source == owner:
            yield True
            return
        try:
            lock = filelock.FileLock(self.root / "locks" / source)
            lock.acquire(blocking=False)
        except filelock.Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def _remove(self, path: Path) -> None:
        """An entry, with the blobs that no other one has, or a beginning."""
        if not path.is_dir():
            path.unlink(missing_ok=True)
            return
        shutil.rmtree(path)
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Entries that are not whole, and blobs of no entry."""
        adapters = self.adapters()
        whole = {adapter.directory for adapter in adapters}
        held = {blob for adapter in adapters for blob in adapter.blobs.values()}
        for path in (self.root / "adapters").iterdir():
            if path not in whole:
                shutil.rmtree(path)
        for path in (self.root / "blobs").iterdir():
            if path.name not in held:
                path.unlink()


@dataclass(frozen=True)
class Lease:
    """The right to fetch from one source and to read what the cache has of it."""

    cache: DiskCache
    key: str
    shown: str
    """The source, for a log."""

    def newest(self) -> CachedAdapter | None:
        """The entry of this source that was used last."""
        own = [adapter for adapter in self.cache.adapters(self.key) if _is_whole(adapter)]
        return own[-1] if own else None

    def find(self, files: Sequence[RemoteFile]) -> CachedAdapter | None:
        """The entry with exactly these files; None also where they have no version to go by."""
        if any(file.version is None for file in files):
            return None
        adapter = _read(self._directory(files))
        return adapter if adapter is not None and _is_whole(adapter) else None

    def directory(self, adapter: CachedAdapter) -> Path:
        """Where an entry is read, while the lease lasts; this is its last use from now on."""
        now = time.time()
        os.utime(adapter.directory / _RECORD, (now, now))
        return adapter.directory / "files"

    def make_room(self, num_bytes: int) -> None:
        """Raises RemoteProblem."""
        self.cache.make_room(num_bytes, self.key)

    def partial(self, file: RemoteFile) -> Path:
        """Where the beginning of a file is kept; another version has another place."""
        return self.cache.root / "partial" / f"{self.key}-{self._version([file])}"

    def scratch(self, name: str) -> Path:
        """Where a file is put that was part of another."""
        return self.cache.root / "partial" / f"{self.key}-unpacked-{name}"

    def bytes_to_come(self, file: RemoteFile) -> int:
        """Of a file that has been begun or not; 0 where that is not known."""
        return max((file.size or 0) - _size(self.partial(file)), 0)

    def adopt(self, file: RemoteFile) -> bool:
        """Take a file from the cache itself, if it holds the same content under another entry."""
        if file.size is None:  # a beginning could not be told from the whole
            return False
        with self.cache.lock():
            blob = self._blob_of(file)
            if blob is None:
                return False
            path, held = self.partial(file), self.cache.root / "blobs" / blob
            if not held.exists():
                return False
            path.unlink(missing_ok=True)
            try:
                # A second link: the first may be removed before this one becomes an entry.
                os.link(held, path)
            except OSError:  # a file system without links
                return False
        return path.stat().st_size == file.size and digest(path) == blob

    def drop_partials(self, keep: Sequence[RemoteFile] = ()) -> None:
        """Remove beginnings of this source's files, but for those of ``keep``."""
        kept = {self.partial(file) for file in keep}
        for path in self.cache.partials(self.key):
            if path not in kept:
                path.unlink()

    def publish(self, files: Sequence[RemoteFile], parts: Mapping[str, Path]) -> CachedAdapter:
        """Make an entry of files that have come in whole, at once."""
        digests = {name: digest(path) for name, path in parts.items()}
        sizes = {name: path.stat().st_size for name, path in parts.items()}
        directory = self._directory(files)
        with self.cache.lock():
            for name, path in parts.items():
                os.replace(path, self.cache.root / "blobs" / digests[name])
                path.unlink(missing_ok=True)  # two links to one file: replacing did nothing
            new = Path(tempfile.mkdtemp(dir=self.cache.root / "adapters"))
            (new / "files").mkdir()
            for name, blob in digests.items():
                (new / "files" / name).symlink_to(Path("../../../blobs", blob))
            record = {
                "source": self.shown,
                "origin": self.origin(files),
                "blobs": digests,
                "sizes": sizes,
            }
            (new / _RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
            if directory.exists():
                shutil.rmtree(directory)
            os.replace(new, directory)
        self.drop_partials()
        with contextlib.suppress(RemoteUnavailable):  # others hold the room that is too much
            self.cache.make_room(0, self.key, keep=directory)
        adapter = _read(directory)
        assert adapter is not None, "an entry is whole when it is made"
        return adapter

    @staticmethod
    def origin(files: Sequence[RemoteFile]) -> Origin:
        """What a source says of files that tells whether they are the same."""
        return sorted([f.name, f.size, f.version, f.sha256] for f in files)

    def _directory(self, files: Sequence[RemoteFile]) -> Path:
        return self.cache.root / "adapters" / f"{self.key}-{self._version(files)}"

    def _version(self, files: Sequence[RemoteFile]) -> str:
        return hashlib.sha256(json.dumps(self.origin(files)).encode()).hexdigest()[:32]

    def _blob_of(self, file: RemoteFile) -> str | None:
        """By the digest that the source tells, or as the same version of the same file."""
        if file.sha256 is not None:
            return file.sha256
        if file.version is None:
            return None
        [row] = self.origin([file])
        same = (adapter for adapter in self.cache.adapters(self.key) if row in adapter.origin)
        return next((a.blobs[file.name] for a in same if file.name in a.blobs), None)


def _read(directory: Path) -> CachedAdapter | None:
    """An entry; None for what is none (any more)."""
    path = directory / _RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return CachedAdapter(
            directory=directory,
            origin=record["origin"],
            blobs=record["blobs"],
            sizes=record["sizes"],
            used_at=path.stat().st_mtime,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _is_whole(adapter: CachedAdapter) -> bool:
    """Whether its blobs are there; somebody may have tidied up by hand."""
    try:
        return all(
            (adapter.directory / "files" / name).stat().st_size == size
            for name, size in adapter.sizes.items()
        )
    except OSError:
        return False
