"""Text whose tokens can be seen: one character, one token."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from loramux.errors import InvalidRequest
from loramux.guide import Guide, GuideFailed


class FakeCodec:
    """An ``EngineText`` where every character is one token, its code point.

    With ``chat_template`` False it refuses chats, and without a ``tool_template`` tools.
    """

    added_tokens: Mapping[str, int] = MappingProxyType({})
    special_tokens: Collection[str] = ()

    def __init__(
        self, *, chat_template: bool = True, tool_template: str = "", key: str = ""
    ) -> None:
        self.key = key
        self._chat_template = chat_template
        self.tool_template = tool_template

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text = "".join(chr(token) for token in token_ids)
        text.encode()  # half a character is no text: ValueError, as for what is no code point
        return text

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """``tools:`` and their names, then ``role:content`` with calls in JSON; a line for each."""
        if not self._chat_template:
            raise InvalidRequest("the model has no chat template", "messages")
        if tools and not self.tool_template:
            raise InvalidRequest("the model's chat template has no place for tools", "tools")
        lines = [f"tools:{','.join(t['function']['name'] for t in tools)}"] if tools else []
        for message in messages:
            calls = message.get("tool_calls")
            lines.append(
                f"{message['role']}:{message.get('content', '')}"
                + (json.dumps(calls) if calls else "")
            )
        return self.encode("".join(f"{line}\n" for line in lines))

    def compile(self, guide: Guide) -> FakeGrammar:
        """A choice as it is meant, any other guide as its own text; ``bad`` is refused."""
        if guide.text == "bad":
            raise InvalidRequest(f"{guide.param} cannot be followed: it is bad", guide.param)
        return FakeGrammar(guide.choices() if guide.kind == "choice" else [guide.text])

    def warm_up(self) -> None:
        """There is nothing to do."""

    def detokenizer(
        self, *, skip_special_tokens: bool = True, kept: Collection[str] = ()
    ) -> FakeDetokenizer:
        """No token is special, so all are shown, kept or not."""
        return FakeDetokenizer()


class FakeDetokenizer:
    """Holds nothing back: every token is a whole character."""

    def push(self, token_id: int) -> str:
        return chr(token_id)

    def finish(self) -> str:
        return ""


@dataclass(frozen=True)
class FakeGrammar:
    """A ``Grammar`` of some texts; none of them may begin another, since no token ends a text."""

    texts: Sequence[str]

    def matcher(self) -> FakeMatcher:
        return FakeMatcher(self.texts)


class FakeMatcher:
    """The ``Matcher`` of a FakeGrammar."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._rests = list(texts)

    @property
    def allowed(self) -> bytes:
        mask = 0
        for rest in self._rests:
            mask |= 1 << ord(rest[0])
        return mask.to_bytes(mask.bit_length() // 8 + 1, "little")

    def push(self, token_id: int) -> bool:
        self._rests = [rest[1:] for rest in self._rests if rest[0] == chr(token_id)]
        if not self._rests:
            raise GuideFailed(f"{chr(token_id)!r} does not go on with any of the texts")
        return not all(self._rests)
