"""Adapters in whatever fsspec knows: s3, gs, memory and many more."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from loramux.adapters.remotes.archives import archive_name
from loramux.adapters.remotes.remote import (
    CHUNK_BYTES,
    RemoteFile,
    RemoteMissing,
    RemoteProblem,
    RemoteUnavailable,
    RemoteUnfit,
    Transfer,
    TransferBroken,
    choose,
)
from loramux.adapters.report import printable

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_VERSION_KEYS = (
    "ETag", "etag", "generation", "md5Hash", "content_hash", "version_id", "VersionId",
    "LastModified", "last_modified", "updated", "modified", "mtime", "created",
)  # fmt: skip
"""By which file systems tell that a file was written again; each has its own words."""


class StoreRemote:
    """A folder of a file system, or one archive in it."""

    immutable = False
    offline = False

    def __init__(self, url: str) -> None:
        self.source = url
        self._archive = archive_name(url)

    def look(self) -> Sequence[RemoteFile]:
        with _problems():
            system, path = self._place
            system.invalidate_cache()
            if self._archive is not None:
                return [_remote_file(self._archive, system.info(path))]
            there = {
                info["name"].rstrip("/").rpartition("/")[2]: info
                for info in system.ls(path, detail=True)
                if info["type"] == "file"
            }
        return [_remote_file(name, there[name]) for name in choose(there)]

    @contextmanager
    def open(self, file: RemoteFile, start: int) -> Iterator[Transfer]:
        with _problems():
            stream = self._place[0].open(file.place, "rb")
        with stream:
            yield Transfer(start, _chunks(stream, file.name, start))

    def close(self) -> None:
        """Nothing: fsspec's clients live as long as the process."""

    @cached_property
    def _place(self) -> tuple[Any, str]:
        import fsspec

        scheme = self.source.partition("://")[0]
        try:
            # A client of another load may hold listings from before a change.
            return fsspec.url_to_fs(self.source, skip_instance_cache=True)
        except ImportError as error:
            if scheme in _EXTRAS:
                remedy = f"pip install 'loramux[{_EXTRAS[scheme]}]'"
            else:
                remedy = str(error).strip().partition("\n")[0]
            raise RemoteUnfit(f"{scheme}:// needs a package that is not there: {remedy}") from None
        except ValueError as error:
            raise RemoteUnfit(f"fsspec cannot open it: {printable(str(error))}") from None


def _chunks(stream: Any, name: str, start: int) -> Iterator[bytes]:
    try:
        stream.seek(start)
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk
    except Exception as error:
        raise TransferBroken(f"the transfer of {name} broke off: {_first_line(error)}") from error


@contextmanager
def _problems() -> Iterator[None]:
    """What the many file systems raise, in our terms."""
    try:
        yield
    except RemoteProblem:
        raise
    except (FileNotFoundError, NotADirectoryError):
        raise RemoteMissing("there is nothing at this place") from None
    except PermissionError as error:
        raise RemoteUnavailable(f"it is refused to this server: {_first_line(error)}") from error
    except Exception as error:  # each client library has errors of its own, without a common base
        raise RemoteUnavailable(f"it cannot be reached: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:400] or type(error).__name__


def _remote_file(name: str, info: Mapping[str, Any]) -> RemoteFile:
    told = {key: str(info[key]) for key in _VERSION_KEYS if info.get(key) is not None}
    size = info.get("size")
    return RemoteFile(
        name=name,
        place=info["name"],
        size=size if isinstance(size, int) else None,
        version=json.dumps(told, sort_keys=True) if told else None,
        resumable=bool(told),
    )
