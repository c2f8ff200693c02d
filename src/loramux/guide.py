"""What an answer must look like, as plain data; and what follows an answer through it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

from loramux.errors import InvalidRequest

GuideKind = Literal["json", "regex", "choice", "grammar"]

_MAX_REGEX_BYTES = 8 * 2**10
"""The time to compile a regular expression grows with the square of its length: here 0.2 s."""

MAX_BYTES: Mapping[str, int] = {
    "json": 64 * 2**10,
    "regex": _MAX_REGEX_BYTES,
    "choice": 64 * 2**10,
    "grammar": 16 * 2**10,
}
"""How long the text of each kind may be in UTF-8."""


JSON_WHITESPACE = r"[ ]|\n[ ]{0,20}"
"""Between the parts of JSON: a blank, or a line break with an indent. Some models never come to an
end of white space that may be of any length."""


@dataclass(frozen=True, slots=True)
class Guide:
    """What an answer must look like. Raises InvalidRequest for what can be no guide of its kind.

    >>> Guide.json({"type": "array", "items": {"type": "integer"}})
    >>> Guide.regex(r"[0-9]{4}-[0-9]{2}")
    >>> Guide.choice(["yes", "no"])
    >>> Guide.grammar('start: "a" | "b" start')

    Whether llguidance can compile it is found out when a request is admitted.
    """

    kind: GuideKind
    text: str
    """A JSON schema, a regular expression, a JSON list of strings, or a grammar in Lark."""
    param: str = field(default="guide", compare=False)
    """What the request calls it, for errors."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GuideKind):
            kinds = ", ".join(get_args(GuideKind))
            raise InvalidRequest(f"{self.kind!r} is no kind of guide: use {kinds}", self.param)
        if not isinstance(self.text, str) or not self.text:
            raise InvalidRequest(f"{self.param} must be text that is not empty", self.param)
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError:
            raise InvalidRequest(
                f"{self.param} holds half a surrogate pair: send text that is valid Unicode",
                self.param,
            ) from None
        if size > MAX_BYTES[self.kind]:
            raise InvalidRequest(
                f"{self.param} has {size} bytes, the limit is {MAX_BYTES[self.kind]}: shorten it",
                self.param,
            )
        if self.kind == "json":
            self._check_schema()
        elif self.kind == "choice":
            self._check_choices()

    @classmethod
    def json(cls, schema: Mapping[str, Any] | str, param: str = "guide") -> Guide:
        """JSON that a schema, given as an object or as JSON text, describes."""
        return cls("json", schema if isinstance(schema, str) else _as_json(schema, param), param)

    @classmethod
    def regex(cls, pattern: str, param: str = "guide") -> Guide:
        """Text that a regular expression, in the syntax of Rust's, matches as a whole."""
        return cls("regex", pattern, param)

    @classmethod
    def choice(cls, choices: Sequence[str], param: str = "guide") -> Guide:
        """One of several texts."""
        return cls("choice", _as_json(choices, param), param)

    @classmethod
    def grammar(cls, lark: str, param: str = "guide") -> Guide:
        """Text of a context-free grammar in llguidance's dialect of Lark."""
        return cls("grammar", lark, param)

    def choices(self) -> list[str]:
        """The texts of a guide of the kind ``choice``."""
        return json.loads(self.text)

    def _check_schema(self) -> None:
        schema = self._parsed(object_hook=self._check_patterns)
        if not isinstance(schema, dict):
            raise InvalidRequest(f"{self.param} must be a JSON schema, an object", self.param)

    def _check_patterns(self, part: dict[str, Any]) -> dict[str, Any]:
        """One object of a schema; those inside it have been here before."""
        named = part.get("patternProperties")
        patterns = [part.get("pattern"), *(named if isinstance(named, dict) else ())]
        if any(isinstance(p, str) and len(p) > _MAX_REGEX_BYTES for p in patterns):
            raise InvalidRequest(
                f"{self.param} has a pattern of more than {_MAX_REGEX_BYTES} characters: "
                "shorten it",
                self.param,
            )
        return part

    def _check_choices(self) -> None:
        choices = self._parsed()
        if not isinstance(choices, list) or not choices:
            raise InvalidRequest(f"{self.param} must be a list with one choice or more", self.param)
        if not all(isinstance(choice, str) and choice for choice in choices):
            raise InvalidRequest(f"{self.param} must hold strings that are not empty", self.param)

    def _parsed(self, **how: Any) -> object:
        try:
            return json.loads(self.text, **how)
        except (ValueError, RecursionError) as error:
            reason = error if isinstance(error, ValueError) else "it is nested too deeply"
            raise InvalidRequest(f"{self.param} is not valid JSON: {reason}", self.param) from None


class GuideFailed(Exception):
    """An answer that cannot go on as its guide demands, with the reason."""


class Matcher(Protocol):
    """Follows one answer through its guide."""

    @property
    def allowed(self) -> bytes:
        """Tokens that may come next, among them the ends of text where the answer may end: one bit
        for each, the lowest bit of a byte first. Those beyond the last byte may not."""
        ...

    def push(self, token_id: int) -> bool:
        """Take the newest token, which ends no text; whether nothing can follow it.

        Raises GuideFailed.
        """
        ...


class Grammar(Protocol):
    """A guide made ready for one tokenizer."""

    def matcher(self) -> Matcher:
        """A fresh one for one answer; for any thread."""
        ...


def _as_json(value: object, param: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} cannot be written as JSON: {error}", param) from None
