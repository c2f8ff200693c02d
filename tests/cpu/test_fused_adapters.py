"""Adapters whose linears are fused otherwise than the base's answer as PEFT does on a twin base."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from loramux import LLM, SamplingParams
from loramux.types import RequestOutput
from tests.cpu import twins
from tests.cpu.architectures import build
from tests.cpu.engines import assemble_tiny

NEW_TOKENS = 6
PROMPTS = [[5, 77, 31], [(i * 37 + 11) % twins.VOCAB for i in range(21)]]
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
PLAIN = {"r": 6, "lora_alpha": 9}
ODD = {"r": 5, "lora_alpha": 7, "rank_pattern": {"q_proj": 3, "v_proj": 1, "up_proj": 11}}

SPLIT: dict[str, dict[str, Any]] = {
    "all": {**PLAIN, "target_modules": ALL},
    "odd ranks": {**ODD, "target_modules": ALL},
    "alphas": {**ODD, "alpha_pattern": {"k_proj": 20, r"layers\.0\.mlp\.gate_proj": 1}}
    | {"target_modules": ALL},
    "rslora": {**ODD, "use_rslora": True, "target_modules": ALL},
    "dora": {**ODD, "use_dora": True, "target_modules": ALL},
    "dora in parts": {**PLAIN, "rank_pattern": {"k_proj": 3}, "use_dora": True}
    | {"target_modules": ["k_proj", "up_proj"]},
    "only v": {**PLAIN, "target_modules": ["v_proj"]},
    "q and v": {**PLAIN, "target_modules": ["q_proj", "v_proj"]},
    "only gate": {**PLAIN, "target_modules": ["gate_proj"]},
    "only up": {**PLAIN, "target_modules": ["up_proj"]},
    "one layer": {**PLAIN, "target_modules": ["k_proj"], "layers_to_transform": [1]},
    "untouched": {**PLAIN, "target_modules": ["o_proj", "down_proj"]},
}
"""What PEFT is asked for on the split twin; served on the fused one."""

FUSED_ALL = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
FUSED: dict[str, dict[str, Any]] = {
    "all": {**PLAIN, "target_modules": FUSED_ALL},
    "odd ranks": {"r": 5, "lora_alpha": 7, "rank_pattern": {"qkv_proj": 3}}
    | {"target_modules": FUSED_ALL},
    "rslora": {"r": 5, "lora_alpha": 7, "use_rslora": True, "target_modules": FUSED_ALL},
    "dora": {"r": 5, "lora_alpha": 7, "use_dora": True, "target_modules": FUSED_ALL},
    "only qkv": {**PLAIN, "target_modules": ["qkv_proj"]},
    "only gate and up": {**PLAIN, "target_modules": ["gate_up_proj"]},
}
"""The reverse."""


class Batch:
    """The answers of one base to all adapters of a table and to none, all in one batch."""

    def __init__(
        self,
        folder: Path,
        trained_on: PreTrainedModel,
        served_on: PreTrainedModel,
        table: dict[str, dict[str, Any]],
    ) -> None:
        self.peft: dict[str | None, nn.Module] = {None: copy.deepcopy(trained_on)}
        for name, config in table.items():
            self.peft[name] = twins.write_adapter(trained_on, folder / name, **config)
        names = [None, *table] * len(PROMPTS)
        prompts = [prompt for prompt in PROMPTS for _ in range(len(table) + 1)]
        parts = assemble_tiny(
            served_on, max_loras=len(table), max_num_seqs=len(names), max_step_tokens=40
        )
        llm = LLM.over(parts, {name: str(folder / name) for name in table})
        outputs = llm.generate(prompts, greedy(), adapter=names)
        self.outputs: dict[str | None, list[RequestOutput]] = {name: [] for name in names}
        for name, output in zip(names, outputs, strict=True):
            self.outputs[name].append(output)


def greedy() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=0, ignore_eos=True)


def check(outputs: list[RequestOutput], model: nn.Module) -> None:
    """The chosen tokens are the model's own, and so are their log-probabilities."""
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        answer = output.completions[0]
        chosen = list(answer.token_ids)
        expected = twins.logprobs(model, [*prompt, *chosen[:-1]])[len(prompt) - 1 :]
        assert chosen == expected.argmax(-1).tolist()
        got = torch.tensor([entry.logprob for entry in answer.logprobs])
        torch.testing.assert_close(got, expected.amax(-1), rtol=0, atol=2e-5)


@pytest.fixture(scope="module")
def split_on_fused(tmp_path_factory: pytest.TempPathFactory) -> Batch:
    return Batch(tmp_path_factory.mktemp("split"), twins.llama(), twins.phi3(), SPLIT)


