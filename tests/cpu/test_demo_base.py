"""The converted demo base is the one the adapters were trained on, and is made once."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from loramux.demo import base as demo_base_module
from loramux.demo.base import demo_base
from loramux.errors import ModelNotServable
from tests.golden.load import Golden


@pytest.fixture(scope="module")
def tokenizer(smollm2_base: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_base)


@pytest.fixture(scope="module")
def config(smollm2_base: Path) -> dict[str, Any]:
    return json.loads((smollm2_base / "config.json").read_text(encoding="utf-8"))


def test_weights_are_those_of_the_golden_outputs(
    smollm2_base: Path, smollm2_golden: Golden
) -> None:
    with (smollm2_base / "model.safetensors").open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == smollm2_golden.model_sha256


def test_tiny_weights_are_those_of_the_golden_outputs(tiny_base: Path, tiny_golden: Golden) -> None:
    weights = (tiny_base / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == tiny_golden.model_sha256


def test_white_space_before_a_digit_is_one_token(smollm2_base: Path) -> None:
    tokens = Tokenizer.from_file(str(smollm2_base / "tokenizer.json")).encode("  7").tokens
    assert tokens == ["ĠĠ", "7"]


def test_each_digit_is_a_token(smollm2_base: Path) -> None:
    tokens = Tokenizer.from_file(str(smollm2_base / "tokenizer.json")).encode("1985").tokens
    assert tokens == ["1", "9", "8", "5"]


def test_chat_prompts_have_the_golden_tokens(tokenizer: Any, smollm2_golden: Golden) -> None:
    for prompt in smollm2_golden.prompts.values():
        if prompt.kind == "chat":
            messages = [{"role": "user", "content": prompt.text}]
            rendered = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            assert tokenizer(rendered).input_ids == list(prompt.input_ids), prompt.id


def test_no_token_is_put_before_a_raw_prompt(tokenizer: Any, smollm2_golden: Golden) -> None:
    prompt = smollm2_golden.prompts["raw-fox"]
    assert tokenizer(prompt.text).input_ids == list(prompt.input_ids)


def test_special_tokens_and_limits_survive_the_conversion(tokenizer: Any) -> None:
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert tokenizer.model_max_length == 8192


def test_config_says_what_the_checkpoint_is(config: dict[str, Any]) -> None:
    assert config["dtype"] == "bfloat16"
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100000.0
    assert "quantization_config" not in config


def test_files_can_be_read_by_other_users(smollm2_base: Path) -> None:
    if os.name == "posix":
        assert (smollm2_base / "model.safetensors").stat().st_mode & 0o777 == 0o644
        assert smollm2_base.stat().st_mode & 0o777 == 0o755


def test_the_second_call_does_not_convert(
    smollm2_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_base_module, "publish", lambda *_: pytest.fail("converted again"))
    assert demo_base() == smollm2_base


def test_a_failed_conversion_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo_base_module.sys, "executable", str(tmp_path / "python"))
    fake_python = tmp_path / "python"
    fake_python.write_text("#!/bin/sh\necho 'OSError: no space left on device' >&2\nexit 1\n")
    fake_python.chmod(0o755)
    with pytest.raises(ModelNotServable, match="no space left on device"):
        demo_base()
    assert list(tmp_path.glob("loramux/*/*")) == []
