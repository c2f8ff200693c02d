"""Specs of adapters whose linears are fused otherwise than the base's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from loramux.adapters.fusions import find_fusions
from loramux.adapters.spec import BaseLayout, ModuleDelta, ModuleShape
from tests.adapter_files import PREFIX, Shapes, gpt2_layout, llama_layout, pair
from tests.unit.adapters.test_peft_spec import refusal, renamed, spec

QKV, GATE_UP = "model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.gate_up_proj"
Q, K, V = (f"model.layers.0.self_attn.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj"))
GATE, UP = (f"model.layers.0.mlp.{leaf}" for leaf in ("gate_proj", "up_proj"))
ROWS = {Q: range(64), K: range(64, 96), V: range(96, 128), GATE: range(96), UP: range(96, 192)}

SIZES = {layer: (64, 32, 32) for layer in range(2)}


def with_fusions(base: BaseLayout, model_type: str) -> BaseLayout:
    fusions = find_fusions(model_type, base.modules, SIZES)
    return replace(base, model_type=model_type, fusions=fusions)


def split_base(model_type: str = "llama") -> BaseLayout:
    return with_fusions(llama_layout(), model_type)


def fused_base(model_type: str = "phi3") -> BaseLayout:
    sizes = {
        "self_attn.qkv_proj": (64, 128),
        "self_attn.o_proj": (64, 64),
        "mlp.gate_up_proj": (64, 192),
        "mlp.down_proj": (96, 64),
    }
    modules = {
        f"model.layers.{i}.{leaf}": ModuleShape(*size)
        for i in range(2)
        for leaf, size in sizes.items()
    }
    return with_fusions(BaseLayout("tiny/phi3", modules), model_type)


def weights(*modules: str, rank: int = 4) -> Shapes:
    """Pairs for modules of layer 0, fused or not."""
    rows = {QKV: 128, GATE_UP: 192} | {name: len(found) for name, found in ROWS.items()}
    return {
        key: shape
        for name in modules
        for key, shape in pair(name, ModuleShape(64, rows[name]), rank).items()
    }


def magnitudes(*modules: str) -> Shapes:
    return {f"{PREFIX}{name}.lora_magnitude_vector": (len(ROWS[name]),) for name in modules}


def keys(module: str) -> tuple[str, str]:
    return f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"


def test_fused_weights_on_a_split_base_feed_each_part_its_rows() -> None:
    found = spec(weights(QKV), base=split_base())
    assert found.deltas == tuple(
        ModuleDelta(part, 4, 2.0, *keys(QKV), stored_rows=(ROWS[part],)) for part in (Q, K, V)
    )
    assert found.max_rank == 4


def test_split_weights_on_a_fused_base_stand_in_the_order_of_its_rows() -> None:
    found = spec(weights(V, UP, Q, K), base=fused_base())
    assert found.deltas == (
        *(ModuleDelta(QKV, 4, 2.0, *keys(part), rows=ROWS[part]) for part in (Q, K, V)),
        ModuleDelta(GATE_UP, 4, 2.0, *keys(UP), rows=ROWS[UP]),
    )
    assert found.max_rank == 12


@pytest.mark.parametrize("base", [split_base(), fused_base()], ids=["split", "fused"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (PREFIX, ""),
        (f"{PREFIX}model.", PREFIX),
        (f"{PREFIX}model.", f"{PREFIX}model.language_model."),
    ],
)
def test_spellings_are_those_of_any_module(base: BaseLayout, old: str, new: str) -> None:
    other = weights(QKV) if Q in base.modules else weights(Q, V)
    plain, spelled = spec(other, base=base), spec(renamed(other, old, new), base=base)
    assert [(d.module, d.rows, d.stored_rows) for d in plain.deltas] == [
        (d.module, d.rows, d.stored_rows) for d in spelled.deltas
    ]


def test_patterns_see_the_parts_by_the_adapters_own_names() -> None:
    shapes = {**weights(Q, rank=3), **weights(K, V, rank=5)}
    found = spec(shapes, base=fused_base(), r=5, rank_pattern={"q_proj": 3}, lora_alpha=15)
    assert [(d.rank, d.scale) for d in found.deltas] == [(3, 5.0), (5, 3.0), (5, 3.0)]
    assert found.max_rank == 13


def test_magnitudes_go_with_the_parts() -> None:
    found = spec({**weights(K), **magnitudes(K)}, base=fused_base(), use_dora=True)
    assert found.deltas[0].magnitude == f"{PREFIX}{K}.lora_magnitude_vector"


# Gate and up -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("swap", "first"), [(None, GATE), (False, GATE), (True, UP)])
def test_rows_of_gate_and_up_on_a_split_base(swap: bool | None, first: str) -> None:
    found = spec(weights(GATE_UP), base=split_base(), swap_gate_up=swap)
    assert {d.module: d.stored_rows for d in found.deltas} == {
        GATE: (range(96) if first == GATE else range(96, 192),),
        UP: (range(96) if first == UP else range(96, 192),),
    }


def test_swapped_rows_on_a_fused_base_are_taken_the_other_way_round() -> None:
    (delta,) = spec(weights(GATE_UP), base=fused_base(), swap_gate_up=True).deltas
    assert (delta.rows, delta.stored_rows) == (None, (range(96, 192), range(96)))
    (delta,) = spec(weights(GATE_UP), base=fused_base()).deltas
    assert delta.stored_rows == ()


def test_split_gate_and_up_do_not_hang_on_how_the_file_would_fuse_them() -> None:
    found = spec(weights(GATE), base=fused_base(), swap_gate_up=True)
    assert found.deltas[0].rows == range(96)
    assert any("swap_gate_up" in warning for warning in found.warnings)


@pytest.mark.parametrize("value", ["yes", 1])
def test_swap_gate_up_is_true_or_false(value: object) -> None:
    with pytest.raises(AssertionError, match="swap_gate_up must be true or false"):
        spec(weights(GATE_UP), base=split_base(), swap_gate_up=value)


# Refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "shapes"),
    [
        (split_base(), weights(QKV, Q)),
        (split_base(), weights(V, QKV)),
        (fused_base(), weights(QKV, K)),
        (fused_base(), weights(UP, GATE_UP)),
    ],
)
def test_one_place_under_two_names_is_refused(base: BaseLayout, shapes: Shapes) -> None:
    assert "duplicate: two names are meant for the same place" in refusal(shapes, base=base)


def test_the_sum_of_ranks_must_be_within_the_limit() -> None:
    shapes = {**weights(Q, rank=3), **weights(K, V, rank=5)}
    how: dict[str, Any] = {"base": fused_base(), "r": 5, "rank_pattern": {"q_proj": 3}}
    text = refusal(shapes, max_rank=12, **how)
    assert "rank 13 (the sum 3 + 5 + 5" in text
    assert "qkv_proj" in text
    assert "start with --max-rank 13" in text
    spec(shapes, max_rank=13, **how)


@pytest.mark.parametrize(
    ("base", "part", "shape", "words"),
    [
        (split_base(), QKV, (112, 4), "[112, 4] where [128, 4]"),
        (fused_base(), K, (64, 4), "[64, 4] where [32, 4]"),
    ],
)
def test_shapes_are_those_of_the_linear_that_the_adapter_has(
    base: BaseLayout, part: str, shape: tuple[int, ...], words: str
) -> None:
    text = refusal({**weights(part), f"{PREFIX}{part}.lora_B.weight": shape}, base=base)
    assert text.count(words) == 1


@pytest.mark.parametrize(
    ("base", "shapes", "words"),
    [
        (split_base("new"), weights(QKV), ("q_proj, k_proj, v_proj", "new", "split qkv_proj")),
        (split_base("new"), weights(GATE_UP), ("gate_proj, up_proj", "swap_gate_up")),
        (fused_base("new"), weights(V), ("inside qkv_proj", "new")),
        (fused_base("new"), weights(GATE), ("inside gate_up_proj", "new")),
    ],
)
def test_unknown_order_is_refused(base: BaseLayout, shapes: Shapes, words: tuple[str, ...]) -> None:
    text = refusal(shapes, base=base)
    assert all(word in text for word in words)


@pytest.mark.parametrize("swap", [True, False])
def test_swap_gate_up_says_what_an_unknown_family_does_not(swap: bool) -> None:
    spec(weights(GATE_UP), base=split_base("new"), swap_gate_up=swap)
    assert "swap_gate_up is said" in refusal(
        weights(GATE_UP), base=fused_base("new"), swap_gate_up=swap
    )


def test_an_adapter_fused_as_its_base_needs_no_known_order() -> None:
    assert len(spec(weights(QKV, GATE_UP), base=fused_base("new")).deltas) == 2


def test_parts_are_never_cut_out_of_projections_that_may_interleave() -> None:
    assert "inside c_attn" in refusal(
        pair("transformer.h.0.attn.q_proj", ModuleShape(64, 64), 4), base=gpt2_layout()
    )


@pytest.mark.parametrize("leaf", ["c_attn", "query_key_value", "W_pack"])
def test_fused_attention_of_other_names_is_never_cut(leaf: str) -> None:
    shapes = pair(f"model.layers.0.self_attn.{leaf}", ModuleShape(64, 128), 4)
    assert f"{leaf} is split only where" in refusal(shapes, base=split_base())


def test_a_layer_that_the_base_lacks_is_said_to_be_that() -> None:
    far = renamed(weights(QKV), "layers.0", "layers.9")
    assert "no such layer" in refusal(far, base=split_base())
