from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loramux.adapters.formats.peft_patterns import BadPattern, PatternTable

Q0 = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("key", "fits"),
    [
        ("q_proj", True),
        ("proj", False),
        ("self_attn.q_proj", True),
        ("0.self_attn.q_proj", True),
        ("10.self_attn.q_proj", False),
        ("^model.layers.0.self_attn.q_proj", True),
        ("^self_attn.q_proj", False),
        ("model.layers.0", False),
        ("model.layers.0.*q_proj", True),
        (r"layers\.[02]\.self_attn\.(q|k)_proj", True),
        ("q.proj", True),
        ("k_proj|q_proj", True),
        ("not_there", False),
    ],
)
def test_key_fits_as_in_peft(key: str, fits: bool):
    assert PatternTable({key: 1}).get(Q0, 0) == int(fits)


def test_first_key_in_file_order_wins():
    assert PatternTable({"q_proj": 1, "layers.0.self_attn.q_proj": 2}).get(Q0, 0) == 1
    assert PatternTable({"layers.0.self_attn.q_proj": 2, "q_proj": 1}).get(Q0, 0) == 2


def test_default_stands_where_no_key_fits():
    assert PatternTable({"k_proj": 1}).get(Q0, 7) == 7


@pytest.mark.parametrize("key", ["(", "*a", "[", "(?P<x>a)(?P<x>b)", "(?:" * 240 + ")" * 240])
def test_invalid_expression_is_refused(key: str):
    with pytest.raises(BadPattern, match="no valid regular expression"):
        PatternTable({key: 1})


def test_overlong_key_is_refused():
    with pytest.raises(BadPattern, match="characters"):
        PatternTable({"a" * 1001: 1})


def test_expression_that_backtracks_for_ever_is_stopped():
    table = PatternTable({r"(([\w.]|[\w.])+)+[!?]": 1}, time_limit=0.2)
    started = time.monotonic()
    with pytest.raises(BadPattern, match="too long"):
        table.get("model.layers.0." + "a" * 60 + ".q_proj", 0)
    assert time.monotonic() - started < 5


def test_time_limit_counts_all_modules_together():
    table = PatternTable({r"(([\w.]|[\w.])+)+[!?]": 1}, time_limit=0.2)
    with pytest.raises(BadPattern):
        table.get("a" * 60, 0)
    with pytest.raises(BadPattern):
        table.get("b" * 60, 0)


NAMES = ["q_proj", "a.q_proj", "b.a.q_proj", "xq_proj", "a_q_proj", "q.proj", "a.q.proj", "a1", "a"]
KEYS = ["q_proj", "q.proj", r"q\.proj", "a.q_proj", r"a\.q_proj", "^a.q_proj", "^q_proj", "a", "."]
KEYS += ["..", "^.", r"\.", "(q|a)_proj", "a?.q_proj", "a[0-9]", "q_proj|b.a.q_proj", "x?q_proj"]


@pytest.mark.parametrize("key", KEYS)
def test_rule_is_that_of_peft_on_every_name(key: str):
    table = PatternTable({key: True})
    fits = {name for name in NAMES if table.get(name, False)}
    assert fits == {name for name in NAMES if re.match(rf"(.*\.)?({key})$", name)}


@given(
    st.lists(st.from_regex(r"\^?([aq1_]|\\?\.){1,5}", fullmatch=True), min_size=1, max_size=6),
    st.lists(st.text("aq1_.", min_size=1, max_size=7), min_size=1, max_size=5),
)
def test_the_first_plain_key_that_fits_wins_as_in_peft(keys: list[str], names: list[str]):
    table = PatternTable({key: i for i, key in enumerate(dict.fromkeys(keys))})
    for name in names:
        fitting = [
            i
            for i, key in enumerate(dict.fromkeys(keys))
            if re.match(rf"(.*\.)?({key})$", name) is not None
        ]
        assert table.get(name, -1) == min(fitting, default=-1), name


def test_plain_keys_and_expressions_are_taken_in_file_order():
    keys = {"k_proj": 0, "(q|v)_proj": 1, "q_proj": 2, ".*_proj": 3}
    wanted = {"a.k_proj": 0, "a.q_proj": 1, "v_proj": 1, "a.o_proj": 3, "a.norm": -1}
    assert {name: PatternTable(keys).get(name, -1) for name in wanted} == wanted


def test_table_with_a_name_for_each_module_of_a_mixture_is_quick():
    """18,432 names in a table of as many: one by one that would be 340 million comparisons."""
    modules = [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj"
        for layer in range(48)
        for expert in range(128)
        for part in ("gate", "up", "down")
    ]
    started = time.process_time()
    table = PatternTable({module: i for i, module in enumerate(modules)})
    assert [table.get(module, -1) for module in modules] == list(range(len(modules)))
    assert time.process_time() - started < 2


def test_a_table_made_to_take_long_without_any_expression_is_stopped():
    """Every key wants other characters to be dots, so none can be looked up with another."""
    keys = ["".join("." if i >> bit & 1 else "a" for bit in range(14)) for i in range(2**14)]
    table = PatternTable(dict.fromkeys(keys, 1), time_limit=0.2)
    started = time.process_time()
    with pytest.raises(BadPattern, match="too long"):
        [table.get(f"b{i:013d}", 0) for i in range(20_000)]
    assert time.process_time() - started < 2
