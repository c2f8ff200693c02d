"""Serve many LoRA adapters over one base model: one process, one batch, base-model speed.

``import loramux`` imports no torch; the names that need it are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loramux.guide import Guide
from loramux.types import PoolingParams, SamplingParams

if TYPE_CHECKING:
    from loramux.engine.async_engine import AsyncEngine
    from loramux.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncEngine", "Guide", "PoolingParams", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    if name == "LLM":
        from loramux.engine.llm import LLM

        return LLM
    if name == "AsyncEngine":
        from loramux.engine.async_engine import AsyncEngine

        return AsyncEngine
    raise AttributeError(f"module 'loramux' has no attribute {name!r}")
