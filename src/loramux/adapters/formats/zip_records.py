"""Where the records of an uncompressed zip stand in their file; nothing is unpacked.

Layout of the file: records, each after a local header, then the directory that lists them, then
the end (22 bytes, before it its 64-bit form where a number needs that), which says where the
directory is.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from loramux.adapters.formats.files import MalformedFile, RandomAccess
from loramux.adapters.report import printable

MAX_DIRECTORY_BYTES = 4 * 2**20
"""About 50,000 records as torch names them."""

_END = struct.Struct("<4s6xHLLH")
"""Signature, skipped, number of records, skipped, size and place of the directory, comment."""
_END64_PLACE = struct.Struct("<4s4xQ4x")
_END64 = struct.Struct("<4s28xQQQ")
_LISTED = struct.Struct("<4s4xHH8xLLHHH8xL")
_LOCAL = struct.Struct("<4s22xHH")

_FULL_16, _FULL_32 = 0xFFFF, 0xFFFFFFFF
"""What a field holds whose value is in a 64-bit field elsewhere."""
_ENCRYPTED = 1
_STORED = 0


@dataclass(frozen=True, slots=True)
class Record:
    """Bytes ``start`` to ``end`` of the file."""

    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


def read_records(what: str, file: RandomAccess, size: int) -> Mapping[str, Record]:
    """The records of a zip of ``size`` bytes by name.

    Raises MalformedFile when the zip is cut off, compressed or encrypted, and when it claims what
    the file cannot hold. Memory and time are bounded whatever it claims.
    """
    place, length, count = _directory(what, file, size)
    if length > MAX_DIRECTORY_BYTES:
        raise MalformedFile(
            f"{what} is too large: the directory of the zip has {length} bytes, "
            f"the limit is {MAX_DIRECTORY_BYTES}"
        )
    if place + length > size:
        raise MalformedFile(f"{what} is corrupt: the directory of the zip is outside the file")
    directory = _read(file, place, length)
    records: dict[str, Record] = {}
    for name, header, num_bytes in _listed(what, directory):
        if name in records:
            raise MalformedFile(f"{what} is corrupt: a record of the zip is there twice")
        records[name] = _record(what, file, header, num_bytes, limit=place)
    if len(records) != count:
        raise MalformedFile(
            f"{what} is corrupt: the zip says it has {count} records and lists {len(records)}"
        )
    return records


def _directory(what: str, file: RandomAccess, size: int) -> tuple[int, int, int]:
    """Place, length and number of records of the directory, as the end of the file says."""
    end = _read(file, size - _END.size, _END.size) if size >= _END.size else b""
    if not end.startswith(b"PK\5\6"):
        raise MalformedFile(f"{what} is truncated: the directory of the zip is missing at its end")
    _, count, length, place, _ = _END.unpack(end)
    if count != _FULL_16 and length != _FULL_32 and place != _FULL_32:
        return place, length, count
    locator_at = size - _END.size - _END64_PLACE.size
    locator = _read(file, locator_at, _END64_PLACE.size) if locator_at >= 0 else b""
    if locator.startswith(b"PK\6\7"):
        _, end64_at = _END64_PLACE.unpack(locator)
        if end64_at + _END64.size <= size:
            signature, count, length, place = _END64.unpack(_read(file, end64_at, _END64.size))
            if signature == b"PK\6\6":
                return place, length, count
    raise MalformedFile(f"{what} is corrupt: the zip does not say where its directory is")


def _listed(what: str, directory: bytes) -> Iterator[tuple[str, int, int]]:
    """Name, place of the local header and number of bytes of every record."""
    at = 0
    while at < len(directory):
        if len(directory) - at < _LISTED.size or directory[at : at + 4] != b"PK\1\2":
            raise MalformedFile(f"{what} is corrupt: the directory of the zip is no directory")
        _, flags, method, packed, unpacked, name_length, extra_length, comment_length, header = (
            _LISTED.unpack_from(directory, at)
        )
        at += _LISTED.size
        name = directory[at : at + name_length].decode("utf-8", "replace")
        extra = directory[at + name_length : at + name_length + extra_length]
        at += name_length + extra_length + comment_length
        if method != _STORED or flags & _ENCRYPTED:
            raise MalformedFile(f"{what} holds a compressed record, {printable(name)}")
        wide = _wide_fields(extra)
        sizes = (unpacked, packed, header)
        unpacked, packed, header = (next(wide, n) if n == _FULL_32 else n for n in sizes)
        if packed != unpacked:
            raise MalformedFile(
                f"{what} is corrupt: record {printable(name)} has two sizes, {packed} and "
                f"{unpacked} bytes"
            )
        yield name, header, unpacked


def _wide_fields(extra: bytes) -> Iterator[int]:
    """The 64-bit numbers of a record, in the order of the fields that they replace."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            data = extra[at + 4 : at + 4 + length]
            for (value,) in struct.iter_unpack("<Q", data[: len(data) // 8 * 8]):
                yield value
            return
        at += 4 + length


def _record(what: str, file: RandomAccess, header: int, num_bytes: int, limit: int) -> Record:
    local = _read(file, header, _LOCAL.size) if header + _LOCAL.size <= limit else b""
    if not local.startswith(b"PK\3\4"):
        raise MalformedFile(f"{what} is corrupt: a record of the zip is not where it should be")
    _, name_length, extra_length = _LOCAL.unpack(local)
    start = header + _LOCAL.size + name_length + extra_length
    if start + num_bytes > limit:
        raise MalformedFile(
            f"{what} is truncated or corrupt: a record should have {num_bytes} bytes, more than "
            "the file holds"
        )
    return Record(start, start + num_bytes)


def _read(file: RandomAccess, start: int, length: int) -> bytes:
    file.seek(start)
    return file.read(length)
