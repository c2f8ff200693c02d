"""Answers that must be calls: the guides that make them so, and how they are read.

    [{"name": "f", "parameters": {"x": 1}}, {"name": "g", "parameters": {}}]

A call of one named function needs no such form: the answer is its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from loramux.guide import Guide
from loramux.server.tools.calls import read_calls
from loramux.server.tools.reader import NoCall, Reader, Reading
from loramux.server.tools.schema import FunctionDefinition

PARAM = "tools"
"""The field whose schemas guides follow, for errors."""

_DATA = frozenset({"const", "enum", "default", "examples"})
"""Keywords of schemas whose values are no schemas."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values hold schemas by names."""


def named_guide(function: FunctionDefinition) -> Guide:
    """The answer is the function's arguments. Raises InvalidRequest."""
    return Guide.json(arguments_schema(function), PARAM)


def list_guide(functions: Sequence[FunctionDefinition], *, parallel: bool) -> Guide:
    """The answer is a list of calls, of one call without ``parallel``. Raises InvalidRequest."""
    calls = [_call_schema(function, i) for i, function in enumerate(functions)]
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
    if not parallel:
        schema["maxItems"] = 1
    return Guide.json(schema, PARAM)


def arguments_schema(function: FunctionDefinition) -> dict[str, Any]:
    """What describes a function's arguments, always an object."""
    if function.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {**function.parameters, "type": "object"}


def read_list(reader: Reader) -> Reading[None]:
    """Reads an answer that ``list_guide`` has guided, to its end, which may have come early."""
    try:
        yield from read_calls(reader)
    except NoCall:
        reader.release()
    yield from reader.text_until(())


def _call_schema(function: FunctionDefinition, index: int) -> dict[str, Any]:
    root = f"#/items/anyOf/{index}/properties/parameters"
    fields = {
        "name": {"const": function.name},
        "parameters": _moved(arguments_schema(function), root),
    }
    return {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references to itself lead to where it stands now, at ``root``."""
    if isinstance(schema, list):
        return [_moved(part, root) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _NAMED and isinstance(value, dict):
            moved[keyword] = {name: _moved(part, root) for name, part in value.items()}
        elif keyword == "$ref" and isinstance(value, str) and re.match("#(/|$)", value):
            moved[keyword] = root + value.removeprefix("#")
        else:
            moved[keyword] = value if keyword in _DATA else _moved(value, root)
    return moved
