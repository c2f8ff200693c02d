from __future__ import annotations

import pytest

from loramux.adapters.formats.module_names import ModuleNames
from loramux.adapters.spec import BaseLayout, ModuleShape
from tests.adapter_files import llama_layout

UP = "model.layers.0.mlp.up_proj"
SHAPE = ModuleShape(8, 8)


@pytest.mark.parametrize(
    "path",
    [
        UP,
        "layers.0.mlp.up_proj",
        "model.language_model.layers.0.mlp.up_proj",
        "language_model.model.layers.0.mlp.up_proj",
        "language_model.layers.0.mlp.up_proj",
    ],
)
def test_every_spelling_finds_the_module(path: str):
    assert ModuleNames(llama_layout()).find(path) == UP


def test_text_only_names_find_the_language_part_of_a_multimodal_base():
    base = BaseLayout(
        "multi",
        {
            "model.language_model.layers.0.mlp.up_proj": SHAPE,
            "model.vision_tower.layers.0.mlp.up_proj": SHAPE,
        },
    )
    found = ModuleNames(base).find("model.layers.0.mlp.up_proj")
    assert found == "model.language_model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    "path",
    [
        "model.vision_tower.encoder.layers.0.mlp.up_proj",
        "vision_tower.layers.0.mlp.up_proj",
        "model.encoder.layers.0.mlp.up_proj",
        "up_proj",
        "0.mlp.up_proj",
        "model.model.layers.0.mlp.up_proj",
        "model.layers.00.mlp.up_proj",
        "",
    ],
)
def test_names_of_something_else_do_not_land_on_a_layer(path: str):
    assert ModuleNames(llama_layout()).find(path) is None


def test_exact_name_wins_over_other_spellings():
    base = BaseLayout("two", {"a.layers.0.q": SHAPE, "layers.0.q": SHAPE})
    assert ModuleNames(base).find("layers.0.q") == "layers.0.q"


def test_name_that_could_be_two_modules_is_ambiguous():
    base = BaseLayout("two", {"a.layers.0.q": SHAPE, "b.layers.0.q": SHAPE})
    names = ModuleNames(base)
    assert names.find("layers.0.q") is None
    assert "ambiguous" in names.why_not("layers.0.q")


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("model.vision_tower.layers.0.q_proj", "vision"),
        ("model.layers.0.mlp.experts.3.up_proj", "experts"),
        ("model.layers.0.mlp.gate", "router"),
        ("transformer.wte", "no module of tiny/llama"),
        ("model.norm", "no linear"),
        ("model.layers.7.mlp.up_proj", "no such layer"),
        ("model.layers.0.self_attn.z_proj", "no module of tiny/llama"),
    ],
)
def test_reason_says_what_the_name_is(path: str, word: str):
    assert word in ModuleNames(llama_layout()).why_not(path)
