"""The KV cache takes what the rest leaves of a GPU's memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from loramux import LLM, SamplingParams
from loramux.config import AdapterOptions, EngineOptions, SchedulerOptions
from loramux.engine.build import Parts, assemble
from loramux.errors import ConfigError
from loramux.model.load import adopt
from loramux.testing import tiny_model
from tests.cpu.engines import word_tokenizer


@pytest.fixture(autouse=True)
def _clean_gpu() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


def build(share: float, *, max_model_len: int = 100_000, kv_cache: str | None = None) -> Parts:
    """A small model whose sequences could fill any GPU's memory many times."""
    model = tiny_model(
        hidden_size=512,
        intermediate_size=384,
        num_layers=8,
        max_positions=100_000,
        dtype="bfloat16",
    ).cuda()
    options = EngineOptions(
        adapters=AdapterOptions(max_loras=2, host_cache="256MiB"),
        scheduler=SchedulerOptions(
            max_num_seqs=256, max_step_tokens=512, gpu_memory=share, kv_cache=kv_cache
        ),
    )
    base = adopt("tiny", model, max_model_len)
    return assemble(base, word_tokenizer(base.vocab_size), options, "tiny")


def share_in_use() -> float:
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / total


def test_memory_in_use_comes_close_to_the_share_and_not_above() -> None:
    parts = build(0.3)
    assert 0.27 < share_in_use() <= 0.305
    llm = LLM.over(parts)
    llm.generate([[1, 2, 3]] * 300, SamplingParams(max_tokens=3, ignore_eos=True))
    assert share_in_use() <= 0.31
    assert llm.stats().kv_blocks_total > 100_000 // 16


def test_a_share_that_leaves_too_little_for_one_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match="--gpu-memory"):
        build(0.001)


def test_a_given_cache_goes_before_the_share() -> None:
    parts = build(0.001, max_model_len=64, kv_cache="64MiB")
    assert 0 < LLM.over(parts).stats().kv_blocks_total < 10_000


def test_a_cache_larger_than_the_gpu_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="does not fit into the GPU's memory"):
        build(0.9, max_model_len=64, kv_cache="10TiB")
