"""What servers and scripts need of an engine. ``AsyncEngine`` is one, ``testing.FakeEngine`` another."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from loramux.types import AdapterInfo, Delta, EngineStats, GenerationRequest, RequestId


class Stream(Protocol):
    """The answer to one request while it is made.

    Iterating yields deltas of all its completions until each has a finish reason. ``abort`` may be
    called at any time and more than once; leaving the iteration early does not abort by itself.
    """

    request_id: RequestId

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    def abort(self) -> None: ...


class TextCodec(Protocol):
    """Text to tokens and back, by the base model's tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt, with the special tokens that the tokenizer adds by itself."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of a conversation that ends where the assistant speaks.

        Raises InvalidRequest when the model has no chat template or the template refuses.
        """
        ...


class Engine(Protocol):
    """Runs requests. All methods are called from one event loop."""

    base_name: str
    max_model_len: int
    text: TextCodec

    def submit(self, request: GenerationRequest) -> Stream:
        """Queue a request. Raises RequestError (UnknownModel, InvalidRequest) at once, so that a
        server can answer with a status before it starts a stream; EngineStopped when it is down.
        """
        ...

    async def load_adapter(
        self, name: str, source: str, *, load_inplace: bool = False, pinned: bool = False
    ) -> AdapterInfo:
        """Read, check and register an adapter without delaying a step. Raises AdapterError."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Take no new requests for the name; running ones finish. Raises UnknownAdapter."""
        ...

    def adapters(self) -> list[AdapterInfo]: ...

    def stats(self) -> EngineStats: ...

    @property
    def failure(self) -> str | None:
        """Why the engine has died, or None while it lives."""
        ...
