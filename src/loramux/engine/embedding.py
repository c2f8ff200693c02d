"""One embedding: from what the steps report of a prompt's hidden states to the vector."""

from __future__ import annotations

import numpy as np

from loramux.plan import SequenceResult
from loramux.scheduling.request import Request
from loramux.types import Delta, FinishReason, PoolingParams

_FLOAT = np.dtype("<f4")
_SMALLEST_LENGTH = 1e-12
"""As in torch's ``normalize``: a vector of zeros stays one."""


class Embedding:
    """Pools the hidden states of one sequence, step by step."""

    def __init__(self, request: Request, params: PoolingParams) -> None:
        self._request = request
        self._params = params
        self._total: np.ndarray | None = None

    def push(self, result: SequenceResult, *, start: int, end: int) -> Delta | None:
        """Take what a step reports of the tokens ``start … end - 1``; the delta at their end."""
        if result.hidden is not None:
            found = np.frombuffer(result.hidden, _FLOAT)
            # A sequence that is computed again begins at 0, and nothing from before counts: not
            # even what a step still brings that was launched before it was preempted.
            self._total = found if start == 0 or self._total is None else self._total + found
        if end < self._request.num_prompt_tokens:
            return None
        assert self._total is not None, "an embedding has nothing to be made of"
        return self._delta("stop", embedding=self._vector(self._total).tobytes())

    def fail(self, error: str) -> Delta:
        """The delta of a prompt that cannot be embedded."""
        return self._delta("error", error=error)

    def abort(self) -> Delta:
        """The delta of an embedding that nobody waits for."""
        return self._delta("abort")

    def _vector(self, total: np.ndarray) -> np.ndarray:
        exact = total.astype(np.float64)
        if self._params.pooling == "mean":
            exact /= self._request.num_prompt_tokens
        if self._params.normalize:
            exact /= max(float(np.linalg.norm(exact)), _SMALLEST_LENGTH)
        return exact.astype(_FLOAT)

    def _delta(
        self, reason: FinishReason, *, embedding: bytes | None = None, error: str | None = None
    ) -> Delta:
        request = self._request
        return Delta(
            request.parent_id,
            request.index,
            "",
            (),
            finish_reason=reason,
            cached_tokens=request.num_cached,
            error=error,
            embedding=embedding,
        )
