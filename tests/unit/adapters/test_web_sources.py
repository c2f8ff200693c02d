"""Adapters behind http URLs: what is fetched, again and in part, and what is refused."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from loramux.adapters.disk_cache import DiskCache
from loramux.adapters.sources import AdapterSources
from loramux.config import SourceOptions
from loramux.errors import (
    AdapterError,
    AdapterRefused,
    AdapterSourceForbidden,
    AdapterSourceNotFound,
    AdapterSourceUnavailable,
)
from loramux.types import SourceRules
from tests.remote_places import CONFIG, WEIGHTS, FileServer, Served, adapter_bytes, snapshot
from tests.unit.adapters.conftest import Fetch

FILES = adapter_bytes()
BIG = len(FILES[WEIGHTS])


def test_folder_gives_its_known_files(web: FileServer, fetch: Fetch, cache: Path):
    tokenizer = {"tokenizer.json": b"{}", "added_tokens.json": b"{}"}
    web.put("/a/", {**FILES, **tokenizer, "optimizer.pt": b"x" * 999})
    assert fetch(f"{web.url}/a/") == {**FILES, **tokenizer}
    assert web.gets("optimizer.pt") == 0
    DiskCache(cache, 2**30).check()


def test_only_the_weights_that_would_be_read_are_fetched(web: FileServer, fetch: Fetch):
    web.put("/a/", {**FILES, "adapter_model.bin": b"x" * 999})
    assert fetch(f"{web.url}/a/") == FILES


def test_unchanged_adapter_is_asked_about_and_not_fetched_again(web: FileServer, fetch: Fetch):
    web.put("/a/", FILES)
    fetch(f"{web.url}/a/")
    travelled = web.sent()
    web.asked.clear()
    assert fetch(f"{web.url}/a/") == FILES
    assert (travelled > BIG, web.sent(), web.gets()) == (True, 0, 0)
    assert web.asked, "it was not asked whether it has changed"


def test_changed_file_alone_is_fetched_again(web: FileServer, fetch: Fetch):
    web.put("/a/", FILES)
    fetch(f"{web.url}/a/")
    web.asked.clear()
    new = adapter_bytes(seed=2)
    web.put("/a/", new)
    assert fetch(f"{web.url}/a/") == new
    assert (web.gets(CONFIG), web.gets(WEIGHTS)) == (0, 1)


def test_file_without_a_version_is_fetched_every_time(web: FileServer, fetch: Fetch):
    web.put("/a/", FILES, etag=None)
    fetch(f"{web.url}/a/")
    assert fetch(f"{web.url}/a/") == FILES
    assert web.gets(WEIGHTS) == 2


def test_broken_transfer_is_taken_up_within_one_load(web: FileServer, fetch: Fetch):
    web.put("/a/", FILES)
    web.files[f"/a/{WEIGHTS}"].break_after = half = (BIG + 1) // 2
    assert fetch(f"{web.url}/a/") == FILES
    assert web.sent(WEIGHTS) == BIG
    ranges = [a.range for a in web.asked if a.method == "GET" and a.path.endswith(WEIGHTS)]
    assert ranges == [None, f"bytes={half}-"]


def interrupt(web: FileServer, fetch: Fetch) -> int:
    """Let the transfer of the weights fail for good; how many of its bytes came."""
    web.put("/a/", FILES)
    web.files[f"/a/{WEIGHTS}"].break_after = 1000
    with pytest.raises(AdapterSourceUnavailable, match=f"transfer of {WEIGHTS} broke off"):
        fetch(f"{web.url}/a/")
    came = web.sent(WEIGHTS)
    assert 0 < came < BIG
    web.asked.clear()
    web.files[f"/a/{WEIGHTS}"].break_after = None
    return came


def test_interrupted_load_goes_on_where_it_stopped(web: FileServer, fetch: Fetch):
    came = interrupt(web, fetch)
    assert fetch(f"{web.url}/a/") == FILES
    assert (web.sent(WEIGHTS), web.gets(CONFIG)) == (BIG - came, 0)


def test_interrupted_load_begins_anew_when_the_file_has_changed(web: FileServer, fetch: Fetch):
    interrupt(web, fetch)
    new = adapter_bytes(seed=2)
    web.put("/a/", new)
    assert fetch(f"{web.url}/a/") == new
    assert web.sent(WEIGHTS) == BIG


def test_interrupted_load_begins_anew_without_ranges(web: FileServer, fetch: Fetch):
    interrupt(web, fetch)
    web.files[f"/a/{WEIGHTS}"].ranges = False
    assert fetch(f"{web.url}/a/") == FILES
    assert web.sent(WEIGHTS) == BIG


@pytest.mark.parametrize("etag", [None, 'W/"weak"'])
def test_parts_are_not_joined_without_a_sure_version(
    web: FileServer, fetch: Fetch, etag: str | None
):
    web.put("/a/", FILES, etag=etag)
    web.files[f"/a/{WEIGHTS}"].break_after = 1000
    with pytest.raises(AdapterSourceUnavailable):
        fetch(f"{web.url}/a/")
    web.put("/a/", FILES, etag=etag)
    web.asked.clear()
    assert fetch(f"{web.url}/a/") == FILES
    assert web.sent(WEIGHTS) == BIG


def test_file_that_changes_while_it_is_read_is_refused(web: FileServer, fetch: Fetch, cache: Path):
    web.put("/a/", FILES)
    new = adapter_bytes(seed=2)

    def change() -> None:
        web.files[f"/a/{CONFIG}"] = Served(new[CONFIG] + b" ")

    web.files[f"/a/{WEIGHTS}"].wait = change
    with pytest.raises(AdapterSourceUnavailable, match="changed while it was read"):
        fetch(f"{web.url}/a/")
    assert DiskCache(cache, 2**30).adapters() == []
    web.put("/a/", new)
    assert fetch(f"{web.url}/a/") == new


FAULTS = {
    "missing": ({"status": 404}, AdapterSourceNotFound, "holds no adapter"),
    "unauthorized": ({"status": 401}, AdapterSourceUnavailable, "refused to this server"),
    "forbidden": ({"status": 403}, AdapterSourceUnavailable, "refused to this server"),
    "confused": ({"status": 416}, AdapterSourceUnavailable, "status 416"),
    "broken": ({"status": 500}, AdapterSourceUnavailable, "status 500"),
    "web_page": (
        {"data": b"<!DOCTYPE html><title>Sign in"}, AdapterRefused, "web page",
    ),
    "web_page_by_type": (
        {"data": b"<!DOCTYPE html><title>Sign in", "content_type": "text/html; charset=utf-8"},
        AdapterSourceNotFound,
        "holds no adapter",
    ),
    "lfs_pointer": (
        {"data": b"version https://git-lfs.github.com/spec/v1\noid sha256:0"}, AdapterRefused,
        "Git LFS pointer",
    ),
    "empty": ({"data": b""}, AdapterRefused, "empty"),
    "too_short": ({"announced": 10**6}, AdapterSourceUnavailable, "broke off"),
    "huge": ({"announced": 10**15}, AdapterRefused, "--disk-cache-bytes"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_failed_load_leaves_the_cache_as_it_was_and_a_good_one_follows(
    web: FileServer, fetch: Fetch, cache: Path, fault: str
):
    change, error, text = FAULTS[fault]
    web.put("/other/", adapter_bytes(seed=9))
    fetch(f"{web.url}/other/")
    before = snapshot(cache)
    web.put("/a/", FILES)
    for name in FILES if error is AdapterSourceNotFound else [WEIGHTS]:
        web.files[f"/a/{name}"] = replace(web.files[f"/a/{name}"], **change)
    with pytest.raises(error, match=text) as caught:
        fetch(f"{web.url}/a/")
    assert isinstance(caught.value, AdapterError)
    after = snapshot(cache)
    assert {k: v for k, v in after.items() if not k.startswith("partial/")} == before
    DiskCache(cache, 2**30).check()
    web.put("/a/", FILES)
    assert fetch(f"{web.url}/a/") == FILES
    assert not [name for name in snapshot(cache) if name.startswith("partial/")]


@pytest.mark.parametrize(
    ("announced", "text"),
    [(-1, "announced with 100 bytes and sent with"), (None, "is longer than")],
)
def test_other_length_than_announced_is_refused(
    web: FileServer, fetch: Fetch, cache: Path, announced: int | None, text: str
):
    web.put("/a/", FILES)
    web.files[f"/a/{WEIGHTS}"] = Served(FILES[WEIGHTS], announced=announced, head_announced=100)
    with pytest.raises(AdapterSourceUnavailable, match=text):
        fetch(f"{web.url}/a/")
    assert sum(map(len, snapshot(cache).values())) == len(FILES[CONFIG])


def test_body_without_a_length_is_cut_at_the_budget(web: FileServer, fetch: Fetch, cache: Path):
    web.put("/a/", FILES)
    web.files[f"/a/{WEIGHTS}"] = Served(FILES[WEIGHTS], announced=None)
    with pytest.raises(AdapterRefused, match="--disk-cache-bytes"):
        fetch(f"{web.url}/a/", disk_cache_bytes="2000")
    assert sum(len(v) for v in snapshot(cache).values()) < 2000


def test_transfer_that_hardly_moves_is_given_up(
    web: FileServer, fetch: Fetch, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("loramux.adapters.remotes.download._PATIENCE_SECONDS", -1)
    monkeypatch.setattr("loramux.adapters.remotes.download._SLOWEST_BYTES_PER_SECOND", 10**12)
    web.put("/a/", FILES)
    with pytest.raises(AdapterSourceUnavailable, match="comes too slowly"):
        fetch(f"{web.url}/a/")


def test_file_without_a_length_is_read_to_its_end(web: FileServer, fetch: Fetch):
    web.put("/a/", FILES, announced=None)
    assert fetch(f"{web.url}/a/") == FILES


def test_huge_configuration_is_refused_before_it_is_read(web: FileServer, fetch: Fetch):
    web.put("/a/", {**FILES, CONFIG: b" " * (5 * 2**20)})
    with pytest.raises(AdapterRefused, match=r"adapter_config\.json is too large"):
        fetch(f"{web.url}/a/")
    assert web.gets() == 0


def test_configuration_of_unknown_length_is_cut_at_its_bound(web: FileServer, fetch: Fetch):
    web.put("/a/", {**FILES, CONFIG: b" " * (5 * 2**20)}, announced=None)
    with pytest.raises(AdapterRefused, match=r"adapter_config\.json is too large"):
        fetch(f"{web.url}/a/")


@pytest.mark.parametrize("status", [403, 405, 501])
def test_server_that_takes_no_head_is_asked_by_get(web: FileServer, fetch: Fetch, status: int):
    web.put("/a/", FILES, head_status=status)
    assert fetch(f"{web.url}/a/") == FILES


def test_store_that_denies_what_is_not_there_serves_what_is(web: FileServer, fetch: Fetch):
    files = {CONFIG: FILES[CONFIG], "adapter_model.bin": b"PK\3\4"}
    web.put("/a/", files)
    for name in (WEIGHTS, "tokenizer.json", "added_tokens.json"):
        web.files[f"/a/{name}"] = Served(b"AccessDenied", status=403)
    assert fetch(f"{web.url}/a/") == files


def test_unreachable_server_tells_of_the_copy_and_offline_serves_it(web: FileServer, fetch: Fetch):
    web.put("/a/", FILES)
    fetch(f"{web.url}/a/")
    web.put("/a/", FILES, status=503)
    with pytest.raises(AdapterSourceUnavailable, match=r"has a copy.*--adapters-offline"):
        fetch(f"{web.url}/a/")
    web.asked.clear()
    assert fetch(f"{web.url}/a/", adapters_offline=True) == FILES
    assert web.asked == []


def test_unreachable_server_without_a_copy_is_an_error(fetch: Fetch):
    with pytest.raises(AdapterSourceUnavailable, match="cannot be reached"):
        fetch("http://127.0.0.1:9/a/")


def test_offline_without_a_copy_is_an_error(web: FileServer, fetch: Fetch):
    with pytest.raises(AdapterSourceUnavailable, match="works offline"):
        fetch(f"{web.url}/a/", adapters_offline=True)
    assert web.asked == []


@pytest.mark.parametrize("path", ["/adapter", "/adapter_model.safetensors", "/x.tar.xz"])
def test_url_of_no_known_form_is_refused_unasked(web: FileServer, fetch: Fetch, path: str):
    with pytest.raises(AdapterRefused, match="must end in /"):
        fetch(web.url + path)
    assert web.asked == []


def test_query_goes_with_every_file_and_into_no_text(web: FileServer, fetch: Fetch):
    with pytest.raises(AdapterSourceNotFound) as caught:
        fetch(f"{web.url}/a/?signature=secret".replace("//", "//me:secret@"))
    assert "secret" not in str(caught.value)


def test_two_loads_at_once_fetch_once(web: FileServer, cache: Path):
    web.put("/a/", FILES)
    begun = threading.Event()

    def slow() -> None:
        begun.set()
        threading.Event().wait(0.3)

    web.files[f"/a/{WEIGHTS}"].wait = slow
    sources = AdapterSources(SourceOptions(disk_cache=str(cache)))

    def load() -> bytes:
        with sources.open("a", f"{web.url}/a/") as directory:
            return (directory / WEIGHTS).read_bytes()

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(load)
        assert begun.wait(10)
        second = pool.submit(load)
        assert first.result() == second.result() == FILES[WEIGHTS]
    assert web.gets(WEIGHTS) == 1


# Rules for sources that others name.


def rules(*prefixes: str) -> SourceRules:
    return SourceRules(prefixes=prefixes)


def test_allowed_prefix_may_be_loaded(web: FileServer, fetch: Fetch):
    web.put("/a/", FILES)
    assert fetch(f"{web.url}/a/", rules(web.url)) == FILES


def test_other_places_are_refused_unasked(web: FileServer, fetch: Fetch):
    with pytest.raises(AdapterSourceForbidden, match="--adapter-sources"):
        fetch(f"{web.url}/a/", rules(f"{web.url}/b/"))
    assert web.asked == []


def test_redirect_out_of_what_is_allowed_is_not_followed(web: FileServer, fetch: Fetch):
    with FileServer().running() as inside:
        inside.put("/", FILES)
        for name in FILES:
            web.files[f"/a/{name}"] = Served(b"", location=f"{inside.url}/{name}")
        with pytest.raises(AdapterSourceForbidden, match="leads to"):
            fetch(f"{web.url}/a/", rules(web.url))
        assert inside.asked == []
        assert fetch(f"{web.url}/a/", rules(web.url, inside.url)) == FILES


def test_operators_own_source_may_redirect(web: FileServer, fetch: Fetch):
    web.put("/real/", FILES)
    for name in FILES:
        web.files[f"/a/{name}"] = Served(b"", location=f"/real/{name}")
    assert fetch(f"{web.url}/a/") == FILES


def test_endless_redirects_end(web: FileServer, fetch: Fetch):
    for name in FILES:
        web.files[f"/a/{name}"] = Served(b"", location=f"/a/{name}")
    with pytest.raises(AdapterSourceUnavailable, match="redirects"):
        fetch(f"{web.url}/a/")
