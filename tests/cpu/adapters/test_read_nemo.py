from __future__ import annotations

import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from loramux.adapters.formats.reader import read_adapter
from loramux.adapters.fusions import find_fusions
from loramux.adapters.identity import adapter_id
from loramux.adapters.loaded import LoadedAdapter
from loramux.adapters.spec import BaseLayout, HeadCounts, ModuleShape
from loramux.errors import AdapterRefused
from tests import nemo_files
from tests.adapter_files import llama_layout, lora_config
from tests.nemo_files import PREFIX, members, write_archive

HEADS, GROUPS, HIDDEN, RANK = 8, 4, 64, 3
PLAIN = llama_layout()
BASE = replace(
    PLAIN,
    model_type="llama",
    heads=dict.fromkeys(range(2), HeadCounts(HEADS, GROUPS)),
    fusions=find_fusions("llama", PLAIN.modules, dict.fromkeys(range(2), (64, 32, 32))),
)
LEAVES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SHARE_A = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}


def peft_tensors(*leaves: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for module, shape in BASE.modules.items():
        leaf = module.rpartition(".")[2]
        if leaf not in (leaves or LEAVES):
            continue
        stem = f"base_model.model.{module}"
        first = f"{stem.replace(leaf, SHARE_A.get(leaf, leaf))}.lora_A.weight"
        a = tensors.get(first, torch.randn(RANK, shape.in_features).to(dtype))
        tensors[f"{stem}.lora_A.weight"] = a
        tensors[f"{stem}.lora_B.weight"] = torch.randn(shape.out_features, RANK).to(dtype)
    return tensors


def nemo_config(**change: Any) -> dict[str, Any]:
    return nemo_files.config(rank=RANK, heads=HEADS, groups=GROUPS, hidden=HIDDEN, **change)


def nemo_tensors(*leaves: str) -> dict[str, Tensor]:
    return nemo_files.weights(peft_tensors(*leaves), heads=HEADS, groups=GROUPS)


def read(path: Path, base: BaseLayout = BASE) -> LoadedAdapter:
    return read_adapter("fancy", path, base, max_rank=64)


def archive(folder: Path, tensors: object, **change: Any) -> Path:
    return write_archive(folder / "tuned.nemo", members(tensors, nemo_config(**change)))


def refusal(path: Path) -> str:
    with pytest.raises(AdapterRefused) as caught:
        read(path)
    return str(caught.value)


def peft_twin(folder: Path, tensors: dict[str, Tensor], alpha: float) -> LoadedAdapter:
    folder.mkdir()
    save_file({k: t.clone() for k, t in tensors.items()}, folder / "adapter_model.safetensors")
    config = lora_config(r=RANK, lora_alpha=alpha)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return read(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_tensor_is_that_of_the_same_adapter_in_peft(dtype: torch.dtype, tmp_path: Path):
    peft = peft_tensors(dtype=dtype)
    stored = nemo_files.weights(peft, heads=HEADS, groups=GROUPS)
    found = read(archive(tmp_path, stored, lora={"alpha": 7}))
    twin = peft_twin(tmp_path / "twin", peft, alpha=7)
    assert found.tensors.keys() == {key.removeprefix(f"{PREFIX[:-7]}") for key in peft}
    for key, tensor in found.tensors.items():
        expected = peft[f"{PREFIX[:-7]}{key}"]
        assert tensor.dtype == dtype
        assert torch.equal(tensor, expected)
    assert adapter_id(found.spec, found.tensors) == adapter_id(twin.spec, twin.tensors)


def test_alpha_that_is_not_said_is_the_rank(tmp_path: Path):
    config = nemo_config()
    del config["peft"]["lora_tuning"]["alpha"]
    path = write_archive(tmp_path / "tuned.nemo", members(nemo_tensors(), config))
    assert {(delta.rank, delta.scale) for delta in read(path).spec.deltas} == {(RANK, 1.0)}


@pytest.mark.parametrize("prefix", ["model.decoder.layers.", "decoder.layers.", "model.layers.",
                                    "model.language_model.encoder.layers."])  # fmt: skip
def test_layers_are_found_under_every_prefix_of_nemo(prefix: str, tmp_path: Path):
    stored = nemo_files.weights(peft_tensors(), heads=HEADS, groups=GROUPS, prefix=prefix)
    assert len(read(archive(tmp_path, stored)).spec.deltas) == 14


def test_adapters_of_single_projections_are_read(tmp_path: Path):
    peft = peft_tensors()
    stored: dict[str, Tensor] = {}
    for key, tensor in peft.items():
        number, block, leaf, part, _ = key.removeprefix(PREFIX).split(".")
        names = nemo_files.WHOLE | nemo_files.UNFUSED
        side = "linear_in" if part == "lora_A" else "linear_out"
        stored[f"model.decoder.layers.{number}.{names[f'{block}.{leaf}']}.{side}.weight"] = tensor
    found = read(archive(tmp_path, stored, lora={"variant": "canonical"}))
    assert all(torch.equal(t, peft[f"{PREFIX[:-7]}{key}"]) for key, t in found.tensors.items())
    assert len(found.spec.deltas) == 14


def test_archive_in_a_folder_and_its_content_unpacked_are_the_same(tmp_path: Path):
    packed, unpacked = tmp_path / "packed", tmp_path / "unpacked"
    packed.mkdir()
    path = write_archive(packed / "tuned.nemo", members(nemo_tensors(), nemo_config(), dot="./"))
    with tarfile.open(path) as file:
        file.extractall(unpacked, filter="data")
    ids = {adapter_id(a.spec, a.tensors) for a in map(read, (path, packed, unpacked))}
    assert len(ids) == 1


def test_fused_base_gets_one_delta_with_the_rows_in_its_own_order(tmp_path: Path):
    sizes = {"self_attn.qkv_proj": 128, "mlp.gate_up_proj": 192}
    modules = {f"model.layers.0.{leaf}": ModuleShape(64, out) for leaf, out in sizes.items()}
    base = BaseLayout("tiny/phi3", modules, model_type="phi3",
                      fusions=find_fusions("phi3", modules, {0: (64, 32, 32)}))  # fmt: skip
    peft = {k: t for k, t in peft_tensors(*set(LEAVES) - {"o_proj", "down_proj"}).items()
            if ".layers.0." in k}  # fmt: skip
    stored = nemo_files.weights(peft, heads=HEADS, groups=GROUPS)
    found = read(archive(tmp_path, stored), base)
    assert [delta.module for delta in found.spec.deltas] == list(modules)
    for delta, leaves in zip(found.spec.deltas, (LEAVES[:3], LEAVES[4:6]), strict=True):
        block = delta.module.split(".")[-2]
        parts = [peft[f"{PREFIX}0.{block}.{leaf}.lora_B.weight"] for leaf in leaves]
        assert torch.equal(torch.cat(delta.pick(found.tensors[delta.b])), torch.cat(parts))
        assert delta.rank == RANK


def test_head_size_of_its_own_is_honoured(tmp_path: Path):
    """Attention that is wider than the model: kv_channels times heads is not hidden_size."""
    base = llama_layout(layers=1, hidden=24, kv=32)
    q = "model.layers.0.self_attn.q_proj"
    modules = {**base.modules, q: ModuleShape(24, 64)}
    stem = "model.decoder.layers.0.self_attention.adapter_layer.lora_kqv_adapter"
    stored = {f"{stem}.linear_in.weight": torch.ones(RANK, 24),
              f"{stem}.linear_out.weight": torch.ones(128, RANK)}  # fmt: skip
    config = nemo_config(hidden_size=24, kv_channels=8)
    path = write_archive(tmp_path / "tuned.nemo", members(stored, config))
    assert len(read(path, replace(base, modules=modules)).spec.deltas) == 3


KQV = "model.decoder.layers.0.self_attention.adapter_layer.lora_kqv_adapter"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"peft": ...}, "peft is missing"),
        ({"peft": {"peft_scheme": "ia3"}}, "peft_scheme is ia3"),
        ({"peft": {"peft_scheme": "lora"}}, "lora_tuning must be"),
        ({"lora": {"adapter_dim": 0}}, "adapter_dim must be"),
        ({"lora": {"adapter_dim": 4}}, "rank 3, but the configuration says rank 4"),
        ({"lora": {"alpha": "${x}"}}, "alpha must be"),
        ({"lora": {"alpha": 1e400}}, "alpha must be"),
        ({"lora": {"alpha": 0}}, "would change nothing"),
        ({"lora": {"weight_tying": True}}, "weight_tying"),
        ({"lora": {"network_alpha": 8}}, "network_alpha"),
        ({"megatron_legacy": True}, "megatron_legacy"),
        ({"num_attention_heads": ...}, "num_attention_heads must be"),
        ({"num_query_groups": 3}, "must divide"),
        ({"num_attention_heads": 2**20, "num_query_groups": 1}, "at most"),
        ({"num_query_groups": 8}, "num_attention_heads and num_query_groups are 8 and 8"),
        ({"num_query_groups": None}, "tiny/llama has 8 and 4"),
        ({"hidden_size": 60}, "kv_channels must be"),
        ({"hidden_size": 4}, "kv_channels must be"),
        ({"kv_channels": 16}, "256 rows are expected"),
        ({"activation": "gelu"}, "which has no gate"),
        ({"activation": "swiglu"}, "order rows of gate and up stand"),
        ({"tensor_model_parallel_size": 2}, "order rows of gate and up stand"),
    ],
)
def test_configuration_that_cannot_be_honoured_is_refused(
    change: dict[str, Any], word: str, tmp_path: Path
):
    assert word in refusal(archive(tmp_path, nemo_tensors(), **change))


