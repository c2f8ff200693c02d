"""What transformers + PEFT answer, one adapter at a time: the measure of ``loramux verify``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from loramux.config import ModelOptions
from loramux.errors import MissingPackage
from loramux.model.load import load_base

NUM_LIKELIEST = 5
"""Tokens whose log-probabilities are kept at each place."""

_LONGEST_REMARK = 300


@dataclass(frozen=True, slots=True)
class Place:
    """One token of a greedy answer."""

    token_id: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...]
    """Tokens and their log-probabilities, best first; of two equal ones, either is chosen."""

    def compared(self, num_likeliest: int) -> dict[int, float]:
        """Log-probabilities of the chosen token and of so many likeliest ones."""
        return {self.token_id: self.logprob, **dict(self.likeliest[:num_likeliest])}

    def lead_over(self, token_id: int) -> float:
        """By how much the chosen token is likelier; at least so much where that is not known."""
        last = self.likeliest[-1][1]
        return self.logprob - dict(self.likeliest).get(token_id, last)


Answer = tuple[Place, ...]


@dataclass(frozen=True)
class PeftAnswers:
    """Answers to all prompts, and what PEFT had to remark on the adapter when it loaded it."""

    answers: tuple[Answer, ...]
    remarks: tuple[str, ...] = ()


class NoAnswer(Exception):
    """PEFT cannot load an adapter, or has no numbers for it; the text says why."""


def require_peft() -> None:
    """Raises MissingPackage where PEFT is not installed."""
    try:
        import peft  # noqa: F401
    except ImportError:
        raise MissingPackage("peft", "loramux verify compares with it") from None


def ask_peft(
    base: str,
    options: ModelOptions,
    adapter: Path | None,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
) -> PeftAnswers:
    """Greedy answers of ``max_tokens`` tokens each; an end-of-text token does not end them.

    The base is loaded anew, since an adapter may leave traces in it (replaced biases, for one).
    ``adapter`` None is the base alone. Raises NoAnswer.
    """
    model: PreTrainedModel = load_base(base, options).model
    remarks: tuple[str, ...] = ()
    if adapter is not None:
        model, remarks = _with_adapter(model, adapter)
    with torch.inference_mode():
        return PeftAnswers(tuple(_answer(model, p, max_tokens) for p in prompts), remarks)


def _with_adapter(model: PreTrainedModel, adapter: Path) -> tuple[PreTrainedModel, tuple[str, ...]]:
    from peft import PeftModel

    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        try:
            adapted = PeftModel.from_pretrained(model, str(adapter))
        except Exception as error:  # of any kind: strangers' files go through many hands there
            reason = f"{type(error).__name__}: {_one_line(str(error))}"
            raise NoAnswer(f"PEFT cannot load it: {reason}") from error
    remarks = dict.fromkeys(_one_line(str(w.message)) for w in raised if _is_remark(w))
    found = adapted.eval().get_base_model()  # with the adapter's layers in it
    assert isinstance(found, PreTrainedModel)
    return found, tuple(remarks)


def _is_remark(warning: warnings.WarningMessage) -> bool:
    """Not a notice of a library about itself."""
    return issubclass(warning.category, UserWarning)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_REMARK else line[:_LONGEST_REMARK] + "..."


def _answer(model: PreTrainedModel, prompt: Sequence[int], max_tokens: int) -> Answer:
    inputs = torch.tensor([list(prompt)], device=model.device)
    # Of the model's own settings none may act: penalties and ends are no part of the arithmetic.
    model.generation_config = GenerationConfig()
    output: Any = model.generate(  # pyright: ignore[reportCallIssue]
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=max_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = output.sequences[0, len(prompt) :].tolist()
    return tuple(
        _place(token, logits[0].float().log_softmax(-1))
        for token, logits in zip(tokens, output.logits, strict=True)
    )


def _place(token: int, logprobs: Tensor) -> Place:
    best = logprobs.topk(min(NUM_LIKELIEST, len(logprobs)))
    if not best.values.isfinite().all():
        raise NoAnswer("PEFT's own log-probabilities are not finite")
    likeliest = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return Place(token, float(logprobs[token]), tuple(likeliest))
