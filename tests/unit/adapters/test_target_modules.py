from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from loramux.adapters.formats.peft_config import parse_config
from loramux.adapters.formats.peft_spec import build_spec
from loramux.adapters.fusions import find_fusions
from loramux.adapters.report import Report
from loramux.adapters.spec import BaseLayout, ModuleShape
from loramux.adapters.target_modules import is_open, restrict
from loramux.adapters.trtllm_names import NAMES, trtllm_name
from loramux.errors import ConfigError
from tests.adapter_files import PREFIX, entries, llama_layout, lora_config, pairs

REFERENCE: Mapping[str, tuple[str, ...]] = {
    "attn_qkv": ("self_attn.qkv_proj", "attn.c_attn", "self_attention.query_key_value"),
    "attn_q": ("self_attn.q_proj",),
    "attn_k": ("self_attn.k_proj",),
    "attn_v": ("self_attn.v_proj",),
    "attn_dense": ("self_attn.o_proj", "self_attn.out_proj", "self_attn.dense", "attn.c_proj"),
    "mlp_h_to_4h": ("mlp.gate_proj", "mlp.c_fc", "mlp.fc1", "mlp.dense_h_to_4h"),
    "mlp_4h_to_h": ("mlp.down_proj", "mlp.c_proj", "mlp.fc2", "mlp.dense_4h_to_h"),
    "mlp_gate": ("mlp.up_proj",),
    "cross_attn_qkv": ("cross_attn.qkv_proj",),
    "cross_attn_q": ("encoder_attn.q_proj", "cross_attn.q_proj"),
    "cross_attn_k": ("encoder_attn.k_proj",),
    "cross_attn_v": ("encoder_attn.v_proj",),
    "cross_attn_dense": ("encoder_attn.out_proj", "cross_attn.o_proj"),
    "moe_h_to_4h": ("block_sparse_moe.experts.3.w1", "mlp.experts.12.gate_proj"),
    "moe_4h_to_h": ("block_sparse_moe.experts.3.w2", "mlp.experts.12.down_proj"),
    "moe_gate": ("block_sparse_moe.experts.3.w3", "mlp.experts.12.up_proj"),
    "moe_router": ("block_sparse_moe.gate", "mlp.gate", "feed_forward.router"),
    "mlp_router": ("mlp.shared_expert_gate",),
    "mlp_gate_up": ("mlp.gate_up_proj",),
    "shared_expert_h_to_4h": ("mlp.shared_expert.gate_proj", "mlp.shared_experts.gate_proj"),
    "shared_expert_4h_to_h": ("mlp.shared_expert.down_proj", "mlp.shared_experts.down_proj"),
    "shared_expert_gate": ("mlp.shared_expert.up_proj", "mlp.shared_experts.up_proj"),
    "mamba_in_proj": ("mamba.in_proj", "mixer.in_proj"),
    "mamba_out_proj": ("mamba.out_proj", "mixer.out_proj"),
    "moe_latent_fc1": ("mixer.fc1_latent_proj",),
    "moe_latent_fc2": ("mixer.fc2_latent_proj",),
}
"""All 26 names in the order of their numbers, with linears of transformers that they mean."""


def test_there_are_as_many_names_as_tensorrt_llm_has():
    assert len(REFERENCE) == 26
    assert set(REFERENCE) == set(NAMES)


@pytest.mark.parametrize(
    ("name", "leaf"), [(name, leaf) for name, leaves in REFERENCE.items() for leaf in leaves]
)
def test_linear_has_the_name_and_is_meant_by_it(name: str, leaf: str):
    module = f"model.layers.3.{leaf}"
    assert trtllm_name(module) == name
    base = BaseLayout("one", {module: ModuleShape(8, 8), "model.layers.3.other": ModuleShape(8, 8)})
    opened = restrict(base, name).open_modules
    assert opened is not None
    assert opened.names == {module}


@pytest.mark.parametrize(
    "module",
    ["model.embed_tokens", "model.layers.0.mlp", "model.layers.0.mlp.experts.gate_up_proj",
     "model.layers.0.linear_attn.in_proj_qkvz", "model.layers.0.self_attn.q_a_proj", "lm_head"],
)  # fmt: skip
def test_other_modules_have_no_name(module: str):
    assert trtllm_name(module) is None


# What a server opens --------------------------------------------------------------------------

LLAMA = llama_layout()
LLAMA = replace(LLAMA, model_type="llama",
                fusions=find_fusions("llama", LLAMA.modules, {}))  # fmt: skip
_FUSED = {
    "model.layers.0.self_attn.qkv_proj": ModuleShape(64, 128),
    "model.layers.0.mlp.gate_up_proj": ModuleShape(64, 192),
}
PHI3 = BaseLayout("tiny/phi3", _FUSED, model_type="phi3",
                  fusions=find_fusions("phi3", _FUSED, {0: (64, 32, 32)}))  # fmt: skip


