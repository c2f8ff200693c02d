"""Answers through a parser, and what comes out of them in the end."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from loramux.server.tools.parser import CallParser, Parser
from loramux.server.tools.reader import Arguments, CallStart, Event, Reader
from loramux.server.tools.styles import STYLES

NAMES = frozenset({"f", "get-time_2"})


@dataclass
class Found:
    """The content and the calls of an answer; each call is a name and its arguments."""

    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def add(self, event: Event) -> None:
        if isinstance(event, str):
            assert event, "an event without content"
            self.content += event
        elif isinstance(event, CallStart):
            assert event.index == len(self.calls)
            self.calls.append((event.name, ""))
        else:
            assert event.text, "an event without arguments"
            assert event.index == len(self.calls) - 1
            name, arguments = self.calls[-1]
            self.calls[-1] = (name, arguments + event.text)


def parser_of(
    style: str, *, max_calls: int | None = None, hidden: Collection[str] = ()
) -> CallParser:
    return CallParser(Reader(NAMES, max_calls=max_calls, hidden=hidden), STYLES[style].read)


def events(parser: Parser, pieces: Iterable[str]) -> list[list[Event]]:
    """What each piece brings, and last what the end brings."""
    return [*map(parser.push, pieces), parser.finish()]


def found(parser: Parser, pieces: Iterable[str]) -> Found:
    whole = Found()
    for some in events(parser, pieces):
        for event in some:
            whole.add(event)
    return whole


def cut(text: str, places: Sequence[int]) -> list[str]:
    """``text`` in pieces that end at ``places``, counted round the text."""
    ends = sorted(place % (len(text) + 1) for place in places)
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def start(name: str, index: int = 0) -> CallStart:
    return CallStart(index, name)


def piece(text: str, index: int = 0) -> Arguments:
    return Arguments(index, text)
