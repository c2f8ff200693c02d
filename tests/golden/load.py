"""The golden outputs of transformers + PEFT as typed values; ``smollm2.json`` and ``tiny.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BASE = "base"
"""Key of the outputs without an adapter."""


@dataclass(frozen=True)
class GoldenPrompt:
    id: str
    kind: str
    """``chat``: the text went through the chat template; ``raw``: it did not."""
    text: str
    input_ids: tuple[int, ...]


@dataclass(frozen=True)
class GoldenOutput:
    """Greedy in float32. One entry of ``logprobs`` and ``lead`` for each token."""

    output_ids: tuple[int, ...]
    """The end-of-text token is kept where it came."""
    text: str
    logprobs: tuple[float, ...]
    lead: tuple[float, ...]
    """The chosen token's logit minus the second best one's: near 0 means a near tie."""


@dataclass(frozen=True)
class Golden:
    model_sha256: str
    """Of the base's model.safetensors."""
    prompts: Mapping[str, GoldenPrompt]
    outputs: Mapping[str, Mapping[str, GoldenOutput]]
    """By adapter name or BASE, then by prompt id."""

    @property
    def adapter_names(self) -> tuple[str, ...]:
        return tuple(name for name in self.outputs if name != BASE)


def load_golden(name: str) -> Golden:
    """``smollm2`` or ``tiny``. The prompts of ``tiny`` have no ids: theirs are ``0``, ``1``, …"""
    data = json.loads(Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8"))
    prompts = [_prompt(index, raw) for index, raw in enumerate(data["prompts"])]
    return Golden(
        model_sha256=data["base"]["model_safetensors_sha256"],
        prompts={prompt.id: prompt for prompt in prompts},
        outputs={adapter: _outputs(raw) for adapter, raw in data["outputs"].items()},
    )


def _prompt(index: int, raw: Mapping[str, Any]) -> GoldenPrompt:
    return GoldenPrompt(
        id=raw.get("id", str(index)),
        kind=raw.get("kind", "raw"),
        text=raw["text"],
        input_ids=tuple(raw["input_ids"]),
    )


def _outputs(raw: Mapping[str, Any] | list[Any]) -> dict[str, GoldenOutput]:
    by_id = raw if isinstance(raw, Mapping) else {str(i): one for i, one in enumerate(raw)}
    return {
        prompt_id: GoldenOutput(
            output_ids=tuple(one["output_ids"]),
            text=one["text"],
            logprobs=tuple(one["logprobs"]),
            lead=tuple(one["lead"]),
        )
        for prompt_id, one in by_id.items()
    }
