"""Where an adapter comes from: a place named by the user becomes a local directory."""

from __future__ import annotations

import re
from pathlib import Path

from loramux.adapters.report import printable
from loramux.errors import AdapterRefused, AdapterSourceNotFound

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://|hf:")
_REMEDY = (
    "give the path of a directory that holds adapter_config.json and the weights, "
    "adapter_model.safetensors for one"
)


def find_directory(name: str, source: str) -> Path:
    """The absolute path of the directory ``source``; a leading ``~`` is the home directory.

    An archive of NeMo stands for a directory. Raises AdapterRefused for URLs and hub names,
    AdapterSourceNotFound for all else that is no directory.
    """
    shown = printable(source, limit=400)
    if _REMOTE.match(source):
        raise AdapterRefused(
            name, [f"{shown} is remote; only local directories are read: download it and {_REMEDY}"]
        )
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
