"""Calls written as JSON: one object each, with the function's name and its arguments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from loramux.server.tools.json_text import read_string, read_value
from loramux.server.tools.reader import NoCall, Reader, Reading

_ARGUMENTS = frozenset({"arguments", "parameters"})
"""Models say one or the other, whichever they were taught."""
_OTHERS = frozenset({"type", "id"})
"""What else some of them write. Objects with more than that are the model's answers in JSON."""


def read_calls(reader: Reader) -> Reading[None]:
    """Take one call or a list of them. Raises NoCall; what came before it stays."""
    yield from reader.space()
    if (yield from reader.peek()) != "[":
        yield from read_call(reader)
        return
    reader.take()
    while True:
        yield from read_call(reader)
        yield from reader.space()
        if (yield from reader.peek()) != ",":
            break
        reader.take()
    yield from reader.expect("]")
    reader.end_call()


def read_call(reader: Reader) -> Reading[None]:
    """Take the object of a call and the white space before it.

    The call begins where its name and the beginning of its arguments are known. Raises NoCall for
    what is no such object, has fields of others, or names no tool.
    """
    yield from reader.space()
    yield from reader.expect("{")
    fields = _Fields(reader)
    while True:
        yield from fields.read_one()
        yield from reader.space()
        if (yield from reader.peek()) != ",":
            break
        reader.take()
    yield from reader.expect("}")
    if not fields.called:
        raise NoCall
    reader.end_call()


def call_rules(names: Sequence[str], key: str) -> Iterator[str]:
    """The rules ``call``, a JSON object, and ``body``, the same without its first brace."""
    yield 'call: "{" body'
    yield f"body: {' | '.join(f'body_{i}' for i in range(len(names)))}"
    for i, name in enumerate(names):
        head = json.dumps(f'"name": "{name}", "{key}": ')
        yield f'body_{i}: {head} arguments_{i} "}}"'


class _Fields:
    """The fields of one call, in any order."""

    def __init__(self, reader: Reader) -> None:
        self.called = False
        self._reader = reader
        self._name: str | None = None
        self._arguments: str | None = None
        """Those that came before the name."""
        self._seen: set[str] = set()

    def read_one(self) -> Reading[None]:
        reader = self._reader
        key = yield from read_string(reader)
        kind = "arguments" if key in _ARGUMENTS else key
        if kind in self._seen:
            raise NoCall
        self._seen.add(kind)
        yield from reader.space()
        yield from reader.expect(":")
        yield from reader.space()
        if kind == "name":
            yield from self._read_name()
        elif kind == "arguments":
            yield from self._read_arguments()
        elif kind in _OTHERS:
            yield from read_value(reader)
        else:
            raise NoCall

    def _read_name(self) -> Reading[None]:
        name = yield from read_string(self._reader)
        if name not in self._reader.names:
            raise NoCall
        self._name = name
        if self._arguments is not None:
            self._reader.start_call(name)
            self._reader.add_arguments(self._arguments)
            self.called = True

    def _read_arguments(self) -> Reading[None]:
        reader = self._reader
        if self._name is not None:
            self.called = True
            yield from read_arguments(reader, self._name)
        elif (yield from reader.peek()) == "{":
            mark = reader.mark()
            yield from read_value(reader)
            self._arguments = reader.since(mark)
        else:
            raise NoCall


def read_arguments(reader: Reader, name: str) -> Reading[None]:
    """Begin a call of ``name`` with the object that comes next. Raises NoCall."""
    if (yield from reader.peek()) != "{":
        raise NoCall
    reader.start_call(name)
    yield from reader.arguments(read_value(reader))