@pytest.fixture(scope="module")
def fused_on_split(tmp_path_factory: pytest.TempPathFactory) -> Batch:
    return Batch(tmp_path_factory.mktemp("fused"), twins.phi3(), twins.llama(), FUSED)


@pytest.mark.parametrize("name", [None, *SPLIT])
def test_split_adapter_on_a_fused_base(split_on_fused: Batch, name: str | None) -> None:
    check(split_on_fused.outputs[name], split_on_fused.peft[name])


@pytest.mark.parametrize("name", [None, *FUSED])
def test_fused_adapter_on_a_split_base(fused_on_split: Batch, name: str | None) -> None:
    check(fused_on_split.outputs[name], fused_on_split.peft[name])


def test_adapters_of_the_tables_differ_from_each_other(
    split_on_fused: Batch, fused_on_split: Batch
) -> None:
    for batch in (split_on_fused, fused_on_split):
        seen = {
            tuple(entry.logprob for entry in outputs[1].completions[0].logprobs)
            for outputs in batch.outputs.values()
        }
        assert len(seen) == len(batch.outputs)


@pytest.mark.parametrize("base", ["phi3", "llama"])
def test_swapped_halves_of_gate_and_up_are_put_right(base: str, tmp_path: Path) -> None:
    adapted = twins.write_adapter(
        twins.phi3(), tmp_path / "plain", **{**FUSED["dora"], "target_modules": ["gate_up_proj"]}
    )
    shutil.copytree(tmp_path / "plain", tmp_path / "swapped")
    tensors = load_file(tmp_path / "plain" / WEIGHTS)
    save_file(
        {k: t if "lora_A" in k else t.roll(twins.MLP, 0) for k, t in tensors.items()},
        tmp_path / "swapped" / WEIGHTS,
    )
    config = json.loads((tmp_path / "plain" / CONFIG).read_text())
    (tmp_path / "swapped" / CONFIG).write_text(json.dumps({**config, "swap_gate_up": True}))
    (tmp_path / "plain" / CONFIG).write_text(json.dumps({**config, "swap_gate_up": False}))
    llm = LLM.over(
        assemble_tiny(getattr(twins, base)()),
        {name: str(tmp_path / name) for name in ("plain", "swapped")},
    )
    for name in ("plain", "swapped"):
        check(llm.generate(PROMPTS, greedy(), adapter=[name] * 2), adapted)


@pytest.mark.parametrize("family", ["phi3", "glm", "glm4"])
def test_a_fused_family_has_gate_before_up(family: str) -> None:
    """Twice the up rows is twice the output of the block; gate goes through the activation."""
    mlp = build(family).model.layers[0].mlp
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = mlp(x)
        half = mlp.gate_up_proj.out_features // 2
        mlp.gate_up_proj.weight[half:] *= 2
        torch.testing.assert_close(mlp(x), 2 * before)


@pytest.mark.parametrize("family", ["glm", "glm4"])
def test_split_mlp_on_the_other_fused_families(family: str, tmp_path: Path) -> None:
    """Against an adapter of the fused form that does the same: A's stacked, B block-diagonal."""
    model = build(family)
    llm = LLM.over(assemble_tiny(model))
    a, b = torch.randn(2, 2, 32), torch.randn(2, 56, 2)
    stem = "base_model.model.model.layers.1.mlp."
    halves = {
        f"{stem}{leaf}.{part}.weight": weight.clone()
        for i, leaf in enumerate(("gate_proj", "up_proj"))
        for part, weight in (("lora_A", a[i]), ("lora_B", b[i]))
    }
    whole = {
        f"{stem}gate_up_proj.lora_A.weight": a.reshape(4, 32).clone(),
        f"{stem}gate_up_proj.lora_B.weight": torch.block_diag(b[0], b[1]),
    }
    write(tmp_path / "halves", halves, r=2, lora_alpha=2)
    write(tmp_path / "whole", whole, r=4, lora_alpha=4)
    for name in ("halves", "whole"):
        llm.load_adapter(name, str(tmp_path / name))
    one, other, base = llm.generate([PROMPTS[1]] * 3, greedy(), adapter=["halves", "whole", None])
    got, expected, without = (
        torch.tensor([entry.logprob for entry in output.completions[0].logprobs])
        for output in (one, other, base)
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)
    assert not torch.allclose(got, without, atol=0.1)


def write(directory: Path, tensors: dict[str, Tensor], **config: Any) -> None:
    directory.mkdir()
    save_file(tensors, directory / WEIGHTS)
    (directory / CONFIG).write_text(
        json.dumps({"peft_type": "LORA", "task_type": "CAUSAL_LM", **config})
    )
