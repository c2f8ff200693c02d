"""Opening files that a stranger wrote: size bounds, telling signs, and JSON that cannot hurt.

No message made here holds content of a file: a link may point at one that is nobody's business.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, Protocol

MAX_JSON_VALUES = 500_000
"""A safetensors header has eight for a tensor. The text alone bounds too little: ``[]`` takes
thirty times its bytes when it is parsed."""


class MalformedFile(Exception):
    """A file is missing or is not what its name says; the text is fit for the user."""


class RandomAccess(Protocol):
    """What a reader of a header needs of an open file."""

    def seek(self, offset: int, /) -> int: ...

    def read(self, length: int, /) -> bytes: ...


class Window:
    """``size`` bytes of an open file from ``start`` on, as a file of their own."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self._file, self._start, self._size = file, start, size
        self._at = 0

    def seek(self, offset: int) -> int:
        self._at = offset
        return offset

    def read(self, length: int) -> bytes:
        self._file.seek(self._start + self._at)
        data = self._file.read(max(0, min(length, self._size - self._at)))
        self._at += len(data)
        return data


def open_regular(path: Path) -> tuple[BufferedReader, int]:
    """Open a file for reading; returns it and its size in bytes.

    Links are followed, since download caches consist of them; devices and pipes are not opened.
    """
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise MalformedFile(f"{path.name} is no regular file")
        return path.open("rb"), info.st_size
    except FileNotFoundError:
        raise MalformedFile(f"{path.name} is missing") from None
    except OSError as error:
        raise MalformedFile(f"{path.name} is unreadable: {error.strerror}") from None


def read_bounded(path: Path, limit: int) -> bytes:
    """The bytes of a small file. Raises MalformedFile when it has more than ``limit``."""
    file, size = open_regular(path)
    with file:
        if size > limit:
            raise MalformedFile(
                f"{path.name} is too large: {size} bytes, the limit is {limit} bytes"
            )
        return file.read(limit)


def refuse_placeholders(what: str, head: bytes) -> None:
    """Raise MalformedFile for an empty file and what else stands in for a failed download."""
    if not head:
        raise MalformedFile(f"{what} is empty: it has 0 bytes (invalid); save or fetch it again")
    if head.startswith(b"version https://git-lfs"):
        raise MalformedFile(
            f"{what} is a Git LFS pointer, not the file itself (invalid): run git lfs pull"
        )
    if head.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")):
        raise MalformedFile(
            f"{what} is a web page (HTML), probably of a failed download (invalid): fetch it again"
        )


def parse_json_object(
    what: str, data: bytes, pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> dict[str, Any]:
    """Parse a JSON object, with or without a byte-order mark. Raises MalformedFile."""
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
        raise MalformedFile(f"{what} is too large: it has more than {MAX_JSON_VALUES} values")
    try:
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=pairs_hook)
    except UnicodeDecodeError:
        raise MalformedFile(f"{what} is not JSON: it is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise MalformedFile(f"{what} is not JSON: {error.msg} ({place})") from None
    except RecursionError:
        raise MalformedFile(f"{what} is nested too deep to be read as JSON") from None
    except ValueError:  # a number of more digits than Python converts
        raise MalformedFile(f"{what} is not JSON: a number is too long") from None
    if not isinstance(value, dict):
        raise MalformedFile(f"{what} must hold a JSON object, not a {type(value).__name__}")
    return value
