"""Files that nobody thought of: each is read whole or refused by a typed error, soon.

``scripts/test --all`` tries many more of them.
"""

from __future__ import annotations

import json
import math
import os
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from loramux.adapters.formats.peft_fields import KNOWN
from loramux.adapters.formats.reader import read_adapter
from loramux.adapters.formats.weight_files import MLX_FILE, PEFT_FILE, TORCH_FILE
from loramux.adapters.fusions import find_fusions
from loramux.adapters.inspection import inspect_adapter
from loramux.adapters.loaded import LoadedAdapter
from loramux.adapters.spec import BaseLayout, LoraSpec, ModuleShape
from loramux.errors import AdapterError
from loramux.lora.weights import packed_bytes
from tests.adapter_files import ITEM_BYTES, llama_layout, lora_config, pairs, safetensors_bytes
from tests.torch_files import Call, Global, Storage, program, tensor, torch_file, zipped

MAX_SECONDS = 10.0
"""Of the processor, for one folder. The tables of patterns of a configuration may take two each."""

MAX_FILE_BYTES = 2**33
"""Larger ones are not made, since not every file system has them; a header may claim them."""

PLAIN = llama_layout(layers=1)
BASE = BaseLayout(
    PLAIN.name,
    PLAIN.modules,
    PLAIN.other_modules,
    "llama",
    find_fusions("llama", PLAIN.modules, {0: (64, 32, 32)}),
)
LEAVES = ("q_proj", "v_proj", "gate_proj", "up_proj")
PAIRS = pairs(BASE, *LEAVES)
CONFIG = "adapter_config.json"

fuzz = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def check(folder: Path, files: Mapping[str, bytes | Callable[[Path], None]]) -> None:
    """Read and inspect a folder of these files."""
    for path in folder.iterdir():
        path.unlink()
    for name, content in files.items():
        if callable(content):
            content(folder / name)
        else:
            (folder / name).write_bytes(content)
    started = time.process_time()
    outcome = read(folder)
    found = inspect_adapter(folder, max_rank=64, packed_bytes=packed, measure=False)
    assert time.process_time() - started < MAX_SECONDS
    event("refused" if isinstance(outcome, AdapterError) else "read")
    if isinstance(outcome, AdapterError):
        assert all(map(str.isprintable, str(outcome).splitlines()))
    else:  # alone it may be served where this base refuses it, and never the other way round
        assert found.verdict == "serveable"
        assert found.reasons == ()


def read(folder: Path) -> LoadedAdapter | AdapterError:
    try:
        return read_adapter("fuzz", folder, BASE, max_rank=64)
    except AdapterError as error:
        return error


def packed(spec: LoraSpec, shapes: Mapping[str, ModuleShape], dtype: str) -> int:
    return packed_bytes(spec, shapes, getattr(torch, dtype))


# Configurations ----------------------------------------------------------------------------------

names = st.one_of(
    st.sampled_from(sorted(KNOWN)),
    st.sampled_from(("fine_tune_type", "num_layers", "lora_parameters", "model", "gamma", "")),
    st.text(max_size=8),
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 70),
    st.sampled_from((2**31, 2**63, -(2**63), 2**64, 10**30, 10**400)),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(("LORA", "CAUSAL_LM", "lora", "dora", "none", "all", "q_proj", "lora_only")),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)
pattern_keys = st.one_of(
    st.sampled_from(("q_proj", r".*\.q_proj", "^q_proj", "(", "[", "(a+)+$", r"\d+", "layers.0.")),
    st.text(alphabet="aq_proj.*+?()[]{}|^$\\09,", max_size=10),
)
patterns = st.dictionaries(pattern_keys, scalars, max_size=3)
right_values = st.sampled_from(
    (
        ("use_rslora", True),
        ("use_dora", True),
        ("swap_gate_up", True),
        ("r", 2),
        ("lora_alpha", 0),
        ("lora_alpha", 1e300),
        ("lora_alpha", 5e-324),
        ("fine_tune_type", "lora"),
        ("num_layers", 1),
        ("lora_parameters", {"rank": 4, "scale": 2.0}),
    )
)
fields = st.one_of(
    st.tuples(names, values),
    st.tuples(st.sampled_from(("rank_pattern", "alpha_pattern")), patterns),
    right_values,
)
literals = st.sampled_from(
    ("NaN", "-Infinity", "1e999", "-0", "9" * 5_000, "[" * 3_000, '{"a":' * 3_000, '"\\ud800"', "x")
)
"""Values that Python's own encoder does not write."""


