"""Where the members of an uncompressed tar stand in their file; nothing is unpacked.

Layout of the file: for each member a header of 512 bytes, then its content, filled up to a multiple
of 512; a header of zeros ends the list. Members that are no plain files have no place in an
adapter, so links and devices are refused whatever they point at.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import BinaryIO

from loramux.adapters.formats.files import MalformedFile
from loramux.adapters.formats.zip_records import Record
from loramux.adapters.report import printable

MAX_MEMBERS = 1_000
MAX_EXTENSION_BYTES = 64 * 2**10
"""Of the records that a pax header adds to a member, such as fractions of a second."""

_BLOCK = 512
_HEADER = struct.Struct("<100s24x12s12x8ss100s6s2x80x155s12x")
"""Name, size, checksum, kind, target of a link, magic, beginning of the name."""
_CHECKSUM = slice(148, 156)

_FILES, _FOLDER, _PAX = (b"0", b"\0", b"7"), b"5", (b"x", b"g")
_KINDS = {b"1": "a link", b"2": "a link", b"3": "a device", b"4": "a device", b"6": "a pipe"}


def read_members(what: str, file: BinaryIO, size: int) -> Mapping[str, Record]:
    """The files in a tar of ``size`` bytes by name, without a leading ``./``.

    Raises MalformedFile when the tar is cut off or compressed, holds anything but files and
    folders with relative names, or claims what the file cannot hold. Memory and time are bounded
    whatever it claims.
    """
    members: dict[str, Record] = {}
    for name, kind, record in _headers(what, file, size):
        if kind in _PAX:
            _check_extension(what, file, record)
            continue
        path = name.removeprefix("./")
        if path.startswith("/") or ".." in path.split("/"):
            raise MalformedFile(
                f"{what} has a member outside of itself (unsafe): {printable(name)}"
            )
        if kind == _FOLDER:
            continue
        if kind not in _FILES:
            found = _KINDS.get(kind, "no file")
            raise MalformedFile(f"{what} has a member that is {found}: {printable(name)}")
        if path in members:
            raise MalformedFile(f"{what} is corrupt: {printable(path)} is there twice (duplicate)")
        members[path] = record
    return members


def _headers(what: str, file: BinaryIO, size: int) -> Iterator[tuple[str, bytes, Record]]:
    """Name, kind and content of every member, in the order of the file."""
    at = 0
    for _ in range(2 * MAX_MEMBERS):  # a member may have one header more
        header = _read(file, at, _BLOCK)
        if header == bytes(_BLOCK):
            return
        if len(header) < _BLOCK:
            raise MalformedFile(f"{what} is truncated: the end of the tar is missing")
        name, num_bytes, kind = _parse(what, header, first=at == 0)
        start = at + _BLOCK
        if start + num_bytes > size:
            raise MalformedFile(
                f"{what} is truncated or corrupt: {printable(name)} should have {num_bytes} bytes, "
                "more than the file holds"
            )
        yield name, kind, Record(start, start + num_bytes)
        at = start + -(-num_bytes // _BLOCK) * _BLOCK
    raise MalformedFile(f"{what} is too large: the tar has more than {MAX_MEMBERS} members")


def _parse(what: str, header: bytes, *, first: bool) -> tuple[str, int, bytes]:
    name, digits, checksum, kind, _, magic, prefix = _HEADER.unpack(header)
    if _octal(checksum) != sum(header) - sum(header[_CHECKSUM]) + 8 * ord(" "):
        if first and header.startswith(b"\x1f\x8b"):
            raise MalformedFile(
                f"{what} is a compressed tar (gzip): unpack it with tar -xzf and give the folder"
            )
        trouble = "is no tar" if first else "is corrupt: a header of the tar is wrong"
        raise MalformedFile(f"{what} {trouble}")
    num_bytes = _octal(digits)
    if num_bytes is None:  # a size of more than 8 GiB is written in another way
        raise MalformedFile(f"{what} is too large or corrupt: a member has no octal size")
    text = _text(name)
    if magic == b"ustar\0" and prefix[:1] != b"\0":
        text = f"{_text(prefix)}/{text}"
    return text, num_bytes, kind


def _octal(field: bytes) -> int | None:
    digits = field.strip(b" \0")
    return int(digits or b"0", 8) if all(c in b"01234567" for c in digits) else None


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "replace")


def _check_extension(what: str, file: BinaryIO, record: Record) -> None:
    """Lines ``LENGTH KEY=VALUE`` that may say times and owners, not names, sizes or targets."""
    if record.num_bytes > MAX_EXTENSION_BYTES:
        raise MalformedFile(
            f"{what} is too large: a header of the tar has {record.num_bytes} bytes"
        )
    content = _read(file, record.start, record.num_bytes)
    for key in (b"path=", b"size=", b"linkpath=", b"GNU.sparse"):
        if b" " + key in content:
            raise MalformedFile(f"{what} has a member with a long name or a size of its own (pax)")


def _read(file: BinaryIO, start: int, length: int) -> bytes:
    file.seek(start)
    return file.read(length)
