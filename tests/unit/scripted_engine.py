"""An engine whose answers are written down beforehand, for the demo's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from loramux.errors import EngineStopped, UnknownModel
from loramux.stats import EngineStats
from loramux.types import Delta, GenerationRequest, RequestId


def stats(**known: int) -> EngineStats:
    """Counters that are 0 unless named."""
    return EngineStats(**{f.name: known.get(f.name, 0) for f in fields(EngineStats)})


class Codec:
    key = ""

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return [ord(character) for character in messages[-1]["content"]]


@dataclass
class ScriptedEngine:
    """Answers each model with the pieces of ``script``; None is the base.

    A model without a script is unknown; one in ``dies`` stops the engine after its pieces.
    """

    script: Mapping[str | None, Sequence[str]]
    max_step_adapters: int = 0
    dies: frozenset[str] = frozenset()
    base_name: str = "SmolLM2-135M-Instruct"
    text: Codec = field(default_factory=Codec)
    log: list[str] = field(default_factory=list)
    """``submit``, ``first delta``, ``start`` and ``stop``, as they happen."""
    requests: list[GenerationRequest] = field(default_factory=list)

    async def text_of(self, model: str | None) -> Codec:
        return self.text

    async def start(self) -> None:
        self.log.append("start")

    async def stop(self) -> None:
        self.log.append("stop")

    async def submit(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        self.log.append("submit")
        self.requests.append(request)
        if request.model not in self.script:
            raise UnknownModel(str(request.model))
        return self._stream(request.model)

    async def _stream(self, model: str | None) -> AsyncIterator[Delta]:
        pieces = self.script[model]
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1 and model not in self.dies
            yield Delta(RequestId("r"), 0, piece, (7,), finish_reason="stop" if last else None)
        if model in self.dies:
            raise EngineStopped("the engine has failed: out of memory")

    async def stats(self) -> EngineStats:
        return stats(
            max_step_adapters=self.max_step_adapters,
            slots_used=self.max_step_adapters,
            slots_total=8,
            adapter_bytes=26_900_000,
        )
