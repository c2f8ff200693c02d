"""Settings of an engine's process."""

from __future__ import annotations

from pathlib import Path

import pytest

from loramux.engine.own_process import keep_compiled

NAMES = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"}


def test_compilers_keep_what_they_make_in_one_folder_of_the_user_alone(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    keep_compiled(environ)
    folder = tmp_path / "loramux" / "compiled"
    assert folder.stat().st_mode & 0o777 == 0o700
    found = {Path(environ[name]) for name in NAMES}
    assert len(found) == 3
    assert {place.parent for place in found} == {folder}


def test_what_the_environment_says_holds(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path), "TRITON_CACHE_DIR": "/mine"}
    keep_compiled(environ)
    assert environ["TRITON_CACHE_DIR"] == "/mine"
    assert environ.keys() > NAMES


def test_a_folder_that_cannot_be_made_is_told_and_leaves_compilers_to_themselves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    environ = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    keep_compiled(environ)
    assert not NAMES & environ.keys()
    assert "the next start compiles again" in caplog.text
