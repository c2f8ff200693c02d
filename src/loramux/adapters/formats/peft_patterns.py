"""``rank_pattern`` and ``alpha_pattern``: which value belongs to which module.

A key fits a module when ``re.match(rf"(.*\\.)?({key})$", module)`` does; the first key in file
order wins. This is PEFT's rule. The keys come from strangers, and Python's own engine can need
years for one of them, so they run in the ``regex`` library under a time limit. Nearly all keys
are plain names, though, often one for each module: these are compared directly, which is the same
and much faster.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import regex

MAX_KEYS = 20_000
MAX_KEY_LENGTH = 1_000
TIME_LIMIT = 2.0
"""Seconds for all modules of one adapter together; an honest table needs far less."""

_PLAIN = re.compile(r"\^?(?:\w|\\?\.)+", re.ASCII)

Value = TypeVar("Value")


class BadPattern(Exception):
    """A table cannot be evaluated; the text says why."""


class PatternTable(Generic[Value]):
    """Values by module name. Raises BadPattern for keys that are no regular expressions."""

    def __init__(self, values: Mapping[str, Value], *, time_limit: float = TIME_LIMIT) -> None:
        if len(values) > MAX_KEYS:
            raise BadPattern(f"has {len(values)} keys, the limit is {MAX_KEYS}")
        self._table = [(_compile(key), value) for key, value in values.items()]
        self._seconds_left = time_limit

    def get(self, module: str, default: Value) -> Value:
        """The value of the first key that fits ``module``.

        Raises BadPattern when the time limit of this table is used up.
        """
        started = time.monotonic()
        try:
            for key, value in self._table:
                if key.fits(module, max(self._seconds_left, 1e-6)):
                    return value
            return default
        except TimeoutError:
            raise BadPattern("holds a regular expression that takes too long") from None
        finally:
            self._seconds_left -= time.monotonic() - started


@dataclass(frozen=True, slots=True)
class _PlainKey:
    """A key without repetitions or choices: it fits exactly the last ``length`` characters."""

    pattern: re.Pattern[str]
    length: int
    anchored: bool

    def fits(self, module: str, _: float) -> bool:
        start = len(module) - self.length
        if start < 0 or (start > 0 and (self.anchored or module[start - 1] != ".")):
            return False
        return self.pattern.fullmatch(module, start) is not None


@dataclass(frozen=True, slots=True)
class _ExpressionKey:
    """Any other key."""

    pattern: regex.Pattern[str]

    def fits(self, module: str, seconds: float) -> bool:
        """Raises TimeoutError after ``seconds``."""
        return self.pattern.match(module, timeout=seconds) is not None


def _compile(key: str) -> _PlainKey | _ExpressionKey:
    if len(key) > MAX_KEY_LENGTH:
        raise BadPattern(f"has a key of {len(key)} characters, the limit is {MAX_KEY_LENGTH}")
    if _PLAIN.fullmatch(key):
        name = key.removeprefix("^")
        return _PlainKey(re.compile(name), len(name.replace("\\.", ".")), name != key)
    text = rf"(.*\.)?({key})$"
    try:
        re.compile(text)  # what PEFT accepts; `regex` alone knows more syntax
        return _ExpressionKey(regex.compile(text))
    except (re.error, regex.error, RecursionError, OverflowError, MemoryError):
        raise BadPattern("has a key that is no valid regular expression") from None
