"""``loramux verify`` against PEFT itself, over the trained tiny model."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from loramux.cli.main import app, main
from loramux.engine.peft_oracle import NoAnswer, PeftAnswers, Place, _place
from loramux.engine.verified import Comparison, OtherToken, Spot, Verification
from loramux.engine.verify import MEASURES, Measure, _compare, _difference, _Outputs
from loramux.lora.weights import HostCopy, pack
from loramux.model.blueprint import draw
from loramux.testing import random_adapter
from loramux.types import Completion, FinishReason, RequestId, RequestOutput, TokenLogprobs
from loramux.worker import worker
from tests.adapter_files import REPOSITORY

SHORT = ("--max-tokens", "6", "--prompt", "Alice was", "--prompt", "The Queen")


def run(base: Path, *arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["verify", str(base), *map(str, arguments)])


def verified(result: Result) -> dict[str, Any]:
    found = json.loads(result.stdout)
    return {comparison["adapter"]: comparison for comparison in found["comparisons"]}


@pytest.fixture
def wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that makes adapters of rank 3 a tenth too strong."""

    def pack_wrongly(spec: Any, *arguments: Any, **options: Any) -> HostCopy:
        if spec.max_rank == 3:
            deltas = tuple(replace(delta, scale=1.1 * delta.scale) for delta in spec.deltas)
            spec = replace(spec, deltas=deltas)
        return pack(spec, *arguments, **options)

    monkeypatch.setattr(worker, "pack", pack_wrongly)


@pytest.fixture
def rank_3(tiny_base: Path, tmp_path: Path) -> Path:
    layout = draw(str(tiny_base)).layout
    return random_adapter(tmp_path / "rank-3", layout, rank=3, targets=["q_proj"], seed=1)


