"""An adapter of NeMo answers as the same adapter in PEFT does, on a base with shared key heads."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

from loramux import LLM
from loramux.cli.main import app
from tests import nemo_files
from tests.cpu import twins
from tests.cpu.engines import assemble_tiny
from tests.cpu.test_fused_adapters import ALL, PROMPTS, check, greedy
from tests.nemo_files import members, write_archive

RANK, ALPHA = 6, 9
FIRST = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """The archive, and PEFT's model with the same weights."""
    folder = tmp_path_factory.mktemp("nemo")
    config = LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, target_modules=ALL)
    model = get_peft_model(copy.deepcopy(twins.llama()), config)
    generator = torch.Generator().manual_seed(3)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            leaf = name.split(".")[-4]
            if "lora_A" in name and leaf in FIRST:
                weight.copy_(weights[name.replace(leaf, FIRST[leaf])])
            elif "lora_" in name:
                weight.normal_(0.0, 0.6 * weight.shape[-1] ** -0.5, generator=generator)
    model.save_pretrained(str(folder / "peft"))
    tensors = load_file(folder / "peft" / "adapter_model.safetensors")
    sizes = {"heads": twins.HEADS, "groups": twins.KV_HEADS}
    configuration = nemo_files.config(rank=RANK, hidden=48, lora={"alpha": ALPHA}, **sizes)
    stored = nemo_files.weights(tensors, **sizes)
    return write_archive(folder / "tuned.nemo", members(stored, configuration)), model.eval()


@pytest.mark.parametrize("base", ["llama", "phi3"])
def test_answers_are_those_of_peft(base: str, adapted: tuple[Path, nn.Module]) -> None:
    archive, model = adapted
    llm = LLM.over(assemble_tiny(getattr(twins, base)()), {"tuned": str(archive)})
    check(llm.generate(PROMPTS, greedy(), adapter=["tuned"] * 2), model)


def test_inspection_says_what_an_archive_holds(adapted: tuple[Path, nn.Module]) -> None:
    archive, _ = adapted
    result = CliRunner().invoke(app, ["inspect", str(archive), "--json"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert (found["verdict"], found["format"]) == ("serveable", "nemo")
    assert (found["rank"], found["alpha"], found["use_dora"]) == (RANK, ALPHA, False)
    assert len(found["modules"]) == 14
    assert all(m["alpha"] == ALPHA and m["delta_norm"] > 0 for m in found["modules"])
    assert 0 < found["bytes"]["file"] < found["bytes"]["block"] * 2


def test_inspection_lists_every_reason_against_an_archive(
    adapted: tuple[Path, nn.Module], tmp_path: Path
) -> None:
    archive, _ = adapted
    twins.llama().save_pretrained(str(tmp_path / "base"))
    arguments = ["inspect", str(archive), "--base", str(tmp_path / "base"), "--max-rank", "4"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "rank 6 is above the limit of 4" in result.stdout
    served = CliRunner().invoke(app, arguments[:-2])
    assert served.stdout.startswith("serveable on ")
    assert served.exit_code == 0
