"""A base drawn from its config.json alone is the one that would be loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from loramux.errors import ConfigError, ModelNotServable
from loramux.model.anatomy import examine, linear_weight
from loramux.model.attention_seam import AttentionSeam
from loramux.model.blueprint import StoredWeights, draw
from loramux.model.load import adopt
from loramux.testing import tiny_model
from tests.cpu.architectures import build


def config_only(model: PreTrainedModel, folder: Path) -> Path:
    model.config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3", "gpt_bigcode", "mixtral", "olmoe"])
def test_layout_is_that_of_the_loaded_model(name: str, tmp_path: Path) -> None:
    model = build(name)
    blueprint = draw(str(config_only(model, tmp_path)))
    assert blueprint.examined
    assert blueprint.layout == examine(adopt(str(tmp_path), model), AttentionSeam(model)).layout


def test_code_that_looks_at_values_leaves_names_and_shapes(tmp_path: Path) -> None:
    # GPT-2 looks whether its first token is the one for padding.
    model = build("gpt2")
    blueprint = draw(str(config_only(model, tmp_path)))
    assert not blueprint.examined
    loaded = examine(adopt(str(tmp_path), model), AttentionSeam(model)).layout
    assert blueprint.layout == replace(loaded, heads={})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtype_is_that_in_which_the_base_is_served(dtype: str, tmp_path: Path) -> None:
    tiny_model(dtype=dtype).save_pretrained(tmp_path)
    assert draw(str(tmp_path)).dtype == getattr(torch, dtype)


def test_base_that_only_a_long_context_forbids_is_drawn(tmp_path: Path) -> None:
    folder = config_only(tiny_model(), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {
        "rope_type": "dynamic",
        "factor": 2.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 32,
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert len(draw(str(folder)).layout.modules) == 16


def test_folder_that_is_missing_is_an_option_that_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        draw(str(tmp_path / "none"))


@pytest.mark.parametrize("config", ["{}", '{"model_type": "t5"}', "not JSON"])
def test_folder_of_no_causal_model_cannot_be_served(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelNotServable):
        draw(str(tmp_path))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
def test_norms_are_those_of_the_models_weights(name: str, shard_size: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors").exists() == (shard_size == "1GB")
    layout = draw(str(tmp_path)).layout
    weights = StoredWeights(tmp_path, layout)
    assert layout.modules
    for module in layout.modules:
        norm = linear_weight(model.get_submodule(module)).norm().item()
        assert weights.norm(module) == pytest.approx(norm, rel=1e-5)


def test_names_without_the_models_own_prefix_are_found(tmp_path: Path) -> None:
    model = build("gpt2")
    model.save_pretrained(tmp_path)
    layout = draw(str(tmp_path)).layout
    whole = {module: StoredWeights(tmp_path, layout).norm(module) for module in layout.modules}
    file = tmp_path / "model.safetensors"
    save_file({k.removeprefix("transformer."): v for k, v in load_file(file).items()}, file)
    bare = {module: StoredWeights(tmp_path, layout).norm(module) for module in layout.modules}
    assert bare == whole
    assert None not in whole.values()


@pytest.mark.parametrize("damage", ["nothing", "index", "shard", "shape"])
def test_weights_that_cannot_be_read_have_no_norm(damage: str, tmp_path: Path) -> None:
    model = tiny_model()
    folder = config_only(model, tmp_path)
    if damage != "nothing":
        model.save_pretrained(folder, max_shard_size="20KB")
    layout = draw(str(folder)).layout
    module = "model.layers.0.mlp.up_proj"
    index = folder / "model.safetensors.index.json"
    if damage == "index":
        index.write_text("[]")
    if damage == "shard":
        for shard in folder.glob("*.safetensors"):
            shard.write_bytes(b"short")
    if damage == "shape":
        table = json.loads(index.read_text())["weight_map"]
        for shard in set(table.values()):
            tensors = {key: value[:1] for key, value in load_file(folder / shard).items()}
            save_file(tensors, folder / shard)
    assert StoredWeights(folder, layout).norm(module) is None
