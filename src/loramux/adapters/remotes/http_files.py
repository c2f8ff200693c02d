"""Files behind http and https URLs: their size and version, and their bytes from any place on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from loramux.adapters.remotes.remote import (
    RemoteDenied,
    RemoteFile,
    RemoteForbidden,
    RemoteMissing,
    RemoteUnavailable,
    Transfer,
    TransferBroken,
)
from loramux.adapters.report import printable

if TYPE_CHECKING:
    import httpx2

_CONNECT_SECONDS = 10.0
_READ_SECONDS = 30.0
_MAX_REDIRECTS = 5
_SHOWN_LENGTH = 400
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
_HEAD_NOT_TAKEN = (403, 405, 501)
"""Answers of servers that know GET alone; a signed URL is good for one method."""


class HttpFiles:
    """A client for one load. ``may_visit`` is asked about every URL, redirects included."""

    def __init__(
        self,
        *,
        headers: Mapping[str, str] | None = None,
        may_visit: Callable[[str], bool] | None = None,
    ) -> None:
        # Bytes as they lie there: a length is of no use for a compressed transfer.
        self._headers = {**(headers or {}), "Accept-Encoding": "identity"}
        self._may_visit = may_visit

    @cached_property
    def _client(self) -> httpx2.Client:
        import httpx2

        return httpx2.Client(
            headers=self._headers,
            follow_redirects=True,
            max_redirects=_MAX_REDIRECTS,
            timeout=httpx2.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS),
            event_hooks={"request": [self._check]},
        )

    def close(self) -> None:
        if "_client" in vars(self):
            self._client.close()

    def look(self, name: str, url: str) -> RemoteFile | None:
        """The file at ``url``; None where there is none, or a web page in its stead."""
        try:
            headers = self._head(url)
        except RemoteMissing:
            return None
        if headers.get("content-type", "").startswith("text/html"):
            return None
        validator = headers.get("etag") or headers.get("last-modified")
        return RemoteFile(
            name=name,
            place=url,
            size=_length(headers),
            version=validator,
            resumable=validator is not None and not validator.startswith("W/"),
        )

    @contextmanager
    def open(self, file: RemoteFile, start: int, *, validated: bool = True) -> Iterator[Transfer]:
        """Read from ``start`` on; ``validated``: only if the file still has its version."""
        headers: dict[str, str] = {}
        if start:
            headers["Range"] = f"bytes={start}-"
            if validated and file.version is not None:
                headers["If-Range"] = file.version
        with self._stream("GET", file.place, headers, (416,) if start else ()) as response:
            if response.status_code != 416:
                begin = _begin(response, file, start)
                yield Transfer(begin, _chunks(response, file.name))
                return
        with self.open(file, 0) as whole:
            yield whole

    def _head(self, url: str) -> Mapping[str, str]:
        """Headers of the whole file."""
        with self._stream("HEAD", url, {}, allowed=_HEAD_NOT_TAKEN) as response:
            if response.status_code not in _HEAD_NOT_TAKEN:
                return response.headers
        with self._stream("GET", url, {}) as response:  # the body is left unread
            return response.headers

    @contextmanager
    def _stream(
        self, method: str, url: str, headers: Mapping[str, str], allowed: tuple[int, ...] = ()
    ) -> Iterator[httpx2.Response]:
        """An answer that is a success or has one of the ``allowed`` statuses."""
        import httpx2

        where = without_secrets(url)
        try:
            with self._client.stream(method, url, headers=dict(headers)) as response:
                if response.status_code not in allowed:
                    _raise_for_status(where, response.status_code)
                yield response
        except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeError) as error:  # of the host's name
            detail = str(error) or type(error).__name__
            raise RemoteUnavailable(f"{where} cannot be reached: {detail}") from error

    def _check(self, request: httpx2.Request) -> None:
        """Each hop of a chain of redirects comes by here."""
        url = str(request.url)
        if self._may_visit is not None and not self._may_visit(url):
            raise RemoteForbidden(
                f"leads to {without_secrets(url)}, which no --adapter-sources allows"
            )


def without_secrets(url: str) -> str:
    """A URL for eyes: without user, password and query, where signatures are."""
    url = re.sub(r"^([A-Za-z][A-Za-z0-9+.\-]*://)[^/?#]*@", r"\1", url)
    bare = re.split(r"[?#]", url, maxsplit=1)[0]
    plain = bare.isascii() and bare.isprintable() and len(bare) <= _SHOWN_LENGTH
    return bare if plain else printable(bare, limit=_SHOWN_LENGTH)


def _raise_for_status(where: str, status: int) -> None:
    if status in (404, 410):
        raise RemoteMissing(f"{where} does not exist (status {status})")
    if status in (401, 403):
        raise RemoteDenied(f"{where} is refused to this server (status {status})")
    if not 200 <= status < 300:
        raise RemoteUnavailable(f"{where} answers with status {status}")


def _length(headers: Mapping[str, str]) -> int | None:
    text = headers.get("content-length", "")
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def _begin(response: httpx2.Response, file: RemoteFile, start: int) -> int:
    """Where the bytes of an answer begin. Raises RemoteUnavailable if they are another file's."""
    begin, size = 0, _length(response.headers)
    if response.status_code == 206:
        found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if found is None or int(found[1]) != start:
            raise RemoteUnavailable(f"{file.name}: the server sends another part than asked for")
        begin, size = start, None if found[2] == "*" else int(found[2])
    if None not in (size, file.size) and size != file.size:
        raise RemoteUnavailable(
            f"{file.name} is announced with {file.size} bytes and sent with {size}: load it again"
        )
    return begin


def _chunks(response: httpx2.Response, name: str) -> Iterator[bytes]:
    import httpx2

    try:
        yield from response.iter_raw()  # chunks of a set size would be lost half full
    except httpx2.HTTPError as error:
        detail = str(error) or type(error).__name__
        raise TransferBroken(f"the transfer of {name} broke off: {detail}") from error
