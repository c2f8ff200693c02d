from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from loramux.adapters.formats.reader import read_adapter
from loramux.adapters.fusions import find_fusions
from loramux.adapters.identity import adapter_id
from loramux.adapters.loaded import LoadedAdapter
from loramux.errors import AdapterRefused
from tests.adapter_files import PREFIX, llama_layout, lora_config

BASE = llama_layout()
SPLIT = replace(BASE, fusions=find_fusions("llama", BASE.modules, {0: (64, 32, 32)}))
RANK = 3
SCALE = 0.1  # 3 * 0.1 / 3 is another float


def mlx_config(**change: Any) -> dict[str, Any]:
    """What mlx-lm writes; a value of ``...`` leaves the field out."""
    config = {
        "model": "mlx-community/llama",
        "train": True,
        "batch_size": 4,
        "fine_tune_type": "lora",
        "num_layers": 2,
        "lora_parameters": {"rank": RANK, "scale": SCALE, "dropout": 0.0},
    }
    return {key: value for key, value in (config | change).items() if value is not ...}


def parameters(**change: Any) -> dict[str, Any]:
    return {"rank": RANK, "scale": SCALE, "dropout": 0.0} | change


def weights(*leaves: str, dora: bool = False) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {}
    for module, shape in BASE.modules.items():
        if module.split(".")[-1] in (leaves or ("q_proj", "v_proj")):
            tensors[f"{module}.lora_a"] = torch.randn(shape.in_features, RANK)
            tensors[f"{module}.lora_b"] = torch.randn(RANK, shape.out_features)
            if dora:
                tensors[f"{module}.m"] = torch.rand(shape.out_features) + 1
    return tensors


def read(directory: Path, tensors: dict[str, torch.Tensor], **change: Any) -> LoadedAdapter:
    save_file(tensors, directory / "adapters.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(mlx_config(**change)))
    return read_adapter("fancy", directory, SPLIT, max_rank=64)


def refusal(directory: Path, tensors: dict[str, torch.Tensor], **change: Any) -> str:
    with pytest.raises(AdapterRefused) as caught:
        read(directory, tensors, **change)
    return str(caught.value)


def test_delta_is_that_of_mlx(tmp_path: Path):
    stored = weights()
    loaded = read(tmp_path, stored)
    assert len(loaded.spec.deltas) == 4
    for delta in loaded.spec.deltas:
        a, b = stored[f"{delta.module}.lora_a"], stored[f"{delta.module}.lora_b"]
        found = delta.scale * (loaded.tensors[delta.b] @ loaded.tensors[delta.a])
        torch.testing.assert_close(found, (SCALE * (a @ b)).t())
        assert (delta.rank, delta.scale) == (RANK, SCALE)


def test_same_adapter_in_the_peft_format_has_the_same_id(tmp_path: Path):
    mlx_folder, peft_folder = tmp_path / "mlx", tmp_path / "peft"
    mlx_folder.mkdir()
    peft_folder.mkdir()
    inner = parameters(scale=2.0)
    one = read(mlx_folder, weights("k_proj", "down_proj", dora=True),
               fine_tune_type="dora", lora_parameters=inner)  # fmt: skip
    renamed = {}
    for key, tensor in weights("k_proj", "down_proj", dora=True).items():
        module, _, part = key.rpartition(".")
        name = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}.get(
            part, "lora_magnitude_vector"
        )
        renamed[f"{PREFIX}{module}.{name}"] = tensor.t().contiguous() if part != "m" else tensor
    save_file(renamed, peft_folder / "adapter_model.safetensors")
    config = lora_config(r=RANK, lora_alpha=2 * RANK, use_dora=True, target_modules=["k_proj"])
    (peft_folder / "adapter_config.json").write_text(json.dumps(config))
    two = read_adapter("fancy", peft_folder, BASE, max_rank=64)
    assert adapter_id(one.spec, one.tensors) == adapter_id(two.spec, two.tensors)
    assert all(tensor.is_contiguous() for tensor in one.tensors.values())


def test_square_matrices_are_turned_too(tmp_path: Path):
    """Where rank, input and output are equal no shape tells which way a matrix stands."""
    base = llama_layout(hidden=4, kv=4, mlp=4)
    module = "model.layers.1.self_attn.q_proj"
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    save_file({f"{module}.lora_a": a, f"{module}.lora_b": b}, tmp_path / "adapters.safetensors")
    config = mlx_config(lora_parameters=parameters(rank=4))
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    loaded = read_adapter("fancy", tmp_path, base, max_rank=64)
    (delta,) = loaded.spec.deltas
    assert torch.equal(loaded.tensors[delta.a], a.t())
    assert torch.equal(loaded.tensors[delta.b], b.t())


