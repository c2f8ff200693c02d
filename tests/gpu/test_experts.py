"""Experts in captured steps: bits that hang neither on who takes part nor on how a step is run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from loramux import LLM
from loramux.types import RequestOutput
from loramux.worker.graphs import GraphKey, StepGraphs
from tests.cpu.engines import assemble_tiny
from tests.cpu.test_experts import per_expert, write
from tests.gpu.test_captured_steps import generate, likelihoods

HIDDEN, SIZE, EXPERTS = 256, 128, 8
PARTS = ("gate_proj", "up_proj", "down_proj")


def model() -> PreTrainedModel:
    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        vocab_size=160, hidden_size=HIDDEN, intermediate_size=384, moe_intermediate_size=SIZE,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        num_experts=EXPERTS, num_experts_per_tok=2, norm_topk_prob=True,
        max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        tie_word_embeddings=False, initializer_range=0.1,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("adapters")
    base, sizes = model(), (HIDDEN, SIZE)
    adapters = {
        "all": per_expert(base, PARTS, range(EXPERTS), (8,), sizes=sizes),
        "mixed": per_expert(base, PARTS, (0, 3, 6), (1, 5, 16), sizes=sizes, seed=100),
        "large": per_expert(base, PARTS, range(EXPERTS), (40,), sizes=sizes, seed=200),
        "down": per_expert(base, ("down_proj",), range(EXPERTS), (8,), sizes=sizes, seed=300),
        "up": per_expert(base, ("up_proj",), range(EXPERTS), (8,), sizes=sizes, seed=400),
    }
    for name, weights in adapters.items():
        write(folder / name, weights)
    parts = assemble_tiny(
        base.cuda(),
        max_loras=len(adapters),
        max_step_tokens=128,
        kv_blocks=256,
        device_cache="64MiB",
        host_cache="256MiB",
        prefix_cache=False,
    )
    return LLM.over(parts, {name: str(folder / name) for name in adapters})


MIXES = [
    [None, None, None],
    ["all"],
    ["all", None, "mixed", "down"],
    ["large", "all", None, "up", "mixed", "down", None],
    [None, "up", "large", None, "all", "mixed", "down"] * 2,
]


def test_adapters_change_answers_and_differ(llm: LLM) -> None:
    names = (None, "all", "mixed", "large", "down", "up")
    answers = [likelihoods(generate(llm, [name] * 5)) for name in names]
    for i, answer in enumerate(answers):
        assert answer not in answers[:i], names[i]


@pytest.mark.parametrize("names", MIXES, ids=str)
def test_replayed_steps_give_the_bits_of_launched_ones(
    llm: LLM, names: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed = generate(llm, names)

    def launch(self: StepGraphs, key: GraphKey) -> Tensor:
        logits = self._forward(key)
        self._logits[: len(logits)].copy_(logits)
        return self._logits

    monkeypatch.setattr(StepGraphs, "replay", launch)
    assert_same(generate(llm, names), replayed)


@pytest.mark.parametrize("names", MIXES, ids=str)
def test_base_rows_keep_every_bit(llm: LLM, names: list[str | None]) -> None:
    alone = generate(llm, [None] * len(names))
    beside = generate(llm, names)
    for name, one, other in zip(names, alone, beside, strict=True):
        if name is None:
            assert_same([other], [one])


def test_answers_are_the_same_each_time(llm: LLM) -> None:
    first = generate(llm, MIXES[-1])
    for _ in range(20):
        assert_same(generate(llm, MIXES[-1]), first)


def assert_same(got: Sequence[RequestOutput], wanted: Sequence[RequestOutput]) -> None:
    tokens = [[output.completions[0].token_ids for output in outputs] for outputs in (got, wanted)]
    assert tokens[0] == tokens[1]
    assert likelihoods(got) == likelihoods(wanted)
