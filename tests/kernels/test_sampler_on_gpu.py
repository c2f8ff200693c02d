"""The sampler on a GPU: it launches at once beside a busy device, and chooses as on the CPU."""

from __future__ import annotations

import pytest
import torch

from loramux.worker.drawing import draw_by_triton, draw_for
from loramux.worker.logprobs import prompt_logprobs
from loramux.worker.sampler import Sampler
from tests.cpu.test_sampler import mixed_batch, random_logits, sample
from tests.kernels.test_triton_sampling import FILTERS, seeded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

BUSY_CYCLES = 4_000_000_000
"""About two seconds."""


def gpu_sampler() -> Sampler:
    return Sampler(draw_for(torch.device("cuda")))


def test_a_gpu_draws_by_one_kernel() -> None:
    assert draw_for(torch.device("cuda")) is draw_by_triton


def test_launch_returns_while_the_device_is_busy() -> None:
    rows = mixed_batch()
    logits = random_logits(len(rows), vocab=5000)
    expected = [chosen.token_id for chosen in Sampler().launch(logits, rows).result()]
    on_device = logits.cuda()
    sampler = gpu_sampler()
    sampler.warm_up(5000, on_device.dtype, on_device.device)
    sampler.launch(on_device, rows).result()  # loads the kernels, which may wait
    prompt_logprobs(on_device, [1] * len(rows), 2).result()

    torch.cuda._sleep(BUSY_CYCLES)
    sampling = sampler.launch(on_device, rows)
    prompt = prompt_logprobs(on_device, [1] * len(rows), 2)

    assert not torch.cuda.current_stream().query(), "the launch has waited for the device"
    assert [chosen.token_id for chosen in sampling.result()] == expected
    assert sampling.token_ids.tolist() == expected
    assert len(prompt.result()) == len(rows)


@pytest.mark.parametrize("vocab", [5000, 128256])
def test_choice_on_a_gpu_does_not_depend_on_the_rest_of_the_batch(vocab: int) -> None:
    rows = mixed_batch()
    logits = random_logits(len(rows), vocab=vocab).cuda().bfloat16()
    together = gpu_sampler().launch(logits, rows).token_ids.tolist()
    for i in range(0, len(rows), 7):
        alone = gpu_sampler().launch(logits[i : i + 1], rows[i : i + 1])
        assert alone.token_ids.item() == together[i]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0], ids=lambda s: f"spread {s}")
def test_a_real_vocabulary_is_drawn_from_as_on_the_cpu(dtype: torch.dtype, spread: float) -> None:
    """Flat rows, in which top_p keeps more than the kernel has room for, and steep ones."""
    samples = seeded(FILTERS * 3)
    logits = (random_logits(len(samples), vocab=128256) * spread).to(dtype)
    expected = [chosen.token_id for chosen in Sampler().launch(logits, samples).result()]
    found = gpu_sampler().launch(logits.cuda(), samples).result()
    assert [chosen.token_id for chosen in found] == expected


@pytest.mark.parametrize("params", [{"top_k": 3000}, {"top_p": 0.999}, {"top_k": 50}], ids=str)
def test_many_tied_tokens_are_drawn_from_as_on_the_cpu(params: dict[str, float]) -> None:
    samples = [sample(seed=seed, **params) for seed in range(16)]
    logits = random_logits(16, vocab=128256).round()
    expected = [chosen.token_id for chosen in Sampler().launch(logits, samples).result()]
    assert [c.token_id for c in gpu_sampler().launch(logits.cuda(), samples).result()] == expected
