"""What an inspection of an adapter takes and finds, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from loramux.adapters.formats.files import MalformedFile, parse_json_object, read_bounded
from loramux.adapters.formats.peft_config import CONFIG_FILE, MAX_CONFIG_BYTES
from loramux.adapters.spec import BaseLayout

Verdict = Literal["serveable", "refused", "config only"]


@dataclass(frozen=True)
class ReferenceBase:
    """The base that an adapter is checked against."""

    layout: BaseLayout
    dtype: str
    """In which it is served; blocks have it too."""
    weight_norm: Callable[[str], float | None]
    """Frobenius norm of a module's weight; None where it cannot be had."""
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModuleFacts:
    """One delta of an adapted module. None: not known, for the reasons that the verdict names."""

    module: str
    """As the base calls it, or as the adapter does where no base has been compared."""
    kind: str
    """The name inside its layer."""
    layer: int | None
    trtllm_name: str | None = None
    """What TensorRT-LLM calls it, where it has a name."""
    rows: tuple[int, int] | None = None
    """First and end of the output rows that change, where the base has several linears in one."""
    rank: int | None
    alpha: float | None
    scale: float | None
    """What ``B A`` is multiplied with."""
    delta_norm: float | None = None
    """Frobenius norm of ``scale * B A``."""
    base_norm: float | None = None
    relative_norm: float | None = None
    """``delta_norm / base_norm``"""
    top_share: float | None = None
    """Part of the energy (squared norm) in the largest singular value."""
    values_for_90: int | None = None
    """How many singular values hold 90 % of the energy."""
    singular_values: tuple[float, ...] = ()
    """Of ``scale * B A``, largest first."""


@dataclass(frozen=True)
class LayerFacts:
    """All deltas of one layer together; their squares are added."""

    layer: int
    delta_norm: float
    relative_norm: float | None


@dataclass(frozen=True)
class TierBytes:
    """What the adapter takes up, and where."""

    file: int | None
    """Tensors in the weight file."""
    block: int | None
    """The block in host memory, and again in the device's arena while it has a slot."""
    block_dtype: str


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Everything; the fields are those of ``--json``."""

    verdict: Verdict
    reasons: tuple[str, ...]
    checked_against: str | None
    """The base, or None when nothing that hangs on the base has been checked."""
    unusual: tuple[str, ...]
    adapter: str
    format: str
    peft_version: str | None
    base_model: str | None
    revision: str | None
    rank: int | None
    alpha: float | None
    use_rslora: bool | None
    use_dora: bool | None
    bytes: TierBytes
    modules: tuple[ModuleFacts, ...] = ()
    layers: tuple[LayerFacts, ...] = ()
    replaced: tuple[str, ...] = ()
    """Parameters of the base that the adapter has its own values for."""
    vocab_size: int | None = None
    """Tokens of the adapter, where they are known to be more than the base's."""


@dataclass(frozen=True)
class Stated:
    """Fields of adapter_config.json that decide nothing."""

    raw: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, directory: Path) -> Stated:
        try:
            data = read_bounded(directory / CONFIG_FILE, MAX_CONFIG_BYTES)
            return cls(parse_json_object(CONFIG_FILE, data))
        except MalformedFile:  # which is a reason for the refusal
            return cls()

    def text(self, name: str) -> str | None:
        value = self.raw.get(name)
        return value if isinstance(value, str) and value else None

    @property
    def dropout(self) -> float:
        value = self.raw.get("lora_dropout")
        return value if isinstance(value, float) else 0.0


def place(module: str) -> tuple[str, int | None]:
    """``model.layers.3.mlp.up_proj`` is ``mlp.up_proj`` in layer 3."""
    parts = module.split(".")
    number = next((i for i, part in enumerate(parts) if part.isascii() and part.isdigit()), None)
    if number is None or len(parts[number]) > 9:
        return module, None
    return ".".join(parts[number + 1 :]) or module, int(parts[number])
