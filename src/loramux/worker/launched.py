"""A step that has been launched: its tokens on the device, and on their way to the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loramux.plan import SequenceResult, SequenceStep, StepResult
from loramux.types import RequestId
from loramux.worker.logprobs import PromptLogprobs
from loramux.worker.pooling import Pooling
from loramux.worker.sampler import Sampling
from loramux.worker.vocabularies import MixedSampling


@dataclass(frozen=True)
class SampledTokens:
    """What a step has sampled, for the step after it."""

    token_ids: Tensor
    """int64 ``[rows]`` on the device; a valid token also for a row that has failed."""
    rows: Mapping[RequestId, int] = field(default_factory=dict)

    @staticmethod
    def none(device: torch.device) -> SampledTokens:
        """Before the first step."""
        return SampledTokens(torch.zeros(0, dtype=torch.int64, device=device))


class LaunchedStep:
    """Implements ``engine.interface.LaunchedStep``."""

    def __init__(
        self,
        sequences: Sequence[SequenceStep],
        sampling: Sampling | MixedSampling,
        prompts: Mapping[RequestId, PromptLogprobs],
        pooling: Pooling | None,
        load_seconds: float,
    ) -> None:
        self.load_seconds = load_seconds
        self._sequences = sequences
        self._sampling = sampling
        self._prompts = prompts
        self._pooling = pooling
        sampled = (s.request_id for s in sequences if s.sample is not None)
        self.tokens = SampledTokens(
            sampling.token_ids, {request_id: row for row, request_id in enumerate(sampled)}
        )

    def result(self) -> StepResult:
        """Wait for the device; results stand in the order of the plan's sequences."""
        sampled = iter(self._sampling.result())
        pooled = {} if self._pooling is None else self._pooling.result()
        results: list[SequenceResult] = []
        for sequence in self._sequences:
            found = self._prompts.get(sequence.request_id)
            prompt = () if found is None else found.result()
            if sequence.hidden is not None:
                vector = pooled[sequence.request_id]
                results.append(
                    SequenceResult(sequence.request_id, hidden=vector.hidden, error=vector.error)
                )
                continue
            if sequence.sample is None:
                results.append(SequenceResult(sequence.request_id, prompt_logprobs=prompt))
                continue
            token = next(sampled)
            results.append(
                SequenceResult(
                    sequence.request_id,
                    token_id=token.token_id,
                    logprobs=token.logprobs,
                    prompt_logprobs=prompt,
                    error=token.error,
                )
            )
        return StepResult(tuple(results))