@pytest.mark.parametrize(
    ("key", "word"),
    [
        (f"{KQV}.linear_out.bias", "biases"),
        (f"{KQV}.layer_norm.weight", "norms inside"),
        ("model.decoder.layers.0.mlp.adapter_layer.lora_moe_hto4h_adapter.0.linear_in.weight",
         "does not have"),
        ("model.decoder.layers.0.mlp.experts.local_experts.1.adapter_layer.lora_moe_4htoh_adapter."
         "expert_adapters.1.linear_in.weight", "no such expert"),
        ("model.decoder.layers.0.adapter_layer.adapter_1.linear_in.weight", "only LoRA"),
        ("model.decoder.layers.0.mlp.adapter_layer.lora_kqv_adapter.linear_in.weight",
         "does not have"),
        ("model.enc_dec_model.decoder.layers.0.inter_attention.adapter_layer.lora_q_adapter."
         "linear_in.weight", "does not have"),
        ("model.decoder.layers.9.self_attention.adapter_layer.lora_dense_attention_adapter."
         "linear_in.weight", "no such layer"),
        (KQV.replace("model.decoder.", "decoder.") + ".linear_in.weight", "duplicate"),
    ],
)  # fmt: skip
def test_tensor_that_has_no_place_is_refused(key: str, word: str, tmp_path: Path):
    assert word in refusal(archive(tmp_path, nemo_tensors() | {key: torch.ones(RANK, 64)}))


