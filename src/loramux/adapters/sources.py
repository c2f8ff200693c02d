"""Where an adapter comes from: a place named by the user becomes a local directory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from urllib.parse import unquote

from loramux.adapters.disk_cache import DiskCache
from loramux.adapters.remotes.fetch import fetched
from loramux.adapters.remotes.http_files import without_secrets
from loramux.adapters.remotes.hub import HubRemote
from loramux.adapters.remotes.remote import (
    Remote,
    RemoteForbidden,
    RemoteMissing,
    RemoteProblem,
    RemoteUnfit,
)
from loramux.adapters.remotes.stores import StoreRemote
from loramux.adapters.remotes.web import WebRemote
from loramux.adapters.report import printable
from loramux.adapters.source_rules import allows, confine
from loramux.config import SourceOptions, parse_bytes
from loramux.errors import (
    AdapterError,
    AdapterRefused,
    AdapterSourceForbidden,
    AdapterSourceNotFound,
    AdapterSourceUnavailable,
    ConfigError,
)
from loramux.types import SourceRules

_REMOTE = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://|hf:")
_LOCAL_SCHEMES = ("file", "local")
_REMEDY = (
    "give the path of a directory that holds adapter_config.json and the weights, "
    "adapter_model.safetensors for one"
)


class AdapterSources:
    """Opens sources of every kind; remote ones by way of the disk cache. Safe in any thread."""

    def __init__(self, options: SourceOptions | None = None) -> None:
        self._options = options or SourceOptions()

    @cached_property
    def _cache(self) -> DiskCache:
        # Not before it is needed: there may be no home directory to put it in.
        budget = parse_bytes(self._options.disk_cache_bytes)
        return DiskCache(self._options.cache_directory(), budget)

    @contextmanager
    def open(self, name: str, source: str, rules: SourceRules | None = None) -> Iterator[Path]:
        """The directory with the adapter's files, good for reading while the context is open.

        ``rules`` are for a source that somebody else than the operator has named. Raises
        AdapterError.
        """
        source = _local_path(name, source)
        if not _REMOTE.match(source):
            if rules is None or rules.root is None:
                yield find_directory(name, source)
            else:
                yield confine(name, source, rules.root)
            return
        source = re.sub(r"^hf://", "hf:", source)
        shown = without_secrets(source)
        if rules is not None and not allows(source, rules.prefixes):
            raise AdapterSourceForbidden(
                name,
                shown,
                "remote sources can be loaded over HTTP only where the server was started with "
                "their beginning as --adapter-sources",
            )
        with ExitStack() as stack:
            try:
                remote = stack.enter_context(closing(_remote(source, rules)))
                directory = stack.enter_context(
                    fetched(remote, self._cache, offline=self._options.adapters_offline)
                )
            except RemoteProblem as problem:
                raise _as_adapter_error(name, shown, problem) from problem
            except (OSError, NotImplementedError, ConfigError) as error:  # full, without locks, ...
                raise AdapterSourceUnavailable(
                    name,
                    shown,
                    f"the disk cache cannot be used: {error}; make room for it, or choose another "
                    "directory with --disk-cache",
                ) from error
            yield directory


def find_directory(name: str, source: str) -> Path:
    """The absolute path of the directory ``source``; a leading ``~`` is the home directory.

    An archive of NeMo stands for a directory. Raises AdapterSourceNotFound for all else that is no
    directory.
    """
    shown = printable(source, limit=400)
    if not source:
        raise AdapterSourceNotFound(name, shown, f"the source is empty; {_REMEDY}")
    try:
        path = Path(source).expanduser().absolute()
        if path.is_dir() or (path.suffix == ".nemo" and path.is_file()):
            return path
        detail = "is a file, not a directory" if path.exists() else "there is no such directory"
    except (OSError, RuntimeError, ValueError):  # permissions, unknown user, zero byte
        detail = "the path cannot be read"
    raise AdapterSourceNotFound(name, shown, f"{detail}; {_REMEDY}")


def shown_source(source: str) -> str:
    """A source for logs and answers: a URL without its user, password and query."""
    return without_secrets(source) if _REMOTE.match(source) else source


def lasting_source(source: str, rules: SourceRules | None) -> tuple[str, SourceRules | None]:
    """A source and its rules that mean the same in a process with another working directory."""
    if rules is not None and rules.root is not None:
        rules = replace(rules, root=str(Path(rules.root).expanduser().absolute()))
        return source, rules
    if not _REMOTE.match(source):
        source = str(Path(source).expanduser().absolute())
    return source, rules


def _local_path(name: str, source: str) -> str:
    """The path in a ``file://`` URL; any other source as it is."""
    match = _REMOTE.match(source)
    if match is None or (match[1] or "").lower() not in _LOCAL_SCHEMES:
        return source
    path = re.fullmatch(r"\w+://(?:localhost)?(/.*)", source, re.DOTALL)
    if path is None:
        raise AdapterSourceNotFound(
            name, printable(source, limit=400), "write file:/// and an absolute path"
        )
    return unquote(path[1])


def _remote(source: str, rules: SourceRules | None) -> Remote:
    """Raises RemoteUnfit for what is no source of any kind."""
    scheme = source.partition(":")[0].lower()
    try:
        source.encode()
    except UnicodeEncodeError:
        raise RemoteUnfit("it holds characters that are none") from None
    if source.startswith("hf:"):
        return HubRemote(source)
    if scheme in ("http", "https"):
        may_visit = None if rules is None else partial(allows, prefixes=rules.prefixes)
        return WebRemote(source, may_visit)
    if "::" in source:
        raise RemoteUnfit("chained URLs are not read: name the place itself")
    return StoreRemote(source)


def _as_adapter_error(name: str, shown: str, problem: RemoteProblem) -> AdapterError:
    text = str(problem)
    if isinstance(problem, RemoteMissing):
        return AdapterSourceNotFound(name, shown, text)
    if isinstance(problem, RemoteForbidden):
        return AdapterSourceForbidden(name, shown, text)
    if isinstance(problem, RemoteUnfit):
        return AdapterRefused(name, [f"{shown}: {text}"])
    return AdapterSourceUnavailable(name, shown, text)
