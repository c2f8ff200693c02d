"""``loramux convert``: the same adapter in another format, and a base that has it inside."""

from __future__ import annotations

import copy
import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel
from typer.testing import CliRunner, Result

from loramux import LLM
from loramux.adapters.formats.reader import read_adapter
from loramux.adapters.identity import adapter_id
from loramux.cli.main import app
from loramux.model.blueprint import draw
from tests import nemo_files
from tests.cpu import twins
from tests.cpu.engines import assemble_tiny
from tests.cpu.test_fused_adapters import FUSED, PROMPTS, SPLIT, check, greedy
from tests.nemo_files import members, write_archive

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PLAIN = SPLIT["all"]
DORA = {**PLAIN, "use_dora": True}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The split and the fused twin as directories."""
    folder = tmp_path_factory.mktemp("bases")
    for name in ("llama", "phi3"):
        getattr(twins, name)().save_pretrained(str(folder / name))
    return {name: folder / name for name in ("llama", "phi3")}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def convert(source: Path, out: Path, base: Path, *more: str) -> str:
    result = run(source, out, "--base", base, *more)
    assert result.exit_code == 0, result.output
    return result.stdout


def identity(adapter: Path, base: Path) -> str:
    loaded = read_adapter("a", adapter, draw(str(base)).layout, max_rank=10**6)
    return adapter_id(loaded.spec, loaded.tensors)


def peft(folder: Path, base: str = "llama", **config: Any) -> tuple[Path, nn.Module]:
    return folder, twins.write_adapter(getattr(twins, base)(), folder, **config)


# To PEFT -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPLIT)
def test_adapter_comes_out_as_itself_and_peft_agrees(
    name: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    source, model = peft(tmp_path / "source", **SPLIT[name])
    convert(source, tmp_path / "out", bases["llama"])
    assert identity(tmp_path / "out", bases["llama"]) == identity(source, bases["llama"])
    again = PeftModel.from_pretrained(twins.llama(), str(tmp_path / "out"))
    expected, found = (twins.logprobs(m, PROMPTS[1]) for m in (model, again))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", FUSED)
def test_fused_adapter_comes_out_split_on_a_split_base(
    name: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    source, model = peft(tmp_path / "source", base="phi3", **FUSED[name])
    convert(source, tmp_path / "out", bases["llama"])
    assert identity(tmp_path / "out", bases["llama"]) == identity(source, bases["llama"])
    again = PeftModel.from_pretrained(twins.llama(), str(tmp_path / "out"))
    expected, found = (twins.logprobs(m, PROMPTS[1]) for m in (model, again))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["alphas", "dora in parts", "only up"])
def test_parts_of_a_fused_base_keep_their_identity(
    name: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    source, _ = peft(tmp_path / "source", **SPLIT[name])
    convert(source, tmp_path / "out", bases["phi3"])
    assert identity(tmp_path / "out", bases["phi3"]) == identity(source, bases["phi3"])


def respell(key: str) -> str:
    """As older releases and other tools wrote it: with the adapter's name, without the head."""
    key = key.replace("base_model.model.model.", "base_model.model.")
    return key.replace(".weight", ".default.weight").replace("vector", "vector.default")


def test_old_spellings_come_out_in_todays(bases: dict[str, Path], tmp_path: Path) -> None:
    source, model = peft(tmp_path / "source", **DORA)
    old = tmp_path / "old"
    old.mkdir()
    tensors = load_file(source / WEIGHTS)
    torch.save({respell(key): t for key, t in tensors.items()}, old / "adapter_model.bin")
    (old / CONFIG).write_text((source / CONFIG).read_text())
    convert(old, tmp_path / "out", bases["llama"])
    written = load_file(tmp_path / "out" / WEIGHTS)
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[key], tensors[key]) for key in tensors)
    again = PeftModel.from_pretrained(twins.llama(), str(tmp_path / "out"))
    assert torch.equal(twins.logprobs(again, PROMPTS[1]), twins.logprobs(model, PROMPTS[1]))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
)
def test_dtype_is_kept(dtype: torch.dtype, bases: dict[str, Path], tmp_path: Path) -> None:
    source, _ = peft(tmp_path / "source", **PLAIN)
    tensors = {key: t.to(dtype) for key, t in load_file(source / WEIGHTS).items()}
    save_file(tensors, source / WEIGHTS)
    convert(source, tmp_path / "out", bases["llama"])
    written = load_file(tmp_path / "out" / WEIGHTS)
    assert all(written[key].dtype == dtype for key in tensors)
    assert all(torch.equal(written[k].float(), t.float()) for k, t in tensors.items())