def test_all_findings_are_told_at_once(tmp_path: Path):
    stored = nemo_tensors("q_proj", "k_proj", "v_proj") | {f"{KQV}.linear_out.bias": torch.ones(3)}
    path = archive(tmp_path, stored, megatron_legacy=True, lora={"weight_tying": True})
    text = refusal(path)
    assert all(word in text for word in ("megatron_legacy", "weight_tying", "biases"))


@pytest.mark.parametrize("shard", ["mp_rank_00", "tp_rank_00_pp_rank_000"])
@pytest.mark.parametrize("packed", [True, False])
def test_shards_are_refused_by_name(shard: str, packed: bool, tmp_path: Path):
    files = {f"./{shard}/model_weights.ckpt": b"x", "./model_config.yaml": b"a: b"}
    path = write_archive(tmp_path / "tuned.nemo", files)
    if not packed:
        folder = tmp_path / "unpacked"
        with tarfile.open(path) as file:
            file.extractall(folder, filter="data")
        path = folder
    text = refusal(path)
    assert f"sharded over GPUs ({shard})" in text
    assert "parallelism of 1" in text


def test_distributed_checkpoint_is_refused_by_name(tmp_path: Path):
    files = {"model_config.yaml": b"a: b", "model_weights/common.pt": b"x"}
    text = refusal(write_archive(tmp_path / "tuned.nemo", files))
    assert "holds a distributed checkpoint (model_weights/)" in text


def test_folder_with_two_archives_is_refused(tmp_path: Path):
    for name in ("one.nemo", "two.nemo"):
        write_archive(tmp_path / name, members(nemo_tensors(), nemo_config()))
    assert "more than one adapter of NeMo: one.nemo, two.nemo" in refusal(tmp_path)


@pytest.mark.parametrize("missing", ["model_config.yaml", "model_weights.ckpt"])
def test_missing_half_is_named(missing: str, tmp_path: Path):
    files = members(nemo_tensors(), nemo_config())
    del files[missing]
    assert f"{missing} (NeMo) is missing" in refusal(write_archive(tmp_path / "a.nemo", files))


def test_compressed_archive_is_refused_with_the_remedy(tmp_path: Path):
    files = members(nemo_tensors(), nemo_config())
    assert "tar -xzf" in refusal(write_archive(tmp_path / "a.nemo", files, "w:gz"))
