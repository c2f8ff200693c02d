"""Collects what is wrong with an adapter, so that everything is told at once."""

from __future__ import annotations

import re
from itertools import islice

from loramux.errors import AdapterRefused

_SHOWN_PLACES = 4
_SHOWN_FINDINGS = 40
_PLAIN = re.compile(r"[\w.+\-/\[\]]+", re.ASCII)


class Report:
    """Refusals and warnings about one adapter.

    The same reason at several places (32 layers, say) is one line that counts the places.
    """

    def __init__(self, *, lenient: bool = False) -> None:
        """``lenient``: unknown fields of a configuration are warned about instead of refused."""
        self._lenient = lenient
        self._refusals: dict[str, list[str]] = {}
        self._warnings: dict[str, list[str]] = {}

    def refuse(self, reason: str, place: str | None = None) -> None:
        """A finding for which the adapter cannot be served; ``place`` is a module or a tensor."""
        places = self._refusals.setdefault(reason, [])
        if place is not None:
            places.append(place)

    def warn(self, text: str, place: str | None = None) -> None:
        """A finding that changes nothing in the answers, but that an operator may want to know."""
        places = self._warnings.setdefault(text, [])
        if place is not None:
            places.append(place)

    def unknown_field(self, name: str, where: str) -> None:
        """A field that is set, though nobody here knows what it does."""
        if self._lenient:
            self.warn(f"unknown field {printable(name)} in {where} is set, but ignored (lenient)")
        else:
            self.refuse(
                f"unknown fields in {where} have values that may change the arithmetic "
                "(--lenient ignores them)",
                name,
            )

    @property
    def refused(self) -> bool:
        return bool(self._refusals)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Refusals in the order in which they were found; a very long list is cut and counted."""
        return _lines(self._refusals)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Likewise."""
        return _lines(self._warnings)

    def raise_if_refused(self, name: str) -> None:
        """Raise AdapterRefused with every reason, if there is any."""
        if self.refused:
            raise AdapterRefused(name, self.reasons)


def printable(text: str, limit: int = 120) -> str:
    """A name out of a file, safe for a terminal or a reply: quoted unless plain, and cut."""
    if len(text) > limit:
        text = text[:limit] + "..."
    return text if _PLAIN.fullmatch(text) else ascii(text)


def _lines(findings: dict[str, list[str]]) -> tuple[str, ...]:
    shown = islice(findings.items(), _SHOWN_FINDINGS)
    lines = tuple(_line(text, places) for text, places in shown)
    rest = len(findings) - len(lines)
    return (*lines, f"and {rest} findings more") if rest else lines


def _line(text: str, places: list[str]) -> str:
    if not places:
        return text
    shown = ", ".join(printable(place) for place in places[:_SHOWN_PLACES])
    rest = len(places) - _SHOWN_PLACES
    return f"{text}: {shown}" + (f" and {rest} more" if rest > 0 else "")