def test_nemo_comes_out_as_peft(bases: dict[str, Path], tmp_path: Path) -> None:
    source, _ = peft(tmp_path / "source", **PLAIN)
    tensors = load_file(source / WEIGHTS)
    for key in tensors:  # NeMo has one A for q, k and v
        first = key.replace("k_proj.lora_A", "q_proj.lora_A").replace("v_proj.lora_A",
            "q_proj.lora_A").replace("up_proj.lora_A", "gate_proj.lora_A")  # fmt: skip
        tensors[key] = tensors[first]
    sizes = {"heads": twins.HEADS, "groups": twins.KV_HEADS}
    config = nemo_files.config(rank=6, hidden=48, lora={"alpha": 9}, **sizes)
    archive = tmp_path / "tuned.nemo"
    write_archive(archive, members(nemo_files.weights(tensors, **sizes), config))
    convert(archive, tmp_path / "out", bases["llama"])
    written = load_file(tmp_path / "out" / WEIGHTS)
    assert all(torch.equal(written[key], tensors[key]) for key in tensors)
    assert json.loads((tmp_path / "out" / CONFIG).read_text())["lora_alpha"] == 9


@pytest.mark.parametrize(("scale", "use_rslora"), [(20.0, False), (0.1, True)])
def test_scale_of_mlx_becomes_an_alpha_that_gives_it_exactly(
    scale: float, use_rslora: bool, bases: dict[str, Path], tmp_path: Path
) -> None:
    """No float divided by 3 is 0.1, but one divided by the root of 3 is."""
    source = mlx_adapter(tmp_path / "mlx", rank=3, scale=scale)
    convert(source, tmp_path / "out", bases["llama"])
    assert identity(tmp_path / "out", bases["llama"]) == identity(source, bases["llama"])
    assert json.loads((tmp_path / "out" / CONFIG).read_text())["use_rslora"] is use_rslora


def test_scale_that_no_alpha_gives_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    source = mlx_adapter(tmp_path / "mlx", rank=3, scale=1.9)
    result = run(source, tmp_path / "out", "--base", bases["llama"])
    assert result.exit_code == 1
    assert "no alpha of PEFT gives exactly the scale 1.9 at rank 3" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["mlx"]


def mlx_adapter(folder: Path, *, rank: int, scale: float) -> Path:
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    stem = "model.layers.1.self_attn.o_proj"
    tensors = {f"{stem}.lora_a": torch.randn(48, rank, generator=generator),
               f"{stem}.lora_b": torch.randn(rank, 48, generator=generator)}  # fmt: skip
    save_file(tensors, folder / "adapters.safetensors")
    config = {"fine_tune_type": "lora", "num_layers": 2,
              "lora_parameters": {"rank": rank, "scale": scale, "dropout": 0.0}}  # fmt: skip
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


# To mlx-lm ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [PLAIN, DORA, SPLIT["rslora"] | {"rank_pattern": {}},
                                    SPLIT["one layer"]])  # fmt: skip
