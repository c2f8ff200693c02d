from __future__ import annotations

from pathlib import Path

import pytest

from loramux.adapters.sources import find_directory
from loramux.errors import AdapterRefused, AdapterSourceNotFound


def test_directory_is_found_as_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "pirate").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_directory("p", "pirate") == tmp_path / "pirate"


def test_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "pirate").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_directory("p", "~/pirate") == tmp_path / "pirate"


@pytest.mark.parametrize("source", ["hf:org/repo", "s3://bucket/x", "https://example.org/x"])
def test_remote_sources_are_refused_as_not_supported(source: str):
    with pytest.raises(AdapterRefused, match="only local directories"):
        find_directory("p", source)


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
