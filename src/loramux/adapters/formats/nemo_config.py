"""Reads the model_config.yaml of a NeMo adapter: the sizes of attention, and how LoRA scales.

The file is the configuration of the whole model; under ``peft`` it says what was trained. NeMo
multiplies ``B A x`` by ``alpha / adapter_dim``, and takes ``adapter_dim`` for an alpha that is not
said.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loramux.adapters.formats.files import MalformedFile, refuse_placeholders
from loramux.adapters.formats.meaning import BesideLora
from loramux.adapters.formats.nemo_files import CONFIG, NemoFile
from loramux.adapters.formats.peft_fields import is_number, is_rank
from loramux.adapters.formats.yaml_text import MAX_YAML_BYTES, parse_yaml_mapping
from loramux.adapters.report import Report, printable

MAX_HEADS = 2**16

_INERT = frozenset(
    {
        "adapter_dim", "alpha", "adapter_dropout", "dropout_position", "column_init_method",
        "row_init_method", "target_modules", "layer_selection", "variant", "a2a_experimental",
    }
)  # fmt: skip
"""Fields of ``lora_tuning`` that are read here, act in training only, or show in the weights."""

_ONLY_WITH_WEIGHT_TYING = "position_embedding_strategy"

_GATED = frozenset({"fast-swiglu", "fast-geglu", "fast-reglu"})
"""Activations for which the first linear of the MLP is two in one, gate before up."""

_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_LONGEST_NUMBER = 40


@dataclass(frozen=True)
class NemoConfig:
    """What of the file decides the arithmetic."""

    rank: int
    alpha: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str
    tp_size: int
    """GPUs that shared each linear in training."""
    ep_size: int
    """GPUs that shared the experts in training."""
    use_dora: bool = False
    swap_gate_up: bool | None = None
    base_model: str | None = None
    targets: tuple[str, ...] = ()

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """The same for every module."""
        return self.rank, self.alpha / self.rank

    @property
    def beside(self) -> BesideLora:
        """Biases and norms that were trained beside are refused by the reader."""
        return BesideLora()

    @property
    def is_gated(self) -> bool:
        """Whether the first linear of the MLP holds gate and up."""
        return self.activation in _GATED

    @property
    def mlp_is_known(self) -> bool:
        """Whether the rows of that linear stand as ``is_gated`` says."""
        if self.is_gated:
            return self.tp_size == 1  # the halves may be in pieces, one of each for a GPU
        return not self.activation.endswith("glu")


def read_config(file: NemoFile, report: Report) -> NemoConfig | None:
    """Read the configuration; None when it cannot be used, for the reasons in ``report``."""
    try:
        if file.record.num_bytes > MAX_YAML_BYTES:
            raise MalformedFile(
                f"{file.name} is too large: {file.record.num_bytes} bytes, "
                f"the limit is {MAX_YAML_BYTES} bytes"
            )
        data = file.read()
        refuse_placeholders(file.name, data[:256])
        raw = parse_yaml_mapping(file.name, data)
    except MalformedFile as problem:
        report.refuse(str(problem))
        return None
    return _arithmetic(raw, report)


def _arithmetic(raw: Mapping[str, Any], report: Report) -> NemoConfig | None:
    lora = _lora_tuning(raw, report)
    if lora is None:
        return None
    _check_other_fields(raw, lora, report)
    get = _Fields(report)
    rank = get.integer(lora, "peft.lora_tuning.adapter_dim")
    alpha = get.number(lora, "peft.lora_tuning.alpha", default=rank)
    num_heads = get.integer(raw, "num_attention_heads")
    num_kv_heads = get.integer(raw, "num_query_groups", default=num_heads)
    tp_size = get.integer(raw, "tensor_model_parallel_size", default=1)
    ep_size = get.integer(raw, "expert_model_parallel_size", default=1)
    hidden = get.integer(raw, "hidden_size")
    if rank is None or alpha is None or num_heads is None or num_kv_heads is None:
        return None
    if num_heads > MAX_HEADS or num_heads % num_kv_heads:
        report.refuse(
            f"{CONFIG}: num_query_groups ({num_kv_heads}) must divide num_attention_heads "
            f"({num_heads}), which must be at most {MAX_HEADS}"
        )
        return None
    even = hidden is not None and hidden % num_heads == 0  # else it must be said
    head_dim = get.integer(raw, "kv_channels", hidden // num_heads if hidden and even else None)
    if head_dim is None or tp_size is None or ep_size is None:
        return None
    activation = raw.get("activation", "gelu")
    return NemoConfig(
        rank=rank,
        alpha=alpha,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        activation=activation if isinstance(activation, str) else "",
        tp_size=tp_size,
        ep_size=ep_size,
    )


def _lora_tuning(raw: Mapping[str, Any], report: Report) -> Mapping[str, Any] | None:
    peft = raw.get("peft")
    if not isinstance(peft, dict):
        report.refuse(f"{CONFIG} is not of an adapter of NeMo: peft is missing")
        return None
    scheme = peft.get("peft_scheme")
    if scheme != "lora":
        shown = printable(scheme, 40) if isinstance(scheme, str) else "no string"
        report.refuse(f"{CONFIG}: peft.peft_scheme is {shown}, only lora is served")
        return None
    lora = peft.get("lora_tuning")
    if not isinstance(lora, dict):
        report.refuse(f"{CONFIG}: peft.lora_tuning must be a mapping with adapter_dim")
        return None
    return lora


def _check_other_fields(raw: Mapping[str, Any], lora: Mapping[str, Any], report: Report) -> None:
    tied = _is_live(lora.get("weight_tying"))
    if tied:
        report.refuse(f"{CONFIG}: peft.lora_tuning.weight_tying: layers share one adapter")
    for name, value in lora.items():
        if name in _INERT or name in ("weight_tying", _ONLY_WITH_WEIGHT_TYING):
            continue
        if _is_live(value):
            report.unknown_field(str(name), f"peft.lora_tuning of {CONFIG}")
    if _is_live(raw.get("megatron_legacy")):
        report.refuse(
            f"{CONFIG}: megatron_legacy: q, k and v stand in an order of old checkpoints, "
            "which is not read"
        )


def _is_live(value: object) -> bool:
    """Whether a field is set; leaves are strings, whatever they mean."""
    if isinstance(value, str):
        return value.lower() not in ("", "null", "~", "false", "no", "off")
    return bool(value)


class _Fields:
    """Numbers out of strings; a wrong one goes to the report."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def integer(self, raw: Mapping[str, Any], name: str, default: int | None = None) -> int | None:
        text = self._text(raw, name)
        if text is None and default is not None:
            return default
        value = int(text) if text is not None and text.isascii() and text.isdecimal() else None
        if not is_rank(value):
            self._report.refuse(f"{CONFIG}: {name} must be a positive integer")
            return None
        return value

    def number(self, raw: Mapping[str, Any], name: str, default: int | None) -> float | None:
        text = self._text(raw, name)
        if text is None:
            return None if default is None else float(default)
        value = float(text) if _NUMBER.fullmatch(text) else None
        if not is_number(value):
            self._report.refuse(f"{CONFIG}: {name} must be a finite number")
            return None
        return value

    def _text(self, raw: Mapping[str, Any], name: str) -> str | None:
        """None where the field is not set; what is no string cannot be a number either."""
        value = raw.get(name.rpartition(".")[2])
        if value is None or (isinstance(value, str) and value.lower() in ("", "null", "~")):
            return None
        return value if isinstance(value, str) and len(value) <= _LONGEST_NUMBER else "invalid"
