"""``rank_pattern`` and ``alpha_pattern``: which value belongs to which module.

A key fits a module when ``re.match(rf"(.*\\.)?({key})$", module)`` does; the first key in file
order wins. This is PEFT's rule. The keys come from strangers, and Python's own engine can need
years for one of them, so they run in the ``regex`` library under a time limit. Nearly all keys
are plain names, though, often one for each module: these are looked up, which finds the same in a
time that does not hang on how many there are.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import regex

MAX_KEYS = 20_000
MAX_KEY_LENGTH = 1_000
TIME_LIMIT = 2.0
"""Seconds of work for all modules of one adapter together; an honest table needs far less."""

_PLAIN = re.compile(r"\^?(?:\w|\\?\.)+", re.ASCII)

Value = TypeVar("Value")


class BadPattern(Exception):
    """A table cannot be evaluated; the text says why."""


class PatternTable(Generic[Value]):
    """Values by module name. Raises BadPattern for keys that are no regular expressions."""

    def __init__(self, values: Mapping[str, Value], *, time_limit: float = TIME_LIMIT) -> None:
        if len(values) > MAX_KEYS:
            raise BadPattern(f"has {len(values)} keys, the limit is {MAX_KEYS}")
        self._values = [*values.values()]
        self._names = _PlainNames()
        self._expressions: list[tuple[int, _ExpressionKey]] = []
        for place, key in enumerate(values):
            if len(key) > MAX_KEY_LENGTH:
                raise BadPattern(
                    f"has a key of {len(key)} characters, the limit is {MAX_KEY_LENGTH}"
                )
            if _PLAIN.fullmatch(key):
                self._names.add(key, place)
            else:
                self._expressions.append((place, _compile(key)))
        self._seconds_left = time_limit

    def get(self, module: str, default: Value) -> Value:
        """The value of the first key that fits ``module``.

        Raises BadPattern when the time limit of this table is used up.
        """
        if not self._values:
            return default
        started = time.thread_time()
        try:
            first = self._names.first(module, started + self._seconds_left)
            for place, key in self._expressions:
                if place > first:
                    break
                if key.fits(module, max(self._seconds_left, 1e-6)):
                    first = place
                    break
            return default if first == _NONE else self._values[first]
        except TimeoutError:
            raise BadPattern("takes too long to look through") from None
        finally:
            self._seconds_left -= time.thread_time() - started


_NONE = sys.maxsize
"""A place behind all keys."""


_Groups = dict[int, dict[tuple[int, ...], dict[str, int]]]
"""Places of keys by their length, then by where they have dots, then by their text."""


class _PlainNames:
    """Keys without repetitions or choices, each of which fits so many characters at a name's end.

    A dot of theirs stands for any character, as a rule for a dot. Keys of one length that have such
    dots at the same places are looked up at once, by the characters in between.
    """

    def __init__(self) -> None:
        self._ends: _Groups = {}
        self._whole: _Groups = {}

    def add(self, key: str, place: int) -> None:
        """Keys are added in their order."""
        name = key.removeprefix("^")
        characters = re.findall(r"\\?.", name)
        text = "".join(character[-1] for character in characters)
        dots = tuple(i for i, character in enumerate(characters) if character == ".")
        groups = self._ends if name == key else self._whole
        groups.setdefault(len(text), {}).setdefault(dots, {}).setdefault(text, place)

    def first(self, module: str, deadline: float) -> int:
        """The place of the first key that fits, or ``_NONE``. Raises TimeoutError once this thread
        has worked until ``deadline``."""
        found = self._among(self._whole, module, deadline)
        start = 0
        while True:
            found = min(found, self._among(self._ends, module[start:], deadline))
            start = module.find(".", start) + 1
            if not start:
                return found

    def _among(self, groups: _Groups, name: str, deadline: float) -> int:
        found = _NONE
        for dots, places in groups.get(len(name), {}).items():
            if time.thread_time() > deadline:
                raise TimeoutError
            found = min(found, places.get(_with_dots(name, dots), _NONE))
        return found


def _with_dots(name: str, dots: tuple[int, ...]) -> str:
    """The name with dots at these places, where any character may stand that is no line's end."""
    if all(name[i] == "." for i in dots):
        return name
    characters = [*name]
    for i in dots:
        if name[i] == "\n":
            return ""
        characters[i] = "."
    return "".join(characters)


@dataclass(frozen=True, slots=True)
class _ExpressionKey:
    """A key that is no plain name."""

    pattern: regex.Pattern[str]

    def fits(self, module: str, seconds: float) -> bool:
        """Raises TimeoutError after ``seconds``."""
        return self.pattern.match(module, timeout=seconds) is not None


def _compile(key: str) -> _ExpressionKey:
    text = rf"(.*\.)?({key})$"
    try:
        re.compile(text)  # what PEFT accepts; `regex` alone knows more syntax
        return _ExpressionKey(regex.compile(text))
    except (re.error, regex.error, RecursionError, OverflowError, MemoryError):
        raise BadPattern("has a key that is no valid regular expression") from None
