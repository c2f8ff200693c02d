"""What is told of an adapter before its weights are read; none of this loads torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from loramux.adapters.formats.peft_config import read_config
from loramux.adapters.inspected import Inspection, ModuleFacts, ReferenceBase, Stated, place
from loramux.adapters.inspection import inspect_adapter
from loramux.adapters.report import Report
from loramux.adapters.spec import LoraSpec, ModuleShape
from loramux.adapters.unusual import remarks
from tests.adapter_files import llama_layout, lora_config
from tests.unit.adapters.test_config_corpus import (
    HERE,
    OUTSIDE,
    SERVE,
    VERDICTS,
    expected,
    outside_rows,
)


def never_packed(spec: LoraSpec, shapes: Mapping[str, ModuleShape], dtype: str) -> int:
    raise AssertionError("there are no weights")


def inspect_config(
    directory: Path, config: bytes | dict[str, Any], base: ReferenceBase | None = None
) -> Inspection:
    data = config if isinstance(config, bytes) else json.dumps(config).encode()
    (directory / "adapter_config.json").write_bytes(data)
    return inspect_adapter(directory, base, max_rank=512, packed_bytes=never_packed)


@pytest.mark.parametrize("name", VERDICTS)
def test_configuration_alone_is_refused_for_what_it_says(name: str, tmp_path: Path):
    found = inspect_config(tmp_path, (HERE / name).read_bytes())
    report = Report()
    read_config(tmp_path, report)
    assert found.reasons == report.reasons
    assert found.verdict == ("refused" if report.refused else "config only")
    if VERDICTS[name] == SERVE:
        assert found.verdict == "config only"


@pytest.mark.skipif(not outside_rows(), reason="the collection is not beside this checkout")
@pytest.mark.parametrize("row", outside_rows(), ids=lambda row: row["file"])
def test_configuration_of_the_collection_is_refused_only_where_it_may_be(
    row: dict[str, str], tmp_path: Path
):
    found = inspect_config(tmp_path, (OUTSIDE / row["file"]).read_bytes())
    if found.verdict == "refused":
        assert False in expected(row["server_should"]), found.reasons
    else:
        assert found.verdict == "config only"
        assert found.reasons == ()


def test_fields_of_the_configuration_are_told(tmp_path: Path):
    fields = lora_config(revision="main", peft_version="0.19.0", use_rslora=True)
    found = inspect_config(tmp_path, fields)
    assert (found.base_model, found.revision) == ("tiny/llama", "main")
    assert (found.format, found.peft_version) == ("peft", "0.19.0")
    assert (found.rank, found.alpha, found.use_rslora, found.use_dora) == (4, 8.0, True, False)
    assert found.bytes.file is None


def test_without_weights_nothing_is_checked_against_the_base(tmp_path: Path):
    base = ReferenceBase(llama_layout(), "float32", lambda module: None)
    assert inspect_config(tmp_path, lora_config(), base).checked_against is None


def test_fields_of_wrong_types_are_not_told(tmp_path: Path):
    found = inspect_config(tmp_path, lora_config(revision=["x"], peft_version=3, lora_dropout="a"))
    assert (found.revision, found.peft_version) == (None, None)
    assert found.verdict == "config only"


def test_empty_directory_is_refused(tmp_path: Path):
    found = inspect_adapter(tmp_path, max_rank=8, packed_bytes=never_packed)
    assert found.verdict == "refused"
    assert found.reasons == ("adapter_config.json is missing",)


def test_rank_above_the_limit_is_told_without_weights(tmp_path: Path):
    shutil.copy(HERE / "gen_r256_alpha512.json", tmp_path / "adapter_config.json")
    found = inspect_adapter(tmp_path, max_rank=64, packed_bytes=never_packed)
    assert found.verdict == "config only"
    assert "rank 256 is above the limit of 64" in found.unusual


@pytest.mark.parametrize(
    ("module", "kind_and_layer"),
    [
        ("model.layers.12.mlp.up_proj", ("mlp.up_proj", 12)),
        ("transformer.h.0.attn.c_attn", ("attn.c_attn", 0)),
        ("model.layers.1.experts.3.w1", ("experts.3.w1", 1)),
        ("lm_head", ("lm_head", None)),
        ("layers.7", ("layers.7", 7)),
        ("layers.²", ("layers.²", None)),
        ("layers." + "9" * 999, ("layers." + "9" * 999, None)),
    ],
)
def test_place_of_a_module(module: str, kind_and_layer: tuple[str, int | None]):
    assert place(module) == kind_and_layer


def facts(**change: Any) -> ModuleFacts:
    plain = {"module": "m.0.q", "kind": "q", "layer": 0, "rank": 4, "alpha": 8.0, "scale": 2.0}
    return ModuleFacts(**{**plain, **change})


@pytest.mark.parametrize(
    ("modules", "remark"),
    [
        ([facts(rank=4), facts(rank=8)], "ranks differ between modules: 4, 8"),
        ([facts(scale=17.0)], "scale 17 is beyond 16: m.0.q"),
        ([facts(scale=-1.0)], "the scale is negative: the delta is subtracted: m.0.q"),
        ([facts(delta_norm=0.0)], "the delta is zero (lora_B, lora_A or the scale): m.0.q"),
        ([facts(relative_norm=0.6)], "the delta is larger than 0.5 of the base weight: m.0.q"),
    ],
)
def test_unusual_module_is_remarked_upon(modules: list[ModuleFacts], remark: str):
    assert remarks(Stated(), None, modules, None) == (remark,)


def test_usual_modules_are_not():
    usual = facts(scale=16.0, delta_norm=1.0, relative_norm=0.5)
    assert remarks(Stated(), None, [usual, usual], None) == ()


def test_dropout_is_said_to_have_no_effect():
    [remark] = remarks(Stated({"lora_dropout": 0.05}), None, [], None)
    assert remark.startswith("lora_dropout is 0.05: of no effect")


def test_comparison_with_a_base_is_remarked_upon():
    base = ReferenceBase(llama_layout(layers=3), "float32", lambda module: None, ("told by name",))
    found = remarks(Stated({"revision": "v2"}), None, [facts(delta_norm=1.0)], base)
    assert found == (
        "told by name",
        "revision v2 of the base is named: not compared",
        "weights of the base that cannot be read as safetensors: no relative norm",
        "adapts 1 of 3 layers",
    )