def test_mlx_and_back_is_the_same_adapter(
    config: dict[str, Any], bases: dict[str, Path], tmp_path: Path
) -> None:
    source, _ = peft(tmp_path / "source", **config)
    convert(source, tmp_path / "mlx", bases["llama"], "--to", "mlx")
    assert sorted(path.name for path in (tmp_path / "mlx").iterdir()) == [
        CONFIG,
        "adapters.safetensors",
    ]
    convert(tmp_path / "mlx", tmp_path / "back", bases["llama"])
    ids = {identity(tmp_path / f, bases["llama"]) for f in ("source", "mlx", "back")}
    assert len(ids) == 1
    first, last = (load_file(tmp_path / f / WEIGHTS) for f in ("source", "back"))
    assert all(torch.equal(first[key], last[key]) for key in first)


def test_mlx_is_refused_with_every_reason(bases: dict[str, Path], tmp_path: Path) -> None:
    source, _ = peft(tmp_path / "source", **SPLIT["alphas"])
    save_file({key: t.double() for key, t in load_file(source / WEIGHTS).items()}, source / WEIGHTS)
    result = run(source, tmp_path / "out", "--base", bases["phi3"], "--to", "mlx")
    assert result.exit_code == 1
    for word in ("one rank", "one scale", "inside a fused linear", "does not read float64"):
        assert word in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# Merged ------------------------------------------------------------------------------------------


def logits(model: nn.Module) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([PROMPTS[1]])).logits