@st.composite
def changed_config(draw: st.DrawFn, right: Mapping[str, Any]) -> bytes:
    """A configuration with some fields changed, left out, repeated; now and then damaged."""
    pairs_of_text = [(json.dumps(name), json.dumps(value)) for name, value in right.items()]
    if draw(st.integers(0, 3)) == 0:
        del pairs_of_text[draw(st.integers(0, len(pairs_of_text) - 1))]
    for name, value in draw(st.lists(fields, max_size=3)):
        pairs_of_text.append((json.dumps(name), json.dumps(value)))
    if draw(st.integers(0, 5)) == 0:
        pairs_of_text.append((json.dumps(draw(names)), draw(literals)))
    text = "{" + ", ".join(f"{name}: {value}" for name, value in pairs_of_text) + "}"
    encoding = draw(st.sampled_from(("utf-8",) * 6 + ("utf-16", "utf-8-sig")))
    return draw(damaged(text.encode(encoding)))


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """The same bytes mostly, else with some overwritten, inserted or cut off."""
    if draw(st.integers(0, 3)):
        return data
    at = draw(st.integers(0, max(len(data) - 1, 0)))
    piece = draw(st.binary(max_size=8))
    kept = draw(st.sampled_from((0, len(piece), len(data))))
    return data[:at] + piece + data[at + kept :]


@fuzz
@given(config=changed_config(lora_config()))
def test_any_configuration_is_read_or_refused(folder: Path, config: bytes) -> None:
    data = safetensors_bytes(PAIRS, fill=b"\x3c")
    check(folder, {CONFIG: config, PEFT_FILE: data})


MLX_SHAPES = {
    key.removeprefix("base_model.model.")
    .replace("lora_A.weight", "lora_a")
    .replace("lora_B.weight", "lora_b"): shape[::-1]
    for key, shape in PAIRS.items()
}
MLX_CONFIG = {
    "fine_tune_type": "lora",
    "num_layers": -1,
    "lora_parameters": {"rank": 4, "scale": 2.0},
}


@fuzz
@given(config=changed_config(MLX_CONFIG))
def test_any_configuration_of_mlx_is_read_or_refused(folder: Path, config: bytes) -> None:
    check(folder, {CONFIG: config, MLX_FILE: safetensors_bytes(MLX_SHAPES, fill=b"\x3c")})


# Names and shapes of tensors ---------------------------------------------------------------------

pieces = st.one_of(
    st.sampled_from(
        (
            "base_model.model.", "model.", "language_model.", "layers.0.", "layers.1.",
            "layers.99.", "self_attn.", "q_proj.", "qkv_proj.", "gate_up_proj.", "mlp.",
            "experts.0.", "lora_A.",
            "lora_B.", "default.", "weight", "bias", "lora_magnitude_vector", "lora_embedding_A",
            "modules_to_save.", "embed_tokens.", "lm_head.", "original_module.", "vision_tower.",
            "../", "/etc/", "\0", "..", ".", "", "é", "9" * 30 + ".", "a." * 400, "\ud800",
        )
    ),
    st.text(max_size=5),
)  # fmt: skip
sizes = st.sampled_from((0, 1, 2, 3, 4, 8, 32, 64, 96, 128, 2**20, 2**31, 2**62, 2**63 - 1))
shapes = st.lists(sizes, max_size=4).map(tuple)


@st.composite
def changed_keys(draw: st.DrawFn, right: Mapping[str, tuple[int, ...]]) -> list[tuple[str, Any]]:
    """Keys and shapes near the right ones; a key may come twice."""
    found = list(right.items())
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(found) - 1))
        key, shape = found[at]
        change = draw(st.integers(0, 6))
        if change == 0:
            found[at] = key, draw(shapes)
        elif change == 1:
            old, new = draw(st.sampled_from(sorted({*key.split(".")}))), draw(pieces).strip(".")
            found[at] = key.replace(old, new, 1), shape
        elif change == 2:
            found[at] = draw(pieces) + key, shape
        elif change == 3:
            found[at] = key + draw(pieces), shape
        elif change == 4 and len(found) > 1:
            del found[at]
        elif change == 5:
            found.append((key, shape))
        else:
            found.append(("".join(draw(st.lists(pieces, max_size=6))), draw(shapes)))
    return found


