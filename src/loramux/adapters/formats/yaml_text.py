"""YAML that cannot hurt: plain strings, lists and mappings, of bounded size, without references.

PyYAML tells the text apart into events. Nothing is given a type, so no tag makes an object and no
text a number of a million digits; aliases, with which a line can stand for gigabytes, are refused.
"""

from __future__ import annotations

from typing import Any

import yaml

from loramux.adapters.formats.files import MalformedFile

MAX_YAML_BYTES = 64 * 2**10
"""NeMo's configurations have about ten; without libyaml, parsing takes seconds for a megabyte."""

_MAX_DEPTH = 100

_Loader: Any = yaml.CBaseLoader if yaml.__with_libyaml__ else yaml.BaseLoader


def parse_yaml_mapping(what: str, data: bytes) -> dict[str, Any]:
    """Parse a mapping whose leaves are strings. Raises MalformedFile."""
    if len(data) > MAX_YAML_BYTES:
        raise MalformedFile(
            f"{what} is too large: {len(data)} bytes, the limit is {MAX_YAML_BYTES} bytes"
        )
    try:
        value = _value(data.decode("utf-8-sig"))
    except MalformedFile as problem:
        raise MalformedFile(f"{what}: {problem}") from None
    except UnicodeDecodeError:
        raise MalformedFile(f"{what} is not YAML: it is not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise MalformedFile(f"{what} is not YAML{place}") from None
    except (yaml.YAMLError, ValueError, TypeError):
        raise MalformedFile(f"{what} is not YAML") from None
    if not isinstance(value, dict):
        raise MalformedFile(f"{what} must hold a YAML mapping, not a {type(value).__name__}")
    return value


def _value(text: str) -> Any:
    """The one document of a text; its leaves are strings."""
    nested: list[list[Any]] = [[]]
    for event in yaml.parse(text, _Loader):
        if isinstance(event, yaml.AliasEvent):
            raise MalformedFile("it has aliases (*name), which are not read: write values out")
        if isinstance(event, yaml.CollectionStartEvent):
            nested.append([])
            if len(nested) > _MAX_DEPTH:
                raise MalformedFile(f"it is nested too deep: more than {_MAX_DEPTH} levels")
        elif isinstance(event, yaml.ScalarEvent):
            nested[-1].append(event.value)
        elif isinstance(event, yaml.CollectionEndEvent):
            items = nested.pop()
            is_mapping = isinstance(event, yaml.MappingEndEvent)
            nested[-1].append(_mapping(items) if is_mapping else items)
    (documents,) = nested
    if len(documents) > 1:
        raise MalformedFile("it has more than one document")
    return documents[0] if documents else None


def _mapping(items: list[Any]) -> dict[str, Any]:
    """``items``: keys and values by turns."""
    keys, values = items[::2], items[1::2]
    if not all(isinstance(key, str) for key in keys):
        raise MalformedFile("a key is a list or a mapping")
    found = dict(zip(keys, values, strict=True))
    if len(found) != len(keys):
        raise MalformedFile("a key is there twice (duplicate)")
    return found
