"""``loramux inspect``: exit codes, text and JSON; adapters without weights, so without torch."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from loramux.adapters.inspected import Inspection, LayerFacts, ModuleFacts, TierBytes
from loramux.cli.inspection_text import lines, plot
from loramux.cli.main import app
from tests.adapter_files import lora_config
from tests.remote_places import FileServer

FOUND = Inspection(
    verdict="serveable",
    reasons=(),
    checked_against=None,
    unusual=(),
    adapter="a",
    format="peft",
    peft_version=None,
    base_model=None,
    revision=None,
    rank=4,
    alpha=8.0,
    use_rslora=False,
    use_dora=False,
    bytes=TierBytes(1000, 3 * 2**20, "bfloat16"),
)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["inspect", *arguments])


def write(directory: Path, **change: Any) -> str:
    (directory / "adapter_config.json").write_text(json.dumps(lora_config(**change)))
    return str(directory)


def text(**change: Any) -> list[str]:
    return list(lines(dataclasses.replace(FOUND, **change)))


def module(layer: int, **change: Any) -> ModuleFacts:
    plain = {"module": f"m.{layer}.q", "kind": "q", "rank": 4, "alpha": 8.0, "scale": 2.0}
    return ModuleFacts(**{**plain, "layer": layer, **change})


def test_configuration_without_faults_exits_with_0(tmp_path: Path):
    result = run(write(tmp_path))
    assert result.exit_code == 0
    assert result.stdout.startswith("config only: ")


def test_refused_adapter_exits_with_1_and_names_every_reason(tmp_path: Path):
    result = run(write(tmp_path, bias="some", lora_bias="yes"))
    assert result.exit_code == 1
    verdict, *reasons = result.stdout.splitlines()
    assert verdict == "refused (not checked against a base)"
    assert "bias must be" in reasons[0]
    assert "lora_bias" in reasons[1]


def test_lenience_is_an_option(tmp_path: Path):
    folder = write(tmp_path, use_superlora=True)
    assert run(folder).exit_code == 1
    result = run(folder, "--lenient")
    assert result.exit_code == 0
    assert "unusual\n  - unknown field use_superlora in adapter_config.json" in result.stdout


@pytest.mark.parametrize(
    "arguments", [["no/such/folder"], ["hf:org/repo"], [], [".", "--max-rank", "0"], [".", "--x"]]
)
def test_wrong_use_exits_with_2(arguments: list[str]):
    assert run(*arguments).exit_code == 2


def test_base_that_is_no_folder_is_wrong_use(tmp_path: Path):
    assert run(write(tmp_path), "--base", str(tmp_path / "none")).exit_code == 2


def test_json_is_one_object_with_every_field(tmp_path: Path):
    folder = write(tmp_path, use_dora="yes")
    result = run(folder, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert set(found) == {field.name for field in dataclasses.fields(Inspection)}
    assert (found["verdict"], found["adapter"]) == ("refused", folder)
    assert found["reasons"] == ["use_dora must be true or false"]
    assert found["bytes"] == {"file": None, "block": None, "block_dtype": "bfloat16"}


def test_verdict_names_the_base():
    assert text(checked_against="tiny/llama")[0] == "serveable on tiny/llama"


def test_facts_have_a_line_each():
    found = text(peft_version="0.1", base_model="org/m", revision="r1", use_rslora=True)
    assert found[2:] == [
        "adapter     a",
        "format      peft 0.1",
        "made for    org/m, revision r1",
        "config      rank 4, alpha 8, rsLoRA",
        "file        1000 bytes",
        "block       3.0 MiB in bfloat16: on the host, and on the device while it has a slot",
    ]


def test_row_of_a_kind_spans_its_layers():
    modules = [module(0), module(1, rank=8, alpha=16.0), module(2), module(5)]
    head, row = text(modules=modules)[-2:]
    assert head.split() == ["module", "layers", "rank", "alpha", "scale"]
    assert row.split() == ["q", "0-2,5", "4..8", "8..16", "2"]


def test_row_has_norms_relative_to_the_base_where_they_are_known():
    own = {"delta_norm": 3.0, "top_share": 0.5, "values_for_90": 2}
    modules = [module(0, **own), module(1, **own | {"delta_norm": 4.0})]
    assert text(modules=modules)[-1].split()[-3:] == ["3..4", "50%", "2"]
    modules = [dataclasses.replace(facts, relative_norm=0.01) for facts in modules]
    head, row = text(modules=modules)[-2:]
    assert "delta/base" in head
    assert row.split()[-3:] == ["0.01", "50%", "2"]


def test_text_of_strangers_cannot_steer_a_terminal():
    evil = "a\x1b[2J\nb"
    found = text(
        reasons=(f"no module of {evil}",),
        unusual=(evil,),
        adapter=evil,
        checked_against=evil,
        base_model=evil,
        revision=evil,
        peft_version=evil,
        modules=[module(0, kind=evil)],
    )
    assert all(line.isprintable() for line in found)
    assert r"  - no module of a\x1b[2J\nb" in found


def plotted(*layers: LayerFacts) -> list[str]:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    console.print(plot(layers))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()[1:]


def test_plot_has_bars_as_long_as_norms():
    title, half, whole = plotted(LayerFacts(0, 2.0, None), LayerFacts(1, 4.0, None))
    assert title.strip() == "norm of the delta by layer"
    assert (half.count("█"), whole.count("█")) == (20, 40)
    assert whole.split()[0] == "1"
    assert whole.split()[-1] == "4"


def test_plot_is_relative_to_the_base_where_all_layers_are():
    title, first, second = plotted(LayerFacts(0, 9.0, 0.1), LayerFacts(1, 1.0, 0.2))
    assert title.strip() == "norm of the delta by layer, relative to the base"
    assert first.count("█") < second.count("█")


def test_plot_of_zero_deltas_has_no_bars():
    assert "█" not in "".join(plotted(LayerFacts(0, 0.0, None)))


def test_remote_adapter_is_fetched_into_the_given_cache(tmp_path: Path):
    with FileServer().running() as web:
        web.put("/a/", {"adapter_config.json": json.dumps(lora_config()).encode()})
        result = run(f"{web.url}/a/", "--disk-cache", str(tmp_path / "cache"))
        assert result.exit_code == 0
        assert result.stdout.startswith("config only: ")
        assert list((tmp_path / "cache" / "blobs").iterdir())
        missing = run(f"{web.url}/nowhere/", "--disk-cache", str(tmp_path / "cache"))
    assert missing.exit_code == 2
