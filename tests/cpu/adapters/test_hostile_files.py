"""Files made to hurt are refused in little time and memory, in a process that measures both."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.adapter_files import PREFIX, REPOSITORY, lora_config
from tests.nemo_files import config as nemo_config
from tests.torch_files import Call, Storage, program, tensor, torch_file, zipped

MAX_SECONDS = 1.0
MAX_MEMORY = 200 * 10**6
MARKER = Path(tempfile.gettempdir(), "loramux-hostile-pickle-was-run")

SAFETENSORS, BIN = "adapter_model.safetensors", "adapter_model.bin"
CONFIG, MLX, NEMO = "adapter_config.json", "adapters.safetensors", "tuned.nemo"

GIGABYTE = 1 << 30
Q_PROJ = [f"{PREFIX}model.layers.0.self_attn.q_proj.{part}.weight" for part in ("lora_A", "lora_B")]

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux can measure it so"
)

MEASURE = """
import gc, json, sys, time
from pathlib import Path
from loramux.adapters.formats.reader import read_adapter
from loramux.errors import AdapterRefused
from tests.adapter_files import llama_layout

def status(field):
    text = Path("/proc/self/status").read_text()
    return int(text.partition(field + ":")[2].split()[0]) * 1024

def measure(directory):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, started, text = status("VmRSS"), time.process_time(), ""
    try:
        read_adapter("hostile", directory, base, max_rank=64)
    except AdapterRefused as error:
        text = str(error)
    return text, time.process_time() - started, status("VmHWM") - before

base = llama_layout()
gc.collect()
gc.freeze()  # as a server does before its first request
for directory in map(Path, sys.argv[1:]):
    runs = [measure(directory)]
    while runs[-1][1] > 0.5 and len(runs) < 5:  # others can make one run slower, and none faster
        runs.append(measure(directory))
    texts, seconds, growths = zip(*runs)
    print(json.dumps([directory.name, texts[0], min(seconds), max(growths)]), flush=True)
