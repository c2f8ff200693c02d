"""Calls that the model makes by itself, held to the schemas of strict functions.

Any text passes until a marker, and behind that nothing but calls in the model's style.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from loramux.guide import JSON_WHITESPACE, Guide
from loramux.server.tools.forced import PARAM, arguments_schema
from loramux.server.tools.schema import FunctionDefinition
from loramux.server.tools.style import Style


def strict_guide(
    style: Style,
    functions: Sequence[FunctionDefinition],
    added_tokens: Mapping[str, int],
    *,
    parallel: bool,
) -> Guide:
    """A grammar in llguidance's Lark; functions that are not strict take any object.

    ``added_tokens`` are the tokenizer's. Raises InvalidRequest.
    """
    others = [i for token, i in added_tokens.items() if token not in style.markers]
    text = f"(TEXT <[{_ranges(others)}]>)" if others else '""'
    rules = [
        "%llguidance {}",
        f"start: {_start(style, parallel=parallel)}",
        # llguidance takes added tokens for no text: those that mark nothing pass by their ids.
        f"text: {text}",
        r"TEXT: /(.|\n)*/",
        r"WS: /[ \t\r\n]{0,20}/",
        *_marker_rules(style.markers, added_tokens),
        *style.rules([function.name for function in functions], parallel),
        *(f"arguments_{i}: %json {json.dumps(_schema(f))}" for i, f in enumerate(functions)),
    ]
    return Guide.grammar("\n".join(rules), PARAM)


def _start(style: Style, *, parallel: bool) -> str:
    if parallel:
        rest = "(text | section)* TEXT"
        return f"opening? {rest}" if style.may_lack_marker else rest
    rest = "text* (TEXT | section WS)"
    return f"opening WS | {rest}" if style.may_lack_marker else rest


def _marker_rules(markers: Sequence[str], added_tokens: Mapping[str, int]) -> Iterator[str]:
    """``head``, text up to the first marker, and ``marker_1`` and so on, the others.

    Each is a token of its own, if there is one, or spelled.
    """
    first, *others = markers
    yield f"spelled[lazy]: TEXT {json.dumps(first)}"
    yield (
        f"head: spelled | TEXT <[{added_tokens[first]}]>"
        if first in added_tokens
        else "head: spelled"
    )
    for i, marker in enumerate(others, start=1):
        token = f" | <[{added_tokens[marker]}]>" if marker in added_tokens else ""
        yield f"marker_{i}: {json.dumps(marker)}{token}"


def _schema(function: FunctionDefinition) -> dict[str, Any]:
    schema = arguments_schema(function) if function.strict else {"type": "object"}
    Guide.json(schema, PARAM)  # its bounds hold inside a grammar, too
    return {"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}, **schema}


def _ranges(token_ids: Collection[int]) -> str:
    """Ids as llguidance has them: ``3-5,9``."""
    ranges: list[list[int]] = []
    for token_id in sorted(token_ids):
        if ranges and ranges[-1][1] == token_id - 1:
            ranges[-1][1] = token_id
        else:
            ranges.append([token_id, token_id])
    return ",".join(f"{low}-{high}" for low, high in ranges)
