"""What sampling parameters refuse, by name."""

from __future__ import annotations

from typing import Any

import pytest

from loramux.errors import InvalidRequest
from loramux.types import MAX_BIASES, SamplingParams


def test_biases_are_kept_as_pairs_in_order_of_tokens() -> None:
    given: Any = {7: 1.5, 3: -2}
    assert SamplingParams(logit_bias=given).logit_bias == ((3, -2), (7, 1.5))
    assert SamplingParams(logit_bias=((7, 1.5), (3, -2))) == SamplingParams(logit_bias=given)


@pytest.mark.parametrize(
    ("biases", "told"),
    [
        (((3, 1.0), (3, 2.0)), "twice"),
        ({-1: 1.0}, "logit_bias"),
        ({3: 100.5}, "logit_bias"),
        ({3: float("nan")}, "logit_bias"),
        ({True: 1.0}, "logit_bias"),
        (dict.fromkeys(range(MAX_BIASES + 1), 0.5), f"the limit is {MAX_BIASES}"),
    ],
)
def test_biases_out_of_range_are_refused(biases: Any, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told) as refusal:
        SamplingParams(logit_bias=biases)
    assert refusal.value.param == "logit_bias"


def test_tokens_to_be_kept_are_strings() -> None:
    kept: Any = ["<a>", "<b>"]
    assert SamplingParams(kept_special_tokens=kept).kept_special_tokens == ("<a>", "<b>")
    for wrong in ([""], [5]):
        with pytest.raises(InvalidRequest) as refusal:
            SamplingParams(kept_special_tokens=wrong)  # type: ignore[arg-type]
        assert refusal.value.param == "kept_special_tokens"
