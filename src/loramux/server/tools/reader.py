"""A model's text as it comes, for those who look for calls in it.

What reads an answer is written as a generator that waits for more text wherever it needs some. So
it is the same however the text is cut into pieces, and no piece has the text before it read again.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import TypeVar

T = TypeVar("T")

Reading = Generator[None, None, T]
"""Reads on until it is done; each time it yields it waits for more text."""

_SPACE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins, the ``index``-th of its answer."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of a call's arguments, as the model has written it."""

    index: int
    text: str


Event = str | CallStart | Arguments
"""What an answer has more of: content, or a call."""


class NoCall(Exception):
    """What looked like a call cannot be one."""


class Reader:
    """One answer's text, where it has been read to, and what has been found.

    What is taken is held until it is known what it is: ``release`` gives it out as content,
    ``drop`` as nothing. While a call's arguments are read they are given out as they come.
    """

    def __init__(
        self, names: Collection[str], *, max_calls: int | None = None, hidden: Collection[str] = ()
    ) -> None:
        """``names`` are those of the tools. Calls beyond ``max_calls`` are left out. ``hidden``
        are markers that are content nowhere."""
        self.names = names
        self.after_call = False
        """Nothing but white space has come since the last call."""
        self.num_calls = 0
        self._max_calls = max_calls
        self._hidden = tuple(hidden)
        self._text = ""
        self._at = 0
        self._ended = False
        self._held: list[str] = []
        self._in_arguments = False
        self._events: list[Event] = []

    # Text comes in, and what has been found goes out.

    def feed(self, text: str) -> None:
        """More text; all before it must have been read."""
        assert self._at == len(self._text), "text has been left unread"
        self._text, self._at = text, 0

    def end(self) -> None:
        """No more text will come."""
        self._ended = True

    def take_events(self) -> list[Event]:
        """What has been found since the last time."""
        if self._in_arguments:
            self._give_arguments()
        events, self._events = self._events, []
        return list(_joined(events))

    # Reading.

    def peek(self) -> Reading[str]:
        """The next character, which is not taken; "" at the end."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def take(self) -> None:
        """Take the character that ``peek`` has shown."""
        self._hold(self._at + 1)

    def run(self, pattern: re.Pattern[str]) -> Reading[None]:
        """Take the characters that fit; ``pattern`` repeats a set of them."""
        while (yield from self.peek()):
            if not self._take_run(pattern):
                return

    def space(self) -> Reading[None]:
        """Take the white space of JSON."""
        yield from self.run(_SPACE)

    def expect(self, text: str) -> Reading[None]:
        """Take ``text``. Raises NoCall where something else comes."""
        for character in text:
            if (yield from self.peek()) != character:
                raise NoCall
            self.take()

    def marker(self, markers: Sequence[str]) -> Reading[str]:
        """Take one of ``markers``, of which none begins another; "" where something else comes."""
        word = ""
        while word not in markers:
            character = yield from self.peek()
            if not character or not any(m.startswith(word + character) for m in markers):
                self._take_back(word)
                return ""
            self.take()
            word += character
        if word in self._hidden:
            del self._held[-len(word) :]
        return word

    def text_until(self, markers: Sequence[str]) -> Reading[str]:
        """Give out content up to one of ``markers``, which is taken; "" at the end.

        White space before it is held with it, since it only parts text from calls.
        """
        sought = (*markers, *(m for m in self._hidden if m not in markers))
        firsts = {marker[0] for marker in sought}
        plain = _plain("".join(sorted(firsts)))
        while (yield from self.peek()):
            if self._take_run(plain):
                self.release()
                continue
            yield from self.space()
            found = yield from self.marker(sought)
            if found and found in markers:
                return found
            if not found and (yield from self.peek()) in firsts:  # a marker's beginning and no more
                self.take()
                self.release()
        if self.after_call:
            self.drop()
        else:
            self.release()
        return ""

    def mark(self) -> int:
        """A place in what is held, for ``since``."""
        return len(self._held)

    def since(self, mark: int) -> str:
        """What has been taken since then."""
        return "".join(self._held[mark:])

    # What has been read.

    def release(self) -> None:
        """What is held is content."""
        if self._held:
            self.after_call = False
            self._events.append("".join(self._held))
            self._held.clear()

    def drop(self) -> None:
        """What is held belongs to a call and is neither content nor arguments."""
        self._held.clear()

    def start_call(self, name: str) -> None:
        """A call of ``name`` begins; what is held belongs to it."""
        self.drop()
        self.num_calls += 1
        self._add(CallStart(self.num_calls - 1, name))

    def arguments(self, reading: Reading[None]) -> Reading[None]:
        """Give out as the call's arguments what ``reading`` takes, as far as it comes."""
        self._in_arguments = True
        try:
            yield from reading
        finally:
            self._give_arguments()
            self._in_arguments = False

    def add_arguments(self, text: str) -> None:
        """Give out arguments that have been read before their call could begin."""
        self._add(Arguments(self.num_calls - 1, text))

    def end_call(self) -> None:
        """The call is complete, and what is held belongs to it."""
        self.drop()
        self.after_call = True

    def _hold(self, end: int) -> None:
        self._held.append(self._text[self._at : end])
        self._at = end

    def _take_run(self, pattern: re.Pattern[str]) -> bool:
        """Take what fits of the text that is here; whether that is anything."""
        match = pattern.match(self._text, self._at)
        if match is None or match.end() == self._at:
            return False
        self._hold(match.end())
        return True

    def _take_back(self, taken: str) -> None:
        """``taken`` came last, character by character, and is to be read again."""
        del self._held[len(self._held) - len(taken) :]
        if self._at >= len(taken):
            self._at -= len(taken)
        else:  # it began in a piece that is gone
            self._text, self._at = taken + self._text[self._at :], 0

    def _give_arguments(self) -> None:
        if self._held:
            self.add_arguments("".join(self._held))
            self._held.clear()

    def _add(self, event: CallStart | Arguments) -> None:
        if self._max_calls is None or self.num_calls <= self._max_calls:
            self._events.append(event)


@cache
def _plain(firsts: str) -> re.Pattern[str]:
    """Text that no marker begins in, up to white space that may stand before one.

    ``firsts`` are the characters that markers begin with.
    """
    plain = rf"[^ \t\n\r{re.escape(firsts)}]"
    # Possessive: what has been matched is never given back, so nothing is kept to do that.
    return re.compile(rf"(?:{plain}++|[ \t\n\r]++(?={plain}))++")


def _joined(events: Sequence[Event]) -> Iterator[Event]:
    """The same with one piece of content for several in a row."""
    for is_content, group in groupby(events, lambda event: isinstance(event, str)):
        if is_content:
            yield "".join(event for event in group if isinstance(event, str))
        else:
            yield from group
