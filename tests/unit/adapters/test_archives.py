"""What is taken out of an archive, and archives that were made to do harm."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from loramux.adapters.remotes.archives import archive_name, unpack
from loramux.adapters.remotes.remote import RemoteMissing, RemoteProblem, RemoteUnfit, choose
from tests.remote_places import CONFIG, WEIGHTS, adapter_bytes

FILES = adapter_bytes()


def zipped(files: Mapping[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return out.getvalue()


def tarred(files: Mapping[str, bytes | tarfile.TarInfo], mode: str = "w") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            info = data if isinstance(data, tarfile.TarInfo) else tarfile.TarInfo(name)
            if isinstance(data, bytes):
                info.size = len(data)
            archive.addfile(info, io.BytesIO(data) if isinstance(data, bytes) else None)
    return out.getvalue()


def gzipped(files: Mapping[str, bytes | tarfile.TarInfo]) -> bytes:
    return tarred(files, "w:gz")


PACKERS = {"archive.zip": zipped, "archive.tar": tarred, "archive.tar.gz": gzipped}


def taken_from(folder: Path, data: bytes, kind: str) -> dict[str, bytes]:
    path = folder / "packed"
    path.write_bytes(data)
    taken: dict[str, bytes] = {}

    def write(name: str, chunks: Iterator[bytes]) -> None:
        taken[name] = b"".join(chunks)

    unpack(path, kind, write)
    return taken


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/a.tar", "archive.tar"),
        ("/a.b.TAR.GZ", "archive.tar.gz"),
        ("s3://b/a.tgz", "archive.tgz"),
        ("/a.zip", "archive.zip"),
        ("/a.tar.xz", None),
        ("/tar", None),
        ("/a.zip/", None),
    ],
)
def test_archives_are_told_by_their_suffix(path: str, name: str | None):
    assert archive_name(path) == name


@pytest.mark.parametrize("kind", PACKERS)
@pytest.mark.parametrize("folder", ["", "tuned/", "./", "some/where/deep/"])
def test_adapter_is_taken_from_any_folder(tmp_path: Path, kind: str, folder: str):
    packed = {f"{folder}{name}": data for name, data in FILES.items()}
    data = PACKERS[kind]({**packed, "README.md": b"#", f"{folder}optimizer.pt": b"x" * 999})
    assert taken_from(tmp_path, data, kind) == FILES


def test_what_is_said_of_experts_comes_along():
    present = [*FILES, "lora_layout.json", "README.md"]
    assert set(choose(present)) == {*FILES, "lora_layout.json"}


@pytest.mark.parametrize("kind", PACKERS)
def test_paths_that_lead_out_have_no_meaning(tmp_path: Path, kind: str):
    packed = {f"../../../tmp/{name}": data for name, data in FILES.items()}
    assert taken_from(tmp_path, PACKERS[kind](packed), kind) == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]


@pytest.mark.parametrize("kind", PACKERS)
def test_several_adapters_are_refused_by_name(tmp_path: Path, kind: str):
    packed = {f"{a}/{name}": data for a in ("one", "two") for name, data in FILES.items()}
    with pytest.raises(RemoteUnfit, match=r"2 adapters \(one, two\)"):
        taken_from(tmp_path, PACKERS[kind](packed), kind)


@pytest.mark.parametrize("kind", PACKERS)
def test_archive_without_an_adapter(tmp_path: Path, kind: str):
    with pytest.raises(RemoteMissing, match="holds no adapter_config"):
        taken_from(tmp_path, PACKERS[kind]({"README.md": b"#"}), kind)


@pytest.mark.parametrize("link", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(tmp_path: Path, link: bytes):
    info = tarfile.TarInfo(WEIGHTS)
    info.type, info.linkname = link, "/etc/passwd"
    data = tarred({CONFIG: FILES[CONFIG], WEIGHTS: info})
    with pytest.raises(RemoteUnfit, match="no regular file"):
        taken_from(tmp_path, data, "archive.tar")


def test_file_that_is_there_twice_is_refused(tmp_path: Path):
    twice = tarred({**FILES, f"./{CONFIG}": b"{}"})
    with pytest.raises(RemoteUnfit, match="twice"):
        taken_from(tmp_path, twice, "archive.tar")


def bomb_gzip() -> bytes:
    return gzipped({CONFIG: FILES[CONFIG], "junk": b"\0" * (200 * 2**20), WEIGHTS: b"x"})


def bomb_zip() -> bytes:
    return zipped({CONFIG: FILES[CONFIG], WEIGHTS: b"\0" * (200 * 2**20)})


def many_members_tar() -> bytes:
    return gzipped({**FILES, **{str(i): b"" for i in range(10_001)}})


def many_members_zip() -> bytes:
    return zipped({**FILES, **{str(i): b"" for i in range(10_001)}}, zipfile.ZIP_STORED)


def long_header() -> bytes:
    """A header of 100 MiB before the first file, which shrinks to nothing."""
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 100 * 2**20
    return gzip.compress(info.tobuf(tarfile.USTAR_FORMAT) + b"\0" * info.size)


def odd_method() -> bytes:
    return zipped(FILES, zipfile.ZIP_BZIP2)


def encrypted() -> bytes:
    data = bytearray(zipped(FILES, zipfile.ZIP_STORED))
    start = data.find(b"PK\x01\x02")
    while start >= 0:
        struct.pack_into("<H", data, start + 8, 1)
        start = data.find(b"PK\x01\x02", start + 1)
    return bytes(data)


HOSTILE: dict[str, tuple[Callable[[], bytes], str, str]] = {
    "gzip_bomb": (bomb_gzip, "archive.tar.gz", "unpacks to more"),
    "zip_bomb": (bomb_zip, "archive.zip", "unpacks to more"),
    "many_members_tar": (many_members_tar, "archive.tgz", "more than 10000 members"),
    "many_members_zip": (many_members_zip, "archive.zip", "more than 10000 members"),
    "long_header": (long_header, "archive.tar.gz", "damaged|unpacks"),
    "odd_method": (odd_method, "archive.zip", "use deflate"),
    "encrypted": (encrypted, "archive.zip", "encrypted"),
    "no_zip": (lambda: b"<html>", "archive.zip", "damaged"),
    "no_tar": (lambda: b"<html>" * 999, "archive.tar", "damaged"),
    "nothing": (lambda: b"", "archive.tar", "damaged"),
    "cut_gzip": (lambda: gzipped(FILES)[:300], "archive.tar.gz", "damaged"),
    "cut_tar": (lambda: tarred(FILES)[:3000], "archive.tar", "damaged"),
    "cut_zip": (lambda: zipped(FILES)[:-30], "archive.zip", "damaged"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_archives_are_refused_in_little_memory(tmp_path: Path, case: str):
    make, kind, text = HOSTILE[case]
    path = tmp_path / "packed"
    path.write_bytes(make())

    def write(name: str, chunks: Iterator[bytes]) -> None:
        for _ in chunks:
            pass

    tracemalloc.start()
    try:
        with pytest.raises(RemoteUnfit, match=text):
            unpack(path, kind, write)
        assert tracemalloc.get_traced_memory()[1] < 40 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", PACKERS)
def test_damage_anywhere_is_a_refusal_or_changes_nothing_else(tmp_path: Path, kind: str):
    """Each byte of the headers in turn is set to something else."""
    whole = PACKERS[kind](FILES)
    for place in range(0, min(len(whole), 1200), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        try:
            taken_from(tmp_path, bytes(damaged), kind)
        except RemoteProblem:
            continue
