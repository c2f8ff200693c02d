"""Calls as Mistral's models write them: a list, or in newer ones the name before its arguments.

    [TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]
    [TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}

Some of the newer ones write an id between: ``[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{}``.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Iterable, Sequence

from loramux.server.tools.calls import call_rules, read_arguments, read_calls
from loramux.server.tools.reader import NoCall, Reader, Reading
from loramux.server.tools.style import Style

_CALLS, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MARKERS = (_CALLS, _ID, _ARGUMENTS)
_NAME = re.compile(r"[a-zA-Z0-9_-]*")
_ALPHANUMERICS = string.ascii_letters + string.digits


def _is_in(template: str) -> bool:
    return _CALLS in template


def _read(reader: Reader) -> Reading[None]:
    while (yield from reader.text_until((_CALLS,))):
        try:
            yield from _read_some(reader)
        except NoCall:
            reader.release()


def _read_some(reader: Reader) -> Reading[None]:
    yield from reader.space()
    # A list begins as another marker does.
    while marker := (yield from reader.marker(_MARKERS)):
        if marker != _CALLS:
            raise NoCall
        yield from reader.space()
    if (yield from reader.peek()) == "[":
        yield from read_calls(reader)
    else:
        yield from _read_named(reader)


def _read_named(reader: Reader) -> Reading[None]:
    mark = reader.mark()
    yield from reader.run(_NAME)
    name = reader.since(mark)
    if name not in reader.names:
        raise NoCall
    marker = yield from reader.marker((_ID, _ARGUMENTS))
    if marker == _ID:
        # The call has an id of ours, which comes back to the model with the conversation.
        yield from reader.run(_NAME)
        marker = yield from reader.marker((_ARGUMENTS,))
    if not marker:
        raise NoCall
    yield from reader.space()
    yield from read_arguments(reader, name)
    reader.end_call()


def _new_id() -> str:
    """The templates take ids of nine letters and digits alone."""
    return "".join(secrets.choice(_ALPHANUMERICS) for _ in range(9))


def _rules(names: Sequence[str], parallel: bool) -> Iterable[str]:
    more = ' ("," WS call)*' if parallel else ""
    yield f'section: head WS ("[" call{more} "]" | named)'
    yield f"named: {' | '.join(f'named_{i}' for i in range(len(names)))}"
    for i, name in enumerate(names):
        yield f'named_{i}: "{name}" (marker_1 /[a-zA-Z0-9]{{9}}/)? marker_2 arguments_{i}'
    yield from call_rules(names, "arguments")


MISTRAL = Style(
    name="mistral",
    markers=_MARKERS,
    is_in=_is_in,
    read=_read,
    rules=_rules,
    new_id=_new_id,
)
