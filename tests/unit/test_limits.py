"""Sizes of a step: given, or by the device."""

from __future__ import annotations

import pytest

from loramux.config import SchedulerOptions, StepLimits
from loramux.errors import ConfigError


@pytest.mark.parametrize(
    ("device", "limits"), [("cpu", StepLimits(64, 1024)), ("cuda", StepLimits(256, 8192))]
)
def test_defaults_are_those_of_the_device(device: str, limits: StepLimits) -> None:
    assert SchedulerOptions().limits(device) == limits


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_given_holds_on_every_device(device: str) -> None:
    options = SchedulerOptions(max_num_seqs=5, max_step_tokens=7)
    assert options.limits(device) == StepLimits(5, 7)


def test_what_is_not_given_makes_room_for_what_is() -> None:
    assert SchedulerOptions(max_num_seqs=2000).limits("cpu") == StepLimits(2000, 2000)
    assert SchedulerOptions(max_num_seqs=3).limits("cpu") == StepLimits(3, 1024)
    assert SchedulerOptions(max_step_tokens=9).limits("cuda") == StepLimits(9, 9)
    assert SchedulerOptions(max_step_tokens=500).limits("cuda") == StepLimits(256, 500)


def test_given_sizes_that_cannot_work_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_step_tokens"):
        SchedulerOptions(max_num_seqs=8, max_step_tokens=7)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01, float("nan")])
def test_a_share_of_memory_is_above_zero_and_at_most_one(share: float) -> None:
    with pytest.raises(ConfigError, match="gpu_memory"):
        SchedulerOptions(gpu_memory=share)


@pytest.mark.parametrize(
    "text",
    [
        "sql=0", "sql=-1", "sql=nan", "sql=inf", "sql=many", "sql", "sql=", "=4", "", "sql=4,",
        "sql=4,sql=4", "*=1,*=2", "sql=1001", "sql=0.0009", "sql=2000,*=1.9",
    ],
)  # fmt: skip
def test_weights_that_are_none_are_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(ConfigError, match=r"adapter_weights: .*(write|leave|choose)"):
        SchedulerOptions(adapter_weights=text)


def test_without_weights_there_are_no_shares() -> None:
    assert SchedulerOptions().weights("base") is None
    given = SchedulerOptions(adapter_weights="sql=1000,base=2").weights("base")
    assert given is not None
    assert (given.of("sql"), given.of("chat"), given.of(None)) == (1000, 1, 2)
