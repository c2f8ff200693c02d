"""What somebody else than the operator may name as a source."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loramux.adapters.source_rules import allows, confine
from loramux.adapters.sources import AdapterSources
from loramux.errors import AdapterSourceForbidden, AdapterSourceNotFound
from loramux.types import SourceRules

ALLOWED = [
    ("hf:", "hf:org/repo"),
    ("hf:org", "hf:org/repo@main"),
    ("hf:org/", "hf:org/repo/folder"),
    ("hf:org/repo", "hf:org/repo"),
    ("hf:org/repo", "hf:org/repo@main"),
    ("s3://bucket", "s3://bucket/a/b"),
    ("s3://bucket/a/", "S3://bucket/a/b"),
    ("https://", "https://any.host/a/"),
    ("https://host", "https://host/a.zip?sig=1/../2"),
    ("https://Host:8443/", "https://hOST:8443/a/"),
]

NOT_ALLOWED = [
    ("hf:org", "hf:organisation/repo"),
    ("hf:org/repo", "hf:org/repository"),
    ("s3://bucket", "s3://bucket2/a"),
    ("s3://bucket/a", "s3://bucket/ab"),
    ("s3://bucket/a/", "s3://bucket/A/b"),
    ("s3://bucket/a/", "s3://bucket/a/../b"),
    ("s3://bucket/a/", "s3://bucket/a/.."),
    ("https://host/a/", "https://host/a/%2e%2e/b/"),
    ("https://host/a/", "https://host/a/..%2fb/"),
    ("https://host/a/", "https://host/a/%252e%252e/b/"),
    ("https://host/a/", "https://host/a/..\\b/"),
    ("https://host", "https://host.evil.org/"),
    ("https://host", "https://host@evil.org/"),
    ("https://host", "https://host:9/"),
    ("https://", "https://user@host/"),
    ("https://host", "http://host/"),
    ("https://host", " https://host/"),
    ("https://host/", "https://host/\n"),
    ("https://host/", "https://host\\@evil.org/"),
    ("hf:org", "hf:../org/repo"),
]


@pytest.mark.parametrize(("prefix", "source"), ALLOWED)
def test_sources_below_a_prefix_are_allowed(prefix: str, source: str):
    assert allows(source, ["s3://other/", prefix])


@pytest.mark.parametrize(("prefix", "source"), NOT_ALLOWED)
def test_what_only_looks_like_a_prefix_is_not(prefix: str, source: str):
    assert not allows(source, [prefix])


def test_without_a_prefix_nothing_is_allowed():
    assert not allows("hf:org/repo", [])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with ``mine``; beside it ``secret``, which is nobody's business."""
    for folder in (tmp_path / "root" / "mine", tmp_path / "secret"):
        folder.mkdir(parents=True)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / name).write_text(str(folder))
    return tmp_path / "root"


def opened(root: Path, source: str) -> Path:
    with AdapterSources().open("a", source, SourceRules(root=str(root))) as directory:
        return directory


def test_path_is_relative_to_the_root(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir("/")
    assert opened(root, "mine") == opened(root, "./mine/") == root / "mine"


def test_root_itself_may_be_a_link(root: Path, tmp_path: Path):
    (tmp_path / "alias").symlink_to(root)
    assert opened(tmp_path / "alias", "mine") == root / "mine"


def test_links_inside_the_root_are_followed(root: Path):
    (root / "again").symlink_to("mine")
    (root / "files").mkdir()
    (root / "files" / "adapter_config.json").symlink_to("../mine/adapter_config.json")
    assert opened(root, "again") == root / "mine"
    assert opened(root, "files") == root / "files"


@pytest.mark.parametrize(
    "source",
    [
        "../secret",
        "mine/../../secret",
        "mine/..",
        "~",
        "~root",
        "/",
        "/etc",
        "file:///etc",
        "//etc",
    ],
)
def test_absolute_paths_and_parents_are_refused(root: Path, source: str):
    with pytest.raises(AdapterSourceForbidden, match="relative to it"):
        opened(root, source)


def test_absolute_path_inside_the_root_is_refused_too(root: Path):
    with pytest.raises(AdapterSourceForbidden):
        opened(root, str(root / "mine"))


def test_directory_that_is_a_link_out_is_refused(root: Path):
    (root / "link").symlink_to("../secret")
    with pytest.raises(AdapterSourceForbidden, match="leads out"):
        opened(root, "link")
    (root / "parent").symlink_to("..")
    with pytest.raises(AdapterSourceForbidden, match="leads out"):
        opened(root, "parent/secret")


@pytest.mark.parametrize(
    "name",
    [
        "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin",
        "adapters.safetensors", "tokenizer.json", "added_tokens.json",
    ],
)  # fmt: skip
def test_file_that_is_a_link_out_is_refused(root: Path, name: str):
    (root / "mine" / name).unlink(missing_ok=True)
    (root / "mine" / name).symlink_to("../../secret/adapter_config.json")
    with pytest.raises(AdapterSourceForbidden, match=f"{name} is a link that leads out"):
        opened(root, "mine")


def test_dangling_links_out_are_refused(root: Path):
    (root / "mine" / "adapter_model.bin").symlink_to("/nowhere/at/all")
    with pytest.raises(AdapterSourceForbidden):
        opened(root, "mine")


def test_loops_of_links_are_not_found(root: Path):
    (root / "loop").symlink_to("loop")
    with pytest.raises((AdapterSourceNotFound, AdapterSourceForbidden)):
        opened(root, "loop")


@pytest.mark.parametrize("source", ["nowhere", "a\0b", "x" * 10_000, "mine/adapter_config.json"])
def test_what_is_no_directory_is_not_found(root: Path, source: str):
    with pytest.raises(AdapterSourceNotFound):
        confine("a", source, str(root))


def test_without_a_root_local_paths_are_free(root: Path):
    with AdapterSources().open("a", str(root / "mine"), SourceRules()) as directory:
        assert directory == root / "mine"


def test_operators_own_path_is_not_bound(root: Path):
    (root / "link").symlink_to("../secret")
    with AdapterSources().open("a", str(root / "link")) as directory:
        assert os.path.samefile(directory, root.parent / "secret")
