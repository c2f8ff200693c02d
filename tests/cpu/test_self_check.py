"""The self-check passes for what is right, and finds what a forward pass cannot tell by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from loramux.errors import ModelNotServable
from loramux.plan import SequenceStep, StepPlan
from loramux.types import RequestId
from loramux.worker.inputs import StepInputs, build_inputs
from loramux.worker.runner import Computed
from tests.cpu.served import Served


def break_inputs(monkeypatch: pytest.MonkeyPatch, how: Callable[[StepInputs], StepInputs]) -> None:
    def broken(plan: StepPlan, last_rows: Mapping[RequestId, int]) -> StepInputs:
        return how(build_inputs(plan, last_rows))

    monkeypatch.setattr("loramux.worker.self_check.build_inputs", broken)


def test_a_sound_worker_differs_by_rounding_only(tmp_path: Path) -> None:
    assert 0.0 < Served(tmp_path).self_check() < 1e-4


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 14])
def test_it_keeps_to_the_tokens_of_a_step(tmp_path: Path, max_tokens: int) -> None:
    assert Served(tmp_path, max_tokens=max_tokens).self_check() < 1e-4


@pytest.mark.parametrize("num_blocks", [2, 3, 4])
def test_it_keeps_to_the_blocks_of_the_cache(tmp_path: Path, num_blocks: int) -> None:
    assert Served(tmp_path, num_blocks=num_blocks).self_check() < 1e-4


def test_positions_that_start_anew_in_every_chunk_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(tmp_path)
    break_inputs(
        monkeypatch,
        lambda inputs: replace(
            inputs,
            positions=np.concatenate([np.arange(s.num_tokens) for s in inputs.attention]),
        ),
    )
    with pytest.raises(ModelNotServable, match="standard deviations"):
        served.self_check()


def test_sequences_that_see_each_other_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(tmp_path)

    def same_blocks(inputs: StepInputs) -> StepInputs:
        attention = [s._replace(block_table=[0, 1]) for s in inputs.attention]
        return replace(inputs, attention=attention)

    break_inputs(monkeypatch, same_blocks)
    with pytest.raises(ModelNotServable, match="standard deviations"):
        served.self_check()


@pytest.mark.parametrize("sequence", [0, 1])
def test_nan_in_either_sequence_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sequence: int
) -> None:
    served = Served(tmp_path)
    forward = served.worker.forward

    def poisoned(inputs: StepInputs, sequences: Sequence[SequenceStep]) -> Computed:
        computed = forward(inputs, sequences)
        logits = computed.logits.clone()
        parts = logits.split([len(s.token_ids) for s in sequences])
        for s, part in zip(sequences, parts, strict=True):
            if s.request_id == f"self-check-{sequence}":
                part.fill_(torch.nan)
        return computed._replace(logits=logits)

    monkeypatch.setattr(served.worker, "forward", poisoned)
    with pytest.raises(ModelNotServable, match="nan standard deviations"):
        served.self_check()


def test_the_model_is_served_by_pages_again_after_the_check(tmp_path: Path) -> None:
    served = Served(tmp_path)
    served.self_check()
    assert served.base.model.config._attn_implementation == "loramux"
