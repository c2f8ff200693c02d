from __future__ import annotations

import pytest

from loramux.adapters.fusions import find_fusions
from loramux.adapters.spec import Fusion, ModuleShape
from tests.adapter_files import gpt2_layout, llama_layout

ROWS = {0: (64, 32, 16)}
ATTENTION = "model.layers.0.self_attn"


def fused(rows: int = 112) -> dict[str, ModuleShape]:
    return {f"{ATTENTION}.qkv_proj": ModuleShape(48, rows)}


def test_a_split_base_has_the_sizes_of_its_own_linears() -> None:
    found = find_fusions("llama", llama_layout(layers=1, hidden=64, kv=32, mlp=96).modules, {})
    qkv, gate_up = found
    assert qkv == Fusion(
        f"{ATTENTION}.qkv_proj",
        (f"{ATTENTION}.q_proj", f"{ATTENTION}.k_proj", f"{ATTENTION}.v_proj"),
        (64, 32, 32),
        64,
        order_is_known=True,
    )
    assert gate_up.sizes == (96, 96)
    assert gate_up.rows == (range(96), range(96, 192))


def test_a_fused_base_has_those_that_attention_sees() -> None:
    (found,) = find_fusions("phi3", fused(), ROWS)
    assert found.sizes == (64, 32, 16)
    assert found.rows == (range(64), range(64, 96), range(96, 112))
    assert found.in_features == 48


def test_each_layer_has_its_own_sizes() -> None:
    modules = {f"layers.{i}.attn.qkv_proj": ModuleShape(8, 12 * (i + 1)) for i in range(2)}
    found = find_fusions("phi3", modules, {0: (8, 2, 2), 1: (16, 4, 4)})
    assert [fusion.sizes for fusion in found] == [(8, 2, 2), (16, 4, 4)]


@pytest.mark.parametrize("rows", [{}, {1: (64, 32, 16)}, {0: (64, 32, 32)}])
def test_sizes_that_do_not_add_up_are_no_fusion(rows: dict[int, tuple[int, int, int]]) -> None:
    assert find_fusions("phi3", fused(), rows) == ()


def test_a_base_that_has_both_forms_in_one_place_has_no_fusion() -> None:
    both = fused() | {f"{ATTENTION}.q_proj": ModuleShape(48, 64)}
    assert find_fusions("phi3", both, ROWS) == ()


def test_linears_of_different_inputs_are_no_fusion() -> None:
    modules = {"mlp.gate_proj": ModuleShape(8, 16), "mlp.up_proj": ModuleShape(4, 16)}
    assert find_fusions("llama", modules, {}) == ()


@pytest.mark.parametrize("missing", ["q_proj", "k_proj", "v_proj"])
def test_a_base_without_one_of_the_parts_has_no_fusion(missing: str) -> None:
    modules = {k: s for k, s in llama_layout().modules.items() if not k.endswith(missing)}
    assert {f.fused.rpartition(".")[2] for f in find_fusions("llama", modules, {})} == {
        "gate_up_proj"
    }


@pytest.mark.parametrize(
    ("model_type", "known"),
    [("phi3", True), ("llama", True), ("codegen", False), ("glm", False), ("", False)],
)
def test_the_order_is_known_for_some_families_only(model_type: str, known: bool) -> None:
    (found,) = find_fusions(model_type, fused(), ROWS)
    assert found.order_is_known == known


def test_projections_of_gpt2_are_left_alone() -> None:
    assert find_fusions("gpt2", gpt2_layout().modules, {0: (64, 64, 64)}) == ()
