from __future__ import annotations

from pathlib import Path

import pytest

from loramux.adapters.sources import AdapterSources, find_directory, shown_source
from loramux.config import SourceOptions
from loramux.errors import AdapterError, AdapterSourceNotFound
from loramux.types import SourceRules


def test_directory_is_found_as_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "pirate").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_directory("p", "pirate") == tmp_path / "pirate"


def test_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "pirate").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_directory("p", "~/pirate") == tmp_path / "pirate"


def test_missing_directory_tells_what_to_give(tmp_path: Path):
    with pytest.raises(AdapterSourceNotFound, match=r"no such directory.*adapter_config\.json"):
        find_directory("p", str(tmp_path / "nowhere"))


def test_file_is_no_source(tmp_path: Path):
    file = tmp_path / "adapter_model.safetensors"
    file.touch()
    with pytest.raises(AdapterSourceNotFound, match="is a file, not a directory"):
        find_directory("p", str(file))


def test_nemo_archive_stands_for_a_directory(tmp_path: Path):
    file = tmp_path / "tuned.nemo"
    with pytest.raises(AdapterSourceNotFound, match="no such directory"):
        find_directory("p", str(file))
    file.touch()
    assert find_directory("p", str(file)) == file


@pytest.mark.parametrize("source", ["", "a\0b", "x" * 10_000, "~no-such-user-here/x"])
def test_impossible_paths_are_not_found_rather_than_a_crash(source: str):
    with pytest.raises(AdapterSourceNotFound):
        find_directory("p", source)


@pytest.mark.parametrize("url", ["file://elsewhere/a", "file://", "local://x/y", "FILE://x"])
def test_file_urls_without_an_absolute_path_tell_the_form(url: str):
    with pytest.raises(AdapterSourceNotFound, match="file:///"), AdapterSources().open("p", url):
        pass


@pytest.mark.parametrize(
    "source",
    [
        "https://[", "http://[::1/a/", "https://host:99999/a/", "https:// /", "https:///a/",
        "http://\0/", "https://\u2488/a/", "https://" + "x" * 300 + "/", "https://h/\ud800/",
        "file://[x", "file:///\0", "file:///%00", "hf:a/b@\n", "hf:", "://", "a::b://c",
        "memory://", "reference:///etc/passwd", "zip://x", "github://a", "s3:///", "::://",
    ],
)  # fmt: skip
@pytest.mark.parametrize("rules", [None, SourceRules(root=".", prefixes=("https://", "hf:"))])
def test_whatever_is_named_fails_with_a_typed_error(
    source: str, rules: SourceRules | None, tmp_path: Path
):
    sources = AdapterSources(SourceOptions(disk_cache=str(tmp_path), adapters_offline=False))
    with pytest.raises(AdapterError), sources.open("p", source, rules):
        pass


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("/a/b", "/a/b"),
        ("pirate", "pirate"),
        ("hf:org/repo@main", "hf:org/repo@main"),
        ("s3://b/\n\x1b[2J", r"'s3://b/\n\x1b[2J'"),
        ("https://me:secret@host/a/?sig=secret#x", "https://host/a/"),
    ],
)
def test_secrets_of_a_source_are_not_shown(source: str, shown: str):
    assert shown_source(source) == shown
