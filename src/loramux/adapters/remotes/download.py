"""One file of a remote onto the disk: taken up where it stopped, bounded, and checked."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from loramux.adapters.formats.files import MalformedFile, refuse_placeholders
from loramux.adapters.formats.peft_config import MAX_CONFIG_BYTES
from loramux.adapters.remotes.remote import (
    CONFIG_FILES,
    TOKENIZER_FILES,
    Remote,
    RemoteFile,
    RemoteUnavailable,
    RemoteUnfit,
    TransferBroken,
)

_ATTEMPTS = 3
_STEP_BYTES = 16 * 2**20
"""So much is written between two looks at the room that is left."""
_MAX_TOKENIZER_BYTES = 64 * 2**20
_PATIENCE_SECONDS = 60.0
_SLOWEST_BYTES_PER_SECOND = 4096

MakeRoom = Callable[[int], None]
"""Makes room for so many bytes more on the disk, or raises RemoteProblem."""


def check_size(file: RemoteFile) -> None:
    """Refuse, before it is read, a file that says it is too large or empty. Raises RemoteUnfit."""
    limit = _limit(file.name)
    if file.size is not None and limit is not None and file.size > limit:
        raise RemoteUnfit(f"{file.name} is too large: {file.size} bytes, the limit is {limit}")
    if file.size == 0:
        raise RemoteUnfit(f"{file.name} is empty (0 bytes)")


def download(remote: Remote, file: RemoteFile, target: Path, make_room: MakeRoom) -> None:
    """Bring ``file`` to ``target``, which may hold its beginning from an earlier attempt.

    What has come stays there when the transfer breaks off. Raises RemoteProblem.
    """
    have = _usable(file, target)
    for attempt in range(1, _ATTEMPTS + 1):
        if have == file.size:
            break
        try:
            _append(remote, file, target, have, make_room)
            break
        except TransferBroken:
            progress, have = have, _usable(file, target)
            if attempt == _ATTEMPTS or have <= progress:
                raise
    _check(file, target)


def write_bounded(name: str, chunks: Iterator[bytes], target: Path, make_room: MakeRoom) -> None:
    """Write a file that comes out of an archive. Raises RemoteProblem."""
    target.unlink(missing_ok=True)
    file = RemoteFile(name=name, place=name, size=None, version=None)
    _write(file, chunks, target, 0, make_room)
    _check(file, target)


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _limit(name: str) -> int | None:
    """Weights are bounded by the room on the disk alone."""
    if name in CONFIG_FILES:
        return MAX_CONFIG_BYTES
    return _MAX_TOKENIZER_BYTES if name in TOKENIZER_FILES else None


def _usable(file: RemoteFile, target: Path) -> int:
    """How many bytes of the file are there; what does not fit to it is removed."""
    have = target.stat().st_size if target.exists() else 0
    if have and file.resumable and (file.size is None or have <= file.size):
        return have
    target.unlink(missing_ok=True)
    return 0


def _append(remote: Remote, file: RemoteFile, target: Path, have: int, make_room: MakeRoom) -> None:
    with remote.open(file, have) as transfer:
        if transfer.start == 0:
            target.unlink(missing_ok=True)
        _write(file, transfer.chunks, target, transfer.start, make_room)
    size = target.stat().st_size
    if file.size is not None and size < file.size:
        raise TransferBroken(f"{file.name} ended after {size} of {file.size} bytes")


def _write(
    file: RemoteFile, chunks: Iterator[bytes], target: Path, start: int, make_room: MakeRoom
) -> None:
    limit = _limit(file.name)
    received, since_look, began = 0, 0, time.monotonic()
    with target.open("ab") as out:
        for chunk in chunks:
            received += len(chunk)
            since_look += len(chunk)
            if file.size is not None and start + received > file.size:
                target.unlink()
                raise RemoteUnavailable(
                    f"{file.name} is longer than the {file.size} bytes that were announced"
                )
            if limit is not None and start + received > limit:
                raise RemoteUnfit(f"{file.name} is too large: the limit is {limit} bytes")
            if since_look >= _STEP_BYTES:
                make_room(len(chunk))
                since_look = 0
            out.write(chunk)
            _check_speed(file, received, time.monotonic() - began)


def _check_speed(file: RemoteFile, received: int, seconds: float) -> None:
    """A server that sends a byte now and then would hold its thread for ever."""
    if seconds > _PATIENCE_SECONDS and received < seconds * _SLOWEST_BYTES_PER_SECOND:
        raise RemoteUnavailable(
            f"{file.name} comes too slowly: {received} bytes in {seconds:.0f} s"
        )


def _check(file: RemoteFile, target: Path) -> None:
    """Look at what has come, and remove it if it is not what it should be."""
    try:
        with target.open("rb") as opened:
            refuse_placeholders(file.name, opened.read(256))
        if file.sha256 is not None and digest(target) != file.sha256:
            raise RemoteUnavailable(f"{file.name} is not what was announced: its SHA-256 differs")
    except MalformedFile as problem:
        target.unlink()
        raise RemoteUnfit(str(problem)) from None
    except RemoteUnavailable:
        target.unlink()
        raise
