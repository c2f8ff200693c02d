"""Names and rows of the tensors of a NeMo adapter, and what they are in PEFT's terms.

A module has ``linear_in`` ``[r, in]`` and ``linear_out`` ``[out, r]``. Attention's first linear is
q, k and v in one: for each key head the query heads that use it, then the key head, then its value
head (Megatron). The MLP's first linear is gate and up in one where its activation is gated.

In a mixture every expert has a list with an adapter for each expert, and uses the one of its own
number: ``local_experts.3`` that of ``expert_adapters.3``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from loramux.adapters.experts import DOWN, GATE, UP
from loramux.adapters.formats.nemo_config import NemoConfig
from loramux.adapters.formats.nemo_files import CONFIG
from loramux.adapters.formats.torch_header import TorchEntry
from loramux.adapters.fusions import GATE_UP, QKV
from loramux.adapters.report import Report, printable
from loramux.adapters.spec import BaseLayout, HeadCounts

_LAYER = r"(?:model\.)?(?:decoder\.|language_model\.encoder\.)?layers\.(\d{1,9})"
_SIDE = r"linear_(in|out)\.weight"
_KEY = re.compile(rf"{_LAYER}\.(self_attention|mlp)\.adapter_layer\.(\w+(?:\.\w+)?)\.{_SIDE}")
_EXPERT_KEY = re.compile(
    rf"{_LAYER}\.mlp\.experts\.local_experts\.(\d{{1,9}})\.adapter_layer"
    rf"\.(lora_moe_(?:hto4h|4htoh)_adapter)\.expert_adapters\.(\d{{1,9}})\.{_SIDE}"
)

_ATTENTION = "lora_kqv_adapter"
_MLP = "lora_hto4h_adapter"
_EXPERT_MLP = "lora_moe_hto4h_adapter"

_WHOLE: Mapping[tuple[str, str], str] = {
    ("self_attention", "lora_unfused_kqv_adapter.q_adapter"): "self_attn.q_proj",
    ("self_attention", "lora_unfused_kqv_adapter.k_adapter"): "self_attn.k_proj",
    ("self_attention", "lora_unfused_kqv_adapter.v_adapter"): "self_attn.v_proj",
    ("self_attention", "lora_dense_attention_adapter"): "self_attn.o_proj",
    ("mlp", "lora_unfused_hto4h_adapter.gate_adapter"): "mlp.gate_proj",
    ("mlp", "lora_unfused_hto4h_adapter.up_adapter"): "mlp.up_proj",
    ("mlp", "lora_4htoh_adapter"): "mlp.down_proj",
}
"""Adapters of one linear as transformers has it."""

_PEFT_PART = {"in": "lora_A.weight", "out": "lora_B.weight"}

_OTHER_KINDS = (
    (re.compile(r"\.bias$"), "biases of NeMo's adapters are not served"),
    (re.compile(r"adapter_[12]\.|infused_adapter|ptuning|prompt"), "only LoRA of NeMo is served"),
    (re.compile(r"layer_norm"), "norms inside NeMo's adapters are not served"),
)
_UNKNOWN = "tensors that LoRA of NeMo does not have"


@dataclass(frozen=True)
class Piece:
    """A tensor in PEFT's terms: some rows of one that is stored, in this order; none: all."""

    entry: TorchEntry
    """The stored one with the shape of the piece."""
    stored_key: str
    rows: tuple[range, ...] = ()


@dataclass(frozen=True)
class _Linear:
    """A linear of NeMo that has an adapter."""

    layer: int
    block: str
    adapter: str
    expert: int | None = None


@dataclass(frozen=True)
class _Part:
    """A module of transformers that has some rows of a linear of NeMo; none: all of them."""

    module: str
    rows: tuple[range, ...] = ()


def translate(
    stored: Mapping[str, TorchEntry], config: NemoConfig, base: BaseLayout, report: Report
) -> dict[str, Piece]:
    """The tensors by PEFT's names; what has none goes to ``report``."""
    linears = _Linears(config, base)
    found: dict[str, Piece] = {}
    for key, entry in stored.items():
        if _is_unused(key):
            report.warn("NeMo's experts have adapters that only other experts would use", key)
            continue
        named = _parse(key)
        if named is None:
            report.refuse(_describe_other(key), key)
            continue
        linear, side = named
        problem = linears.why_not(linear)
        if problem is not None:
            report.refuse(problem, f"layers.{linear.layer}")
            continue
        parts = linears.parts(linear, entry)
        if not parts:
            report.refuse(_describe_other(key), key)
        if side == "out":
            _check_rows(key, entry, parts, report)
        for part in parts:
            name = f"layers.{linear.layer}.{part.module}.{_PEFT_PART[side]}"
            if name in found:
                report.refuse("duplicate: two tensors are meant for the same place", key)
            found[name] = _piece(entry, key, part.rows if side == "out" else ())
    return found


