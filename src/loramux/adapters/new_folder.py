"""A folder of results that is there as a whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from loramux.errors import ConfigError


def check_target(target: Path, *, force: bool, marker: str, inputs: Sequence[Path]) -> None:
    """Raise ConfigError when ``target`` must not be written.

    What is there is replaced only with ``force``, and only a folder that is empty or has
    ``marker``, the file by which such results are known; never one that ``inputs`` lie in.
    """
    if not target.parent.is_dir():
        raise ConfigError(f"{target}: there is no folder {target.parent}: make it first")
    if not os.path.lexists(target):
        return
    if not force:
        raise ConfigError(f"{target} is there already: name another place, or say --force")
    if target.is_symlink() or not target.is_dir():
        raise ConfigError(f"{target} is no folder, so --force does not replace it")
    if any(target.iterdir()) and not (target / marker).is_file():
        raise ConfigError(f"{target} has no {marker}, so --force does not replace it")
    own = target.resolve()
    for path in inputs:
        if path.resolve().is_relative_to(own):
            raise ConfigError(f"{target} holds {path}, which is read: name another place")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """An empty folder that gets the name ``target`` at the end, in place of what has it then.

    After an error nothing is left of it, and ``target`` is as it was.
    """
    beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        folder = beside / "new"
        folder.mkdir()
        yield folder
        if os.path.lexists(target):
            target.rename(beside / "old")
        folder.rename(target)
    finally:
        shutil.rmtree(beside)
