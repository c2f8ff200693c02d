from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loramux.adapters.formats.peft_numbers import alpha_of, as_pattern, as_targets
from loramux.adapters.formats.peft_patterns import PatternTable

RANKS = st.integers(1, 2**20)
NAMES = st.dictionaries(
    st.builds(
        lambda layer, leaf: f"model.layers.{layer}.{leaf}",
        st.integers(0, 120),
        st.sampled_from(["mlp.up_proj", "self_attn.q_proj", "self_attn.q_projx", "x_proj", "proj"]),
    ),
    st.integers(1, 4),
    min_size=1,
)


@given(st.floats(-(10.0**6), 10.0**6), RANKS, st.booleans())
def test_scale_that_an_alpha_made_has_an_alpha(alpha: float, rank: int, use_rslora: bool):
    divisor = math.sqrt(rank) if use_rslora else rank
    scale = alpha / divisor
    found = alpha_of(scale, rank, use_rslora=use_rslora)
    assert found is not None
    assert found / divisor == scale


@pytest.mark.parametrize("rank", [1, 8, 64])
def test_rank_that_is_a_power_of_two_reaches_every_scale(rank: int):
    assert alpha_of(0.1, rank, use_rslora=False) == 0.1 * rank


def test_scale_that_no_quotient_is_has_no_alpha():
    assert alpha_of(0.1, 3, use_rslora=False) is None
    assert alpha_of(1e308, 64, use_rslora=False) is None


@given(NAMES)
def test_table_and_default_give_every_module_its_value(values: dict[str, int]):
    default, table = as_pattern(values)
    read = PatternTable(table)
    assert {name: read.get(name, default) for name in values} == values


def test_modules_that_agree_share_one_key():
    values = {f"model.layers.{i}.{leaf}": rank for i in range(9)
              for leaf, rank in (("up_proj", 2), ("q_proj", 4), ("k_proj", 4))}  # fmt: skip
    assert as_pattern(values) == (4, {"up_proj": 2})


def test_leaf_is_a_target_unless_other_modules_have_it():
    adapted = ["model.layers.0.a.q_proj", "model.layers.1.a.q_proj", "model.layers.1.a.v_proj"]
    assert as_targets(adapted, ["model.layers.0.a.v_proj", "vision.k_proj"]) == [
        "q_proj",
        "model.layers.1.a.v_proj",
    ]