def test_model_of_the_configuration_is_compared_with_the_base(tmp_path: Path):
    assert read(tmp_path, weights()).spec.warnings == ()
    (warning,) = read(tmp_path, weights(), model="mlx-community/Other-4bit").spec.warnings
    assert "Other-4bit" in warning


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"fine_tune_type": "full"}, "fine_tune_type full"),
        ({"fine_tune_type": "ia3"}, "fine_tune_type is ia3"),
        ({"fine_tune_type": 3}, "fine_tune_type is no string"),
        ({"lora_parameters": ...}, "lora_parameters"),
        ({"lora_parameters": [1]}, "lora_parameters"),
        ({"lora_parameters": parameters(rank=0)}, "rank must be"),
        ({"lora_parameters": parameters(rank=8)}, "rank 3, but the configuration says rank 8"),
        ({"lora_parameters": parameters(scale="2")}, "scale must be"),
        ({"lora_parameters": {"rank": 3, "dropout": 0.0}}, "scale must be"),
        ({"lora_parameters": parameters(scale=0)}, "would change nothing"),
        ({"lora_parameters": parameters(alpha=16)}, "alpha"),
        ({"lora_parameters": parameters(use_rslora=True)}, "use_rslora"),
        ({"lora_parameters": parameters(keys="q_proj")}, "keys must be"),
        ({"lora_parameters": parameters(keys=["self_attn.q_proj"])}, "keys does not name"),
        ({"num_layers": 1}, "would not load earlier layers"),
        ({"num_layers": ...}, "num_layers must be"),
        ({"swap_gate_up": 1}, "swap_gate_up must be"),
        ({"fine_tune_type": "dora"}, "lora_magnitude_vector is missing"),
        ({"peft_type": "LORA"}, "is of a PEFT adapter"),
    ],
)
def test_configuration_that_cannot_be_honoured_is_refused(
    change: dict[str, Any], word: str, tmp_path: Path
):
    assert word in refusal(tmp_path, weights(), **change)


@pytest.mark.parametrize(
    "change",
    [
        {"fine_tune_type": ...},
        {"num_layers": -1},
        {"num_layers": ..., "lora_layers": 2},
        {"lora_parameters": parameters(keys=["self_attn.q_proj", "self_attn.v_proj"])},
        {"lora_parameters": parameters(future=None)},
    ],
)
def test_other_spellings_of_the_same_adapter_are_read(change: dict[str, Any], tmp_path: Path):
    assert len(read(tmp_path, weights(), **change).spec.deltas) == 4


def test_adapter_on_the_last_layers_only_is_read(tmp_path: Path):
    last = {key: value for key, value in weights().items() if ".1." in key}
    assert len(read(tmp_path, last, num_layers=1).spec.deltas) == 2


def test_magnitude_without_dora_is_refused(tmp_path: Path):
    assert "use_dora (DoRA) is not true" in refusal(tmp_path, weights(dora=True))


@pytest.mark.parametrize(
    ("key", "word"),
    [
        ("model.layers.0.self_attn.q_proj.lora_A.weight", "does not have"),
        ("model.layers.0.self_attn.q_proj.weight", "does not have"),
        ("model.layers.0.self_attn.q_proj.lora_a_scales", "does not have"),
        ("model.layers.0.mlp.switch_mlp.gate_proj.lora_a", "does not have"),
        ("model.embed_tokens.lora_a", "LoRA on an embedding"),
        ("model.layers.0.self_attn.o_proj.lora_a", "lora_B is missing"),
    ],
)
def test_tensor_that_is_no_lora_on_a_linear_is_refused(key: str, word: str, tmp_path: Path):
    assert word in refusal(tmp_path, weights() | {key: torch.ones(64, RANK)})


def test_matrices_that_stand_as_in_peft_are_refused(tmp_path: Path):
    turned = {key: value.t().contiguous() for key, value in weights().items()}
    assert "is expected" in refusal(tmp_path, turned)


@pytest.mark.parametrize("up_first", [True, False])
def test_fused_projection_is_split_in_the_order_that_is_said(up_first: bool, tmp_path: Path):
    module = "model.layers.0.mlp.gate_up_proj"
    a, b = torch.randn(64, RANK), torch.randn(RANK, 2 * 96)
    stored = {f"{module}.lora_a": a, f"{module}.lora_b": b}
    loaded = read(tmp_path, stored, swap_gate_up=up_first)
    halves = dict(zip(("up_proj", "gate_proj") if up_first else ("gate_proj", "up_proj"),
                      b.t().chunk(2), strict=True))  # fmt: skip
    assert len(loaded.spec.deltas) == 2
    for delta in loaded.spec.deltas:
        found = torch.cat(delta.pick(loaded.tensors[delta.b]))
        assert torch.equal(found, halves[delta.module.rpartition(".")[2]])


def test_lenience_warns_of_unknown_parameters(tmp_path: Path) -> None:
    text = refusal(tmp_path, weights(), lora_parameters=parameters(gamma=2))
    assert "gamma" in text
    loaded = read_adapter("fancy", tmp_path, SPLIT, max_rank=64, lenient=True)
    warning = "unknown field gamma in lora_parameters is set, but ignored (lenient)"
    assert warning in loaded.spec.warnings
