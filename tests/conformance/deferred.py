"""Cases of features that are refused today, each with a word that its refusal must hold."""

from __future__ import annotations

from collections.abc import Iterable

DEFERRED = {
    "pissa_unconverted": "pissa",
    "alora": "aLoRA",
    "vision_tower_keys": "vision",
}

DECLINED = {"config_huge": "too large"}
"""Cases that may be served or refused, and are refused on purpose, with a word of the refusal."""


def is_deferred(names: Iterable[str]) -> bool:
    """Whether a case that needs all these adapters has to wait for one of them."""
    return any(name in DEFERRED for name in names)
