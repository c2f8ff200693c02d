"""What makes one way of writing calls, of those that models are trained to write."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from loramux.server.tools.reader import Reader, Reading


def long_id() -> str:
    """An id for a call, in OpenAI's shape."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """One way of writing calls."""

    name: str
    """As ``--tool-parser`` has it."""
    markers: tuple[str, ...]
    """What stands around calls, first what begins them: special tokens with some models, ordinary
    ones or text with others."""
    is_in: Callable[[str], bool]
    """Whether the literal text of a chat template has calls in this style."""
    read: Callable[[Reader], Reading[None]]
    """Reads an answer to its end."""
    rules: Callable[[Sequence[str], bool], Iterable[str]]
    """Rules of ``grammar``'s Lark, out of the functions' names and whether several calls may come:
    ``section`` is text with the calls behind its marker."""
    may_lack_marker: bool = False
    """Answers may begin with calls without one: the rule ``opening``."""
    new_id: Callable[[], str] = long_id
    """Ids that the style's chat templates take."""