def test_right_engine_agrees_for_all_adapters_in_one_batch(
    tiny_base: Path, tiny_adapters: dict[str, Path]
) -> None:
    result = run(tiny_base, *tiny_adapters.values(), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["agrees"] is True
    assert found["adapters_in_one_step"] == len(tiny_adapters)
    compared = verified(result)
    assert set(compared) == {None, *tiny_adapters}
    for comparison in compared.values():
        assert comparison["verdict"] == "agrees"
        assert 0 < comparison["largest_difference"] < 1e-4
        assert comparison["first_other_token"] is None


def test_documents_name_every_field_of_the_json() -> None:
    page = (REPOSITORY / "docs" / "adapters.md").read_text(encoding="utf-8")
    section = page.partition("## Comparing with PEFT")[2].partition("\n## ")[0]
    names = [f.name for kind in (Verification, Comparison, OtherToken, Spot) for f in fields(kind)]
    assert [name for name in names if f"`{name}`" not in section] == []


@pytest.mark.usefixtures("wrong_scale")
def test_wrong_engine_is_found_and_the_adapter_named(
    tiny_base: Path, tiny_adapters: dict[str, Path], rank_3: Path
) -> None:
    result = run(tiny_base, f"good={tiny_adapters['cat']}", f"bad={rank_3}", *SHORT)
    assert result.exit_code == 1
    verdict, *_ = result.stdout.splitlines()
    assert verdict == "does not agree with PEFT within 0.001: bad"


def test_adapter_of_the_same_rank_is_right_without_the_fault(tiny_base: Path, rank_3: Path) -> None:
    assert run(tiny_base, rank_3, *SHORT).exit_code == 0


def test_tolerance_decides(tiny_base: Path, tiny_adapters: dict[str, Path]) -> None:
    assert run(tiny_base, tiny_adapters["dora"], *SHORT, "--tolerance", "0").exit_code == 1


def test_likelihoods_in_bfloat16_agree_for_the_tokens_of_peft(
    tiny_base: Path, tiny_adapters: dict[str, Path]
) -> None:
    result = run(tiny_base, tiny_adapters["cat"], *SHORT, "--dtype", "bfloat16", "--json")
    found = json.loads(result.stdout)
    assert (found["agrees"], found["tolerance"], found["num_likeliest"]) == (True, 0.5, 0)


def as_mlx(source: Path, directory: Path) -> Path:
    """The same adapter as mlx-lm would have saved it, which PEFT cannot read."""
    directory.mkdir()
    stored = load_file(source / "adapter_model.safetensors")
    renamed = {
        key.removeprefix("base_model.model.")
        .replace("lora_A.weight", "lora_a")
        .replace("lora_B.weight", "lora_b"): tensor.T.contiguous()
        for key, tensor in stored.items()
    }
    save_file(renamed, directory / "adapters.safetensors")
    peft = json.loads((source / "adapter_config.json").read_text())
    parameters = {"rank": peft["r"], "scale": peft["lora_alpha"] / peft["r"]}
    config = {"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": parameters}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def test_refused_and_incomparable_adapters_do_not_stop_the_others(
    tiny_base: Path, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    refused = shutil.copytree(tiny_adapters["cat"], tmp_path / "refused")
    config = json.loads((refused / "adapter_config.json").read_text())
    (refused / "adapter_config.json").write_text(json.dumps(config | {"gamma": 0.5}))
    mlx = as_mlx(tiny_adapters["cat"], tmp_path / "mlx")
    result = run(tiny_base, refused, mlx, tiny_adapters["dora"], *SHORT, "--json")
    assert result.exit_code == 1
    found = verified(result)
    assert found["dora"]["verdict"] == "agrees"
    assert found["refused"]["verdict"] == "refused"
    assert "gamma" in found["refused"]["reasons"][0]
    assert found["mlx"]["verdict"] == "not compared"
    assert found["mlx"]["reasons"][0].startswith("PEFT cannot load it: ")


def test_prompts_come_from_options_and_a_file(
    tiny_base: Path, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "prompts").write_text("one\n\ntwo\n")
    file = ("--prompts", tmp_path / "prompts", "--max-tokens", "2", "--json")
    result = run(tiny_base, tiny_adapters["cat"], "--prompt", "zero", *file)
    assert json.loads(result.stdout)["prompts"] == ["zero", "one", "two"]


def test_peft_that_is_not_installed_is_named_with_the_remedy(
    tiny_base: Path,
    tiny_adapters: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(tiny_base), str(tiny_adapters["cat"])])
    assert ended.value.code == 1
    assert "pip install peft" in capsys.readouterr().err


def test_prompt_beyond_the_context_is_wrong_use(
    tiny_base: Path, tiny_adapters: dict[str, Path]
) -> None:
    assert run(tiny_base, tiny_adapters["cat"], "--prompt", "a " * 5000).exit_code == 2


# Places ------------------------------------------------------------------------------------------

PLACE = Place(7, -1.0, ((9, -1.0), (7, -1.0), (3, -2.5)))


def test_chosen_token_is_compared_and_as_many_likeliest_as_wanted() -> None:
    assert PLACE.compared(0) == {7: -1.0}
    assert PLACE.compared(3) == {7: -1.0, 9: -1.0, 3: -2.5}


def test_lead_is_over_the_token_that_came_instead() -> None:
    assert PLACE.lead_over(9) == 0
    assert PLACE.lead_over(3) == 1.5
    assert PLACE.lead_over(100) == 1.5


def test_token_that_we_do_not_list_is_at_most_as_likely_as_our_last() -> None:
    ours = TokenLogprobs(7, -1.25, ((7, -1.25), (4, -9.0)))
    assert _difference({7: -1.0}, ours) == 0.25
    assert _difference({7: -1.0, 9: -1.0}, ours) == 8.0


def output(tokens: tuple[int, ...], reason: FinishReason = "length") -> RequestOutput:
    ours = tuple(TokenLogprobs(token, -1.0, ((7, -1.0), (9, -1.0), (3, -2.5))) for token in tokens)
    completion = Completion(0, "", tokens, reason, logprobs=ours)
    return RequestOutput(RequestId("r"), (1,), (completion,), prompt_logprobs=(None, *ours))


@pytest.mark.parametrize(
    ("token", "verdict", "near_tie"),
    [(7, "agrees", None), (9, "agrees", True), (3, "differs", False)],
)
def test_other_token_counts_unless_it_is_a_near_tie(
    token: int, verdict: str, near_tie: bool | None
) -> None:
    outputs = [_Outputs(forced=output((7,)), greedy=output((token,)))]
    found = _compare("a", PeftAnswers(((PLACE,),)), outputs, Measure(0.5, num_likeliest=3))
    other = found.first_other_token
    assert (found.verdict, other and other.near_tie) == (verdict, near_tie)


def test_answer_that_ends_with_an_error_differs_and_is_still_json() -> None:
    outputs = [_Outputs(forced=output((7,)), greedy=output((), "error"))]
    found = _compare("a", PeftAnswers(((PLACE,),)), outputs, MEASURES["float32"])
    assert (found.verdict, found.largest_difference) == ("differs", None)
    assert found.reasons == ("the answer to prompt 1 ended with an error",)
    json.dumps(asdict(found), allow_nan=False)


def test_numbers_of_peft_that_are_not_finite_are_not_compared() -> None:
    with pytest.raises(NoAnswer, match="not finite"):
        _place(1, torch.tensor([0.0, float("nan"), 1.0]))


def test_number_that_is_not_finite_differs_beyond_any_tolerance() -> None:
    assert _difference({7: float("nan")}, TokenLogprobs(7, -1.0)) == float("inf")
