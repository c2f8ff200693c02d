"""A server that opens some modules to adapters refuses the others, and keeps room for less."""

from __future__ import annotations

from pathlib import Path

import pytest

from loramux import LLM
from loramux.errors import AdapterRefused, ConfigError
from tests.cpu import twins
from tests.cpu.engines import assemble_tiny


def test_only_adapters_on_open_modules_are_loaded(tmp_path: Path) -> None:
    for name, targets in (("narrow", ["q_proj", "v_proj"]), ("wide", ["q_proj", "up_proj"])):
        twins.write_adapter(twins.llama(), tmp_path / name, r=2, target_modules=targets)
    parts = assemble_tiny(twins.llama(), lora_target_modules="attn_q,attn_v")
    llm = LLM.over(parts, {"narrow": str(tmp_path / "narrow")})
    remedy = r"start with --lora-target-modules attn_q,attn_v,up_proj: .*mlp\.up_proj"
    with pytest.raises(AdapterRefused, match=remedy):
        llm.load_adapter("wide", str(tmp_path / "wide"))


def test_default_memory_is_for_the_open_modules() -> None:
    every, some = (
        assemble_tiny(twins.llama(), lora_target_modules=words) for words in (None, "o_proj")
    )
    assert 0 < some.worker.arena_bytes < every.worker.arena_bytes / 4


def test_start_fails_when_a_word_names_nothing() -> None:
    with pytest.raises(ConfigError, match="no such linear"):
        assemble_tiny(twins.llama(), lora_target_modules="cross_attn_q")
