"""Vectors made of a step's hidden states, for the sequences that ask for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from loramux.plan import SequenceStep
from loramux.types import RequestId
from loramux.worker.transfer import Download, upload

_NOT_FINITE = "the hidden states are not finite"


class Pooled(NamedTuple):
    """One sequence's vector, or the reason why there is none."""

    hidden: bytes | None = None
    error: str | None = None


class Pooling:
    """Vectors that are on their way to the host."""

    def __init__(self, vectors: Tensor, request_ids: Sequence[RequestId]) -> None:
        """``vectors``: float32 ``[sequences, hidden]``."""
        self._request_ids = request_ids
        self._arriving = Download((vectors,))

    def result(self) -> Mapping[RequestId, Pooled]:
        """What each sequence has come to; waits for the device."""
        [vectors] = self._arriving.wait()
        rows = vectors.numpy()
        return {
            request_id: Pooled(row.astype("<f4").tobytes())
            if np.isfinite(row).all()
            else Pooled(error=_NOT_FINITE)
            for request_id, row in zip(self._request_ids, rows, strict=True)
        }


@torch.inference_mode()
def launch(states: Tensor, sequences: Sequence[SequenceStep]) -> Pooling:
    """Pool ``states [T, hidden]`` of a step's tokens for those sequences that ask for it.

    Waits for nothing. Sums are made in float32, each over its own rows alone.
    """
    last: dict[RequestId, int] = {}
    summed: dict[RequestId, Tensor] = {}
    start = 0
    for s in sequences:
        end = start + len(s.token_ids)
        if s.hidden == "last":
            last[s.request_id] = end - 1
        elif s.hidden == "sum":
            summed[s.request_id] = states[start:end].sum(dim=0, keepdim=True, dtype=torch.float32)
        start = end
    rows = upload(list(last.values()), torch.int64, states.device)
    vectors = torch.cat((states.index_select(0, rows).float(), *summed.values()))
    return Pooling(vectors, [*last, *summed])
