"""Adapters with values of their own beside LoRA: as PEFT computes them, all kinds in one batch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from loramux import LLM, SamplingParams
from loramux.types import RequestOutput
from tests.cpu.architectures import ARCHITECTURES, VOCAB, build
from tests.cpu.engines import assemble_tiny

NEW_TOKENS = 6
PROMPTS = [[5, 77, 31, 9], [(i * 37 + 11) % VOCAB for i in range(21)]]
TOKENS = [31, 5, 48, 122]
"""Tokens with rows of their own; some are in the prompts, and not in ascending order."""


@dataclass(frozen=True)
class Kind:
    """A PEFT configuration for an architecture."""

    architecture: str
    config: dict[str, Any]
    targets: tuple[str, ...] | None = None
    tied: bool = False


KINDS = {
    "bias_all": Kind("llama_bias", {"bias": "all"}),
    "bias_lora_only": Kind("llama_bias", {"bias": "lora_only"}, ("q_proj", "down_proj")),
    "bias_all_dora": Kind("llama_bias", {"bias": "all", "use_dora": True}),
    "bias_all_gpt2": Kind("gpt2", {"bias": "all"}),
    "lora_bias": Kind("llama", {"lora_bias": True}),
    "lora_bias_beside_base_bias": Kind("llama_bias", {"lora_bias": True, "bias": "lora_only"}),
    "norms": Kind("llama", {"modules_to_save": ["norm", "input_layernorm"]}),
    "norms_of_heads": Kind("qwen3", {"modules_to_save": ["q_norm", "k_norm"]}),
    "norms_plus_one": Kind(
        "gemma3_text", {"modules_to_save": ["norm", "post_attention_layernorm"]}
    ),
    "norms_with_bias": Kind("gpt2", {"modules_to_save": ["ln_1", "ln_f"]}),
    "linear": Kind(
        "llama_bias", {"modules_to_save": ["k_proj", "down_proj"]}, ("q_proj", "o_proj")
    ),
    "transposed_linear": Kind("gpt2", {"modules_to_save": ["c_fc"]}, ("c_attn",)),
    "whole_mlp": Kind("llama", {"modules_to_save": ["mlp"]}, ("q_proj",)),
    "head": Kind("llama", {"modules_to_save": ["lm_head"]}),
    "embedding_and_head": Kind("llama", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "scaled_embedding": Kind("gemma3_text", {"modules_to_save": ["embed_tokens"]}),
    "lora_on_embedding": Kind("llama", {}, ("q_proj", "embed_tokens")),
    "dora_on_embedding": Kind("llama", {"use_dora": True}, ("q_proj", "embed_tokens")),
    "lora_on_scaled_embedding": Kind("gemma3_text", {}, ("q_proj", "embed_tokens")),
    "lora_on_head": Kind("llama", {}, ("q_proj", "lm_head")),
    "dora_on_head": Kind("llama", {"use_dora": True}, ("q_proj", "lm_head")),
    "lora_on_both_ends": Kind("gpt2", {}, ("c_attn", "wte", "lm_head")),
    "tokens": Kind("llama", {"trainable_token_indices": TOKENS}),
    "tokens_of_scaled_embedding": Kind("gemma3_text", {"trainable_token_indices": TOKENS}),
    "tokens_of_head": Kind("llama", {"trainable_token_indices": {"lm_head": TOKENS}}),
    "tokens_tied": Kind("llama", {"trainable_token_indices": TOKENS}, tied=True),
    "embedding_tied": Kind("llama", {"modules_to_save": ["embed_tokens"]}, tied=True),
    "embedding_kept_tied": Kind(
        "llama", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, tied=True
    ),
    "lora_on_tied_embedding": Kind("llama", {}, ("q_proj", "embed_tokens"), tied=True),
    "lora_on_tied_head": Kind("llama", {}, ("q_proj", "lm_head"), tied=True),
}


def base_of(kind: Kind) -> PreTrainedModel:
    return build(kind.architecture, tie_word_embeddings=kind.tied)


def config_of(kind: Kind) -> LoraConfig:
    architecture = ARCHITECTURES[kind.architecture]
    return LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=list(kind.targets or architecture.targets),
        fan_in_fan_out=architecture.fan_in_fan_out,
        task_type="CAUSAL_LM",
        **kind.config,
    )


def write(kind: Kind, folder: Path) -> nn.Module:
    """Save a random adapter of the kind; what PEFT makes of it when it is loaded again."""
    save(base_of(kind), config_of(kind), folder)
    return PeftModel.from_pretrained(base_of(kind), str(folder)).eval()


def save(model: PreTrainedModel, config: LoraConfig, folder: Path, **how: Any) -> None:
    """Save, as ``how`` tells PEFT, an adapter of which every trained parameter has moved."""
    tuned = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in tuned.named_parameters():
        if parameter.requires_grad:
            _disturb(name, parameter, generator)
    tuned.save_pretrained(str(folder), **how)


def _disturb(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    """Move a trained parameter by enough to show, whatever it is."""
    noise = torch.randn(parameter.shape, generator=generator)
    if "magnitude" in name:
        parameter.data.mul_(1 + 0.3 * noise.abs())
    elif "lora_" in name and parameter.dim() == 2:
        parameter.data.copy_(noise * parameter.shape[-1] ** -0.5)
    else:
        parameter.data.add_(noise * (0.5 if parameter.dim() == 1 else 0.5 * parameter.std()))


def likelihoods(model: nn.Module, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)


def ask(llm: LLM, names: list[str | None]) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=0, ignore_eos=True)
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(names))]
    return llm.generate(prompts, params, adapter=names)


def assert_right(output: RequestOutput, oracle: nn.Module) -> None:
    """Each token is the best, and as likely, as the oracle says after the very same tokens."""
    prompt, answer = list(output.prompt_token_ids), output.completions[0]
    found = likelihoods(oracle, [*prompt, *answer.token_ids])[len(prompt) - 1 : -1]
    for row, entry in zip(found, answer.logprobs, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=2e-4)
        assert float(row.max() - row[entry.token_id]) < 2e-4


def bits(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (output.completions[0].token_ids, [e.logprob for e in output.completions[0].logprobs])
        for output in outputs
    ]


def test_all_kinds_share_a_batch(tmp_path: Path) -> None:
    kinds = {n: k for n, k in KINDS.items() if k.architecture == "llama" and not k.tied}
    oracles = {name: write(kind, tmp_path / name) for name, kind in kinds.items()}
    base = base_of(kinds["head"])
    llm = LLM.over(assemble_tiny(base_of(kinds["head"]), max_loras=5, max_step_tokens=64))
    before = bits(ask(llm, [None] * 2 * (len(kinds) + 1)))
    for name in kinds:
        llm.load_adapter(name, str(tmp_path / name))

    names: list[str | None] = [None, None, *(name for name in kinds for _ in range(2))]
    outputs = ask(llm, names)

    for name, output in zip(names, outputs, strict=True):
        assert_right(output, base if name is None else oracles[name])
    assert llm.stats().max_step_adapters == 5
    assert [o.completions[0].token_ids for o in outputs[:2]] == [tokens for tokens, _ in before[:2]]


def test_a_slot_has_nothing_left_of_the_adapter_before(tmp_path: Path) -> None:
    kinds = {"own": KINDS["norms"], "plain": Kind("llama", {})}
    oracles = {name: write(kind, tmp_path / name) for name, kind in kinds.items()}
    llm = LLM.over(assemble_tiny(base_of(kinds["own"]), max_loras=1))
    for name in kinds:
        llm.load_adapter(name, str(tmp_path / name))
    for name in ("own", "plain", "own"):
        for output in ask(llm, [name, name]):
            assert_right(output, oracles[name])


@pytest.mark.parametrize("name", KINDS)
def test_answers_are_those_of_peft_and_the_base_keeps_its_own(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    oracle = write(kind, tmp_path / "own")
    plain = Kind(kind.architecture, {}, tied=kind.tied)
    plain_oracle = write(plain, tmp_path / "plain")
    base = base_of(kind)
    # What the cache finds would have been computed in other steps.
    llm = LLM.over(assemble_tiny(base_of(kind), prefix_cache=False))
    before = bits(ask(llm, [None] * 6))
    for adapter in ("own", "plain"):
        llm.load_adapter(adapter, str(tmp_path / adapter))

    outputs = ask(llm, ["own", "own", None, None, "plain", "own"])

    for output, model in zip(
        outputs, [oracle, oracle, base, base, plain_oracle, oracle], strict=True
    ):
        assert_right(output, model)
    assert bits(outputs[2:4]) == before[2:4]
    changed = likelihoods(oracle, PROMPTS[0]) - likelihoods(plain_oracle, PROMPTS[0])
    assert changed.abs().max() > 0.05, "what the adapter has of its own is too weak to show"
