from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loramux.adapters.sources import AdapterSources
from loramux.config import SourceOptions
from loramux.types import SourceRules
from tests.remote_places import FakeHub, FileServer

Fetch = Callable[..., dict[str, bytes]]


@pytest.fixture
def web() -> Iterator[FileServer]:
    with FileServer().running() as server:
        yield server


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """The only hub there is."""
    from huggingface_hub import constants

    hub = FakeHub()
    with hub.running():
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def fetch(cache: Path) -> Fetch:
    """Opens a source; the files that a reader would see, by name."""

    def fetch(source: str, rules: SourceRules | None = None, **options: object) -> dict[str, bytes]:
        sources = AdapterSources(SourceOptions(disk_cache=str(cache), **options))  # type: ignore[arg-type]
        with sources.open("a", source, rules) as directory:
            return {path.name: path.read_bytes() for path in directory.iterdir()}

    return fetch
