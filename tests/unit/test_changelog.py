"""The changelog's newest entry is this version."""

from __future__ import annotations

import re
from pathlib import Path

import loramux

CHANGELOG = Path(__file__).parents[2] / "CHANGELOG.md"


def test_top_version_is_the_packages() -> None:
    versions = re.findall(r"^## \[(.+?)\]", CHANGELOG.read_text(encoding="utf-8"), re.MULTILINE)
    assert versions[0] == loramux.__version__
