"""The sampler beside a device that is busy: it launches at once, and chooses as on the CPU."""

from __future__ import annotations

import pytest
import torch

from loramux.worker.logprobs import prompt_logprobs
from loramux.worker.sampler import Sampler
from tests.cpu.test_sampler import mixed_batch, random_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

BUSY_CYCLES = 4_000_000_000
"""About two seconds."""


def test_launch_returns_while_the_device_is_busy() -> None:
    rows = mixed_batch()
    logits = random_logits(len(rows), vocab=5000)
    expected = [chosen.token_id for chosen in Sampler().launch(logits, rows).result()]
    on_device = logits.cuda()
    Sampler().launch(on_device, rows).result()  # loads the kernels, which may wait
    prompt_logprobs(on_device, [1] * len(rows), 2).result()

    torch.cuda._sleep(BUSY_CYCLES)
    sampling = Sampler().launch(on_device, rows)
    prompt = prompt_logprobs(on_device, [1] * len(rows), 2)

    assert not torch.cuda.current_stream().query(), "the launch has waited for the device"
    assert [chosen.token_id for chosen in sampling.result()] == expected
    assert sampling.token_ids.tolist() == expected
    assert len(prompt.result()) == len(rows)


@pytest.mark.parametrize("vocab", [5000, 128256])
def test_choice_on_a_gpu_does_not_depend_on_the_rest_of_the_batch(vocab: int) -> None:
    rows = mixed_batch()
    logits = random_logits(len(rows), vocab=vocab).cuda().bfloat16()
    together = Sampler().launch(logits, rows).token_ids.tolist()
    for i in range(0, len(rows), 7):
        assert Sampler().launch(logits[i : i + 1], rows[i : i + 1]).token_ids.item() == together[i]
