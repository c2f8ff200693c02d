from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from loramux.adapters.formats import peft_fields
from loramux.adapters.formats.reader import read_adapter
from loramux.adapters.identity import adapter_id
from loramux.adapters.loaded import LoadedAdapter
from loramux.errors import AdapterRefused
from tests.adapter_files import PREFIX, REPOSITORY, llama_layout, lora_config, pairs

BASE = llama_layout()
Q0 = f"{PREFIX}model.layers.0.self_attn.q_proj"


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {key: torch.randn(shape) for key, shape in pairs(BASE, "q_proj", "v_proj").items()}


def read(
    directory: Path, tensors: dict[str, torch.Tensor] | None = None, **change: Any
) -> LoadedAdapter:
    """Write an adapter, then read it."""
    save_file(weights() if tensors is None else tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(lora_config(**change)))
    return read_adapter("fancy", directory, BASE, max_rank=64)


def refusal(directory: Path, tensors: dict[str, torch.Tensor], **change: Any) -> str:
    with pytest.raises(AdapterRefused) as caught:
        read(directory, tensors, **change)
    return str(caught.value)


def test_tensors_are_those_of_the_file(tmp_path: Path):
    loaded = read(tmp_path)
    assert loaded.tensors.keys() == weights().keys()
    assert all(torch.equal(loaded.tensors[key], value) for key, value in weights().items())
    assert loaded.num_bytes == sum(value.nbytes for value in weights().values())


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2],
)
def test_tensors_keep_the_dtype_of_the_file(dtype: torch.dtype, tmp_path: Path):
    loaded = read(tmp_path, {key: value.to(dtype) for key, value in weights().items()})
    assert {tensor.dtype for tensor in loaded.tensors.values()} == {dtype}


