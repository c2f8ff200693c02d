"""Numbers and verdicts of ``inspect_adapter`` on adapters with weights."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loramux.adapters.formats.files import MalformedFile
from loramux.adapters.formats.peft_config import parse_config
from loramux.adapters.formats.reader import read_adapter
from loramux.adapters.inspected import Inspection, ReferenceBase
from loramux.adapters.inspection import inspect_adapter
from loramux.adapters.report import Report
from loramux.adapters.spec import BaseLayout, LoraSpec, ModuleShape
from loramux.adapters.spectrum import singular_values
from loramux.errors import AdapterRefused
from loramux.lora.weights import ModuleTable, pack, packed_bytes
from loramux.model.anatomy import examine
from loramux.model.attention_seam import AttentionSeam
from loramux.model.load import adopt
from loramux.testing import random_adapter
from tests.adapter_files import (
    PREFIX,
    REPOSITORY,
    gpt2_layout,
    llama_layout,
    lora_config,
    pairs,
    safetensors_bytes,
)
from tests.cpu import twins
from tests.unit.adapters.test_config_corpus import (
    HERE,
    OTHER_SIZES,
    OUTSIDE,
    SERVE,
    SERVED_ALL_THE_SAME,
    VERDICTS,
    expected,
    outside_rows,
    weights_for,
)

BASE = llama_layout()
TARGETS = ("q_proj", "down_proj")


def against(layout: BaseLayout, norm: float | None = 10.0) -> ReferenceBase:
    return ReferenceBase(layout, "float32", lambda module: norm)


def packed(spec: LoraSpec, shapes: Mapping[str, ModuleShape], dtype: str) -> int:
    return packed_bytes(spec, shapes, getattr(torch, dtype))


def inspect(directory: Path, base: ReferenceBase | None = None, **options: Any) -> Inspection:
    return inspect_adapter(directory, base, **{"max_rank": 512, "packed_bytes": packed} | options)


@pytest.mark.parametrize(
    ("rank", "rows", "columns"), [(1, 5, 7), (4, 16, 24), (6, 4, 9), (6, 9, 4)]
)
def test_singular_values_are_those_of_the_product(rank: int, rows: int, columns: int) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(rank, columns), torch.randn(rows, rank)
    whole = torch.linalg.svdvals(-0.5 * b.double() @ a.double())
    found = torch.tensor(singular_values(a, b, -0.5), dtype=torch.float64)
    assert len(found) == min(rank, rows, columns)
    torch.testing.assert_close(found, whole[: len(found)], rtol=1e-10, atol=1e-10)


def test_module_has_the_numbers_of_its_delta(tmp_path: Path) -> None:
    random_adapter(tmp_path, BASE, rank=4, targets=TARGETS, seed=1, rank_pattern={"down_proj": 6})
    found = inspect(tmp_path, against(BASE))
    assert found.verdict == "serveable"
    assert found.checked_against == BASE.name
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert [facts.module for facts in found.modules] == [
        name for name in BASE.modules if name.endswith(TARGETS)
    ]
    for facts in found.modules:
        key = f"{PREFIX}{facts.module}"
        rank = 6 if "down" in facts.module else 4
        delta = (8 / rank) * (
            tensors[f"{key}.lora_B.weight"].double() @ tensors[f"{key}.lora_A.weight"].double()
        )
        energy = torch.linalg.svdvals(delta).square()
        shares = energy.cumsum(0) / energy.sum()
        assert (facts.rank, facts.alpha, facts.scale) == (rank, 8.0, 8 / rank)
        assert facts.delta_norm == pytest.approx(delta.norm().item())
        assert facts.relative_norm == pytest.approx(delta.norm().item() / 10)
        assert facts.top_share == pytest.approx(shares[0].item())
        assert facts.values_for_90 == int((shares < 0.9).sum()) + 1
    assert "ranks differ between modules: 4, 6" in found.unusual


def test_layers_add_up_their_modules(tmp_path: Path) -> None:
    random_adapter(tmp_path, BASE, rank=2, targets=TARGETS, seed=2)
    found = inspect(tmp_path, against(BASE))
    for layer in found.layers:
        norms = [m.delta_norm or 0.0 for m in found.modules if m.layer == layer.layer]
        assert len(norms) == len(TARGETS)
        assert layer.delta_norm == pytest.approx(math.sqrt(sum(n**2 for n in norms)))
        assert layer.relative_norm == pytest.approx(layer.delta_norm / (10 * math.sqrt(2)))


def test_parts_of_a_fused_base_are_told_with_their_rows(tmp_path: Path) -> None:
    split, fused = twins.llama(), twins.phi3()
    base = examine(adopt("fused", fused), AttentionSeam(fused)).layout
    targets = ("q_proj", "v_proj", "gate_proj")
    layout = examine(adopt("split", split), AttentionSeam(split)).layout
    random_adapter(tmp_path, layout, rank=2, targets=targets, seed=4)
    found = inspect(tmp_path, against(base))
    alone = {facts.module: facts for facts in inspect(tmp_path).modules}
    assert found.verdict == "serveable"
    assert len(found.modules) == len(alone) == 6
    for facts in found.modules:
        [target] = [
            name
            for name, (module, rows) in twins.ROWS.items()
            if name in targets
            and facts.module.endswith(module)
            and facts.rows == (rows.start, rows.stop)
        ]
        place = facts.module.rpartition(".")[0]
        assert facts.singular_values == alone[f"{place}.{target}"].singular_values
    for layer in found.layers:
        assert layer.relative_norm == pytest.approx(layer.delta_norm / (10 * math.sqrt(2)))


def test_fused_adapter_is_measured_part_by_part_on_a_split_base(tmp_path: Path) -> None:
    split, fused = twins.llama(), twins.phi3()
    layout = examine(adopt("fused", fused), AttentionSeam(fused)).layout
    base = examine(adopt("split", split), AttentionSeam(split)).layout
    random_adapter(tmp_path, layout, rank=2, targets=("gate_up_proj",), seed=5)
    found, alone = inspect(tmp_path, against(base)), inspect(tmp_path)
    assert [facts.kind for facts in found.modules] == ["mlp.gate_proj", "mlp.up_proj"] * 2
    for part, whole in zip(found.layers, alone.layers, strict=True):
        assert part.delta_norm == pytest.approx(whole.delta_norm)


def test_norms_are_not_relative_where_the_base_has_none(tmp_path: Path) -> None:
    random_adapter(tmp_path, BASE, rank=2, targets=TARGETS, seed=2)
    found = inspect(tmp_path, against(BASE, norm=None))
    assert all(m.delta_norm and m.relative_norm is None for m in found.modules)
    assert all(layer.relative_norm is None for layer in found.layers)
    assert any("no relative norm" in remark for remark in found.unusual)


def test_nothing_is_measured_unless_wanted(tmp_path: Path) -> None:
    random_adapter(tmp_path, BASE, rank=2, targets=TARGETS, seed=2)
    found = inspect(tmp_path, measure=False)
    assert found.verdict == "serveable"
    assert all(facts.delta_norm is None for facts in found.modules)
    assert found.layers == ()


@pytest.mark.parametrize("dora", [False, True])
def test_bytes_are_those_of_the_file_and_of_the_packed_block(tmp_path: Path, dora: bool) -> None:
    random_adapter(
        tmp_path, BASE, rank=3, targets=TARGETS, seed=3, dora=dora, rank_pattern={"q_proj": 9}
    )
    found = inspect(tmp_path, against(BASE))
    loaded = read_adapter("a", tmp_path, BASE, max_rank=512)
    table = ModuleTable(tuple(BASE.modules), tuple(BASE.modules.values()))

    def weight(module: int) -> torch.Tensor:
        shape = table.shapes[module]
        return torch.ones(shape.out_features, shape.in_features)

    copy = pack(loaded.spec, loaded.tensors, table, torch.float32, weight)
    assert found.bytes.block == copy.num_bytes
    assert found.bytes.block_dtype == "float32"
    assert found.bytes.file == loaded.num_bytes


def write(directory: Path, tensors: dict[str, torch.Tensor], **change: Any) -> Path:
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(lora_config(**change)))
    return directory


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {key: torch.randn(shape) for key, shape in pairs(BASE, "q_proj", "v_proj").items()}


def test_zero_delta_is_remarked_upon(tmp_path: Path) -> None:
    tensors = weights()
    tensors[f"{PREFIX}model.layers.1.self_attn.q_proj.lora_B.weight"].zero_()
    found = inspect(write(tmp_path, tensors))
    assert found.verdict == "serveable"
    [facts] = [m for m in found.modules if m.delta_norm == 0]
    assert facts.top_share is None
    assert facts.values_for_90 is None
    [remark] = found.unusual
    assert remark.endswith("model.layers.1.self_attn.q_proj")


Q0 = f"{PREFIX}model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("key", "tensor", "reason"),
    [
        (f"{Q0}.lora_B.weight", None, "lora_B is missing (incomplete pair)"),
        (f"{Q0}.lora_A.weight", torch.ones(5, 64), "lora_A has rank 5, but lora_B has rank 4"),
        (f"{Q0}.lora_A.weight", torch.ones(64), "shape [64] where [4, 64] is expected"),
        (f"{Q0}.lora_A.weight", torch.full((4, 64), math.nan), "not finite"),
        (f"{Q0}.lora_A.weight", torch.ones(4, 64, dtype=torch.int32), "dtype I32"),
        (f"{Q0}.lora_A.weight", torch.ones(4, 0), "empty tensors"),
        (f"{PREFIX}lm_head.lora_A.weight", torch.ones(4, 64), "lora_B is missing"),
        (f"{PREFIX}model.norm.weight", torch.ones(64), "modules_to_save does not name"),
        (f"{Q0}.bias", torch.ones(64), "bias is none"),
        (f"{PREFIX}vision_tower.0.q.lora_A.weight", torch.ones(4, 64), "vision or audio"),
        ("other", torch.ones(1), "tensors of an unknown kind"),
    ],
)
def test_faults_that_need_no_base_are_found_without_one(
    tmp_path: Path, key: str, tensor: torch.Tensor | None, reason: str
) -> None:
    tensors = {name: value for name, value in weights().items() if name != key}
    if tensor is not None:
        tensors[key] = tensor
    found = inspect(write(tmp_path, tensors))
    assert found.verdict == "refused"
    assert any(reason in text for text in found.reasons), found.reasons
    assert found.modules, "what is refused is described too"


def test_rank_that_the_configuration_denies_is_refused_and_told(tmp_path: Path) -> None:
    found = inspect(write(tmp_path, weights(), r=8, lora_alpha=4))
    assert any("but the configuration says rank 8" in reason for reason in found.reasons)
    assert {(m.rank, m.alpha, m.scale) for m in found.modules} == {(4, 4.0, 0.5)}


def test_what_hangs_on_the_base_is_refused_only_with_one(tmp_path: Path) -> None:
    write(tmp_path, weights())
    other = llama_layout(hidden=32, name="other")
    assert inspect(tmp_path).verdict == "serveable"
    assert inspect(tmp_path, against(other)).verdict == "refused"


def test_no_base_is_missed_where_none_is_given(tmp_path: Path) -> None:
    found = inspect(write(tmp_path, weights(), base_model_name_or_path="some/where/else"))
    assert found.unusual == ()


def fitting(config: Path, directory: Path, layout: BaseLayout) -> Path:
    """The configuration with weights that training with it would have saved, small enough."""
    shutil.copy(config, directory / "adapter_config.json")
    try:
        parsed = parse_config(config.read_bytes(), Report())
    except MalformedFile:
        parsed = None
    shapes = {} if parsed is None else weights_for(parsed, config.name, layout)
    # 0x3c00 is 1.0.
    data = safetensors_bytes(shapes, "F16", b"\x00\x3c")
    (directory / "adapter_model.safetensors").write_bytes(data)
    return directory


def small_layout(name: str) -> BaseLayout:
    if "gpt2" in name:
        return gpt2_layout(hidden=8)
    return llama_layout(layers=30, hidden=16, kv=8, mlp=24)


@pytest.mark.parametrize("name", VERDICTS)
def test_configuration_with_weights_gets_its_verdict(name: str, tmp_path: Path) -> None:
    layout = small_layout(name)
    found = inspect(fitting(HERE / name, tmp_path, layout), against(layout), measure=False)
    if VERDICTS[name] == SERVE:
        assert (found.verdict, found.reasons) == ("serveable", ())
    else:
        assert found.verdict == "refused"
        assert VERDICTS[name] in "\n".join(found.reasons)


@pytest.mark.skipif(not outside_rows(), reason="the collection is not beside this checkout")
@pytest.mark.parametrize("row", outside_rows(), ids=lambda row: row["file"])
def test_configuration_of_the_collection_gets_its_verdict(
    row: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = row["file"]
    if name in OTHER_SIZES:
        monkeypatch.setitem(OTHER_SIZES, name, llama_layout(hidden=40, mlp=56))
    layout = small_layout(name)
    found = inspect(fitting(OUTSIDE / name, tmp_path, layout), against(layout), measure=False)
    wanted = (True,) if name in SERVED_ALL_THE_SAME else expected(row["server_should"])
    assert (found.verdict == "serveable") in wanted, found.reasons


@pytest.mark.parametrize("seed", range(40))
def test_damaged_files_are_refused_and_nothing_else_is_raised(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    write(tmp_path, weights())
    path = tmp_path / rng.choice(["adapter_model.safetensors", "adapter_config.json"])
    data = bytearray(path.read_bytes())
    end = min(len(data), 2000)  # the header, since any value of a weight is right
    for _ in range(rng.randrange(1, 6)):
        data[rng.randrange(end)] = rng.randrange(256)
    path.write_bytes(data[: rng.randrange(end)] if seed % 4 == 0 else data)
    for base in (None, against(BASE)):
        found = inspect(tmp_path, base)
        assert (found.verdict == "refused") == bool(found.reasons)
        json.dumps(dataclasses.asdict(found))
    assert found.reasons == reasons_of_the_reader(tmp_path)


def reasons_of_the_reader(directory: Path) -> tuple[str, ...]:
    try:
        read_adapter("a", directory, BASE, max_rank=512)
    except AdapterRefused as refusal:
        return refusal.reasons
    return ()


def test_shipped_adapters_are_serveable() -> None:
    for config in (REPOSITORY / "examples" / "adapters").glob("*/adapter_config.json"):
        found = inspect(config.parent)
        assert found.verdict == "serveable"
        assert all(facts.delta_norm for facts in found.modules)


def described(directory: Path, base: ReferenceBase | None = None) -> list[tuple[object, ...]]:
    """What an inspection says about the modules, but for their alpha."""
    found = inspect(directory, base)
    assert found.verdict == "serveable", found.reasons
    return [
        (m.module, m.rank, m.scale, m.delta_norm, m.relative_norm, m.top_share)
        for m in sorted(found.modules, key=lambda m: m.module)
    ]


@pytest.mark.parametrize("base", [None, against(BASE)], ids=["alone", "with a base"])
def test_lenience_shows_unknown_fields_as_unusual(
    base: ReferenceBase | None, tmp_path: Path
) -> None:
    random_adapter(tmp_path, BASE, rank=2, targets=TARGETS, seed=0)
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"gamma": 0.5}))
    assert inspect(tmp_path, base).verdict == "refused"
    found = inspect(tmp_path, base, lenient=True)
    assert found.verdict == "serveable"
    assert "unknown field gamma" in found.unusual[0]


@pytest.mark.parametrize("base", [None, against(BASE)], ids=["alone", "with a base"])
def test_formats_of_one_adapter_are_described_alike(
    tmp_path: Path, base: ReferenceBase | None
) -> None:
    names = ("peft", "bin", "mlx")
    peft, binary, mlx = (tmp_path / name for name in names)
    random_adapter(peft, BASE, rank=4, targets=TARGETS, seed=5)
    tensors = load_file(peft / "adapter_model.safetensors")
    binary.mkdir()
    shutil.copy(peft / "adapter_config.json", binary)
    torch.save(tensors, binary / "adapter_model.bin")
    mlx.mkdir()
    parts = {"lora_A.weight": "lora_a", "lora_B.weight": "lora_b"}
    turned = {
        f"{key.removeprefix(PREFIX)[: -len(part) - 1]}.{parts[part]}": tensor.t().contiguous()
        for key, tensor in tensors.items()
        for part in parts
        if key.endswith(part)
    }
    save_file(turned, mlx / "adapters.safetensors")
    config = {"fine_tune_type": "lora", "num_layers": -1, "model": BASE.name}
    config["lora_parameters"] = {"rank": 4, "scale": 2.0, "dropout": 0.0}
    (mlx / "adapter_config.json").write_text(json.dumps(config))
    wanted = described(peft, base)
    assert described(binary, base) == wanted
    assert described(mlx, base) == wanted
    assert inspect(mlx).format == "mlx"
    assert inspect(mlx).modules[0].alpha == 8.0