def weight_file(keys: list[tuple[str, Any]], dtype: str, fill: bytes) -> Callable[[Path], None]:
    """A file with a sound header, unless a key comes twice; its data may be a hole."""
    header, end = [], 0
    for key, shape in keys:
        start, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        entry = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        header.append(f"{json.dumps(key)}: {json.dumps(entry)}")
    text = ("{" + ", ".join(header) + "}").encode()

    def write(path: Path) -> None:
        path.write_bytes(struct.pack("<Q", len(text)) + text + fill * min(end // len(fill), 2**16))
        os.truncate(path, min(8 + len(text) + end, MAX_FILE_BYTES))

    return write


fills = st.sampled_from((b"\0", b"\x3c", b"\xff", b"\x00\x3c\x80\x3f"))


@fuzz
@given(
    keys=changed_keys(PAIRS),
    dtype=st.sampled_from(("F32",) * 4 + tuple(ITEM_BYTES)),
    fill=fills,
    change=st.one_of(st.just(("r", 4)), right_values),
)
def test_any_tensors_are_read_or_refused(
    folder: Path, keys: list[tuple[str, Any]], dtype: str, fill: bytes, change: tuple[str, Any]
) -> None:
    config = json.dumps(lora_config(**{change[0]: change[1]})).encode()
    check(folder, {CONFIG: config, PEFT_FILE: weight_file(keys, dtype, fill)})


@fuzz
@given(keys=changed_keys(MLX_SHAPES), fill=fills)
def test_any_tensors_of_mlx_are_read_or_refused(
    folder: Path, keys: list[tuple[str, Any]], fill: bytes
) -> None:
    files = {CONFIG: json.dumps(MLX_CONFIG).encode(), MLX_FILE: weight_file(keys, "F32", fill)}
    check(folder, files)


# Bytes of weight files ---------------------------------------------------------------------------

SAFETENSORS = safetensors_bytes(PAIRS, fill=b"\x3c")
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(("F32", "BF16", "F8_E4M3", "F99", 3)),
        "shape": st.one_of(values, st.lists(sizes, max_size=3)),
        "data_offsets": st.one_of(values, st.lists(sizes, min_size=2, max_size=2)),
    }
)


@fuzz
@given(data=damaged(SAFETENSORS[: int.from_bytes(SAFETENSORS[:8], "little") + 8]))
def test_any_damage_to_a_header_is_refused_or_harmless(folder: Path, data: bytes) -> None:
    rest = SAFETENSORS[int.from_bytes(SAFETENSORS[:8], "little") + 8 :]
    check(folder, {CONFIG: json.dumps(lora_config()).encode(), PEFT_FILE: data + rest})


@fuzz
@given(
    header=st.dictionaries(st.sampled_from(sorted(PAIRS)), st.one_of(entries, values), max_size=4),
    length=st.one_of(st.none(), st.sampled_from((0, 1, 8, 2**20, 2**24, 2**40, 2**64 - 1))),
    data=st.binary(max_size=32),
)
def test_any_header_is_read_or_refused(
    folder: Path, header: dict[str, Any], length: int | None, data: bytes
) -> None:
    text = json.dumps(header).encode()
    size = struct.pack("<Q", len(text) if length is None else length)
    check(folder, {CONFIG: json.dumps(lora_config()).encode(), PEFT_FILE: size + text + data})


STORAGE_BYTES = 4 * 96 * 64
TORCH_WEIGHTS = {
    key: tensor(Storage("0", STORAGE_BYTES // 4), shape) for key, shape in PAIRS.items()
}
pickled = st.recursive(
    st.one_of(
        scalars,
        st.builds(Global, st.sampled_from(("torch", "builtins", "os")), st.text("ab", max_size=4)),
        st.builds(
            lambda n, shape, offset, stride: tensor(
                Storage("0", n), tuple(shape), offset=offset, stride=stride
            ),
            sizes,
            st.lists(sizes, max_size=3),
            sizes,
            st.one_of(st.none(), st.lists(sizes, max_size=3).map(tuple)),
        ),
        st.builds(Call, st.just("collections"), st.just("OrderedDict")),
        st.builds(Call, st.just("torch._utils"), st.just("_rebuild_tensor_v2"), scalars, scalars),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=4), inner, max_size=3),
    ),
    max_leaves=6,
)


@fuzz
@given(data=damaged(torch_file(TORCH_WEIGHTS, {"0": b"\x3c" * STORAGE_BYTES})))
def test_any_damage_to_a_file_of_torch_is_refused_or_harmless(folder: Path, data: bytes) -> None:
    check(folder, {CONFIG: json.dumps(lora_config()).encode(), TORCH_FILE: data})


@fuzz
@given(data=damaged(program(TORCH_WEIGHTS)))
def test_any_damage_to_a_pickle_is_refused_or_harmless(folder: Path, data: bytes) -> None:
    file = zipped({"data.pkl": data, "byteorder": b"little", "data/0": b"\x3c" * STORAGE_BYTES})
    check(folder, {CONFIG: json.dumps(lora_config()).encode(), TORCH_FILE: file})


@fuzz
@given(value=st.one_of(pickled, st.dictionaries(st.sampled_from(sorted(PAIRS)), pickled)))
def test_any_pickle_is_read_or_refused(folder: Path, value: object) -> None:
    data = torch_file(value, {"0": bytes(64)})
    check(folder, {CONFIG: json.dumps(lora_config()).encode(), TORCH_FILE: data})
