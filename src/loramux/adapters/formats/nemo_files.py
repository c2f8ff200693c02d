"""Where the two files of a NeMo adapter are: in an archive, which is a tar, or in a folder.

Nothing is unpacked: an archive's members are read at their place in it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from loramux.adapters.formats.files import MalformedFile, open_regular, refuse_placeholders
from loramux.adapters.formats.tar_records import read_members
from loramux.adapters.formats.zip_records import Record
from loramux.adapters.report import printable

SUFFIX = ".nemo"
WEIGHTS, CONFIG = "model_weights.ckpt", "model_config.yaml"

_DISTRIBUTED = "model_weights"
_RANK_FOLDER = re.compile(r"(?:mp|tp)_rank_\d+\w*")


@dataclass(frozen=True)
class NemoFile:
    """A file, or a part of one, as ``record`` says; ``name`` is what messages call it."""

    name: str
    path: Path
    record: Record

    def read(self) -> bytes:
        """The whole of it; the caller bounds the size."""
        file, _ = open_regular(self.path)
        with file:
            file.seek(self.record.start)
            return file.read(self.record.num_bytes)


@dataclass(frozen=True)
class NemoFiles:
    """The files of one adapter; None: it is not there."""

    weights: NemoFile | None
    config: NemoFile | None

    def missing(self) -> list[str]:
        parts = ((WEIGHTS, self.weights), (CONFIG, self.config))
        return [name for name, file in parts if file is None]


def is_nemo(path: Path) -> bool:
    """Whether this is an archive of NeMo, or a folder in which one or its content lies."""
    if path.suffix == SUFFIX and path.is_file():
        return True
    names = (WEIGHTS, CONFIG)
    return any(os.path.lexists(path / name) for name in names) or bool(_archives(path))


def find_files(path: Path) -> NemoFiles:
    """The files of the adapter at ``path``. Raises MalformedFile, with the remedy."""
    if path.is_file():
        return _inside(path)
    archives = _archives(path)
    unpacked = any(os.path.lexists(path / name) for name in (WEIGHTS, CONFIG))
    if len(archives) + unpacked > 1:
        found = [archive.name for archive in archives] + [WEIGHTS] * unpacked
        shown = ", ".join(map(printable, found[:4]))
        raise MalformedFile(f"the folder holds more than one adapter of NeMo: {shown}")
    if archives:
        return _inside(archives[0])
    try:
        _refuse_shards(path.name, (entry.name for entry in path.iterdir()))
    except OSError as error:
        raise MalformedFile(f"the folder is unreadable: {error.strerror}") from None
    return NemoFiles(_whole(path / WEIGHTS), _whole(path / CONFIG))


def _archives(folder: Path) -> list[Path]:
    return sorted(folder.glob("*" + SUFFIX))


def _whole(path: Path) -> NemoFile | None:
    if not os.path.lexists(path):
        return None
    file, size = open_regular(path)
    file.close()
    return NemoFile(path.name, path, Record(0, size))


def _inside(archive: Path) -> NemoFiles:
    what = printable(archive.name)
    file, size = open_regular(archive)
    with file:
        refuse_placeholders(what, file.read(256))
        members = read_members(what, file, size)
    _refuse_shards(what, (name.partition("/")[0] for name in members))
    found = {
        name: NemoFile(f"{name} in {what}", archive, members[name])
        for name in (WEIGHTS, CONFIG)
        if name in members
    }
    return NemoFiles(found.get(WEIGHTS), found.get(CONFIG))


def _refuse_shards(what: str, names: Iterable[str]) -> None:
    """Raise MalformedFile when there are folders that hold the weights in pieces."""
    names = set(names)
    if _DISTRIBUTED in names:
        raise MalformedFile(
            f"{what} holds a distributed checkpoint ({_DISTRIBUTED}/): save the adapter in NeMo "
            f"as {WEIGHTS}"
        )
    shards = sorted({name for name in names if _RANK_FOLDER.fullmatch(name)})
    if shards:
        shown = ", ".join(map(printable, shards[:4]))
        raise MalformedFile(
            f"{what} is sharded over GPUs ({shown}): save the adapter in NeMo with tensor and "
            "pipeline parallelism of 1"
        )
