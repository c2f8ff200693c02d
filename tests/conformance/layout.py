"""The layout of a tiny base model, as a server of it sees it."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

from loramux.adapters.spec import BaseLayout
from loramux.model.blueprint import draw


@functools.cache
def base_layout(directory: Path) -> BaseLayout:
    """What adapters may name in the model in ``directory``."""
    return replace(draw(str(directory)).layout, name=f"tiny/{directory.name}")
