"""Adapters in repositories of the Hugging Face hub: ``hf:org/repo[/folder][@revision]``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from loramux.adapters.remotes.http_files import HttpFiles
from loramux.adapters.remotes.remote import (
    RemoteFile,
    RemoteMissing,
    RemoteUnavailable,
    RemoteUnfit,
    Transfer,
    choose,
)
from loramux.adapters.report import printable

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

_FORM = re.compile(r"hf:(?P<repo>[\w.\-]+/[\w.\-]+)(?P<folder>(?:/[^/@]+)*)/?(?:@(?P<rev>.+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SECONDS = 20.0
_LOG_IN = "for one that is private or gated, set HF_TOKEN to a token that may read it"


class HubRemote:
    """The hub says what is there; the files come as plain downloads of one commit."""

    def __init__(self, source: str) -> None:
        """Raises RemoteUnfit."""
        match = _FORM.fullmatch(source)
        if match is None:
            raise RemoteUnfit("a source on the hub is written hf:org/repo[/folder][@revision]")
        self.source = source
        self._repo = match["repo"]
        self._folder = match["folder"].removeprefix("/")
        self._revision: str | None = match["rev"]
        self.immutable = self._revision is not None and bool(_COMMIT.fullmatch(self._revision))

    @property
    def offline(self) -> bool:
        from huggingface_hub import constants

        return constants.HF_HUB_OFFLINE

    def look(self) -> Sequence[RemoteFile]:
        from huggingface_hub import HfApi, hf_hub_url

        api = HfApi()
        info = self._info(api)
        prefix = f"{self._folder}/" if self._folder else ""
        there = {
            sibling.rfilename.removeprefix(prefix): sibling
            for sibling in info.siblings or ()
            if sibling.rfilename.startswith(prefix)
        }
        return [
            _remote_file(
                name,
                there[name],
                hf_hub_url(self._repo, prefix + name, revision=info.sha, endpoint=api.endpoint),
                info.sha,
            )
            for name in choose(there)
        ]

    @contextmanager
    def open(self, file: RemoteFile, start: int) -> Iterator[Transfer]:
        # A commit cannot change, so what came before fits without asking.
        with self._files.open(file, start, validated=False) as transfer:
            yield transfer

    def close(self) -> None:
        if "_files" in vars(self):
            self._files.close()

    @cached_property
    def _files(self) -> HttpFiles:
        from huggingface_hub.utils import build_hf_headers

        return HttpFiles(headers=build_hf_headers(library_name="loramux"))

    def _info(self, api: Any) -> Any:
        """The repository with the sizes and digests of its files."""
        from huggingface_hub import errors

        revision = self._revision or "main"
        try:
            return api.model_info(
                self._repo, revision=revision, files_metadata=True, timeout=_SECONDS
            )
        except errors.GatedRepoError:
            raise RemoteUnavailable(f"{self._repo} is gated; {_LOG_IN}") from None
        except errors.RevisionNotFoundError:
            raise RemoteMissing(f"{self._repo} has no revision {printable(revision)}") from None
        except errors.RepositoryNotFoundError:
            raise RemoteMissing(f"there is no repository {self._repo}; {_LOG_IN}") from None
        except errors.HFValidationError as error:
            raise RemoteUnfit(str(error)) from None
        except Exception as error:  # of the network; the hub's library changes clients over time
            detail = str(error).strip().partition("\n")[0] or type(error).__name__
            raise RemoteUnavailable(f"{api.endpoint} cannot be asked: {detail}") from error


def _remote_file(name: str, sibling: RepoSibling, url: str, commit: str) -> RemoteFile:
    sha256 = None if sibling.lfs is None else sibling.lfs.sha256
    return RemoteFile(
        name=name,
        place=url,
        size=sibling.size,
        version=sha256 or sibling.blob_id or commit,
        sha256=sha256,
    )
