"""What of an adapter's source is allowed when somebody else than the operator names it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote

from loramux.adapters.report import printable
from loramux.errors import AdapterSourceForbidden, AdapterSourceNotFound

_INSIDE = "give the path of a directory inside --adapter-root, relative to it"


def allows(source: str, prefixes: Iterable[str]) -> bool:
    """Whether a remote source begins with one of ``prefixes``, whole words only.

    What could mean another place than it seems to is not allowed at all: steps to a parent folder,
    also in disguise, and a user before the host.
    """
    path = unquote(re.split(r"[?#]", source, maxsplit=1)[0])
    if re.search(r"(^|[/\\:])\.{1,2}([/\\]|$)|\\|%", path) or any(ord(c) <= 32 for c in path):
        return False
    if re.match(r"[^/]*://[^/?#]*@", source):
        return False
    return any(_begins(_plain(source), _plain(prefix)) for prefix in prefixes)


def confine(name: str, source: str, root: str) -> Path:
    """The directory ``source`` inside ``root``, none of whose files lie outside by way of links.

    An archive of NeMo stands for a directory. Raises AdapterSourceForbidden, or
    AdapterSourceNotFound where there is no directory.
    """
    shown = printable(source, limit=400)
    if source.startswith(("/", "~")) or ".." in Path(source).parts:
        raise AdapterSourceForbidden(name, shown, _INSIDE)
    inside = Path(root).expanduser().resolve()
    try:
        directory = (inside / source).resolve()
        if not directory.is_relative_to(inside):
            raise AdapterSourceForbidden(name, shown, f"it leads out of it; {_INSIDE}")
        if directory.suffix == ".nemo" and directory.is_file():
            return directory
        if not directory.is_dir():
            raise AdapterSourceNotFound(name, shown, f"there is no such directory; {_INSIDE}")
        for file in directory.iterdir():
            if not file.resolve().is_relative_to(inside):
                leads_out = f"{printable(file.name)} is a link that leads out of it"
                raise AdapterSourceForbidden(name, shown, leads_out)
    except (OSError, RuntimeError, ValueError):  # permissions, a loop of links, a zero byte
        raise AdapterSourceNotFound(name, shown, f"the path cannot be read; {_INSIDE}") from None
    return directory


def _plain(source: str) -> str:
    """Scheme and host, which are the same in any case, in lower case."""
    if "://" not in source:
        return source
    scheme, rest = source.split("://", 1)
    host, slash, path = rest.partition("/")
    return f"{scheme.lower()}://{host.lower()}{slash}{path}"


def _begins(source: str, prefix: str) -> bool:
    if not source.startswith(prefix):
        return False
    rest = source[len(prefix) :]
    return not rest or prefix.endswith(("/", ":")) or rest[0] in "/@?"
