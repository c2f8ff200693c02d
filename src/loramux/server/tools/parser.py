"""From the text of one answer, as it comes, to content and calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from loramux.server.tools.reader import Arguments, CallStart, Event, Reader, Reading


class Parser(Protocol):
    """Follows one answer. What it finds does not hang on how the text is cut into pieces."""

    def push(self, text: str) -> list[Event]:
        """What the next piece of the text brings."""
        ...

    def finish(self) -> list[Event]:
        """What is still held back, at the end of the answer."""
        ...


class PlainText:
    """The parser of answers without calls."""

    def push(self, text: str) -> list[Event]:
        return [text] if text else []

    def finish(self) -> list[Event]:
        return []


class OneCall:
    """The parser of answers that are the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._start: list[Event] = [CallStart(0, name)]

    def push(self, text: str) -> list[Event]:
        if not text:
            return []
        start, self._start = self._start, []
        return [*start, Arguments(0, text)]

    def finish(self) -> list[Event]:
        return []


class CallParser:
    """The parser of answers that may have calls in them, in the form that ``read`` knows."""

    def __init__(self, reader: Reader, read: Callable[[Reader], Reading[None]]) -> None:
        self._reader = reader
        self._reading = read(reader)

    def push(self, text: str) -> list[Event]:
        self._reader.feed(text)
        next(self._reading, None)
        return self._reader.take_events()

    def finish(self) -> list[Event]:
        self._reader.end()
        next(self._reading, None)
        return self._reader.take_events()
