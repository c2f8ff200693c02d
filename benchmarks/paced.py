"""The real engine over a forward that is a wait, as for a GPU: what its own steps cost is left."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from benchmarks.gpu_models import word_tokenizer
from loramux.config import AdapterOptions, EngineOptions, SchedulerOptions
from loramux.engine.build import assemble
from loramux.engine.service import EngineService
from loramux.model.load import adopt
from loramux.testing import tiny_model
from loramux.worker.runner import Computed

_VOCAB = 2000


def build(forward_seconds: float) -> EngineService:
    """For up to 256 sequences, of the base ``tiny``."""
    torch.set_num_threads(1)
    options = EngineOptions(
        adapters=AdapterOptions(max_loras=4),
        scheduler=SchedulerOptions(max_num_seqs=256, max_step_tokens=8192, kv_cache="64MiB"),
    )
    model = tiny_model(vocab_size=_VOCAB, num_layers=1, max_positions=1024)
    parts = assemble(adopt("tiny", model), word_tokenizer(_VOCAB), options, "tiny")
    logits = torch.randn(256, _VOCAB)

    def forward(inputs: object, sequences: Sequence[object]) -> Computed:
        time.sleep(forward_seconds)
        return Computed(logits[: len(sequences)], None)

    parts.worker.forward = forward
    return parts.service(max_open=1000)
