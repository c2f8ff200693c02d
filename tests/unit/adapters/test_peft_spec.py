from __future__ import annotations

import json
from collections import Counter
from typing import Any, ClassVar

import pytest

from loramux.adapters.formats import peft_spec
from loramux.adapters.formats.peft_config import parse_config
from loramux.adapters.formats.peft_spec import build_spec
from loramux.adapters.formats.places import Place, Places
from loramux.adapters.report import Report
from loramux.adapters.spec import BaseLayout, LoraSpec, ModuleDelta
from tests.adapter_files import (
    PREFIX,
    Shapes,
    entries,
    gpt2_layout,
    llama_layout,
    lora_config,
    pair,
    pairs,
)

BASE = llama_layout()
QV = pairs(BASE, "q_proj", "v_proj")
Q0 = "model.layers.0.self_attn.q_proj"


def build(
    shapes: Shapes = QV,
    base: BaseLayout = BASE,
    max_rank: int = 64,
    dtype: str = "F32",
    **change: Any,
) -> tuple[LoraSpec | None, Report]:
    report = Report()
    config = parse_config(json.dumps(lora_config(**change)).encode(), report)
    assert config is not None
    found = build_spec(config, entries(shapes, dtype), base, max_rank=max_rank, report=report)
    return found, report


def spec(shapes: Shapes = QV, **how: Any) -> LoraSpec:
    found, report = build(shapes, **how)
    assert report.reasons == ()
    assert found is not None
    return found


def refusal(shapes: Shapes = QV, **how: Any) -> str:
    found, report = build(shapes, **how)
    assert found is None
    assert report.refused
    return "\n".join(report.reasons)


def renamed(shapes: Shapes, old: str, new: str) -> Shapes:
    return {key.replace(old, new): shape for key, shape in shapes.items()}


def test_each_pair_becomes_one_delta_in_the_order_of_the_base():
    shuffled = dict(sorted(QV.items(), key=lambda item: item[0][::-1]))
    found = spec(shuffled)
    assert [d.module for d in found.deltas] == [
        name for name in BASE.modules if name.endswith(("q_proj", "v_proj"))
    ]
    assert found.deltas[0] == ModuleDelta(
        Q0, 4, 2.0, f"{PREFIX}{Q0}.lora_A.weight", f"{PREFIX}{Q0}.lora_B.weight"
    )
    assert found.warnings == ()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (PREFIX, ""),
        (f"{PREFIX}model.", PREFIX),
        (f"{PREFIX}model.", f"{PREFIX}model.language_model."),
        ("lora_A.weight", "lora_A.default.weight"),
    ],
)
def test_spelling_of_keys_does_not_change_what_is_served(old: str, new: str):
    plain, other = spec(), spec(renamed(QV, old, new))
    arithmetic = [(d.module, d.rank, d.scale) for d in plain.deltas]
    assert [(d.module, d.rank, d.scale) for d in other.deltas] == arithmetic


def test_patterns_see_the_names_of_the_adapter_itself():
    headless = renamed(QV, f"{PREFIX}model.", PREFIX)
    found = spec(headless, alpha_pattern={"^layers.0.self_attn.q_proj": 40})
    assert [d.scale for d in found.deltas] == [10.0, 2.0, 2.0, 2.0]


def test_ranks_may_differ_between_modules():
    shapes = pairs(BASE, "q_proj", rank=3) | pairs(BASE, "v_proj", rank=7)
    found = spec(shapes, r=7, rank_pattern={"q_proj": 3})
    assert {d.rank for d in found.deltas} == {3, 7}
    assert found.max_rank == 7


def test_transposed_base_weights_change_nothing_in_the_adapter():
    base = gpt2_layout()
    found = spec(pairs(base, "attn.c_attn"), base=base, fan_in_fan_out=True)
    assert len(found.deltas) == 2


# Refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_half_a_pair_is_refused(part: str):
    shapes = {k: s for k, s in QV.items() if k != f"{PREFIX}{Q0}.{part}.weight"}
    assert f"{part} is missing" in refusal(shapes)


@pytest.mark.parametrize(
    ("part", "shape", "word"),
    [
        ("lora_A", (4, 80), "shape [4, 80] where [4, 64] is expected"),
        ("lora_B", (80, 4), "shape [80, 4] where [64, 4] is expected"),
        ("lora_A", (64, 4), "shape [64, 4] where [64, 64] is expected"),
        ("lora_A", (256,), "shape [256] where [4, 64] is expected"),
        ("lora_B", (), "shape [] where [64, 4] is expected"),
        ("lora_B", (64, 4, 1), "shape [64, 4, 1] where [64, 4] is expected"),
        ("lora_B", (64, 2), "lora_A has rank 4, but lora_B has rank 2"),
        ("lora_A", (0,), "empty"),
        ("lora_A", (0, 64), "empty"),
    ],
)
def test_wrong_shape_is_refused(part: str, shape: tuple[int, ...], word: str):
    assert word in refusal({**QV, f"{PREFIX}{Q0}.{part}.weight": shape})


def test_rank_other_than_the_configuration_says_is_refused():
    assert "rank 4, but the configuration says rank 8" in refusal(r=8)


def test_rank_above_the_limit_names_the_option_that_would_do():
    assert "--max-rank 4" in refusal(max_rank=3)
    spec(max_rank=4)


