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
    TOKENIZER_FILES,
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
        path = urlsplit(url).path
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
                raise RemoteMissing("there is no such archive")
            return [file]
        found: dict[str, RemoteFile] = {}
        for name in (CONFIG_FILE, *TOKENIZER_FILES):
            self._look_for(name, found)
        for name in WEIGHT_FILES:
            if self._look_for(name, found):
                break
        return [found[name] for name in choose(found)]

    def open(self, file: RemoteFile, start: int) -> AbstractContextManager[Transfer]:
        return self._files.open(file, start)

    def close(self) -> None:
        self._files.close()

    def _look_for(self, name: str, found: dict[str, RemoteFile]) -> bool:
        parts = urlsplit(self.source)
        file = self._files.look(name, urlunsplit(parts._replace(path=parts.path + name)))
        if file is not None:
            found[name] = file
        return file is not None
