from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from loramux.adapters.formats.files import MalformedFile
from loramux.adapters.formats.reader import read_adapter
from loramux.adapters.formats.safetensors_header import examine
from loramux.adapters.formats.tensors import read_safetensors
from loramux.adapters.spec import BaseLayout, ModuleShape
from loramux.errors import AdapterRefused
from loramux.lora.weights import ModuleTable, pack
from tests.adapter_files import llama_layout, lora_config, pair, with_header
from tests.cpu.placed import each_of

BASE = llama_layout()


def refusal(directory: Path) -> str:
    with pytest.raises(AdapterRefused) as caught:
        read_adapter("fancy", directory, BASE, max_rank=64)
    return str(caught.value)


def with_config(directory: Path) -> Path:
    (directory / "adapter_config.json").write_text(json.dumps(lora_config()))
    return directory


def test_empty_folder_is_refused_with_all_that_was_looked_for(tmp_path: Path):
    text = refusal(tmp_path)
    for file in ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"):
        assert file in text
    assert "adapters.safetensors" in text


@pytest.mark.parametrize(
    ("file", "word"),
    [
        ("adapters.npz", "mlx-lm"),
        ("adapter_model.safetensors.index.json", "sharded"),
        ("adapter_model.bin.index.json", "sharded"),
    ],
)
def test_other_weight_files_are_named_with_the_remedy(file: str, word: str, tmp_path: Path):
    (with_config(tmp_path) / file).write_bytes(b"x")
    text = refusal(tmp_path)
    assert f"{file} is" in text
    assert word in text


def test_link_that_leads_nowhere_decides_the_format_and_is_missing(tmp_path: Path):
    (with_config(tmp_path) / "adapters.safetensors").symlink_to("gone")
    assert "adapters.safetensors is missing" in refusal(tmp_path)


# Values of every stored dtype --------------------------------------------------------------------

Q = "model.layers.0.self_attn.q_proj"


def packed(directory: Path, dtype: str, item: bytes, rows: int) -> torch.Tensor:
    """What a device gets of B where all bytes of B are ``item`` and A is one."""
    shape = ModuleShape(1, rows)
    base = BaseLayout("tiny/llama", {Q: shape})
    header, at, parts = {}, 0, (b"\0\0\x80\x3f", item)
    for (key, sizes), data in zip(pair(Q, shape, 1).items(), parts, strict=True):
        stored = "F32" if key.endswith("lora_A.weight") else dtype
        header[key] = {"dtype": stored, "shape": sizes, "data_offsets": [at, at + len(data)]}
        at += len(data)
    file = with_header(header, b"".join(parts))
    (directory / "adapter_model.safetensors").write_bytes(file)
    config = lora_config(r=1, lora_alpha=1, target_modules=["q_proj"])
    (directory / "adapter_config.json").write_text(json.dumps(config))
    loaded = read_adapter("fancy", directory, base, max_rank=64)
    modules = ModuleTable((Q,), (shape,))
    copy = pack(loaded.spec, loaded.tensors, modules, torch.float32, lambda _: torch.empty(0))
    unit = 16 // copy.block.whole.element_size()
    offset = each_of(copy.placements)[0].offset_b * unit
    return copy.block.whole[offset:].view(rows, -1)[:, 0]


def small_float(code: int, exponent_bits: int) -> float:
    """The value of an eight-bit float by its definition."""
    mantissa_bits = 7 - exponent_bits
    bias = (1 << (exponent_bits - 1)) - 1
    exponent = (code & 0x7F) >> mantissa_bits
    fraction = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    size = (1 + fraction if exponent else fraction) * 2.0 ** (max(exponent, 1) - bias)
    return -size if code & 0x80 else size


@pytest.mark.parametrize(
    ("dtype", "exponent_bits", "not_numbers"),
    [("F8_E4M3", 4, {0x7F, 0xFF}), ("F8_E5M2", 5, {*range(0x7C, 0x80), *range(0xFC, 0x100)})],
)
def test_every_value_of_float8_is_widened_exactly(
    dtype: str, exponent_bits: int, not_numbers: set[int], tmp_path: Path
):
    codes = [code for code in range(256) if code not in not_numbers]
    found = packed(tmp_path, dtype, bytes(codes), len(codes))
    assert found.tolist() == [small_float(code, exponent_bits) for code in codes]
    for code in not_numbers:
        with pytest.raises(AdapterRefused, match="not finite"):
            packed(tmp_path, dtype, bytes([code]), 1)


@pytest.mark.parametrize(
    ("dtype", "letter", "values"),
    [
        ("F16", "e", [1.0, -2.5, 65504.0, 2.0**-24, -(2.0**-14), 1 / 1024]),
        ("F64", "d", [1.0, -2.5, 2.0**120, 2.0**-140, 1 + 2.0**-23]),
    ],
)
def test_values_of_wide_and_half_floats_are_read_exactly(
    dtype: str, letter: str, values: list[float], tmp_path: Path
):
    data = struct.pack(f"<{len(values)}{letter}", *values)
    assert packed(tmp_path, dtype, data, len(values)).tolist() == values


@pytest.mark.parametrize(
    ("dtype", "size"), [("I8", 1), ("U8", 1), ("I32", 4), ("I64", 8), ("BOOL", 1), ("F8_E8M0", 1)]
)
def test_dtypes_that_are_no_served_floats_are_refused(dtype: str, size: int, tmp_path: Path):
    with pytest.raises(AdapterRefused, match=f"dtype {dtype} is not served"):
        packed(tmp_path, dtype, bytes([1] * size), 1)


def test_tensors_are_read_wherever_they_stand_in_the_file(tmp_path: Path):
    tensors = {
        "eight": torch.tensor([1.0, -2.0, 0.5]).to(torch.float8_e4m3fn),
        "wide": torch.randn(3, 5, dtype=torch.float64),
        "half": torch.randn(7, 1).half(),
        "brain": torch.randn(2, 2, 2).bfloat16(),
    }
    parts = {name: t.contiguous().view(-1).view(torch.uint8) for name, t in tensors.items()}
    dtypes = {"eight": "F8_E4M3", "wide": "F64", "half": "F16", "brain": "BF16"}
    header, at = {}, 0
    for name, part in parts.items():  # 3 bytes first, so that all others are out of step
        end = at + len(part)
        shape = list(tensors[name].shape)
        header[name] = {"dtype": dtypes[name], "shape": shape, "data_offsets": [at, end]}
        at = end
    data = b"".join(bytes(part.tolist()) for part in parts.values())
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(with_header(header, data))
    found = read_safetensors(examine(path))
    path.write_bytes(b"")
    assert found.keys() == tensors.keys()
    for name, tensor in found.items():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor.double(), tensors[name].double())


@pytest.mark.parametrize(
    "other",
    [
        save({"a": torch.ones(2, 6)}),
        save({"b": torch.ones(3, 4)}),
        save({"a": torch.ones(3, 4)})[:-1],
        b"",
    ],
    ids=["shape", "name", "shorter", "empty"],
)
def test_a_file_that_changes_after_its_header_is_refused(other: bytes, tmp_path: Path):
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(save({"a": torch.ones(3, 4)}))
    file = examine(path)
    path.write_bytes(other)
    with pytest.raises(MalformedFile, match="changed while it was read"):
        read_safetensors(file)