def verdict(base: BaseLayout, *leaves: str, **config: object) -> tuple[str, ...]:
    """Reasons against an adapter of these leaves."""
    report = Report()
    change = lora_config(target_modules=list(leaves), **config)
    meaning = parse_config(json.dumps(change).encode(), report)
    assert meaning is not None
    found = LLAMA if base.name == LLAMA.name else SPLIT_PHI3
    build_spec(meaning, entries(pairs(found, *leaves)), base, max_rank=64, report=report)
    return report.reasons


SPLIT_PHI3 = BaseLayout(
    "tiny/phi3",
    {
        **_FUSED,
        **{
            f"model.layers.0.self_attn.{leaf}": ModuleShape(64, out)
            for leaf, out in (("q_proj", 64), ("k_proj", 32), ("v_proj", 32))
        },
    },
)


@pytest.mark.parametrize(
    "words",
    [None, "q_proj,v_proj", "attn_q,attn_v", "self_attn.q_proj,v_proj", "qkv_proj", "attn_qkv"],
)
def test_open_modules_may_be_changed(words: str | None):
    assert verdict(restrict(LLAMA, words), "q_proj", "v_proj") == ()


def test_closed_modules_are_refused_by_name_with_the_remedy_for_all():
    reasons = verdict(restrict(LLAMA, "q_proj,attn_v"), "q_proj", "k_proj", "up_proj")
    [reason] = reasons
    remedy = "start with --lora-target-modules q_proj,attn_v,k_proj,up_proj"
    assert f"--lora-target-modules q_proj,attn_v does not open these modules: {remedy}" in reason
    assert "model.layers.1.mlp.up_proj" in reason
    assert "q_proj:" not in reason
    assert verdict(restrict(LLAMA, remedy.split()[-1]), "q_proj", "k_proj", "up_proj") == ()


def test_norms_and_biases_are_closed_like_the_rest():
    said = lora_config(modules_to_save=["norm"], target_modules=["q_proj"])
    shapes = pairs(LLAMA, "q_proj")
    for module, parameters in LLAMA.replaceable.items():
        if module.endswith("norm"):
            shapes[f"{PREFIX}{module}.weight"] = parameters["weight"]
    for words, refused in (("q_proj", True), (None, False)):
        report = Report()
        config = parse_config(json.dumps(said).encode(), report)
        assert config is not None
        base = restrict(LLAMA, words)
        build_spec(config, entries(shapes), base, max_rank=64, report=report)
        assert any("does not open" in reason for reason in report.reasons) is refused
        assert report.refused is refused


def test_closed_modules_are_told_with_all_else_that_is_wrong():
    reasons = verdict(restrict(LLAMA, "q_proj"), "v_proj", r=8, bias="some")
    assert len(reasons) == 3


def test_crossed_name_opens_the_up_projection():
    base = restrict(LLAMA, "mlp_gate")
    assert verdict(base, "up_proj") == ()
    assert "does not open" in verdict(base, "gate_proj")[0]


def test_module_in_full_opens_one_layer():
    base = restrict(LLAMA, "model.layers.0.self_attn.q_proj")
    assert is_open(base, "model.layers.0.self_attn.q_proj")
    assert not is_open(base, "model.layers.1.self_attn.q_proj")


def test_part_of_a_fused_linear_is_opened_alone():
    base = restrict(PHI3, "attn_q")
    assert is_open(base, "model.layers.0.self_attn.qkv_proj")
    assert not is_open(base, "model.layers.0.mlp.gate_up_proj")
    assert verdict(base, "q_proj") == ()
    assert "qkv_proj" not in verdict(base, "k_proj")[0].partition("start with")[2].split(":")[0]
    whole = verdict(base, "qkv_proj")[0]
    assert "start with --lora-target-modules attn_q,k_proj,v_proj" in whole


@pytest.mark.parametrize("word", ["attn_qkv", "qkv_proj"])
def test_fused_name_opens_all_its_parts(word: str):
    for leaf in ("qkv_proj", "q_proj", "k_proj", "v_proj"):
        assert verdict(restrict(PHI3, word), leaf) == ()


def test_word_with_two_meanings_is_an_error():
    """Qwen's router of the shared expert is called as TensorRT-LLM calls the expert's up."""
    shape = ModuleShape(8, 8)
    router, up = "layers.0.mlp.shared_expert_gate", "layers.0.mlp.shared_expert.up_proj"
    base = BaseLayout("tiny/qwen", {router: shape, up: shape})
    with pytest.raises(ConfigError, match=rf"name of {router}, and TensorRT-LLM's of {up}"):
        restrict(base, "shared_expert_gate")
    for word, module in (("mlp_router", router), ("mlp.shared_expert_gate", router),
                         ("shared_expert.up_proj", up)):  # fmt: skip
        opened = restrict(base, word).open_modules
        assert opened is not None
        assert opened.names == {module}


@pytest.mark.parametrize(
    ("word", "detail"),
    [("cross_attn_q", "is a name of TensorRT-LLM"), ("qproj", "names no such linear"),
     ("embed_in", "names no such linear")],
)  # fmt: skip
def test_word_that_names_nothing_is_an_error(word: str, detail: str):
    with pytest.raises(ConfigError, match=detail) as caught:
        restrict(LLAMA, f"q_proj,{word}")
    assert "down_proj, embed_tokens, gate_proj" in str(caught.value)