"""


def header_only(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def packed_pickle() -> bytes:
    """A zip of 250 kB whose pickle unpacks to 256 MB."""
    out = io.BytesIO()
    with (
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file,
        file.open("archive/data.pkl", "w") as record,
    ):
        for _ in range(256):
            record.write(bytes(10**6))
    return out.getvalue()


def many_records() -> bytes:
    """A zip that is all directory: a million records that stand at the same place."""
    listed = zipped({"a": b""})
    line = listed[listed.index(b"PK\1\2") : listed.index(b"PK\5\6")]
    start = listed[: listed.index(b"PK\1\2")]
    size = 10**6 * len(line)
    return start + line * 10**6 + struct.pack("<4s6xHLLH", b"PK\5\6", 9, size, len(start), 0)


def tar_of(*headers: tuple[str, bytes, int, bytes]) -> bytes:
    """A tar whose members have these names, kinds, sizes (whatever follows) and contents."""
    out = b""
    for name, kind, size, content in headers:
        member = tarfile.TarInfo(name)
        member.type, member.size, member.linkname = kind, size, "/etc/passwd"
        padding = bytes(-len(content) % 512)
        out += member.tobuf(tarfile.GNU_FORMAT) + content + padding
    return out


def nemo(yaml: bytes, weights: bytes = b"") -> bytes:
    """An archive with this configuration and these weights."""
    files = {"model_config.yaml": yaml, "model_weights.ckpt": weights or torch_file({})}
    members = [(name, tarfile.REGTYPE, len(data), data) for name, data in files.items()]
    return tar_of(*members) + bytes(1024)


def laughs() -> bytes:
    """Nine lines that stand for 10**9 strings."""
    lines = ["a0: &a0 [x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    return "\n".join(lines).encode()


def nested_yaml(**change: Any) -> bytes:
    """JSON is YAML too."""
    return json.dumps(nemo_config(rank=4, heads=8, groups=4, hidden=64, **change)).encode()


def many_tensors() -> bytes:
    """A sound header of tensors without a byte, each of a module that the base lacks."""
    tensor = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    names = (f"base_model.model.layers.{i}.mlp.{'x' * 100}.lora_A.weight" for i in range(40_000))
    return json.dumps(dict.fromkeys(names, tensor), separators=(",", ":")).encode()


def tensor_of_a_gigabyte() -> bytes:
    """The beginning of a safetensors file: two tensors for a module that the base has."""
    a = {"dtype": "F32", "shape": [1 << 21, 64], "data_offsets": [0, GIGABYTE // 2]}
    b = {"dtype": "F32", "shape": [64, 1 << 21], "data_offsets": [GIGABYTE // 2, GIGABYTE]}
    return header_only(json.dumps(dict(zip(Q_PROJ, (a, b), strict=True))).encode())


def lying_zip(**lies: int) -> bytes:
    """A small zip that claims another size of its first ``record`` or of its ``directory``."""
    data = torch_file({})
    listed, end = data.index(b"PK\1\2"), data.index(b"PK\5\6")
    if "record" in lies:
        sizes = struct.pack("<LL", lies["record"], lies["record"])
        data = data[: listed + 20] + sizes + data[listed + 28 :]
    if "directory" in lies:
        data = data[: end + 12] + struct.pack("<L", lies["directory"]) + data[end + 16 :]
    return data


def sparse(head: bytes, size: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(head)
        os.truncate(path, size)

    return write


BYTES = {"0": bytes(1024)}
CODE = Call("builtins", "exec", f"import pathlib; pathlib.Path({str(MARKER)!r}).touch()")
VIEW = tensor(Storage("0", 256), (1 << 12, 1 << 16), stride=(0, 0))

FILES: dict[str, tuple[str, bytes | Callable[[Path], None], str]] = {
    "tar_of_a_gigabyte": (
        NEMO, tar_of(("model_weights.ckpt", b"0", GIGABYTE, b"")), "more than the file holds",
    ),
    "sparse_tar": (
        NEMO, sparse(tar_of(("model_weights.ckpt", b"0", 4 * GIGABYTE, b"")), 50 * GIGABYTE),
        "model_config.yaml (NeMo) is missing",
    ),
    "tar_of_links": (NEMO, tar_of(("model_config.yaml", b"2", 0, b"")), "a link"),
    "tar_of_hard_links": (NEMO, tar_of(("model_config.yaml", b"1", 0, b"")), "a link"),
    "tar_of_devices": (NEMO, tar_of(("model_config.yaml", b"3", 0, b"")), "a device"),
    "tar_of_long_names": (NEMO, tar_of(("x", b"L", GIGABYTE, b"")), "more than the file holds"),
    "tar_with_an_absolute_name": (NEMO, tar_of(("/etc/x", b"0", 0, b"")), "outside of itself"),
    "tar_with_a_way_out": (NEMO, tar_of(("a/../../x", b"0", 0, b"")), "outside of itself"),
    "tar_of_many_members": (
        NEMO, tar_of(("a", b"5", 0, b"")) * 200_000, "more than 1000 members",
    ),
    "tar_of_much_extension": (
        NEMO, sparse(tar_of(("x", b"x", GIGABYTE, b"")), 2 * GIGABYTE), "a header of the tar",
    ),
    "tar_with_a_size_elsewhere": (
        NEMO, tar_of(("x", b"x", 20, b"20 size=99999999999\n")), "of its own (pax)",
    ),
    "tar_with_two_of_a_name": (
        NEMO, tar_of(("a", b"0", 0, b""), ("./a", b"0", 0, b"")), "duplicate",
    ),
    "tar_without_end": (NEMO, tar_of(("a", b"0", 0, b"")), "truncated"),
    "tar_of_nothing": (NEMO, b"", "is empty"),
    "no_tar": (NEMO, b"x" * 4096, "is no tar"),
    "packed_tar": (NEMO, gzip.compress(bytes(256 * 10**6), 1), "compressed tar"),
    "yaml_of_laughs": (NEMO, nemo(laughs()), "aliases"),
    "yaml_of_merges": (NEMO, nemo(b"a: &a {x: 1}\nb: {<<: *a}"), "aliases"),
    "yaml_of_objects": (
        NEMO, nemo(b"peft: !!python/object/apply:os.system ['exit 1']"), "peft is missing",
    ),
    "yaml_of_lists": (NEMO, nemo(b"a: [" + b"[]," * 20_000 + b"]"), "peft is missing"),
    "yaml_of_digits": (NEMO, nemo(nested_yaml(kv_channels="9" * 60_000)), "kv_channels must be"),
    "yaml_of_sixties": (NEMO, nemo(b"a: 1" + b":59" * 20_000), "peft is missing"),
    "yaml_of_questions": (NEMO, nemo(b"? " * 30_000), "too deep"),
    "yaml_of_anchors": (NEMO, nemo(b"a: " + b"&a " * 20_000), "is not YAML"),
    "yaml_twice": (NEMO, nemo(b"a: 1\na: 2"), "duplicate"),
    "long_yaml": (NEMO, nemo(b"a: " + b" " * 10**7), "too large"),
    "deep_yaml": (NEMO, nemo(b"a: " + b"[" * 60_000), "is not YAML"),
    "code_in_nemo": (
        NEMO, nemo(nested_yaml(), torch_file({"a": CODE})), "builtins.exec",
    ),
    "weights_outside_of_their_member": (
        NEMO, nemo(nested_yaml(), torch_file({}, {"0": bytes(9000)})[:-5000]), "truncated",
    ),
    "code": (BIN, torch_file({"a": CODE}), "builtins.exec"),
    "bytes_by_a_call": (BIN, torch_file({"a": Call("builtins", "bytearray", 10**10)}), "bytearray"),
    "tensor_by_a_call": (BIN, torch_file({"a": Call("torch", "Tensor", 10**10)}), "torch.Tensor"),
    "storage_of_a_gigabyte": (
        BIN,
        torch_file({"a": tensor(Storage("0", 1 << 28), (1 << 28,))}, {"0": bytes(16)}),
        "needs a storage",
    ),
    "view_of_a_gigabyte": (BIN, torch_file(dict.fromkeys(Q_PROJ, VIEW), BYTES), "is expected"),
    "packed_pickle": (BIN, packed_pickle(), "compressed"),
    "pickle_of_marks": (BIN, zipped({"data.pkl": b"(" * (15 << 20)}), "instructions"),
    "pickle_of_tuples": (BIN, zipped({"data.pkl": b"N" + b"\x85" * (15 << 20)}), "instructions"),
    "pickle_of_one_text": (
        BIN,
        zipped({"data.pkl": b"X" + struct.pack("<L", 15 << 20) + bytes(15 << 20) + b"."}),
        "no dictionary",
    ),
    "pickle_of_a_long_number": (
        BIN,
        zipped({"data.pkl": b"\x8b" + struct.pack("<L", 15 << 20) + b"\x7f" * (15 << 20) + b"."}),
        "instruction",
    ),
    "pickle_of_many_digits": (
        BIN, zipped({"data.pkl": b"L" + b"9" * 10**7 + b"L\n."}), "instruction LONG",
    ),
    "many_records": (BIN, many_records(), "too large"),
    "sparse_bin": (BIN, sparse(torch_file({}), 50 * GIGABYTE), "truncated"),
    "truncated_bin": (BIN, torch_file({}, {"0": bytes(10**6)})[: 10**6], "truncated"),
    "bare_pickle": (BIN, program({"a": CODE}), "a pickle"),
    "record_says_a_gigabyte": (BIN, lying_zip(record=GIGABYTE), "truncated or corrupt"),
    "directory_says_a_gigabyte": (BIN, lying_zip(directory=GIGABYTE), "too large"),
    "code_in_safetensors": (SAFETENSORS, torch_file({"a": CODE}), "header length"),
    "bare_pickle_in_safetensors": (SAFETENSORS, program({"a": CODE}), "header length"),
    "tensor_says_a_gigabyte": (SAFETENSORS, tensor_of_a_gigabyte(), "truncated"),
    "tensor_of_a_gigabyte": (
        SAFETENSORS,
        sparse(tensor_of_a_gigabyte(), len(tensor_of_a_gigabyte()) + GIGABYTE),
        "the weights have rank 2097152",
    ),
    "header_says_all_of_memory": (SAFETENSORS, b"\xff" * 8 + b"{}", "limit"),
    "header_says_more_than_there_is": (SAFETENSORS, struct.pack("<Q", 2**20) + b"{}", "truncated"),
    "header_says_a_gigabyte": (SAFETENSORS, struct.pack("<Q", GIGABYTE) + b"{}", "limit"),
    "header_of_a_gigabyte": (
        SAFETENSORS, sparse(struct.pack("<Q", GIGABYTE) + b"{", 2 * GIGABYTE), "limit",
    ),
    "header_of_lists": (
        SAFETENSORS, header_only(b'{"a":[' + b"[]," * 249_000 + b"[]]}"), "does not have",
    ),
    "header_of_more_lists": (
        SAFETENSORS, header_only(b'{"a":[' + b"[]," * 5_000_000 + b"[]]}"), "too large",
    ),
    "header_of_names": (
        SAFETENSORS,
        header_only(b"{" + b",".join(b'"%06d":0' % i for i in range(499_000)) + b"}"),
        "does not have dtype",
    ),
    "header_of_texts": (
        SAFETENSORS, header_only(b'{"a":[' + b'"ab",' * 499_000 + b'"ab"]}'), "does not have",
    ),
    "header_of_tensors": (SAFETENSORS, header_only(many_tensors()), "no module of"),
    "header_of_mlx": (MLX, header_only(b'{"a":' + b"[" * (15 << 20)), "too large"),
    "deep_header_of_mlx": (MLX, header_only(b'{"a":' + b"[" * 400_000), "too deep"),
    "deep_header": (SAFETENSORS, header_only(b'{"a":' + b"[" * 400_000), "too deep"),
    "config_of_gigabytes": (CONFIG, sparse(b"{", 50 * GIGABYTE), "too large"),
    "config_of_spaces": (CONFIG, b"{" + b" " * (16 << 20) + b"}", "too large"),
    "config_of_lists": (CONFIG, b'{"a":[' + b"[]," * 249_000 + b"[]]}", "peft_type is missing"),
    "config_of_more_lists": (CONFIG, b'{"a":[' + b"[]," * 1_300_000 + b"[]]}", "too large"),
    "deep_config": (CONFIG, b'{"a":' * 400_000, "too deep"),
}  # fmt: skip


SOUND = {
    "view_of_a_gigabyte", "tensor_of_a_gigabyte", "header_of_tensors", "yaml_of_objects",
    "yaml_of_lists", "yaml_of_digits", "yaml_of_sixties",
}  # fmt: skip
"""Files that are sound; what is refused are the tensors or fields that they describe."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Text of the refusal, seconds of the CPU and growth of the peak of memory for every file."""
    root = tmp_path_factory.mktemp("hostile")
    for name, (file, content, _) in FILES.items():
        directory = root / name
        directory.mkdir()
        (directory / CONFIG).write_text(json.dumps(lora_config()))
        if callable(content):
            content(directory / file)
        else:
            (directory / file).write_bytes(content)
    MARKER.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *(str(root / name) for name in FILES)],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}"},
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {name: rest for name, *rest in rows}


@pytest.mark.parametrize("name", FILES)
def test_hostile_file_is_refused_with_its_name_and_reason(
    name: str, measured: dict[str, list[Any]]
):
    file, _, reason = FILES[name]
    text = measured[name][0]
    assert reason in text
    assert file in text or name in SOUND


@pytest.mark.parametrize("name", FILES)
def test_refusal_takes_little_time_and_memory(name: str, measured: dict[str, list[Any]]):
    _, seconds, growth = measured[name]
    assert seconds < MAX_SECONDS
    assert growth < MAX_MEMORY


def test_no_code_was_run(measured: dict[str, list[Any]]):
    assert measured
    assert not MARKER.exists()
