"""Calls as Hermes and Qwen write them, several in a row.

    <tool_call>
    {"name": "f", "arguments": {"x": 1}}
    </tool_call>

Some write a list of calls between the tags, and some leave the last tag out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from loramux.server.tools.calls import call_rules, read_calls
from loramux.server.tools.reader import NoCall, Reader, Reading
from loramux.server.tools.style import Style

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_OTHER_BODIES = ("<function=", "<arg_key>")
"""Some models write XML between the same tags."""


def _is_in(template: str) -> bool:
    is_other = any(body in template for body in _OTHER_BODIES)
    return _OPEN in template and '"arguments"' in template and not is_other


def _read(reader: Reader) -> Reading[None]:
    while marker := (yield from reader.text_until((_OPEN, _CLOSE))):
        if marker == _CLOSE and reader.after_call:
            reader.drop()
            continue
        try:
            if marker == _CLOSE:
                raise NoCall
            yield from read_calls(reader)
        except NoCall:
            reader.release()


def _rules(names: Sequence[str], parallel: bool) -> Iterable[str]:
    # Each call has tags of its own: how many there may be is how many sections.
    yield "section: head WS call WS marker_1"
    yield from call_rules(names, "arguments")


HERMES = Style(name="hermes", markers=(_OPEN, _CLOSE), is_in=_is_in, read=_read, rules=_rules)
