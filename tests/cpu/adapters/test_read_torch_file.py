"""Files of torch.save are read as torch reads them, and nothing in them is run."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from loramux.adapters.formats import peft, tensors
from loramux.adapters.formats.reader import read_adapter
from loramux.adapters.formats.tensors import read_torch
from loramux.adapters.formats.torch_header import read_header
from loramux.adapters.identity import adapter_id
from loramux.errors import AdapterRefused
from tests.adapter_files import llama_layout, lora_config, pairs

BASE = llama_layout()


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {key: torch.randn(shape) for key, shape in pairs(BASE, "q_proj", "v_proj").items()}


def adapter(directory: Path, value: Any, **options: Any) -> Path:
    (directory / "adapter_config.json").write_text(json.dumps(lora_config()))
    torch.save(value, directory / "adapter_model.bin", **options)
    return directory


def read(path: Path) -> dict[str, torch.Tensor]:
    return read_torch(path, read_header(path))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
)  # fmt: skip
def test_every_dtype_is_read_as_torch_reads_it(dtype: torch.dtype, tmp_path: Path):
    path = tmp_path / "adapter_model.bin"
    torch.save({"a": torch.randn(5, 3).to(dtype), "b": torch.randn(2).to(dtype)}, path)
    expected = torch.load(path, weights_only=True)
    found = read(path)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == dtype
        assert torch.equal(found[key].view(torch.uint8), tensor.view(torch.uint8))


def test_views_are_read_as_torch_reads_them(tmp_path: Path):
    path = tmp_path / "adapter_model.bin"
    flat = torch.randn(60)
    value = {
        "whole": flat.view(6, 10),
        "turned": flat[:12].view(3, 4).t(),
        "later": flat[20:32].view(4, 3),
        "repeated": flat[7:8].expand(2, 3),
        "scalar": torch.tensor(3.5),
        "parameter": torch.nn.Parameter(torch.randn(3, 2)),
    }
    torch.save(value, path)
    expected = torch.load(path, weights_only=True)
    found = read(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert all(tensor.is_contiguous() for tensor in found.values())


def test_state_dict_of_a_module_is_read(tmp_path: Path):
    path = tmp_path / "adapter_model.bin"
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    torch.save(module.state_dict(), path)
    found = read(path)
    assert all(torch.equal(found[key], value) for key, value in module.state_dict().items())


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_adapter_is_the_same_as_from_safetensors(kind: type[dict[str, Any]], tmp_path: Path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    from_pickle = read_adapter("fancy", adapter(one, kind(weights())), BASE, max_rank=64)
    (two / "adapter_config.json").write_text(json.dumps(lora_config()))
    save_file(weights(), two / "adapter_model.safetensors")
    plain = read_adapter("fancy", two, BASE, max_rank=64)
    assert from_pickle.num_bytes == plain.num_bytes
    ids = {adapter_id(loaded.spec, loaded.tensors) for loaded in (from_pickle, plain)}
    assert len(ids) == 1


def test_safetensors_are_preferred(tmp_path: Path):
    adapter(tmp_path, {key: value * 2 for key, value in weights().items()})
    save_file(weights(), tmp_path / "adapter_model.safetensors")
    loaded = read_adapter("fancy", tmp_path, BASE, max_rank=64)
    assert all(torch.equal(loaded.tensors[key], value) for key, value in weights().items())


def test_file_in_the_format_before_zip_is_refused_with_the_remedy(tmp_path: Path):
    adapter(tmp_path, weights(), _use_new_zipfile_serialization=False)
    with pytest.raises(AdapterRefused, match=r"since 1\.6; convert it to safetensors"):
        read_adapter("fancy", tmp_path, BASE, max_rank=64)


def test_wrong_shapes_are_refused_before_any_tensor_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(peft, "read_torch", fail)
    monkeypatch.setattr(tensors, "read_torch", fail)
    adapter(tmp_path, weights() | {"base_model.model.x.lora_A.weight": torch.ones(1000, 1000)})
    with pytest.raises(AdapterRefused, match="no module of"):
        read_adapter("fancy", tmp_path, BASE, max_rank=64)


def test_file_that_shrinks_after_its_header_is_refused(tmp_path: Path):
    path = adapter(tmp_path, weights()) / "adapter_model.bin"
    entries = read_header(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(Exception, match="changed while it was read"):
        read_torch(path, entries)


def test_integers_are_refused_by_their_dtype(tmp_path: Path):
    adapter(tmp_path, {key: value.int() for key, value in weights().items()})
    with pytest.raises(AdapterRefused, match="dtype I32 is not served"):
        read_adapter("fancy", tmp_path, BASE, max_rank=64)
