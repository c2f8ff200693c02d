"""YAML that cannot hurt: plain strings, lists and mappings, of bounded size, without references.

PyYAML does the parsing. Nothing is given a type, so no tag makes an object and no text a number of
a million digits; aliases, with which a line can stand for gigabytes, are refused.
"""

from __future__ import annotations

from typing import Any

import yaml

from loramux.adapters.formats.files import MalformedFile

MAX_YAML_BYTES = 64 * 2**10
"""NeMo's configurations have about ten; parsing takes some seconds for a megabyte."""


class _Loader(yaml.BaseLoader):
    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise MalformedFile("it has aliases (*name), which are not read: write values out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        found = super().construct_mapping(node, deep)
        if len(found) != len(node.value):
            raise MalformedFile("a key is there twice (duplicate)")
        return found


def parse_yaml_mapping(what: str, data: bytes) -> dict[str, Any]:
    """Parse a mapping whose leaves are strings. Raises MalformedFile."""
    if len(data) > MAX_YAML_BYTES:
        raise MalformedFile(
            f"{what} is too large: {len(data)} bytes, the limit is {MAX_YAML_BYTES} bytes"
        )
    try:
        value = yaml.load(data.decode("utf-8-sig"), _Loader)
    except MalformedFile as problem:
        raise MalformedFile(f"{what}: {problem}") from None
    except UnicodeDecodeError:
        raise MalformedFile(f"{what} is not YAML: it is not UTF-8 text") from None
    except RecursionError:
        raise MalformedFile(f"{what} is nested too deep to be read as YAML") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise MalformedFile(f"{what} is not YAML{place}") from None
    except (yaml.YAMLError, ValueError, TypeError):
        raise MalformedFile(f"{what} is not YAML") from None
    if not isinstance(value, dict):
        raise MalformedFile(f"{what} must hold a YAML mapping, not a {type(value).__name__}")
    return value
