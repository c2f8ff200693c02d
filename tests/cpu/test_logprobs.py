"""Log-probabilities of prompts."""

from __future__ import annotations

import torch

from loramux.worker.logprobs import prompt_logprobs, row_logprobs


def test_each_prompt_token_is_judged_by_the_row_before_it() -> None:
    logits = torch.randn(150, 50, generator=torch.Generator().manual_seed(0))
    tokens = [i % 50 for i in range(149)]
    found = prompt_logprobs(logits, tokens, k=2).result()
    raw = logits.log_softmax(-1)
    assert [f.token_id for f in found] == tokens
    assert [f.logprob for f in found] == [raw[i, t].item() for i, t in enumerate(tokens)]
    assert [f.top[0][0] for f in found] == raw[:149].argmax(-1).tolist()
    assert all(len(f.top) == 2 for f in found)


def test_bfloat16_logits_are_judged_in_float32() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    [found] = prompt_logprobs(logits, [3], k=0).result()
    assert found.logprob == logits.float().log_softmax(-1)[0, 3].item()


def test_prompts_are_judged_without_waiting_for_the_device() -> None:
    found = row_logprobs(
        torch.empty(150, 50, device="meta"), torch.empty(150, dtype=torch.int64, device="meta"), 2
    )
    assert found.chosen.shape == (150,)
    assert found.best.shape == found.best_ids.shape == (150, 2)


def test_a_prompt_without_next_tokens_has_none() -> None:
    assert prompt_logprobs(torch.zeros(1, 5), [], k=3).result() == ()
