"""Which folders the demo takes for adapters."""

from __future__ import annotations

from pathlib import Path

import pytest

from loramux.demo import adapters
from loramux.demo.adapters import default_adapters_folder, find_adapters
from loramux.errors import ConfigError


def test_checkout_brings_six_adapters() -> None:
    found = find_adapters(default_adapters_folder())
    assert list(found) == ["emoji", "json", "pirate", "shout", "spanish", "yesno"]


def test_only_folders_with_an_adapter_config_count(tmp_path: Path) -> None:
    for name in ("b", "a", "notes"):
        (tmp_path / name).mkdir()
    for name in ("b", "a"):
        (tmp_path / name / "adapter_config.json").write_text("{}")
    assert find_adapters(tmp_path) == {"a": str(tmp_path / "a"), "b": str(tmp_path / "b")}


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: there is no such folder"):
        find_adapters(tmp_path / "nowhere")


def test_folder_without_adapters_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no folder in it holds an adapter_config\.json"):
        find_adapters(tmp_path)


def test_installed_package_asks_for_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "_IN_A_CHECKOUT", tmp_path / "absent")
    with pytest.raises(ConfigError, match="--adapters"):
        default_adapters_folder()
