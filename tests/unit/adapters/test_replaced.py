"""Tensors beside LoRA: what may be replaced, and what is refused with its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loramux.adapters.formats.peft_config import parse_config
from loramux.adapters.formats.peft_spec import build_spec
from loramux.adapters.report import Report
from loramux.adapters.spec import BaseLayout, LoraSpec, Replacement
from tests.adapter_files import PREFIX, entries, llama_layout, lora_config, pairs

BASE = llama_layout(bias=True)
TIED = llama_layout(tied=True)
Q = "model.layers.0.self_attn.q_proj"
NORM = "model.norm"
EMBED, HEAD = "model.embed_tokens", "lm_head"

Shapes = dict[str, tuple[int, ...]]


def build(more: Shapes, base: BaseLayout = BASE, **config: Any) -> tuple[LoraSpec | None, Report]:
    """An adapter on v_proj with more tensors."""
    report = Report()
    meaning = parse_config(json.dumps(lora_config(**config)).encode(), report)
    assert meaning is not None
    shapes = pairs(base, "v_proj") | {f"{PREFIX}{key}": shape for key, shape in more.items()}
    return build_spec(meaning, entries(shapes), base, max_rank=64, report=report), report


def replaced(more: Shapes, base: BaseLayout = BASE, **config: Any) -> set[Replacement]:
    spec, report = build(more, base, **config)
    assert report.reasons == ()
    assert spec is not None
    return set(spec.replacements)


def own(module: str, parameter: str, key: str, *rows: int) -> Replacement:
    return Replacement(module, parameter, PREFIX + key, rows or None)


@pytest.mark.parametrize(
    "key", [f"{Q}.bias", f"{Q}.base_layer.bias", "layers.0.self_attn.q_proj.bias"]
)
def test_a_bias_may_be_spelled_in_several_ways(key: str) -> None:
    assert replaced({key: (64,)}, bias="all") == {own(Q, "bias", key)}


@pytest.mark.parametrize("named", ["norm", "model.norm"])
def test_a_module_is_named_by_its_end(named: str) -> None:
    norms = [m for m in BASE.replaceable if m.endswith(named)]
    assert len(norms) == (5 if named == "norm" else 1)
    shapes = {f"{norm}.weight": (64,) for norm in norms}
    found = replaced(shapes, modules_to_save=[named])
    assert found == {own(norm, "weight", f"{norm}.weight") for norm in norms}


def test_rows_keep_the_order_of_the_file() -> None:
    key = f"{EMBED}.token_adapter.trainable_tokens_delta"
    found = replaced({key: (3, 64)}, trainable_token_indices=[9, 2, 299])
    assert found == {own(EMBED, "weight", key, 9, 2, 299)}


def test_what_is_for_a_tied_weight_is_for_both_sides() -> None:
    key = f"{EMBED}.token_adapter.trainable_tokens_delta"
    found = replaced({key: (1, 64)}, TIED, trainable_token_indices=[9])
    assert found == {own(EMBED, "weight", key, 9), own(HEAD, "weight", key, 9)}


def test_two_tensors_for_a_tied_weight_must_be_alike() -> None:
    found = replaced({f"{EMBED}.weight": (300, 64), f"{HEAD}.weight": (300, 64)}, TIED)
    assert {(r.module, r.twin) for r in found} == {
        (EMBED, f"{PREFIX}{HEAD}.weight"),
        (HEAD, f"{PREFIX}{EMBED}.weight"),
    }


def test_copies_that_modules_to_save_makes_of_a_tied_weight_may_differ() -> None:
    shapes = {f"{EMBED}.weight": (300, 64), f"{HEAD}.weight": (300, 64)}
    found = replaced(shapes, TIED, modules_to_save=["embed_tokens", "lm_head"])
    assert {r.twin for r in found} == {None}


@pytest.mark.parametrize(
    ("more", "config", "reason"),
    [
        ({f"{Q}.bias": (64,)}, {}, "bias is none"),
        ({f"{Q}.bias": (63,)}, {"bias": "all"}, "shape [63] where [64] is expected"),
        ({"model.layers.0.mlp.up_proj.bias": (96,)}, {"bias": "all"}, "do not have"),
        ({"model.layers.9.mlp.up_proj.bias": (96,)}, {"bias": "all"}, "no such layer"),
        ({"model.layers.bias": (96,)}, {"bias": "all"}, "cannot be replaced here"),
        ({f"{Q}.weight": (64, 64)}, {}, "modules_to_save does not name"),
        ({f"{Q}.base_layer.weight": (64, 64)}, {}, "modules_to_save does not name"),
        ({f"{NORM}.weight": (64,)}, {"modules_to_save": ["q_proj"]}, "does not name"),
        ({}, {"modules_to_save": ["model.norm"]}, "no tensors in the file: model.norm.weight"),
        (
            {"model.layers.0.self_attn.v_proj.weight": (32, 64)},
            {"modules_to_save": ["layers.0.self_attn.v_proj"]},
            "whole weights for a module that has LoRA",
        ),
        (
            {f"{NORM}.weight": (64,), "norm.weight": (64,)},
            {"modules_to_save": ["model.norm", "norm"]},
            "duplicate",
        ),
        (
            {f"{EMBED}.token_adapter.trainable_tokens_delta": (2, 64)},
            {},
            "does not say which tokens",
        ),
        (
            {f"{EMBED}.token_adapter.trainable_tokens_delta": (3, 64)},
            {"trainable_token_indices": [1, 2]},
            "shape [3, 64] where [2, 64] is expected",
        ),
        (
            {f"{EMBED}.token_adapter.trainable_tokens_delta": (2, 64)},
            {"trainable_token_indices": [1, 300]},
            "300",
        ),
        ({f"{EMBED}.weight": (299, 64)}, {}, "shape [299, 64]"),
    ],
)
def test_what_would_not_be_exact_is_refused(
    more: Shapes, config: dict[str, Any], reason: str
) -> None:
    spec, report = build(more, **config)
    assert spec is None
    assert reason in "\n".join(report.reasons)


def test_a_name_that_nothing_has_is_a_warning() -> None:
    _, report = build({}, modules_to_save=["classifier"])
    assert not report.refused
    assert "classifier" in "\n".join(report.warnings)


def test_strange_tensors_of_a_hostile_file_are_counted() -> None:
    _, report = build({f"strange.{i}.weight": (1,) for i in range(3000)})
    assert "2000 tensors more" in "\n".join(report.reasons)
