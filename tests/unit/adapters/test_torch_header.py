from __future__ import annotations

import pickle
import struct
import zipfile
from pathlib import Path

import pytest

from loramux.adapters.formats.files import MalformedFile
from loramux.adapters.formats.torch_header import MAX_PICKLE_BYTES, read_header
from loramux.adapters.formats.torch_pickle import MAX_INSTRUCTIONS
from tests.torch_files import Call, Global, Storage, program, tensor, torch_file, zipped

A = tensor(Storage("0", 6), (2, 3))
BYTES = {"0": bytes(range(24))}


def write(directory: Path, data: bytes) -> Path:
    path = directory / "adapter_model.bin"
    path.write_bytes(data)
    return path


def test_place_is_that_of_the_bytes(tmp_path: Path):
    row = tensor(Storage("0", 6), (3,), offset=3)
    path = write(tmp_path, torch_file({"a": A, "row": row}, BYTES))
    header = read_header(path)
    places = {name: path.read_bytes()[e.start : e.end] for name, e in header.items()}
    assert places == {"a": BYTES["0"], "row": BYTES["0"][12:]}
    assert [(e.dtype, e.shape, e.stride) for e in header.values()] == [
        ("F32", (2, 3), (3, 1)),
        ("F32", (3,), (1,)),
    ]


def test_repeated_and_turned_views_are_read(tmp_path: Path):
    turned = tensor(Storage("0", 6), (3, 2), stride=(1, 3))
    repeated = tensor(Storage("0", 6), (5, 2), stride=(0, 1))
    header = read_header(write(tmp_path, torch_file({"t": turned, "r": repeated}, BYTES)))
    assert [e.end - e.start for e in header.values()] == [24, 8]


def test_parameters_and_versions_of_modules_are_read(tmp_path: Path):
    hooks = Call("collections", "OrderedDict")
    value = {"a": Call("torch._utils", "_rebuild_parameter", A, True, hooks)}
    head, tail = program(value)[:-1], program({"_metadata": {"": {"version": 1}}})[2:-1]
    built = head + tail + pickle.BUILD + pickle.STOP
    records = {"data.pkl": built, "data/0": BYTES["0"]}
    assert list(read_header(write(tmp_path, zipped(records)))) == ["a"]


GOOD = torch_file({"a": A}, BYTES)
END = len(GOOD) - 22
HOOKS = Call("collections", "OrderedDict")
VIEW = (Storage("0", 6), 0, (6,), (1,), False, HOOKS)
NEGATED = Call("torch._utils", "_rebuild_tensor_v2", *VIEW, {"neg": True})


