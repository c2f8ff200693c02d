"""Breadth: many architectures answer as transformers' own ``generate`` and as PEFT do."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from loramux import LLM, SamplingParams
from loramux.config import ModelOptions
from loramux.errors import ModelNotServable
from loramux.model.attention_seam import Recorder
from loramux.model.load import adopt, load_base
from tests.cpu.architectures import ARCHITECTURES, VOCAB, build, write_adapter
from tests.cpu.engines import assemble_tiny

NEW_TOKENS = 8
# Shorter than a sliding window of 8, longer than it, longer than a step of 16 tokens.
PROMPTS = [[5, 77, 31], [(i * 37 + 11) % VOCAB for i in range(19)]]


def generate(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    output = model.generate(  # type: ignore[operator]
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_equal_those_of_transformers_and_peft(name: str, tmp_path: Path) -> None:
    model = build(name)
    base_expected = [generate(model, prompt) for prompt in PROMPTS]
    adapted = write_adapter(name, copy.deepcopy(model), tmp_path / "adapter")
    adapter_expected = [generate(adapted, prompt) for prompt in PROMPTS]
    assert base_expected != adapter_expected, "the adapter is too weak to show"
    assert len({token for tokens in base_expected for token in tokens}) > 2, "too monotonous"

    llm = LLM.over(assemble_tiny(model), {"adapter": str(tmp_path / "adapter")})
    outputs = llm.generate(
        PROMPTS * 2,
        SamplingParams(temperature=0, max_tokens=NEW_TOKENS),
        adapter=[None, None, "adapter", "adapter"],
    )

    answers = [list(output.completions[0].token_ids) for output in outputs]
    assert answers == base_expected + adapter_expected


def tiny_config(kind: str, **change: object) -> transformers.PreTrainedConfig:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4}
    return getattr(transformers, kind)(**{**sizes, **change})


def from_config(config: transformers.PreTrainedConfig) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (tiny_config("BloomConfig", n_layer=1), "attention in code of its own"),
        (tiny_config("MambaConfig", num_hidden_layers=1), "attention in code of its own"),
        (
            tiny_config(
                "LlamaConfig",
                intermediate_size=32,
                num_hidden_layers=1,
                max_position_embeddings=64,
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4,
                                 "original_max_position_embeddings": 32},
            ),
            "--max-model-len 32",
        ),
    ],
    ids=["bloom", "mamba", "dynamic rope"],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_with_the_reason(
    config: transformers.PreTrainedConfig, reason: str
) -> None:
    with pytest.raises(ModelNotServable, match=reason):
        adopt("base", from_config(config))


def test_what_attention_does_not_know_is_refused_by_name() -> None:
    q, k = torch.zeros(5, 4, 8), torch.zeros(5, 2, 8)
    with pytest.raises(ModelNotServable, match="layer 0 uses position_bias"):
        Recorder("base")(0, q, k, k, {"scaling": 1.0, "position_bias": torch.zeros(4)})


def test_a_wrong_mask_is_found_by_the_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mistral")
    monkeypatch.setattr(
        "loramux.ops.torch_attention._Group.mask",
        lambda group, window: torch.ones(1, 1, group.num_queries, group.cache_rows.shape[1]) > 0,
    )
    with pytest.raises(ModelNotServable, match="standard deviations"):
        assemble_tiny(model)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotServable, match=r"config\.json"):
        load_base(str(tmp_path), ModelOptions())