def merged_as_peft(model: PreTrainedModel, folder: Path, dtype: torch.dtype, **config: Any) -> None:
    """Compare with PEFT's own merge in float32, up to the one rounding of each weight."""
    model = model.to(dtype)
    model.save_pretrained(str(folder / "base"))
    (folder / "base" / "tokenizer.json").write_text("{}")
    adapted = twins.write_adapter(copy.deepcopy(model).float(), folder / "adapter", **config)
    convert(folder / "adapter", folder / "out", folder / "base", "--merge")
    merged = AutoModelForCausalLM.from_pretrained(folder / "out", dtype="auto")
    assert merged.dtype == dtype
    assert (folder / "out" / "tokenizer.json").read_text() == "{}"
    expected = adapted.merge_and_unload()  # type: ignore[operator]
    for (name, found), (other, wanted) in zip(
        merged.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert name == other
        torch.testing.assert_close(found.float(), wanted, rtol=torch.finfo(dtype).eps, atol=2e-6)
    if dtype == torch.float32:
        torch.testing.assert_close(logits(merged), logits(expected), rtol=0, atol=1e-4)
        assert not torch.allclose(logits(merged), logits(model), atol=0.1)


MERGED = {name: SPLIT[name] for name in ("odd ranks", "alphas", "rslora", "dora", "one layer")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MERGED)
def test_merged_checkpoint_is_that_of_peft(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    merged_as_peft(twins.llama(), tmp_path, dtype, **MERGED[name])


@pytest.mark.parametrize("name", ["odd ranks", "dora"])
def test_merged_checkpoint_of_a_fused_base(name: str, tmp_path: Path) -> None:
    merged_as_peft(twins.phi3(), tmp_path, torch.float32, **FUSED[name])


def test_tied_embeddings_stay_tied_and_as_they_are(tmp_path: Path) -> None:
    sizes = {**twins.llama().config.to_dict(), "tie_word_embeddings": True}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).eval()
    merged_as_peft(model, tmp_path, torch.float32, **PLAIN)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


def test_generation_settings_are_kept_as_they_are(bases: dict[str, Path], tmp_path: Path) -> None:
    """Also such as transformers would not save: a temperature without sampling."""
    base = tmp_path / "base"
    shutil.copytree(bases["llama"], base)
    text = '{"do_sample": false, "temperature": 0.6, "eos_token_id": 2}'
    (base / "generation_config.json").write_text(text)
    source, _ = peft(tmp_path / "source", **SPLIT["only v"])
    convert(source, tmp_path / "out", base, "--merge")
    assert (tmp_path / "out" / "generation_config.json").read_text() == text


def test_weights_that_stand_transposed_are_merged(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(
        GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=160, n_positions=64)
    ).eval()
    config = {"r": 3, "lora_alpha": 4, "target_modules": ["c_attn", "c_proj", "c_fc"]}
    merged_as_peft(model, tmp_path, torch.float32, fan_in_fan_out=True, **config)


def test_merged_base_answers_as_the_served_adapter(bases: dict[str, Path], tmp_path: Path) -> None:
    source, model = peft(tmp_path / "source", **SPLIT["dora"])
    convert(source, tmp_path / "out", bases["phi3"], "--merge")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    llm = LLM.over(assemble_tiny(merged))
    check(llm.generate(PROMPTS, greedy()), model)


def test_weight_that_another_module_shares_is_not_merged(tmp_path: Path) -> None:
    from loramux.adapters.loaded import LoadedAdapter
    from loramux.errors import AdapterRefused
    from loramux.model import merge

    source, _ = peft(tmp_path / "source", **SPLIT["only v"])
    model = twins.llama()
    model.save_pretrained(str(tmp_path / "base"))
    loaded: LoadedAdapter = read_adapter(
        "a", source, draw(str(tmp_path / "base")).layout, max_rank=64
    )
    layers: Any = model.model.layers
    layers[1].self_attn.v_proj.weight = layers[0].self_attn.v_proj.weight
    with pytest.raises(AdapterRefused, match=r"in model\.layers\.1\.self_attn\.v_proj as well"):
        merge.fold(model, loaded, "a")


# Use of the command ------------------------------------------------------------------------------


def test_what_is_there_is_replaced_with_force_only(bases: dict[str, Path], tmp_path: Path) -> None:
    source, _ = peft(tmp_path / "source", **PLAIN)
    out = tmp_path / "out"
    convert(source, out, bases["llama"])
    (out / "old").touch()
    result = run(source, out, "--base", bases["llama"])
    assert result.exit_code == 2
    assert (out / "old").exists()
    convert(source, out, bases["llama"], "--force")
    assert not (out / "old").exists()


def test_adapter_of_another_base_exits_with_1(bases: dict[str, Path], tmp_path: Path) -> None:
    source, _ = peft(tmp_path / "source", **SPLIT["only v"])
    config = json.loads((source / CONFIG).read_text())
    (source / CONFIG).write_text(json.dumps({**config, "r": 7, "bias": "some"}))
    for more in ([], ["--merge"], ["--to", "mlx"]):
        result = run(source, tmp_path / "out", "--base", bases["llama"], *more)
        assert result.exit_code == 1
        assert "the configuration says rank 7" in result.stdout
        assert "bias must be" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    "more", [["--to", "nemo"], ["--merge", "--to", "peft"], ["--base", "/no/such/base"]]
)
def test_wrong_use_exits_with_2(more: list[str], bases: dict[str, Path], tmp_path: Path) -> None:
    source, _ = peft(tmp_path / "source", **SPLIT["only v"])
    base = [] if "--base" in more else ["--base", bases["llama"]]
    assert run(source, tmp_path / "out", *base, *more).exit_code == 2
    assert run(source, tmp_path / "out").exit_code == 2


@pytest.mark.parametrize("merge", [[], ["--merge"]])
def test_write_that_fails_is_one_line_and_leaves_nothing(
    merge: list[str], bases: dict[str, Path], tmp_path: Path
) -> None:
    source, _ = peft(tmp_path / "source", **SPLIT["only v"])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        result = run(source, tmp_path / "out", "--base", bases["llama"], *merge)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {tmp_path}/out cannot be written: ")
    assert "Traceback" not in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_base_is_never_replaced(bases: dict[str, Path], tmp_path: Path) -> None:
    source, _ = peft(tmp_path / "source", **SPLIT["only v"])
    result = run(source, bases["llama"], "--base", bases["llama"], "--merge", "--force")
    assert result.exit_code == 2
    assert (bases["llama"] / "model.safetensors").exists()
