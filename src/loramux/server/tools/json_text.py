"""JSON (RFC 8259) read as it comes, to know where it ends or stops being JSON."""

from __future__ import annotations

import json
import re

from loramux.server.tools.reader import NoCall, Reader, Reading

_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_DIGIT_RUN = re.compile(r"[0-9]*")
_DIGITS = frozenset("0123456789")
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSERS = {"{": "}", "[": "]"}
_WORDS = {"t": "true", "f": "false", "n": "null"}


def read_value(reader: Reader) -> Reading[None]:
    """Take a value and the white space before it.

    Raises NoCall at the first character that cannot go on with one, and at the end of the text.
    However deep a value is nested, it takes no more stack.
    """
    closers: list[str] = []
    while True:
        yield from reader.space()
        if (yield from reader.peek()) in _CLOSERS:
            if (yield from _open(reader, closers)):
                continue  # to the value inside
        else:
            yield from _read_scalar(reader)
        # A value has ended, and maybe those around it.
        while closers:
            yield from reader.space()
            character = yield from reader.peek()
            if character == closers[-1]:
                reader.take()
                closers.pop()
            elif character == ",":
                reader.take()
                if closers[-1] == "}":
                    yield from _read_key(reader)
                break
            else:
                raise NoCall
        else:
            return


def read_string(reader: Reader) -> Reading[str]:
    """Take a string that is held, and the white space before it; what it says. Raises NoCall."""
    yield from reader.space()
    mark = reader.mark()
    yield from _take_string(reader)
    return json.loads(reader.since(mark))


def _take_string(reader: Reader) -> Reading[None]:
    yield from reader.expect('"')
    while True:
        yield from reader.run(_STRING_RUN)
        if (yield from _option(reader, '"')):
            return
        yield from reader.expect("\\")
        escape = yield from reader.peek()
        if escape != "u" and escape not in _ESCAPES:
            raise NoCall
        reader.take()
        if escape == "u":
            yield from _read_hex(reader)


def _open(reader: Reader, closers: list[str]) -> Reading[bool]:
    """Take the beginning of an object or a list, all of it if it is empty; else True."""
    closer = _CLOSERS[(yield from reader.peek())]
    reader.take()
    yield from reader.space()
    if (yield from reader.peek()) == closer:
        reader.take()
        return False
    closers.append(closer)
    if closer == "}":
        yield from _read_key(reader)
    return True


def _read_key(reader: Reader) -> Reading[None]:
    yield from reader.space()
    yield from _take_string(reader)
    yield from reader.space()
    yield from reader.expect(":")


def _read_scalar(reader: Reader) -> Reading[None]:
    character = yield from reader.peek()
    if character == '"':
        yield from _take_string(reader)
    elif character in _WORDS:
        yield from reader.expect(_WORDS[character])
    else:
        yield from _read_number(reader)


def _read_number(reader: Reader) -> Reading[None]:
    yield from _option(reader, "-")
    if not (yield from _option(reader, "0")):
        yield from _read_digits(reader)
    if (yield from _option(reader, ".")):
        yield from _read_digits(reader)
    if (yield from _option(reader, "e", "E")):
        yield from _option(reader, "+", "-")
        yield from _read_digits(reader)


def _option(reader: Reader, *characters: str) -> Reading[bool]:
    """Take the next character if it is one of these."""
    if (yield from reader.peek()) not in characters:
        return False
    reader.take()
    return True


def _read_digits(reader: Reader) -> Reading[None]:
    if (yield from reader.peek()) not in _DIGITS:
        raise NoCall
    yield from reader.run(_DIGIT_RUN)


def _read_hex(reader: Reader) -> Reading[None]:
    for _ in range(4):
        if (yield from reader.peek()) not in _HEX:
            raise NoCall
        reader.take()
