"""``loramux inspect`` on whole adapters: text, exit codes, and the example in the documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from loramux.cli import inspect as command
from loramux.cli.main import app, main
from loramux.demo.base import BASE_NAME, cache_folder
from tests.adapter_files import REPOSITORY

EXAMPLE = "examples/adapters/yesno"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["inspect", *arguments])


def test_documents_show_what_the_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    result = run(EXAMPLE)
    assert result.exit_code == 0
    page = (REPOSITORY / "docs" / "adapters.md").read_text(encoding="utf-8")
    assert f"```\n$ loramux inspect {EXAMPLE}\n{result.stdout}```\n" in page


def test_documents_name_every_field_of_the_json(
    tiny_base: Path, tiny_adapters: dict[str, Path]
) -> None:
    result = run(str(tiny_adapters["cat"]), "--base", str(tiny_base), "--json")
    found = json.loads(result.stdout)
    page = (REPOSITORY / "docs" / "adapters.md").read_text(encoding="utf-8")
    names = [*found, *found["bytes"], *found["modules"][0], *found["layers"][0]]
    assert [name for name in names if f"`{name}`" not in page] == []


def test_adapter_of_the_base_is_measured_against_it(
    tiny_base: Path, tiny_adapters: dict[str, Path]
) -> None:
    for adapter in tiny_adapters.values():
        result = run(str(adapter), "--base", str(tiny_base), "--json")
        assert result.exit_code == 0
        found = json.loads(result.stdout)
        assert found["verdict"] == "serveable"
        assert found["checked_against"] == str(tiny_base)
        assert all(0 < facts["relative_norm"] < 10 for facts in found["modules"])


def test_adapter_of_another_base_exits_with_1(tiny_base: Path) -> None:
    result = run(str(REPOSITORY / EXAMPLE), "--base", str(tiny_base))
    assert result.exit_code == 1
    assert result.stdout.startswith(f"refused on {tiny_base}\n  - ")


def test_base_that_cannot_be_served_is_one_line_and_exits_with_1(
    tmp_path: Path, tiny_adapters: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(SystemExit) as caught:
        main(["inspect", str(tiny_adapters["cat"]), "--base", str(tmp_path)])
    assert caught.value.code == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: cannot serve {tmp_path}: ")


def test_rank_above_the_limit_exits_with_1(tiny_adapters: dict[str, Path]) -> None:
    result = run(str(tiny_adapters["hatter"]), "--max-rank", "16", "--no-norms")
    assert result.exit_code == 1
    assert "--max-rank 24" in result.stdout


def test_bars_are_for_terminals_only(
    tiny_adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tiny_adapters["cat"])
    assert "█" not in run(folder).stdout
    monkeypatch.setattr(command, "_on_terminal", lambda: True)
    assert run(folder).stdout.count("█") > 40
    assert "█" not in run(folder, "--json").stdout


@pytest.mark.skipif(
    not list(cache_folder({}).glob(f"converted-*/{BASE_NAME}")),
    reason="the demo's base has not been converted on this machine",
)
def test_shipped_adapters_are_serveable_on_the_demos_base(smollm2_base: Path) -> None:
    result = run(str(REPOSITORY / EXAMPLE), "--base", str(smollm2_base), "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["verdict"], found["unusual"]) == (0, "serveable", [])
    assert found["bytes"]["block_dtype"] == "bfloat16"
    assert len(found["layers"]) == 30
    assert all(0 < layer["relative_norm"] < 0.1 for layer in found["layers"])
