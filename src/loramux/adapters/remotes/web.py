"""Adapters behind a plain URL: an archive, or a folder whose files are known by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from urllib.parse import urlsplit, urlunsplit

from loramux.adapters.formats.peft_config import CONFIG_FILE
from loramux.adapters.formats.weight_files import WEIGHT_FILES
from loramux.adapters.remotes.archives import archive_name
from loramux.adapters.remotes.http_files import HttpFiles
from loramux.adapters.remotes.remote import (
    ADAPTER_FILES,
    RemoteDenied,
    RemoteFile,
    RemoteMissing,
    RemoteUnfit,
    Transfer,
    choose,
)


class WebRemote:
    """``https://host/folder/``, or ``https://host/adapter.tar.gz``."""

    immutable = False
    offline = False

    def __init__(self, url: str, may_visit: Callable[[str], bool] | None) -> None:
        """Raises RemoteUnfit for a URL of neither form."""
        self.source = url
        self._files = HttpFiles(may_visit=may_visit)
        try:
            path = urlsplit(url).path
        except ValueError as error:
            raise RemoteUnfit(f"the URL cannot be read: {error}") from None
        self._archive = archive_name(path)
        if self._archive is None and not path.endswith("/"):
            raise RemoteUnfit(
                "a URL must end in / and be the folder of adapter_config.json and the weights, or "
                "be an archive: .tar, .tar.gz, .tgz or .zip"
            )

    def look(self) -> Sequence[RemoteFile]:
        if self._archive is not None:
            file = self._files.look(self._archive, self.source)
            if file is None:
                raise RemoteMissing("there is no such archive, or a web page in its place")
            return [file]
        found: dict[str, RemoteFile] = {}
        denied: dict[str, RemoteDenied] = {}
        for name in ADAPTER_FILES:
            if name in WEIGHT_FILES and not found.keys().isdisjoint(WEIGHT_FILES):
                continue
            try:
                file = self._files.look(name, self._url(name))
            except RemoteDenied as refusal:
                # Stores that do not let everybody list them say so of files that are not there.
                denied[name] = refusal
                continue
            if file is not None:
                found[name] = file
        if CONFIG_FILE in denied:
            raise denied[CONFIG_FILE]
        if denied and found.keys().isdisjoint(WEIGHT_FILES):
            raise next(iter(denied.values()))
        return [found[name] for name in choose(found)]

    def open(self, file: RemoteFile, start: int) -> AbstractContextManager[Transfer]:
        return self._files.open(file, start)

    def close(self) -> None:
        self._files.close()

    def _url(self, name: str) -> str:
        parts = urlsplit(self.source)
        return urlunsplit(parts._replace(path=parts.path + name))
