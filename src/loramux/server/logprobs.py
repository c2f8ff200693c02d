"""Log-probabilities in the three shapes that clients know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loramux.engine.interface import TextCodec
from loramux.types import TokenLogprobs

_LOWEST = -9999.0
"""JSON has no infinity; OpenAI writes this for a token that is out of the question."""


def legacy(
    codec: TextCodec, entries: Sequence[TokenLogprobs | None], token_ids: Sequence[int], offset: int
) -> tuple[dict[str, Any], int]:
    """The ``logprobs`` of a text completion, and the offset behind its last token.

    ``entries`` has one item for each of ``token_ids``; None where there is nothing to report (the
    first prompt token). ``offset`` counts characters from the beginning of the choice's text.
    """
    tokens = [token_text(codec, token) for token in token_ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    shape = {
        "tokens": tokens,
        "token_logprobs": [None if e is None else _finite(e.logprob) for e in entries],
        "top_logprobs": [None if e is None else _by_text(codec, e) for e in entries],
        "text_offset": offsets,
    }
    return shape, offset


def chat(codec: TextCodec, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The ``logprobs`` of a chat choice."""
    content = [
        _chat_token(codec, entry.token_id, entry.logprob)
        | {"top_logprobs": [_chat_token(codec, *pair) for pair in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def prompt(codec: TextCodec, entries: Sequence[TokenLogprobs | None]) -> list[Any]:
    """vLLM's ``prompt_logprobs``: for each prompt token a map from token id to its figures."""
    return [None if entry is None else _by_id(codec, entry) for entry in entries]


def token_text(codec: TextCodec, token_id: int) -> str:
    """One token as text; a part of a character shows as U+FFFD."""
    return codec.decode([token_id], skip_special_tokens=False)


def _pairs(entry: TokenLogprobs) -> dict[int, float]:
    """The most likely tokens, best first, and the chosen one wherever it stands."""
    return {**dict(entry.top), entry.token_id: entry.logprob}


def _by_text(codec: TextCodec, entry: TokenLogprobs) -> dict[str, float]:
    texts: dict[str, float] = {}
    for token_id, logprob in _pairs(entry).items():
        # Two tokens may read the same (parts of characters do): the likelier one stays.
        texts.setdefault(token_text(codec, token_id), _finite(logprob))
    return texts


def _by_id(codec: TextCodec, entry: TokenLogprobs) -> dict[str, Any]:
    return {
        str(token_id): {"logprob": _finite(logprob), "decoded_token": token_text(codec, token_id)}
        for token_id, logprob in _pairs(entry).items()
    }


def _chat_token(codec: TextCodec, token_id: int, logprob: float) -> dict[str, Any]:
    text = token_text(codec, token_id)
    # The bytes of a part of a character cannot be told from its text.
    data = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": _finite(logprob), "bytes": data}


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
