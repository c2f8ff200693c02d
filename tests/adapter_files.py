"""Makes base layouts and the files of adapters, byte by byte and without torch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loramux.adapters.formats.safetensors_header import TensorEntry
from loramux.adapters.spec import BaseLayout, ModuleShape

REPOSITORY = Path(__file__).resolve().parent.parent
PREFIX = "base_model.model."

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I32": 4}

Shapes = Mapping[str, tuple[int, ...]]


def llama_layout(
    *,
    layers: int = 2,
    hidden: int = 64,
    kv: int = 32,
    mlp: int = 96,
    vocab: int = 300,
    tied: bool = False,
    bias: bool = False,
    name: str = "tiny/llama",
) -> BaseLayout:
    """A Llama-shaped decoder; ``kv`` is the output size of k_proj and v_proj, which have a bias
    like q_proj if there is any."""
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, mlp),
        "mlp.up_proj": (hidden, mlp),
        "mlp.down_proj": (mlp, hidden),
    }
    modules = {
        f"model.layers.{i}.{leaf}": ModuleShape(*size)
        for i in range(layers)
        for leaf, size in sizes.items()
    }
    modules["model.embed_tokens"] = ModuleShape(vocab, hidden)
    modules["lm_head"] = ModuleShape(hidden, vocab)
    norms = {"model.norm"} | {
        f"model.layers.{i}.{norm}"
        for i in range(layers)
        for norm in ("input_layernorm", "post_attention_layernorm")
    }
    return BaseLayout(
        name,
        modules,
        frozenset({"model", "model.layers"} | norms),
        replaceable={
            **{m: {"weight": (s.out_features, s.in_features)} for m, s in modules.items()},
            **{
                m: {"weight": (s.out_features, s.in_features), "bias": (s.out_features,)}
                for m, s in modules.items()
                if bias and m.endswith(("q_proj", "k_proj", "v_proj"))
            },
            "model.embed_tokens": {"weight": (vocab, hidden)},
            **{norm: {"weight": (hidden,)} for norm in norms},
        },
        embedding="model.embed_tokens",
        head="lm_head",
        tied=tied,
    )


def gpt2_layout(layers: int = 2, hidden: int = 64) -> BaseLayout:
    sizes = {
        "attn.c_attn": (hidden, 3 * hidden),
        "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (hidden, 4 * hidden),
        "mlp.c_proj": (4 * hidden, hidden),
    }
    modules = {
        f"transformer.h.{i}.{leaf}": ModuleShape(*size)
        for i in range(layers)
        for leaf, size in sizes.items()
    }
    return BaseLayout("tiny/gpt2", modules)


def lora_config(**change: Any) -> dict[str, Any]:
    """A plain adapter_config.json; a value of ``...`` leaves the field out."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny/llama",
        "r": 4,
        "lora_alpha": 8,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    return {key: value for key, value in (config | change).items() if value is not ...}


def pair(module: str, shape: ModuleShape, rank: int) -> dict[str, tuple[int, ...]]:
    """Keys and shapes of A and B of one module, as PEFT names them."""
    return {
        f"{PREFIX}{module}.lora_A.weight": (rank, shape.in_features),
        f"{PREFIX}{module}.lora_B.weight": (shape.out_features, rank),
    }


def pairs(base: BaseLayout, *leaves: str, rank: int = 4) -> dict[str, tuple[int, ...]]:
    """A and B for every module of ``base`` whose name ends in one of ``leaves``."""
    found: dict[str, tuple[int, ...]] = {}
    for module, shape in base.modules.items():
        if any(module.endswith("." + leaf) for leaf in leaves):
            found |= pair(module, shape, rank)
    return found


def entries(shapes: Shapes, dtype: str = "F32") -> dict[str, TensorEntry]:
    """Header entries for tensors of these shapes, one after another."""
    found, end = {}, 0
    for key, shape in shapes.items():
        start, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        found[key] = TensorEntry(dtype, shape, start, end)
    return found


def safetensors_bytes(shapes: Shapes, dtype: str = "F32", fill: bytes = b"\0") -> bytes:
    """A whole safetensors file whose data are ``fill`` again and again."""
    header = {
        key: {"dtype": e.dtype, "shape": list(e.shape), "data_offsets": [e.start, e.end]}
        for key, e in entries(shapes, dtype).items()
    }
    size = sum(e.end - e.start for e in entries(shapes, dtype).values())
    return with_header(header, (fill * size)[:size])


def with_header(header: object, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data
