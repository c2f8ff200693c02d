"""Adapters on a hub, over a small hub of our own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loramux.errors import (
    AdapterRefused,
    AdapterSourceForbidden,
    AdapterSourceNotFound,
    AdapterSourceUnavailable,
)
from loramux.types import SourceRules
from tests.remote_places import CONFIG, WEIGHTS, FakeHub, Served, adapter_bytes
from tests.unit.adapters.conftest import Fetch

FILES = adapter_bytes()
REPO = "org/tuned"


def test_repository_gives_the_adapters_files_alone(hub: FakeHub, fetch: Fetch):
    hub.commit(REPO, {**FILES, "README.md": b"#", "checkpoint-9/optimizer.pt": b"x" * 99})
    assert fetch(f"hf:{REPO}") == FILES
    assert hub.gets("README.md") == hub.gets("optimizer.pt") == 0


def test_folder_of_a_repository(hub: FakeHub, fetch: Fetch):
    other = adapter_bytes(seed=2)
    hub.commit(REPO, {**FILES, **{f"deep/er/{name}": data for name, data in other.items()}})
    assert fetch(f"hf:{REPO}/deep/er") == other
    assert fetch(f"hf://{REPO}/deep/er/@main") == other


def test_branch_that_moves_gives_the_new_files(hub: FakeHub, fetch: Fetch):
    hub.commit(REPO, FILES)
    fetch(f"hf:{REPO}")
    new = adapter_bytes(seed=2)
    hub.commit(REPO, new)
    assert fetch(f"hf:{REPO}@main") == fetch(f"hf:{REPO}") == new


def test_commit_with_the_same_files_costs_nothing(hub: FakeHub, fetch: Fetch):
    hub.commit(REPO, {**FILES, "README.md": b"one"})
    fetch(f"hf:{REPO}")
    travelled = hub.gets(WEIGHTS)
    hub.commit(REPO, {**FILES, "README.md": b"two"})
    assert fetch(f"hf:{REPO}") == FILES
    assert hub.gets(WEIGHTS) == travelled == 1


def test_weights_that_another_source_brought_are_not_fetched(hub: FakeHub, fetch: Fetch):
    hub.commit(REPO, FILES)
    hub.commit("org/copy", FILES)
    fetch(f"hf:{REPO}")
    assert fetch("hf:org/copy") == FILES
    assert hub.gets(f"/org/copy/resolve/main/{WEIGHTS}") == 0
    assert hub.gets(WEIGHTS) == 1


def test_pinned_commit_is_served_without_asking(hub: FakeHub, fetch: Fetch):
    commit = hub.commit(REPO, FILES)
    fetch(f"hf:{REPO}@{commit}")
    hub.asked.clear()
    hub.files.clear()
    assert fetch(f"hf:{REPO}@{commit}") == FILES
    assert hub.asked == []


def test_branch_is_not_served_from_the_cache_unasked(hub: FakeHub, fetch: Fetch):
    hub.commit(REPO, FILES)
    fetch(f"hf:{REPO}")
    for served in hub.files.values():
        served.status = 500
    with pytest.raises(AdapterSourceUnavailable, match="--adapters-offline"):
        fetch(f"hf:{REPO}")


def test_hubs_own_offline_switch_serves_the_cache(
    hub: FakeHub, fetch: Fetch, monkeypatch: pytest.MonkeyPatch
):
    hub.commit(REPO, FILES)
    fetch(f"hf:{REPO}")
    hub.asked.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert fetch(f"hf:{REPO}") == FILES
    with pytest.raises(AdapterSourceUnavailable, match="works offline"):
        fetch("hf:org/other")
    assert hub.asked == []


def test_interrupted_download_goes_on(hub: FakeHub, fetch: Fetch):
    commit = hub.commit(REPO, FILES)
    weights = hub.files[f"/{REPO}/resolve/{commit}/{WEIGHTS}"]
    weights.break_after = 1000
    with pytest.raises(AdapterSourceUnavailable, match="broke off"):
        fetch(f"hf:{REPO}")
    weights.break_after = None
    assert fetch(f"hf:{REPO}") == FILES
    assert hub.sent(WEIGHTS) == len(FILES[WEIGHTS])


def test_other_bytes_than_the_hub_announced_are_refused_and_forgotten(hub: FakeHub, fetch: Fetch):
    commit = hub.commit(REPO, FILES)
    place = f"/{REPO}/resolve/{commit}/{WEIGHTS}"
    hub.files[place] = Served(adapter_bytes(seed=2)[WEIGHTS])
    with pytest.raises(AdapterSourceUnavailable, match="SHA-256 differs"):
        fetch(f"hf:{REPO}")
    hub.files[place] = Served(FILES[WEIGHTS])
    assert fetch(f"hf:{REPO}") == FILES


def test_token_goes_to_the_hub_and_not_where_it_sends_us(
    hub: FakeHub, fetch: Fetch, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    commit = hub.commit(REPO, FILES)
    with FakeHub().running() as elsewhere:
        elsewhere.put("/", FILES)
        place = f"/{REPO}/resolve/{commit}/{WEIGHTS}"
        hub.files[place] = Served(b"", location=f"{elsewhere.url}/{WEIGHTS}")
        assert fetch(f"hf:{REPO}") == FILES
        assert {a.authorization for a in elsewhere.asked} == {None}
    assert {a.authorization for a in hub.asked} == {"Bearer hf_secret"}


@pytest.mark.parametrize(
    ("status", "code", "error", "text"),
    [
        (404, "RepoNotFound", AdapterSourceNotFound, "no repository.*HF_TOKEN"),
        (401, "RepoNotFound", AdapterSourceNotFound, "no repository.*HF_TOKEN"),
        (404, "RevisionNotFound", AdapterSourceNotFound, "no revision main"),
        (403, "GatedRepo", AdapterSourceUnavailable, "gated.*HF_TOKEN"),
        (500, "", AdapterSourceUnavailable, "cannot be asked"),
    ],
)
def test_refusals_of_the_hub(
    hub: FakeHub, fetch: Fetch, status: int, code: str, error: type[Exception], text: str
):
    hub.files[f"/api/models/{REPO}/revision/main"] = Served(b"{}", status=status, error_code=code)
    with pytest.raises(error, match=text):
        fetch(f"hf:{REPO}")


def test_repository_without_an_adapter(hub: FakeHub, fetch: Fetch):
    hub.commit(REPO, {"README.md": b"#", "model.safetensors": b"x"})
    with pytest.raises(AdapterSourceNotFound, match="holds no adapter"):
        fetch(f"hf:{REPO}")


def test_size_beyond_the_budget_is_refused_before_a_byte_travels(hub: FakeHub, fetch: Fetch):
    hub.commit(REPO, FILES)
    with pytest.raises(AdapterRefused, match="--disk-cache-bytes"):
        fetch(f"hf:{REPO}", disk_cache_bytes="2000")
    assert hub.gets(WEIGHTS) == hub.gets(CONFIG) == 0


def test_command_asks_the_hub_of_the_environment(hub: FakeHub, tmp_path: Path):
    hub.commit(REPO, {CONFIG: FILES[CONFIG]})
    own = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "loramux", "inspect", f"hf:{REPO}"],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("config only: ")
    assert list((tmp_path / "loramux" / "adapters" / "blobs").iterdir())


@pytest.mark.parametrize(
    "source", ["hf:", "hf:repo", "hf:org/", "hf:/etc/passwd", "hf:org/repo@", "hf:org/re po"]
)
def test_malformed_names_are_refused_unasked(hub: FakeHub, fetch: Fetch, source: str):
    with pytest.raises(AdapterRefused, match="hf:org/repo"):
        fetch(source)
    assert hub.asked == []


def test_rules_hold_for_the_hub_and_not_for_its_storage(hub: FakeHub, fetch: Fetch):
    commit = hub.commit(REPO, FILES)
    with FakeHub().running() as storage:
        storage.put("/", FILES)
        place = f"/{REPO}/resolve/{commit}/{WEIGHTS}"
        hub.files[place] = Served(b"", location=f"{storage.url}/{WEIGHTS}")
        assert fetch(f"hf:{REPO}", SourceRules(prefixes=("hf:org",))) == FILES
    with pytest.raises(AdapterSourceForbidden):
        fetch(f"hf:{REPO}", SourceRules(prefixes=("hf:organisation", "https://")))
