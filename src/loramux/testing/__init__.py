"""Stand-ins for tests of what is built on loramux; importing this package imports no torch."""

from __future__ import annotations

from loramux.testing.codec import FakeCodec
from loramux.testing.engine import FakeEngine, FakeStream, echoed_embedding
from loramux.testing.models import random_adapter, tiny_model
from loramux.testing.worker import (
    FakeWorker,
    expected_embedding,
    expected_prompt_logprobs,
    expected_tokens,
)

__all__ = [
    "FakeCodec",
    "FakeEngine",
    "FakeStream",
    "FakeWorker",
    "echoed_embedding",
    "expected_embedding",
    "expected_prompt_logprobs",
    "expected_tokens",
    "random_adapter",
    "tiny_model",
]
