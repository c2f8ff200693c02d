from __future__ import annotations

from pathlib import Path

import pytest

from loramux.adapters.new_folder import check_target, new_folder
from loramux.errors import ConfigError


def check(target: Path, *inputs: Path, force: bool = True) -> None:
    check_target(target, force=force, marker="mark", inputs=inputs)


def marked(folder: Path) -> Path:
    folder.mkdir()
    (folder / "mark").touch()
    return folder


def test_folder_appears_with_its_content_and_nothing_else(tmp_path: Path):
    with new_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("x")
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out" / "file").read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_failure_leaves_what_was_there(tmp_path: Path):
    old = marked(tmp_path / "out")
    with pytest.raises(FileNotFoundError), new_folder(old) as folder:
        (folder / "file" / "in no folder").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mark"]


def test_new_folder_takes_the_place_of_the_old(tmp_path: Path):
    old = marked(tmp_path / "out")
    with new_folder(old) as folder:
        (folder / "file").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "file"]


def test_place_that_is_taken_needs_force(tmp_path: Path):
    taken = marked(tmp_path / "out")
    with pytest.raises(ConfigError, match="say --force"):
        check(taken, force=False)
    check(taken)
    check(tmp_path / "free", force=False)


@pytest.mark.parametrize(
    ("name", "detail"),
    [("full", "has no mark"), ("file", "is no folder"), ("link", "is no folder"),
     ("gone/out", "make it first")],
)  # fmt: skip
def test_force_does_not_replace_what_is_no_result(name: str, detail: str, tmp_path: Path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(marked(tmp_path / "marked"))
    with pytest.raises(ConfigError, match=detail):
        check(tmp_path / name)


def test_folder_that_is_read_is_not_replaced(tmp_path: Path):
    base = marked(tmp_path / "base")
    (base / "adapter").mkdir()
    for read in (base, base / "adapter"):
        with pytest.raises(ConfigError, match="which is read"):
            check(base, read)
