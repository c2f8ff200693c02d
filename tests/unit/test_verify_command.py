"""``loramux verify``: wrong use and text, without a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from loramux.cli.main import app
from loramux.cli.options import name_adapters
from loramux.cli.verification_text import lines
from loramux.engine.verified import Comparison, OtherToken, Spot, Verification

BASE = Comparison(adapter=None, verdict="agrees", largest_difference=1.2e-6, largest_at=Spot(0, 2))
FOUND = Verification(
    agrees=True,
    base="org/m",
    dtype="float32",
    tolerance=1e-3,
    prompts=("a", "b"),
    max_tokens=16,
    num_likeliest=5,
    adapters_in_one_step=1,
    comparisons=(BASE, replace(BASE, adapter="fancy")),
)


def test_sources_have_the_name_that_is_given_or_their_own():
    values = ["a=x/y", "some/where/pirate", "json/", "b=c=d", "/odd=path/e"]
    assert name_adapters(values) == {
        "a": "x/y",
        "pirate": "some/where/pirate",
        "json": "json/",
        "b": "c=d",
        "e": "/odd=path/e",
    }
    assert name_adapters(["."]) == {Path.cwd().name: "."}


@pytest.mark.parametrize("values", [["a=x", "a=y"], ["x/a", "y/a"], ["=x"], ["a="]])
def test_sources_without_or_with_the_same_name_are_wrong_use(values: list[str]):
    with pytest.raises(typer.BadParameter):
        name_adapters(values)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["base"],
        ["base", "no/such/adapter"],
        ["base", ".", "--dtype", "float16"],
        ["base", ".", "--max-tokens", "0"],
        ["base", ".", "--prompts", "no/such/file"],
        ["base", ".", "--tolerance", "-1"],
    ],
)
def test_wrong_use_exits_with_2(arguments: list[str]):
    assert CliRunner().invoke(app, ["verify", *arguments]).exit_code == 2


def test_file_without_a_prompt_is_wrong_use(tmp_path: Path):
    (tmp_path / "empty").write_text("\n \n")
    arguments = ["verify", "base", str(tmp_path), "--prompts", str(tmp_path / "empty")]
    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_agreement_is_said_first_and_each_adapter_has_a_line():
    verdict, _, base, compared, batch, _, head, *rows = lines(FOUND)
    assert verdict == "agrees with PEFT within 0.001"
    assert base == "base        org/m"
    assert "PEFT's tokens and its 5 likeliest at 16 places behind each of 2 prompts" in compared
    assert batch == "batch       1 of 1 adapters in one step"
    assert head.split("  ")[0] == "adapter"
    assert [row.split() for row in rows] == [
        [name, "agrees", "1.2e-06", "prompt", "1,", "token", "3", "none"]
        for name in ("(base)", "fancy")
    ]


def test_those_that_do_not_agree_are_named_with_the_reasons():
    other = OtherToken(spot=Spot(1, 0), token_id=7, peft_token_id=8, peft_lead=0.5, near_tie=False)
    found = replace(
        FOUND,
        agrees=False,
        comparisons=(
            BASE,
            replace(BASE, adapter="one", verdict="differs", first_other_token=other),
            Comparison(adapter="two", verdict="refused", reasons=("bias\n=all",)),
        ),
    )
    verdict, *_, one, two, reason = lines(found)
    assert verdict == "does not agree with PEFT within 0.001: one, two"
    assert one.endswith("prompt 2, token 1: 7 where PEFT has 8 (PEFT leads by 0.5)")
    assert two.split() == ["two", "refused", "-", "-", "-"]
    assert reason == "  - two: bias\\n=all"


def test_near_tie_is_called_so():
    other = OtherToken(spot=Spot(0, 0), token_id=7, peft_token_id=8, peft_lead=0.0, near_tie=True)
    *_, row = lines(replace(FOUND, comparisons=(replace(BASE, first_other_token=other),)))
    assert row.endswith("7 where PEFT has 8 (near tie, PEFT leads by 0)")
