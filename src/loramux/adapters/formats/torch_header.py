"""What a file of torch.save says it holds, checked against its size, without running its pickle.

The file is a zip: one record is the pickle of a dictionary, the others are the bytes of storages
that its tensors are views of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from loramux.adapters.formats.files import (
    MalformedFile,
    RandomAccess,
    Window,
    open_regular,
    refuse_placeholders,
)
from loramux.adapters.formats.safetensors_header import MAX_NAME_LENGTH, TensorEntry
from loramux.adapters.formats.torch_pickle import DTYPE_BYTES, PickledTensor, read_pickle
from loramux.adapters.formats.zip_records import Record, read_records
from loramux.adapters.report import printable

MAX_PICKLE_BYTES = 16 * 2**20

REMEDY = "convert it to safetensors, where you trust it: load it and save it with save_pretrained"


@dataclass(frozen=True, slots=True)
class TorchEntry(TensorEntry):
    """One tensor; ``start`` and ``end`` count bytes from the beginning of the file."""

    stride: tuple[int, ...]
    """In elements; 0 repeats a dimension."""


def read_header(path: Path) -> Mapping[str, TorchEntry]:
    """The tensors of a file of torch.save by name, in file order.

    Raises MalformedFile, with the remedy, unless the file holds exactly a dictionary of tensors
    and the bytes of each.
    """
    what = path.name
    file, size = open_regular(path)
    with file:
        head = file.read(256)
        refuse_placeholders(what, head)
        try:
            return _entries(what, file, head, size)
        except MalformedFile as problem:
            raise MalformedFile(f"{problem}; {REMEDY}") from None


def read_header_at(what: str, path: Path, record: Record) -> Mapping[str, TorchEntry]:
    """The same for a file of torch.save that stands inside another file, ``path``."""
    file, _ = open_regular(path)
    with file:
        window = Window(file, record.start, record.num_bytes)
        head = window.read(256)
        refuse_placeholders(what, head)
        entries = _entries(what, window, head, record.num_bytes)
    return {
        name: replace(entry, start=entry.start + record.start, end=entry.end + record.start)
        for name, entry in entries.items()
    }


def _entries(what: str, file: RandomAccess, head: bytes, size: int) -> dict[str, TorchEntry]:
    if not head.startswith(b"PK\3\4"):
        kind = "a pickle" if head.startswith(b"\x80") else "no zip"
        raise MalformedFile(f"{what} is {kind}, not the zip that torch.save writes since 1.6")
    records = read_records(what, file, size)
    folder = _folder(what, records)
    order = records.get(f"{folder}/byteorder")
    if order is not None and _content(file, order, 16) != b"little":
        raise MalformedFile(f"{what} does not store its numbers in little-endian order")
    program = records[f"{folder}/data.pkl"]
    if program.num_bytes > MAX_PICKLE_BYTES:
        raise MalformedFile(
            f"{what} is too large: its pickle has {program.num_bytes} bytes, "
            f"the limit is {MAX_PICKLE_BYTES}"
        )
    tensors = read_pickle(what, _content(file, program, MAX_PICKLE_BYTES))
    return {name: _entry(what, name, t, records, folder) for name, t in tensors.items()}


def _folder(what: str, records: Mapping[str, Record]) -> str:
    """The folder inside the zip that all records are in."""
    found = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(found) != 1:
        raise MalformedFile(f"{what} is a zip, but not one that torch.save writes: no data.pkl")
    return found[0].removesuffix("/data.pkl")


def _content(file: RandomAccess, record: Record, limit: int) -> bytes:
    file.seek(record.start)
    return file.read(min(record.num_bytes, limit))


def _entry(
    what: str, name: str, tensor: PickledTensor, records: Mapping[str, Record], folder: str
) -> TorchEntry:
    if len(name) > MAX_NAME_LENGTH:
        raise MalformedFile(f"{what} has a tensor name of more than {MAX_NAME_LENGTH} characters")
    record = records.get(f"{folder}/data/{tensor.storage}")
    held = record.num_bytes if record is not None else 0
    if record is None or held != tensor.storage_bytes:
        raise MalformedFile(
            f"{what} is truncated or corrupt: tensor {printable(name)} needs a storage of "
            f"{tensor.storage_bytes} bytes, the file holds {held}"
        )
    if tensor.num_spanned > math.prod(tensor.shape):
        raise MalformedFile(f"{what} stores tensor {printable(name)} with gaps, not contiguous")
    item = DTYPE_BYTES[tensor.dtype]
    start = record.start + tensor.offset * item
    end = start + tensor.num_spanned * item
    return TorchEntry(tensor.dtype, tensor.shape, start, end, tensor.stride)
