"""A remote adapter as a directory: out of the disk cache where it is current, else fetched."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from loramux.adapters.disk_cache import CachedAdapter, DiskCache, Lease
from loramux.adapters.remotes.archives import archive_name, unpack
from loramux.adapters.remotes.download import check_size, download, write_bounded
from loramux.adapters.remotes.remote import Remote, RemoteFile, RemoteUnavailable, RemoteUnfit

log = logging.getLogger(__name__)

OFFLINE_REMEDY = "--adapters-offline serves it without asking"


@contextmanager
def fetched(remote: Remote, cache: DiskCache, *, offline: bool) -> Iterator[Path]:
    """The directory of the adapter; it stays while the context is open. Raises RemoteProblem.

    The remote is asked every time whether its files are still the ones in the cache, unless they
    cannot change or the user works offline.
    """
    with cache.lease(remote.source) as lease:
        adapter = _known(remote, lease, offline=offline or remote.offline)
        yield lease.directory(adapter or _renew(remote, lease))


def _known(remote: Remote, lease: Lease, *, offline: bool) -> CachedAdapter | None:
    """What the cache has to give without asking."""
    if not (offline or remote.immutable):
        return None
    newest = lease.newest()
    if newest is None and offline:
        raise RemoteUnavailable("it is not in the disk cache, and the server works offline")
    return newest


def _renew(remote: Remote, lease: Lease) -> CachedAdapter:
    try:
        files = remote.look()
    except RemoteUnavailable as problem:
        newest = lease.newest()
        if newest is None:
            raise
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(newest.used_at))
        raise RemoteUnavailable(
            f"{problem}; the disk cache has a copy, last used {when}: {OFFLINE_REMEDY}"
        ) from problem
    return lease.find(files) or _bring(remote, files, lease)


def _bring(remote: Remote, files: Sequence[RemoteFile], lease: Lease) -> CachedAdapter:
    for file in files:
        check_size(file)
    lease.drop_partials(keep=files)
    missing = [file for file in files if not lease.adopt(file)]
    lease.make_room(sum(lease.bytes_to_come(file) for file in missing))
    try:
        for file in missing:
            download(remote, file, lease.partial(file), lease.make_room)
        parts = _unpacked({file.name: lease.partial(file) for file in files}, lease)
        lease.make_room(0)
    except RemoteUnfit:
        lease.drop_partials()  # of no use for another attempt
        raise
    if missing and not remote.immutable and lease.origin(remote.look()) != lease.origin(files):
        raise RemoteUnavailable("it changed while it was read: load it again")
    log.info("fetched %d of %d files of %s", len(missing), len(files), lease.shown)
    return lease.publish(files, parts)


def _unpacked(parts: dict[str, Path], lease: Lease) -> dict[str, Path]:
    """The files themselves, where what came is an archive."""
    kinds = [name for name in parts if archive_name(name) == name]
    if not kinds:
        return parts
    [kind] = kinds
    taken: dict[str, Path] = {}

    def write(name: str, chunks: Iterator[bytes]) -> None:
        taken[name] = lease.scratch(name)
        write_bounded(name, chunks, taken[name], lease.make_room)

    unpack(parts[kind], kind, write)
    return taken
