"""Calls as Llama 3.1 and later write them, parted by semicolons.

    <|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}

The tag may be missing where the answer begins with a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from loramux.server.tools.calls import call_rules, read_call
from loramux.server.tools.reader import NoCall, Reader, Reading
from loramux.server.tools.style import Style

_TAG = "<|python_tag|>"


def _is_in(template: str) -> bool:
    asks_for_json = "<|start_header_id|>" in template and '"parameters"' in template
    return (_TAG in template or asks_for_json) and "<function=" not in template


def _read(reader: Reader) -> Reading[None]:
    yield from reader.space()
    begins = (yield from reader.peek()) == "{"
    while begins or (yield from reader.text_until((_TAG,))):
        begins = False
        try:
            yield from _read_calls(reader)
        except NoCall:
            reader.release()


def _read_calls(reader: Reader) -> Reading[None]:
    while True:
        yield from read_call(reader)
        yield from reader.space()
        if (yield from reader.peek()) != ";":
            return
        reader.take()


def _rules(names: Sequence[str], parallel: bool) -> Iterable[str]:
    more = " (semicolon WS call)*" if parallel else ""
    yield f"section: head WS call{more}"
    yield f"opening: brace body{more}"
    # Lazy, so that neither can be text.
    yield r"brace[lazy]: /[ \t\r\n]*\{/"
    yield r"semicolon[lazy]: /[ \t\r\n]*;/"
    yield from call_rules(names, "parameters")


LLAMA3 = Style(
    name="llama3",
    markers=(_TAG,),
    is_in=_is_in,
    read=_read,
    rules=_rules,
    may_lack_marker=True,
)
