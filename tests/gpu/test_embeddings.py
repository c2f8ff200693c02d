"""Vectors beside captured steps: right for every kind of adapter, and no other row sees them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel

from loramux import LLM, PoolingParams
from loramux.engine.build import Parts
from loramux.testing import random_adapter
from loramux.types import Delta, EmbeddingRequest, EngineRequest, Pooling, numbers_of
from tests.cpu.served import TARGETS
from tests.cpu.test_embeddings import answer, run, vector_of
from tests.cpu.test_own_values import save
from tests.gpu.test_captured_steps import PROMPTS, assemble, model

LEAST_COSINE = {None: 0.99, "plain": 0.99, "dora": 0.99, "norm": 0.97}
"""In bfloat16 against float32; without its adapter a vector is at 0.78 or below. PEFT's own vectors
come down to 0.975 with a norm of the adapter's own."""


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    layout = assemble(max_loras=1).worker.layout
    for seed, name in enumerate(("plain", "dora")):
        random_adapter(
            folder / name, layout, rank=8, targets=TARGETS, seed=seed, dora=name == "dora", alpha=4
        )
    config = LoraConfig(
        r=4, target_modules=list(TARGETS), task_type="CAUSAL_LM", modules_to_save=["norm"]
    )
    save(model("float32"), config, folder / "norm")  # type: ignore[arg-type]
    return {name: folder / name for name in ("plain", "dora", "norm")}


@pytest.fixture(scope="module")
def parts(adapters: dict[str, Path]) -> Parts:
    parts = assemble(max_loras=4)
    LLM.over(parts, {name: str(path) for name, path in adapters.items()})
    return parts


def oracle_of(name: str | None, adapters: dict[str, Path]) -> torch.nn.Module:
    plain = model("float32")
    if name is None:
        return plain
    return PeftModel.from_pretrained(plain, str(adapters[name])).eval()  # type: ignore[arg-type]


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize(
    "names", [[None], [None, "plain"], ["dora", None, "plain"], ["norm", None]]
)
def test_vectors_are_those_of_peft_beside_rows_that_generate(
    parts: Parts, adapters: dict[str, Path], names: Sequence[str | None], pooling: Pooling
) -> None:
    params = PoolingParams(pooling=pooling)
    asked = [(name, prompt) for name in names for prompt in PROMPTS]
    requests: list[EngineRequest] = [answer(None, PROMPTS[0]), answer("plain", PROMPTS[1])]
    requests += [
        EmbeddingRequest(prompt_token_ids=prompt, params=params, model=name)
        for name, prompt in asked
    ]
    found = run(parts, requests)[2:]
    for (name, prompt), [delta] in zip(asked, found, strict=True):
        assert delta.embedding is not None
        expected = vector_of(oracle_of(name, adapters), prompt, params)
        vector = torch.tensor(numbers_of(delta.embedding))
        cosine = float(torch.nn.functional.cosine_similarity(vector, expected, dim=0))
        assert cosine > LEAST_COSINE[name], name


def test_rows_that_generate_keep_every_bit(parts: Parts) -> None:
    alike = [answer(name, PROMPTS[3]) for name in (None, "plain")]
    others: list[list[EngineRequest]] = [
        [answer(None, PROMPTS[2])],
        [EmbeddingRequest(prompt_token_ids=PROMPTS[2], params=PoolingParams(pooling="mean"))],
        [EmbeddingRequest(prompt_token_ids=PROMPTS[2])],
    ]
    results = [first_bits(run(parts, [*alike, *more])[:2]) for more in others]
    assert results[1:] == results[:1] * 2


def first_bits(found: Sequence[Sequence[Delta]]) -> list[object]:
    """Of the step that all take part in; later ones differ in how many rows they have."""
    return [(deltas[0].token_ids, deltas[0].logprobs) for deltas in found]