def _parse(key: str) -> tuple[_Linear, str] | None:
    """The linear and the side of its adapter; None for a tensor of another kind."""
    if (match := _KEY.fullmatch(key)) is not None:
        layer, block, adapter, side = match.groups()
        return _Linear(int(layer), block, adapter), side
    if (match := _EXPERT_KEY.fullmatch(key)) is not None:
        layer, expert, adapter, _, side = match.groups()
        return _Linear(int(layer), "mlp", adapter, int(expert)), side
    return None


def _is_unused(key: str) -> bool:
    """Whether an expert has this adapter in its list, and never uses it."""
    match = _EXPERT_KEY.fullmatch(key)
    return match is not None and int(match[2]) != int(match[4])


class _Linears:
    """The linears of NeMo as modules of one base."""

    def __init__(self, config: NemoConfig, base: BaseLayout) -> None:
        self._config = config
        self._base = base
        fused = [f.fused for f in base.fusions if f.fused in base.modules and f.order_is_known]
        self._fused = {name.rpartition(".")[2] for name in fused}
        self._has_gate = any(m.endswith((".gate_proj", f".{GATE_UP}")) for m in base.modules)

    def why_not(self, linear: _Linear) -> str | None:
        """Why it is not certain which rows a linear has, and of what, or None."""
        config = self._config
        of_mlp = linear.adapter in (_MLP, _EXPERT_MLP)
        if of_mlp and not config.mlp_is_known:
            detail = f"activation is {printable(config.activation, 40)}"
            if config.tp_size > 1:
                detail += f", tensor_model_parallel_size is {config.tp_size}"
            return f"{detail}: it is not known in which order rows of gate and up stand"
        if of_mlp and not config.is_gated and self._has_gate:
            activation = printable(config.activation, 40)
            return f"activation is {activation}, which has no gate; {self._base.name} has one"
        if linear.expert is not None and config.ep_size > 1:
            return (
                f"expert_model_parallel_size is {config.ep_size}: "
                "numbers of experts count from 0 on each GPU"
            )
        heads = self._base.heads.get(linear.layer)
        if linear.adapter == _ATTENTION and heads not in (None, HeadCounts(*self._counts)):
            return (
                f"num_attention_heads and num_query_groups are {self._counts[0]} and "
                f"{self._counts[1]}, {self._base.name} has {heads.query} and {heads.key_value}"
            )
        return None

    def parts(self, linear: _Linear, entry: TorchEntry) -> tuple[_Part, ...]:
        """The modules that have the rows of a linear; none: NeMo has no such linear."""
        kind = linear.block, linear.adapter
        if kind == ("self_attention", _ATTENTION):
            return self._attention
        if linear.expert is not None:
            mlp = f"mlp.experts.{linear.expert}"
            return self._mlp(mlp, entry) if kind[1] == _EXPERT_MLP else (_Part(f"{mlp}.{DOWN}"),)
        if kind == ("mlp", _MLP):
            return self._mlp("mlp", entry)
        module = _WHOLE.get(kind)
        return () if module is None else (_Part(module),)

    def _mlp(self, name: str, entry: TorchEntry) -> tuple[_Part, ...]:
        if not self._config.is_gated:
            return (_Part(f"{name}.{UP}"),)
        if name == "mlp" and GATE_UP in self._fused:
            return (_Part(f"{name}.{GATE_UP}"),)
        half = entry.shape[0] // 2 if entry.shape else 0
        gate, up = range(half), range(half, 2 * half)
        return _Part(f"{name}.{GATE}", (gate,)), _Part(f"{name}.{UP}", (up,))

    @cached_property
    def _attention(self) -> tuple[_Part, ...]:
        dim = self._config.head_dim
        num_heads, num_groups = self._counts
        queries = num_heads // num_groups * dim
        starts = range(0, (num_heads + 2 * num_groups) * dim, queries + 2 * dim)
        q = tuple(range(start, start + queries) for start in starts)
        k = tuple(range(group.stop, group.stop + dim) for group in q)
        v = tuple(range(group.stop, group.stop + dim) for group in k)
        if QKV in self._fused:
            return (_Part(f"self_attn.{QKV}", q + k + v),)
        leaves = ("q_proj", "k_proj", "v_proj")
        return tuple(
            _Part(f"self_attn.{leaf}", rows) for leaf, rows in zip(leaves, (q, k, v), strict=True)
        )

    @property
    def _counts(self) -> tuple[int, int]:
        return self._config.num_heads, self._config.num_kv_heads


def _check_rows(key: str, entry: TorchEntry, parts: Sequence[_Part], report: Report) -> None:
    expected = sum(len(rows) for part in parts for rows in part.rows)
    if expected and entry.shape[:1] != (expected,):
        report.refuse(
            f"shape {list(entry.shape)} where {expected} rows are expected by {CONFIG}", key
        )


def _piece(entry: TorchEntry, key: str, rows: tuple[range, ...]) -> Piece:
    shape = (sum(map(len, rows)), *entry.shape[1:]) if rows else entry.shape
    return Piece(replace(entry, shape=shape), key, rows)


def _describe_other(key: str) -> str:
    return next((words for pattern, words in _OTHER_KINDS if pattern.search(key)), _UNKNOWN)
