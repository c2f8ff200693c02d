"""Prompts to tokens, without holding up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from loramux.engine.interface import TextCodec
from loramux.errors import InvalidRequest
from loramux.server.schema import Prompt

_INLINE_CHARS = 20_000
"""Up to here tokenising takes a few milliseconds at most, less than a thread is worth."""
_INLINE_TOKENS = 5_000
"""The same for text out of tokens."""


async def encode(codec: TextCodec, text: str) -> list[int]:
    """The tokens of a text."""
    [tokens] = await encode_all(codec, [text])
    return tokens


async def encode_all(codec: TextCodec, prompts: Sequence[Prompt]) -> list[list[int]]:
    """The tokens of each prompt; token ids are taken as they are."""

    def tokens() -> list[list[int]]:
        return [codec.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

    num_chars = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    return tokens() if num_chars <= _INLINE_CHARS else await asyncio.to_thread(tokens)


async def decode(codec: TextCodec, tokens: list[int]) -> str:
    """The text of tokens, special ones included. Raises InvalidRequest for what are none.

    Most tokenizers leave out tokens that they do not have, and some fail at them.
    """
    try:
        if len(tokens) <= _INLINE_TOKENS:
            return codec.decode(tokens, skip_special_tokens=False)
        return await asyncio.to_thread(codec.decode, tokens, skip_special_tokens=False)
    except (ValueError, LookupError, OverflowError, TypeError) as error:
        raise InvalidRequest(
            "tokens: the model's tokenizer does not have all of them", "tokens"
        ) from error


async def render_chat(
    codec: TextCodec, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()
) -> list[int]:
    """A conversation's tokens by the model's chat template. Raises InvalidRequest."""
    if _num_chars([messages, tools]) <= _INLINE_CHARS:
        return codec.render_chat(messages, tools)
    return await asyncio.to_thread(codec.render_chat, messages, tools)


def _num_chars(value: object) -> int:
    """About what a template writes for a value of JSON."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + _num_chars(inside) for key, inside in value.items())
    if isinstance(value, list | tuple):
        return sum(map(_num_chars, value))
    return 1
