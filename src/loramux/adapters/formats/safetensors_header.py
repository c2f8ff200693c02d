"""What a safetensors file says it holds, checked against its size, without reading a tensor.

Layout of the file: 8 bytes little-endian header length, the header (JSON: name to dtype, shape
and place of the data), then the data without gaps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loramux.adapters.formats.files import (
    MalformedFile,
    open_regular,
    parse_json_object,
    refuse_placeholders,
)
from loramux.adapters.report import printable

MAX_HEADER_BYTES = 16 * 2**20
"""About 100,000 tensors; the bound of the safetensors library is six times this."""

MAX_NAME_LENGTH = 1_000
"""Characters; names are searched with patterns, so their length must be bounded."""

_MAX_DIMENSIONS = 16

_FIELDS = {"dtype", "shape", "data_offsets"}

_DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E8M0": 8, "F8_E4M3": 8, "F8_E5M2": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor; ``start`` and ``end`` count bytes from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class SafetensorsFile:
    """A file whose header is sound."""

    path: Path
    entries: Mapping[str, TensorEntry]
    """Tensors by name, in file order."""
    head: bytes
    """All before the data, as it was read: by it one can tell whether the file has changed."""


def read_header(path: Path) -> Mapping[str, TensorEntry]:
    """The tensors of a safetensors file by name, in file order. Raises as ``examine``."""
    return examine(path).entries


def examine(path: Path) -> SafetensorsFile:
    """Read the header of a safetensors file.

    Raises MalformedFile unless every entry is sound and the data fill the file exactly.
    """
    what = path.name
    file, size = open_regular(path)
    with file:
        head = file.read(256)
        refuse_placeholders(what, head)
        length = _header_length(what, head, size)
        file.seek(0)
        head = file.read(8 + length)
    text = head[8:]
    if not text.startswith(b"{"):
        raise MalformedFile(f"{what} is not a safetensors file: its header is no JSON object")
    raw = parse_json_object(f"the header of {what} (safetensors)", text, _unique)
    raw.pop("__metadata__", None)
    entries = {name: _entry(what, name, value) for name, value in raw.items()}
    _check_places(what, entries, size - 8 - length)
    return SafetensorsFile(path, entries, head)


def _header_length(what: str, head: bytes, size: int) -> int:
    if len(head) < 8:
        raise MalformedFile(f"{what} is truncated: too short for a safetensors file")
    length = int.from_bytes(head[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise MalformedFile(
            f"{what} is not a safetensors file: its header length is above the limit of "
            f"{MAX_HEADER_BYTES} bytes"
        )
    if length > size - 8:
        raise MalformedFile(
            f"{what} is truncated or corrupt: its header should have {length} bytes, "
            f"the file has {size}"
        )
    return length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise MalformedFile("the safetensors header is corrupt: a name is there twice (duplicate)")
    return found


def _entry(what: str, name: str, value: Any) -> TensorEntry:
    if len(name) > MAX_NAME_LENGTH:
        raise MalformedFile(f"{what} has a tensor name of more than {MAX_NAME_LENGTH} characters")
    fault = _fault(value)
    if fault is not None:
        raise MalformedFile(f"{what} has a corrupt header: tensor {printable(name)} {fault}")
    start, end = value["data_offsets"]
    return TensorEntry(value["dtype"], tuple(value["shape"]), start, end)


def _fault(value: Any) -> str | None:
    """What is wrong with the description of one tensor."""
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        return "does not have dtype, shape and data_offsets"
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    bits = _DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        return "has an unknown dtype"
    if not _sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        return "has an invalid shape"
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return "has invalid data_offsets"
    if math.prod(shape) * bits != (offsets[1] - offsets[0]) * 8:
        return "has a shape that does not fit its number of bytes"
    return None


def _sizes(value: Any) -> bool:
    """A list of integers that can be sizes."""
    return isinstance(value, list) and all(map(_is_size, value))


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _check_places(what: str, entries: Mapping[str, TensorEntry], data_bytes: int) -> None:
    end = 0
    for entry in sorted(entries.values(), key=lambda e: (e.start, e.end)):
        if entry.start != end:
            raise MalformedFile(f"{what} is corrupt: its tensors overlap or leave gaps")
        end = entry.end
    if end != data_bytes:
        trouble = "truncated" if end > data_bytes else "corrupt"
        raise MalformedFile(
            f"{what} is {trouble}: its header describes {end} bytes of tensors, "
            f"the file holds {data_bytes}"
        )