def test_weights_stay_as_read_when_the_file_is_overwritten(tmp_path: Path):
    loaded = read(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    with file.open("r+b") as handle:
        handle.seek(-64, 2)
        handle.write(b"\0" * 64)
    assert all(torch.equal(loaded.tensors[key], value) for key, value in weights().items())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_value_that_is_not_finite_is_refused_with_its_tensor(
    part: str, value: float, tmp_path: Path
):
    tensors = weights()
    tensors[f"{Q0}.{part}.weight"][1, 2] = value
    text = refusal(tmp_path, tensors)
    assert "not finite" in text
    assert f"{Q0}.{part}.weight" in text


def test_value_beyond_float32_is_refused(tmp_path: Path):
    tensors = {key: value.double() for key, value in weights().items()}
    tensors[f"{Q0}.lora_A.weight"][0, 0] = 1e300
    assert "not finite" in refusal(tmp_path, tensors)


def test_scale_that_overflows_is_refused(tmp_path: Path):
    assert "overflow" in refusal(tmp_path, weights(), lora_alpha=1e300)


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_adapter_that_changes_nothing_is_refused(part: str, tmp_path: Path):
    tensors = {k: torch.zeros_like(v) if part in k else v for k, v in weights().items()}
    assert "would change nothing" in refusal(tmp_path, tensors)


def test_alpha_zero_changes_nothing(tmp_path: Path):
    assert "would change nothing" in refusal(tmp_path, weights(), lora_alpha=0)


def test_one_module_that_changes_something_is_enough(tmp_path: Path):
    tensors = {k: torch.zeros_like(v) if "lora_B" in k else v for k, v in weights().items()}
    tensors[f"{Q0}.lora_B.weight"][0, 0] = 1e-3
    assert len(read(tmp_path, tensors).spec.deltas) == 4


def test_dora_with_zero_b_still_changes_something(tmp_path: Path):
    tensors = {k: torch.zeros_like(v) if "lora_B" in k else v for k, v in weights().items()}
    for key in [key for key in tensors if "lora_B" in key]:
        name = key.replace("lora_B.weight", "lora_magnitude_vector")
        tensors[name] = torch.ones(tensors[key].shape[0])
    assert all(d.magnitude for d in read(tmp_path, tensors, use_dora=True).spec.deltas)


def test_findings_of_both_files_come_in_one_error(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text("{")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(AdapterRefused) as caught:
        read_adapter("fancy", tmp_path, BASE, max_rank=64)
    assert len(caught.value.reasons) == 2


def test_spelling_and_metadata_do_not_change_the_id(tmp_path: Path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = read(tmp_path / "one")
    renamed = {key.removeprefix(PREFIX): value for key, value in reversed(weights().items())}
    two = read(tmp_path / "two", renamed, lora_dropout=0.1, base_model_name_or_path="x/llama")
    assert adapter_id(one.spec, one.tensors) == adapter_id(two.spec, two.tensors)


def test_other_alpha_changes_the_id(tmp_path: Path):
    one, two = read(tmp_path), read(tmp_path, lora_alpha=9)
    assert adapter_id(one.spec, one.tensors) != adapter_id(two.spec, two.tensors)


def test_same_scale_in_other_words_is_the_same_id(tmp_path: Path):
    one = read(tmp_path)
    two = read(tmp_path, lora_alpha=1.0, alpha_pattern={"q_proj": 8, "v_proj": 8})
    assert adapter_id(one.spec, one.tensors) == adapter_id(two.spec, two.tensors)


def test_every_field_of_peft_is_known():
    assert {field.name for field in dataclasses.fields(LoraConfig)} <= peft_fields.KNOWN


# Trained adapters --------------------------------------------------------------------------------

EXAMPLES = sorted((REPOSITORY / "examples" / "adapters").glob("*/adapter_config.json"))
TINY = sorted((REPOSITORY / "tests" / "tiny").glob("*/adapter_config.json"))
SMOLLM2 = llama_layout(layers=30, hidden=576, kv=192, mlp=1536, name="SmolLM2-135M-Instruct")


@pytest.mark.parametrize("config", EXAMPLES, ids=lambda path: path.parent.name)
def test_example_adapter_loads_without_a_warning(config: Path):
    loaded = read_adapter(config.parent.name, config.parent, SMOLLM2, max_rank=512)
    assert loaded.spec.warnings == ()
    assert loaded.tensors.keys() == load_file(config.with_name("adapter_model.safetensors")).keys()


def test_example_adapters_all_differ():
    ids = set()
    for config in EXAMPLES:
        loaded = read_adapter(config.parent.name, config.parent, SMOLLM2, max_rank=512)
        ids.add(adapter_id(loaded.spec, loaded.tensors))
    assert len(ids) == len(EXAMPLES) == 6


def tiny_base() -> Any:
    """Layout of the small trained model, its sizes taken from an adapter on all its linears."""
    file = REPOSITORY / "tests" / "tiny" / "queen" / "adapter_model.safetensors"
    shapes = {key: tensor.shape for key, tensor in load_file(file).items()}
    layer = f"{PREFIX}model.layers.0."
    return llama_layout(
        layers=sum(key.endswith("q_proj.lora_A.weight") for key in shapes),
        hidden=shapes[f"{layer}self_attn.q_proj.lora_A.weight"][1],
        kv=shapes[f"{layer}self_attn.k_proj.lora_B.weight"][0],
        mlp=shapes[f"{layer}mlp.down_proj.lora_A.weight"][1],
        name="glassllm-0.1.0-en",
    )


@pytest.mark.parametrize("config", TINY, ids=lambda path: path.parent.name)
def test_tiny_adapter_loads_without_a_warning(config: Path):
    loaded = read_adapter(config.parent.name, config.parent, tiny_base(), max_rank=512)
    assert loaded.spec.warnings == ()


def test_ranks_and_scales_of_a_tiny_adapter_with_patterns():
    directory = REPOSITORY / "tests" / "tiny" / "hatter"
    deltas = read_adapter("hatter", directory, tiny_base(), max_rank=512).spec.deltas
    found = {delta.module: (delta.rank, delta.scale) for delta in deltas}
    assert found["model.layers.0.self_attn.q_proj"] == (24, 12 / 24)
    assert found["model.layers.0.mlp.down_proj"] == (1, 5.0)
    assert found["model.layers.1.mlp.down_proj"] == (3, 5 / 3)