def changed(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def listed(field: int, value: int) -> bytes:
    """The good file, with a field of the last record's line in the directory changed."""
    return changed(GOOD, GOOD.rindex(b"PK\1\2") + field, struct.pack("<L", value))


def wide_end(place: int) -> bytes:
    """The good file, with the place of the directory given in 64 bits."""
    end64 = struct.pack("<4s28xQQQ", b"PK\6\6", 3, 100, place)
    locator = struct.pack("<4s4xQ4x", b"PK\6\7", END)
    return GOOD[:END] + end64 + locator + changed(GOOD[END:], 16, b"\xff" * 4)


TWICE = zipped({"data.pkl": program({}), "data0pkl": program({})})

CODE = {
    "call": (torch_file({"a": Call("builtins", "exec", "1")}), "builtins.exec"),
    "name": (torch_file({"a": Global("os", "system")}), "os.system"),
    "memory": (torch_file({"a": Call("builtins", "bytearray", 10**10)}), "builtins.bytearray"),
    "tensor": (torch_file({"a": Call("torch", "Tensor", 10**10)}), "torch.Tensor"),
    "call_of_an_allowed_name": (torch_file({"a": Call("torch", "FloatStorage", 9)}), "a call of"),
    "negated": (torch_file({"a": NEGATED}, BYTES), "a call of"),
    "state": (zipped({"data.pkl": b"\x80\x02N}b."}), "a state"),
    "escape_in_a_text": (zipped({"data.pkl": b"\x80\x02S'\\d'\n."}), "instruction STRING"),
    "escape_in_a_name": (zipped({"data.pkl": b"\x80\x02cos\n\\d\n."}), "unsafe"),
    "instruction": (zipped({"data.pkl": b"\x80\x04\x8c\x02os\x8c\x06system\x93."}), "instruction"),
}
BROKEN = {
    "name_without_end": (zipped({"data.pkl": b"\x80\x02ctorch"}), "corrupt"),
    "no_instruction": (zipped({"data.pkl": b"\x80\x02\xff"}), "corrupt"),
    "no_end": (zipped({"data.pkl": b"\x80\x02}"}), "corrupt"),
    "bare_pickle": (pickle.dumps({"a": 1}), "is a pickle, not the zip"),
    "text": (b"hello" * 9, "is no zip"),
    "cut": (GOOD[:-100], "truncated"),
    "cut_to_the_start": (GOOD[:10], "truncated"),
    "other_zip": (zipped({"model.txt": b"x"}), r"no data\.pkl"),
    "two_pickles": (TWICE.replace(b"data0pkl", b"data.pkl"), "there twice"),
    "directory_outside": (changed(GOOD, END + 16, struct.pack("<L", 10**6)), "outside"),
    "directory_of_gigabytes": (changed(GOOD, END + 12, struct.pack("<L", 1 << 30)), "too large"),
    "directory_is_no_directory": (changed(GOOD, END + 16, bytes(4)), "no directory"),
    "other_number_of_records": (changed(GOOD, END + 10, b"\7\0"), "7 records"),
    "wide_end_outside": (wide_end(1 << 60), "outside"),
    "wide_end_missing": (changed(GOOD, END + 16, b"\xff" * 4), "does not say where"),
    "packed_size_lies": (listed(20, 8), "two sizes"),
    "record_elsewhere": (listed(42, 7), "not where it should be"),
    "record_of_gigabytes": (
        changed(listed(20, 1 << 30), GOOD.rindex(b"PK\1\2") + 24, struct.pack("<L", 1 << 30)),
        "more than the file holds",
    ),
    "compressed": (zipped({"data.pkl": b"}."}, compression=zipfile.ZIP_DEFLATED), "compressed"),
    "storage_declares_a_gigabyte": (
        torch_file({"a": tensor(Storage("0", 1 << 28), (1 << 28,))}, BYTES),
        "needs a storage of 1073741824 bytes, the file holds 24",
    ),
    "storage_missing": (torch_file({"a": A}), "the file holds 0"),
    "view_beyond_its_storage": (
        torch_file({"a": tensor(Storage("0", 6), (7,))}, BYTES),
        "cannot be followed",
    ),
    "negative_offset": (
        torch_file({"a": tensor(Storage("0", 6), (1,), offset=-1)}, BYTES),
        "cannot be followed",
    ),
    "gaps": (torch_file({"a": tensor(Storage("0", 6), (3,), stride=(2,))}, BYTES), "gaps"),
    "no_dictionary": (torch_file(A, BYTES), "no dictionary"),
    "number": (torch_file({"a": A, "step": 3}, BYTES), "no tensor step"),
    "nested": (torch_file({"state": {"a": A}}, BYTES), "no tensor state"),
    "pickle_cut": (zipped({"data.pkl": program({"a": A})[:-4]}), "cannot be followed"),
    "pickle_without_stack": (zipped({"data.pkl": b"\x80\x02t."}), "cannot be followed"),
    "name_twice": (
        zipped({"data.pkl": b"\x80\x02}X\1\0\0\0aK\1sX\1\0\0\0aK\1s."}),
        "duplicate",
    ),
    "long_name": (torch_file({"a" * 1001: A}, BYTES), "tensor name"),
    "big_endian": (zipped({"data.pkl": program({}), "byteorder": b"big"}), "little-endian"),
    "large_pickle": (zipped({"data.pkl": bytes(MAX_PICKLE_BYTES + 1)}), "too large"),
    "many_instructions": (zipped({"data.pkl": b"N" * (MAX_INSTRUCTIONS + 1)}), "instructions"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_file_is_malformed_with_reason_and_remedy(case: str, tmp_path: Path):
    data, reason = BROKEN[case]
    with pytest.raises(MalformedFile, match=reason) as caught:
        read_header(write(tmp_path, data))
    assert str(caught.value).startswith("adapter_model.bin ")
    assert "convert it to safetensors" in str(caught.value)


@pytest.mark.parametrize("case", CODE)
def test_pickle_that_does_more_than_weights_is_named_unsafe(case: str, tmp_path: Path):
    data, reason = CODE[case]
    with pytest.raises(MalformedFile, match=reason) as caught:
        read_header(write(tmp_path, data))
    assert "unsafe" in str(caught.value)


def test_wide_numbers_of_the_zip_are_read(tmp_path: Path):
    place = struct.unpack_from("<L", GOOD, END + 16)[0]
    length = struct.unpack_from("<L", GOOD, END + 12)[0]
    data = wide_end(place).replace(
        struct.pack("<QQQ", 3, 100, place), struct.pack("<QQQ", 3, length, place)
    )
    assert read_header(write(tmp_path, data)) == read_header(write(tmp_path, GOOD))


def test_wide_numbers_of_a_record_are_read(tmp_path: Path):
    line_at = GOOD.rindex(b"PK\1\2")
    line, end = GOOD[line_at:END], GOOD[END:]
    place = struct.unpack_from("<L", line, 42)[0]
    wide = struct.pack("<HHQQQ", 1, 24, 24, 24, place)
    line = changed(changed(line, 20, b"\xff" * 8), 42, b"\xff" * 4)
    line = changed(line, 30, struct.pack("<H", len(wide))) + wide
    end = changed(end, 12, struct.pack("<L", struct.unpack_from("<L", end, 12)[0] + len(wide)))
    assert read_header(write(tmp_path, GOOD[:line_at] + line + end)) == read_header(
        write(tmp_path, GOOD)
    )


@pytest.mark.parametrize("place", range(0, len(GOOD), 3))
def test_any_changed_byte_is_read_or_malformed(place: int, tmp_path: Path):
    data = changed(GOOD, place, bytes([GOOD[place] ^ 0xFF]))
    try:
        header = read_header(write(tmp_path, data))
    except MalformedFile:
        return
    assert all(0 <= e.start <= e.end <= len(data) for e in header.values())


def test_empty_file_is_told_as_such(tmp_path: Path):
    with pytest.raises(MalformedFile, match="is empty"):
        read_header(write(tmp_path, b""))


def test_git_lfs_pointer_is_named(tmp_path: Path):
    with pytest.raises(MalformedFile, match="git lfs pull"):
        read_header(write(tmp_path, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"))
