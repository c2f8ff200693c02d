from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest

from adapter_files import safetensors_bytes, with_header
from loramux.adapters.formats.files import MalformedFile
from loramux.adapters.formats.safetensors_header import TensorEntry, read_header

SHAPES = {"a": (2, 3), "b": (4,)}


def write(directory: Path, data: bytes) -> Path:
    path = directory / "adapter_model.safetensors"
    path.write_bytes(data)
    return path


def entry(shape: list[Any], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_entries_hold_dtype_shape_and_place(tmp_path: Path):
    header = read_header(write(tmp_path, safetensors_bytes(SHAPES)))
    assert header == {
        "a": TensorEntry("F32", (2, 3), 0, 24),
        "b": TensorEntry("F32", (4,), 24, 40),
    }


def test_metadata_is_no_tensor(tmp_path: Path):
    data = with_header({"__metadata__": {"format": "pt"}, "a": entry([1], 0, 4)}, b"\0" * 4)
    assert list(read_header(write(tmp_path, data))) == ["a"]


def test_padding_after_the_header_is_allowed(tmp_path: Path):
    text = b'{"a":{"dtype":"F16","shape":[1],"data_offsets":[0,2]}}      '
    data = struct.pack("<Q", len(text)) + text + b"\0\0"
    assert read_header(write(tmp_path, data))["a"].shape == (1,)


def test_link_to_a_file_elsewhere_is_read(tmp_path: Path):
    write(tmp_path, safetensors_bytes(SHAPES))
    link = tmp_path / "link.safetensors"
    link.symlink_to("adapter_model.safetensors")
    assert set(read_header(link)) == {"a", "b"}


GOOD = safetensors_bytes(SHAPES)
BROKEN = {
    "empty": (b"", "is empty"),
    "seven_bytes": (b"\1\0\0\0\0\0\0", "truncated"),
    "cut_in_header": (GOOD[:40], "truncated"),
    "cut_in_data": (GOOD[:-3], "truncated"),
    "data_left_over": (GOOD + b"x", "corrupt"),
    "length_of_2_to_62": (struct.pack("<Q", 1 << 62) + GOOD[8:], "limit"),
    "length_zero": (struct.pack("<Q", 0) + GOOD[8:], "no JSON object"),
    "git_lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    "web_page": (b"\n<!DOCTYPE html><html><title>429", "web page"),
    "header_is_a_list": (with_header([1], b""), "no JSON object"),
    "header_cut_inside_json": (struct.pack("<Q", 5) + b'{"a":', "not JSON"),
    "entry_is_a_number": (with_header({"a": 3}, b""), "shape"),
    "entry_lacks_offsets": (with_header({"a": {"dtype": "F32", "shape": [1]}}, b""), "offsets"),
    "unknown_dtype": (with_header({"a": entry([1], 0, 4, "F31")}, b"1234"), "unknown dtype"),
    "shape_lies": (with_header({"a": entry([2], 0, 4)}, b"1234"), "does not fit"),
    "negative_size": (with_header({"a": entry([-1], 0, 4)}, b"1234"), "invalid shape"),
    "boolean_size": (with_header({"a": entry([True], 0, 4)}, b"1234"), "invalid shape"),
    "many_dimensions": (with_header({"a": entry([1] * 17, 0, 4)}, b"1234"), "invalid shape"),
    "offsets_reversed": (with_header({"a": entry([1], 4, 0)}, b"1234"), "data_offsets"),
    "gap": (with_header({"a": entry([1], 4, 8)}, b"1" * 8), "gaps"),
    "overlap": (with_header({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, b"1234"), "overlap"),
    "long_name": (with_header({"a" * 1001: entry([1], 0, 4)}, b"1234"), "tensor name"),
    "deep": (struct.pack("<Q", 200_000) + b'{"a":' + b"[" * 199_995, "too deep"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_file_is_malformed_with_a_reason(case: str, tmp_path: Path):
    data, reason = BROKEN[case]
    with pytest.raises(MalformedFile, match=reason):
        read_header(write(tmp_path, data))


def test_name_given_twice_is_malformed(tmp_path: Path):
    one = b'"a":{"dtype":"F16","shape":[1],"data_offsets":[0,2]}'
    text = b"{" + one + b"," + one + b"}"
    with pytest.raises(MalformedFile, match="twice"):
        read_header(write(tmp_path, struct.pack("<Q", len(text)) + text + b"\0\0"))


def test_missing_file_is_malformed(tmp_path: Path):
    with pytest.raises(MalformedFile, match=r"adapter_model\.safetensors is missing"):
        read_header(tmp_path / "adapter_model.safetensors")


def test_pipe_is_not_opened(tmp_path: Path):
    os.mkfifo(tmp_path / "adapter_model.safetensors")
    with pytest.raises(MalformedFile, match="no regular file"):
        read_header(tmp_path / "adapter_model.safetensors")


def test_content_of_a_text_file_is_not_in_the_message(tmp_path: Path):
    with pytest.raises(MalformedFile) as caught:
        read_header(write(tmp_path, b"password=hunter2\n" * 100))
    assert "hunter2" not in str(caught.value)