def test_tensor_for_an_unknown_module_is_refused_by_name():
    name = "model.layers.0.self_attn.z_proj"
    assert name in refusal({**QV, **pair(name, BASE.modules[Q0], 4)})


def test_adapter_for_another_architecture_is_said_to_be_that():
    assert "made for another model" in refusal(pairs(gpt2_layout(), "attn.c_attn"))


def test_vision_tower_beside_the_language_layers_is_refused():
    vision = renamed(QV, f"{PREFIX}model.", f"{PREFIX}model.vision_tower.encoder.")
    assert "vision" in refusal({**QV, **vision})


@pytest.mark.parametrize(("old", "new"), [(PREFIX, ""), (f"{PREFIX}model.", PREFIX)])
def test_same_tensor_under_two_spellings_is_refused(old: str, new: str):
    q0 = {key: shape for key, shape in QV.items() if Q0 in key}
    assert "duplicate" in refusal({**QV, **renamed(q0, old, new)})


def test_two_adapters_in_one_file_are_refused():
    shapes = {
        key.replace(".weight", ".one.weight" if "q_proj" in key else ".two.weight"): shape
        for key, shape in QV.items()
    }
    assert "more than one adapter: one, two" in refusal(shapes)


def test_tensor_of_another_kind_is_refused_with_its_name():
    text = refusal({**QV, f"{PREFIX}model.layers.0.self_attn.q_proj.weight": (64, 64)})
    assert "whole weights for a module that has LoRA" in text
    assert "model.layers.0.self_attn.q_proj.weight" in text


def test_file_without_tensors_is_refused():
    assert "no tensors" in refusal({})


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"])
def test_floating_dtypes_are_served(dtype: str):
    spec(dtype=dtype)


def test_integers_are_refused():
    assert "dtype I32" in refusal(dtype="I32")


def test_findings_of_all_kinds_come_together():
    shapes = {**QV, f"{PREFIX}{Q0}.lora_B.weight": (80, 4), "x.lora_C.weight": (1,)}
    text = refusal(shapes, use_dora=True)
    assert all(word in text for word in ("[80, 4]", "lora_C", "lora_magnitude_vector"))


def test_pattern_that_never_ends_is_refused():
    assert "takes too long" in refusal(rank_pattern={r"(([\w.]|[\w.])+)+[!?]": 4})


# DoRA --------------------------------------------------------------------------------------------

MAGNITUDES = {
    f"{PREFIX}{module}.lora_magnitude_vector": (shape.out_features,)
    for module, shape in BASE.modules.items()
    if module.endswith(("q_proj", "v_proj"))
}


def test_dora_magnitudes_are_part_of_the_deltas():
    found = spec(QV | MAGNITUDES, use_dora=True)
    assert found.deltas[0].magnitude == f"{PREFIX}{Q0}.lora_magnitude_vector"


def test_dora_without_magnitudes_is_refused():
    assert "lora_magnitude_vector is missing" in refusal(use_dora=True)


def test_one_missing_magnitude_is_refused():
    some = dict(list(MAGNITUDES.items())[1:])
    assert f"DoRA) is true: {Q0}" in refusal(QV | some, use_dora=True)


def test_magnitudes_without_use_dora_are_refused():
    assert "use_dora (DoRA) is not true" in refusal(QV | MAGNITUDES)


def test_magnitude_of_a_wrong_shape_is_refused():
    wrong = MAGNITUDES | {f"{PREFIX}{Q0}.lora_magnitude_vector": (64, 1)}
    assert "[64, 1] where [64] is expected" in refusal(QV | wrong, use_dora=True)


# Warnings ----------------------------------------------------------------------------------------


def test_target_without_tensors_is_a_warning():
    found = spec(target_modules=["q_proj", "v_proj", "k_proj", "self_attn.q_proj"])
    (warning,) = found.warnings
    assert warning.endswith(": k_proj")


def test_other_base_name_is_a_warning():
    (warning,) = spec(base_model_name_or_path="../../etc/Other").warnings
    assert "../../etc/Other" in warning


@pytest.mark.parametrize("name", ["tiny/llama", "/models/Llama/", "C:\\models\\llama", "", None])
def test_same_base_under_another_path_is_no_warning(name: str | None):
    assert spec(base_model_name_or_path=name).warnings == ()


class CountedPlaces(Places):
    """Counts how often it is asked."""

    asked: ClassVar[Counter[str]] = Counter()

    def find(self, path: str) -> Place | None:
        self.asked["find"] += 1
        return super().find(path)

    def why_not(self, path: str) -> str:
        self.asked["why_not"] += 1
        return super().why_not(path)


def test_names_without_number_cost_a_search_each_and_a_bounded_number_of_explanations(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(peft_spec, "Places", CountedPlaces)
    CountedPlaces.asked.clear()
    strangers = {f"{PREFIX}model.layers.{i}.mlp.x.lora_A.weight": (4, 64) for i in range(5_000)}
    text = refusal({**QV, **strangers})
    assert "layers.3.mlp.x and 996 more" in text
    assert "4000 names more cannot be placed in tiny/llama" in text
    modules = len(QV) // 2 + len(strangers)
    assert CountedPlaces.asked == {"find": modules, "why_not": peft_spec.MAX_EXPLAINED}


def test_no_names_more_are_counted_when_all_are_explained():
    strangers = {f"{PREFIX}x.{i}.lora_A.weight": (4, 64) for i in range(peft_spec.MAX_EXPLAINED)}
    assert "cannot be placed" not in refusal({**QV, **strangers})
