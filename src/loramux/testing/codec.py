"""Text whose tokens can be seen: one character, one token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loramux.errors import InvalidRequest


class FakeCodec:
    """An ``EngineText`` where every character is one token, its code point.

    With ``chat_template`` False it refuses chats.
    """

    def __init__(self, *, chat_template: bool = True) -> None:
        self._chat_template = chat_template

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(token) for token in token_ids)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """``role:content`` and a line break for each message."""
        if not self._chat_template:
            raise InvalidRequest("the model has no chat template", "messages")
        return self.encode("".join(f"{m['role']}:{m['content']}\n" for m in messages))

    def detokenizer(self, *, skip_special_tokens: bool = True) -> FakeDetokenizer:
        """No token is special, so all are shown."""
        return FakeDetokenizer()


class FakeDetokenizer:
    """Holds nothing back: every token is a whole character."""

    def push(self, token_id: int) -> str:
        return chr(token_id)

    def finish(self) -> str:
        return ""
