"""The budget of the disk cache, leases between threads and processes, and what is left behind."""

from __future__ import annotations

import multiprocessing
import os
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from loramux.adapters.disk_cache import DiskCache
from loramux.adapters.sources import AdapterSources
from loramux.config import SourceOptions
from loramux.errors import AdapterRefused, AdapterSourceUnavailable
from tests.remote_places import WEIGHTS, FileServer, adapter_bytes, snapshot
from tests.unit.adapters.conftest import Fetch

ONE = sum(len(data) for data in adapter_bytes().values())
TWO = str(2 * ONE + 100)


@pytest.fixture
def places(web: FileServer) -> FileServer:
    """Adapters ``/1/`` to ``/4/``."""
    for seed in range(1, 5):
        web.put(f"/{seed}/", adapter_bytes(seed))
    return web


def sources(cache: Path, budget: str) -> AdapterSources:
    return AdapterSources(SourceOptions(disk_cache=str(cache), disk_cache_bytes=budget))


def cached(places: FileServer, fetch: Fetch, number: int, budget: str) -> bool:
    """Whether loading an adapter needs no transfer of weights."""
    places.asked.clear()
    assert fetch(f"{places.url}/{number}/", disk_cache_bytes=budget) == adapter_bytes(number)
    return places.gets(WEIGHTS) == 0


def test_least_recently_used_goes_first(places: FileServer, fetch: Fetch, cache: Path):
    for number in (1, 2, 1, 3):
        cached(places, fetch, number, TWO)
    DiskCache(cache, 0).check()
    assert [cached(places, fetch, number, TWO) for number in (1, 3)] == [True, True]
    assert not cached(places, fetch, 2, TWO)


def test_budget_holds_after_each_load(places: FileServer, fetch: Fetch, cache: Path):
    for number in (1, 2, 3, 4, 1):
        cached(places, fetch, number, TWO)
        assert DiskCache(cache, 0).num_bytes() <= int(TWO)
        DiskCache(cache, 0).check()


def test_new_version_takes_the_room_of_the_old(places: FileServer, fetch: Fetch, cache: Path):
    budget = str(ONE + 100)
    fetch(f"{places.url}/1/", disk_cache_bytes=budget)
    places.put("/1/", adapter_bytes(seed=2))
    assert fetch(f"{places.url}/1/", disk_cache_bytes=budget) == adapter_bytes(seed=2)
    assert len(DiskCache(cache, 0).adapters()) == 1


def test_adapter_that_is_read_is_not_evicted(places: FileServer, fetch: Fetch, cache: Path):
    with sources(cache, TWO).open("a", f"{places.url}/1/") as directory:
        for number in (2, 3, 4):
            cached(places, fetch, number, TWO)
        assert (directory / WEIGHTS).read_bytes() == adapter_bytes(1)[WEIGHTS]
    DiskCache(cache, 0).check()


def test_no_room_beside_those_that_are_read(places: FileServer, fetch: Fetch, cache: Path):
    budget = str(ONE + 100)
    with sources(cache, budget).open("a", f"{places.url}/1/"):
        before = snapshot(cache)
        with pytest.raises(AdapterSourceUnavailable, match="others are being read"):
            fetch(f"{places.url}/2/", disk_cache_bytes=budget)
        assert snapshot(cache) == before
    assert fetch(f"{places.url}/2/", disk_cache_bytes=budget) == adapter_bytes(2)


def test_larger_than_the_budget_evicts_nothing(places: FileServer, fetch: Fetch, cache: Path):
    fetch(f"{places.url}/1/", disk_cache_bytes=TWO)
    before = snapshot(cache)
    places.put("/2/", {**adapter_bytes(2), WEIGHTS: b"x" * 10 * ONE})
    with pytest.raises(AdapterRefused, match="--disk-cache-bytes"):
        fetch(f"{places.url}/2/", disk_cache_bytes=TWO)
    assert snapshot(cache) == before


def hold(cache: Path, url: str, held: Event, release: Event) -> None:
    with sources(cache, TWO).open("a", url):
        held.set()
        assert release.wait(60)


def test_other_processes_count_as_readers(places: FileServer, fetch: Fetch, cache: Path):
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    process = context.Process(target=hold, args=(cache, f"{places.url}/1/", held, release))
    process.start()
    try:
        assert held.wait(60)
        for number in (2, 3):
            cached(places, fetch, number, TWO)
        kept = [a for a in DiskCache(cache, 0).adapters() if _is_of(a.directory, 1)]
        assert len(kept) == 1
        process.kill()  # a lease ends with its process
        process.join()
        for number in (2, 3):
            cached(places, fetch, number, TWO)
        assert not any(_is_of(a.directory, 1) for a in DiskCache(cache, 0).adapters())
    finally:
        process.kill()
        process.join()


