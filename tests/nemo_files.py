"""Makes NeMo adapters out of PEFT's tensors, head by head as Megatron orders them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

PREFIX = "base_model.model.model.layers."
WHOLE = {
    "self_attn.o_proj": "self_attention.adapter_layer.lora_dense_attention_adapter",
    "mlp.down_proj": "mlp.adapter_layer.lora_4htoh_adapter",
}
UNFUSED = {
    **{
        f"self_attn.{x}_proj": f"self_attention.adapter_layer.lora_unfused_kqv_adapter.{x}_adapter"
        for x in "qkv"
    },
    **{
        f"mlp.{x}_proj": f"mlp.adapter_layer.lora_unfused_hto4h_adapter.{x}_adapter"
        for x in ("gate", "up")
    },
}


def config(*, rank: int, heads: int, groups: int, hidden: int, **change: Any) -> dict[str, Any]:
    """A model_config.yaml as NeMo writes it, in what matters; ``lora`` changes ``lora_tuning``."""
    lora = {
        "target_modules": ["attention_qkv"],
        "adapter_dim": rank,
        "alpha": rank,
        "adapter_dropout": 0.0,
        "column_init_method": "xavier",
        "row_init_method": "zero",
        "layer_selection": None,
        "weight_tying": False,
        "position_embedding_strategy": None,
    } | change.pop("lora", {})
    whole = {
        "mcore_gpt": True,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "activation": "fast-swiglu",
        "tensor_model_parallel_size": 1,
        "peft": {"peft_scheme": "lora", "restore_from_path": None, "lora_tuning": lora},
    } | change
    return {key: value for key, value in whole.items() if value is not ...}


def weights(
    peft: Mapping[str, Tensor], *, heads: int, groups: int, prefix: str = "model.decoder.layers."
) -> dict[str, Tensor]:
    """The same adapter in NeMo's fused form; q, k and v (gate and up) must have the same A."""
    found: dict[str, Tensor] = {}
    for key, tensor in peft.items():
        number, block, leaf, part, _ = key.removeprefix(PREFIX).split(".")
        stem, side = f"{prefix}{number}.", "linear_in" if part == "lora_A" else "linear_out"
        if leaf in ("q_proj", "k_proj", "v_proj"):
            name = f"{stem}self_attention.adapter_layer.lora_kqv_adapter.{side}.weight"
            q, k, v = (peft[key.replace(leaf, other)] for other in ("q_proj", "k_proj", "v_proj"))
            found[name] = q if part == "lora_A" else by_group(q, k, v, heads, groups)
        elif leaf in ("gate_proj", "up_proj"):
            name = f"{stem}mlp.adapter_layer.lora_hto4h_adapter.{side}.weight"
            gate, up = (peft[key.replace(leaf, other)] for other in ("gate_proj", "up_proj"))
            found[name] = gate if part == "lora_A" else torch.cat([gate, up])
        else:
            found[f"{stem}{WHOLE[f'{block}.{leaf}']}.{side}.weight"] = tensor
    return found


def by_group(q: Tensor, k: Tensor, v: Tensor, heads: int, groups: int) -> Tensor:
    """For each key head its query heads, itself and its value head."""
    dim = len(k) // groups
    rows: list[Tensor] = []
    for group in range(groups):
        for head in range(group * heads // groups, (group + 1) * heads // groups):
            rows += [q[head * dim + i] for i in range(dim)]
        rows += [k[group * dim + i] for i in range(dim)]
        rows += [v[group * dim + i] for i in range(dim)]
    return torch.stack(rows)


def torch_bytes(tensors: object) -> bytes:
    out = io.BytesIO()
    torch.save(tensors, out)
    return out.getvalue()


def write_archive(path: Path, members: Mapping[str, bytes], mode: Any = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(data), 1.5  # a fraction takes a header of its own
            archive.addfile(member, io.BytesIO(data))
    return path


def members(tensors: object, configuration: object, *, dot: str = "") -> dict[str, bytes]:
    return {
        f"{dot}model_config.yaml": yaml.safe_dump(configuration).encode(),
        f"{dot}model_weights.ckpt": torch_bytes(tensors),
    }