def _is_of(directory: Path, seed: int) -> bool:
    return (directory / "files" / WEIGHTS).read_bytes() == adapter_bytes(seed)[WEIGHTS]


def test_beginnings_count_and_are_evicted(places: FileServer, fetch: Fetch, cache: Path):
    places.files[f"/1/{WEIGHTS}"].break_after = 2000
    with pytest.raises(AdapterSourceUnavailable):
        fetch(f"{places.url}/1/", disk_cache_bytes=TWO)
    assert DiskCache(cache, 0).num_bytes() > 2000
    for number in (2, 3):
        cached(places, fetch, number, TWO)
        assert DiskCache(cache, 0).num_bytes() <= int(TWO)
    assert not list((cache / "partial").iterdir())


def test_beginning_of_an_older_version_takes_no_room(places: FileServer, fetch: Fetch, cache: Path):
    budget = str(ONE + 100)
    places.files[f"/1/{WEIGHTS}"].break_after = 2000
    with pytest.raises(AdapterSourceUnavailable):
        fetch(f"{places.url}/1/", disk_cache_bytes=budget)
    places.put("/1/", adapter_bytes(seed=2))
    assert fetch(f"{places.url}/1/", disk_cache_bytes=budget) == adapter_bytes(seed=2)
    assert DiskCache(cache, 0).num_bytes() == ONE


def test_what_a_killed_process_left_is_cleared(places: FileServer, fetch: Fetch, cache: Path):
    fetch(f"{places.url}/1/", disk_cache_bytes=TWO)
    (cache / "blobs" / ("0" * 64)).write_bytes(b"x" * ONE)
    (cache / "adapters" / "tmp123" / "files").mkdir(parents=True)
    assert cached(places, fetch, 1, TWO)
    fetch(f"{places.url}/2/", disk_cache_bytes=TWO)
    DiskCache(cache, 0).check()
    assert cached(places, fetch, 1, TWO), "a leftover was kept in its stead"


def test_blobs_removed_by_hand_are_fetched_again(places: FileServer, fetch: Fetch, cache: Path):
    fetch(f"{places.url}/1/")
    for blob in (cache / "blobs").iterdir():
        blob.unlink()
    assert fetch(f"{places.url}/1/") == adapter_bytes(1)
    DiskCache(cache, 0).check()


def test_shared_blob_stays_while_one_entry_has_it(places: FileServer, fetch: Fetch, cache: Path):
    for number in (1, 2, 3):
        cached(places, fetch, number, TWO)
    DiskCache(cache, 0).check()
    assert len(list((cache / "blobs").glob("*"))) == 3


def test_many_threads_over_few_places(places: FileServer, cache: Path):
    """Everybody reads what was asked for, whatever is evicted meanwhile; then all is whole."""
    opened = sources(cache, str(4 * ONE))
    ready = threading.Barrier(3)

    def load(worker: int) -> None:
        ready.wait(10)
        for turn in range(8):
            number = (worker + turn * (worker + 1)) % 4 + 1
            with opened.open("a", f"{places.url}/{number}/") as directory:
                assert (directory / WEIGHTS).read_bytes() == adapter_bytes(number)[WEIGHTS]

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(load, range(3)))
    DiskCache(cache, 0).check()


def test_cache_that_cannot_be_written_names_the_remedy(places: FileServer, tmp_path: Path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(AdapterSourceUnavailable, match="--disk-cache"),
        sources(tmp_path / "file" / "x", TWO).open("a", f"{places.url}/1/"),
    ):
        pass


def test_default_place_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert SourceOptions().cache_directory() == tmp_path / "loramux" / "adapters"


def test_cache_is_nobody_elses(places: FileServer, fetch: Fetch, cache: Path):
    fetch(f"{places.url}/1/")
    assert os.stat(cache).st_mode & 0o077 == 0


def test_local_sources_need_no_home_directory(
    places: FileServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    opened = AdapterSources()
    with opened.open("a", str(tmp_path)) as directory:
        assert directory == tmp_path
    with (
        pytest.raises(AdapterSourceUnavailable, match=r"home directory.*--disk-cache"),
        opened.open("a", f"{places.url}/1/"),
    ):
        pass


@contextmanager
def files_no_longer_than(num_bytes: int) -> Iterator[None]:
    """The system refuses to write more, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_told_with_the_remedy_and_a_later_load_goes_on(
    places: FileServer, fetch: Fetch, cache: Path
):
    assert fetch(f"{places.url}/1/") == adapter_bytes(1)
    with (
        files_no_longer_than(200),
        pytest.raises(AdapterSourceUnavailable, match=r"disk cache cannot be used.*--disk-cache"),
    ):
        fetch(f"{places.url}/2/")
    DiskCache(cache, 0).check()
    assert fetch(f"{places.url}/1/") == adapter_bytes(1)
    assert fetch(f"{places.url}/2/") == adapter_bytes(2)
