"""The work of ``loramux verify``: all adapters in one batch here, each alone in PEFT, compared."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from loramux.config import EngineOptions, ModelOptions, SchedulerOptions
from loramux.engine.build import load_tokenizer
from loramux.engine.llm import LLM
from loramux.engine.peft_oracle import (
    Answer,
    NoAnswer,
    PeftAnswers,
    Place,
    ask_peft,
    require_peft,
)
from loramux.engine.text import HFText
from loramux.engine.verified import Comparison, OtherToken, Spot, Verification
from loramux.errors import AdapterError, AdapterRefused, ConfigError
from loramux.types import MAX_LOGPROBS, RequestOutput, SamplingParams, TokenLogprobs

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Measure:
    """How close is close enough in a dtype."""

    tolerance: float
    """For a log-probability."""
    num_likeliest: int
    """Tokens whose log-probabilities are compared beside that of the chosen one."""


MEASURES: Mapping[str, Measure] = {
    "float32": Measure(1e-3, num_likeliest=5),
    "bfloat16": Measure(0.5, num_likeliest=0),
}
"""With SmolLM2-135M and six adapters, rounding alone moves a log-probability in float32 by up to
1e-4. In bfloat16 it moves the chosen token's by up to 0.35, and those of others by up to 1."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to compare. ``tolerance`` None: that of the dtype."""

    base: str
    adapters: Mapping[str, Path]
    prompts: Sequence[str]
    chat: bool = False
    """Wrap prompts in the chat template."""
    max_tokens: int
    tolerance: float | None = None


def verify(task: Task, options: EngineOptions) -> Verification:
    """Compare an engine's log-probabilities and greedy tokens with PEFT's.

    Slots and sizes of steps are chosen so that all adapters and the base meet in one step. Raises
    MissingPackage, ConfigError or ModelNotServable.
    """
    require_peft()
    dtype = options.model.dtype
    if dtype not in MEASURES:
        raise ConfigError(f"dtype {dtype!r} cannot be compared: name {' or '.join(MEASURES)}")
    measure = MEASURES[dtype]
    if task.tolerance is not None:
        measure = replace(measure, tolerance=task.tolerance)
    prompts = _encode(task)
    longest = max(map(len, prompts)) + task.max_tokens
    options = replace(options, model=replace(options.model, max_model_len=longest + 1))
    expected, failed = _ask_peft(task, options.model, prompts)
    llm = LLM(task.base, options=_for_one_batch(options, len(task.adapters), len(prompts)))
    failed |= _load(llm, task.adapters)
    expected = {name: found for name, found in expected.items() if name not in failed}
    outputs = _answers(llm, prompts, {name: found.answers for name, found in expected.items()})
    compared = {
        name: _compare(name, found, outputs[name], measure) for name, found in expected.items()
    }
    comparisons = tuple({**compared, **failed}[name] for name in (None, *task.adapters))
    return Verification(
        agrees=all(c.verdict == "agrees" for c in comparisons),
        base=task.base,
        dtype=dtype,
        tolerance=measure.tolerance,
        prompts=tuple(task.prompts),
        max_tokens=task.max_tokens,
        num_likeliest=measure.num_likeliest,
        adapters_in_one_step=llm.stats().max_step_adapters,
        comparisons=comparisons,
    )


def _encode(task: Task) -> list[list[int]]:
    text = HFText(load_tokenizer(task.base))
    if task.chat:
        return [text.render_chat([{"role": "user", "content": p}]) for p in task.prompts]
    prompts = [text.encode(prompt) for prompt in task.prompts]
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise ConfigError(f"prompt {number} has no tokens: give one that is not empty")
    return prompts


def _ask_peft(
    task: Task, model: ModelOptions, prompts: Sequence[list[int]]
) -> tuple[dict[str | None, PeftAnswers], dict[str | None, Comparison]]:
    """Answers of the base and of each adapter; those that PEFT has none for come apart."""
    answers: dict[str | None, PeftAnswers] = {}
    failed: dict[str | None, Comparison] = {}
    for name in (None, *task.adapters):
        log.info("asking PEFT: %s", "the base alone" if name is None else f"adapter {name!r}")
        directory = None if name is None else task.adapters[name]
        try:
            answers[name] = ask_peft(task.base, model, directory, prompts, task.max_tokens)
        except NoAnswer as problem:
            reasons = (str(problem),)
            failed[name] = Comparison(adapter=name, verdict="not compared", reasons=reasons)
        _free_memory()
    return answers, failed


def _free_memory() -> None:
    """Models are webs of references, which a collection alone lets go of."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _for_one_batch(options: EngineOptions, num_adapters: int, num_prompts: int) -> EngineOptions:
    rows = 2 * num_prompts * (num_adapters + 1)
    return replace(
        options,
        adapters=replace(options.adapters, max_loras=max(num_adapters, 1)),
        scheduler=SchedulerOptions(max_num_seqs=rows, max_waiting=rows),
    )


def _load(llm: LLM, adapters: Mapping[str, Path]) -> dict[str, Comparison]:
    """Load all adapters; those that are refused come back with the reasons."""
    refused: dict[str, Comparison] = {}
    for name, directory in adapters.items():
        try:
            llm.load_adapter(name, str(directory))
        except AdapterError as error:
            reasons = error.reasons if isinstance(error, AdapterRefused) else (str(error),)
            refused[name] = Comparison(adapter=name, verdict="refused", reasons=reasons)
    return refused


@dataclass(frozen=True)
class _Outputs:
    """One prompt's: PEFT's answer as a continuation that is given, and an answer of our own."""

    forced: RequestOutput
    greedy: RequestOutput

    @property
    def broken(self) -> bool:
        """Whether numbers that are not finite have ended one of the two."""
        completions = (self.forced.completions[0], self.greedy.completions[0])
        return any(completion.finish_reason == "error" for completion in completions)


def _answers(
    llm: LLM, prompts: Sequence[list[int]], expected: Mapping[str | None, Sequence[Answer]]
) -> dict[str | None, list[_Outputs]]:
    """All requests run as one batch, those of one prompt side by side."""
    rows = [(name, i) for i in range(len(prompts)) for name in expected]
    inputs, params = [], []
    for name, i in rows:
        tokens = [place.token_id for place in expected[name][i]]
        inputs += [[*prompts[i], *tokens], prompts[i]]
        params += [
            SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=MAX_LOGPROBS),
            SamplingParams(
                temperature=0, max_tokens=len(tokens), logprobs=MAX_LOGPROBS, ignore_eos=True
            ),
        ]
    models = [name for name, _ in rows for _ in range(2)]
    outputs = iter(llm.generate(inputs, params, adapter=models))
    found: dict[str | None, list[_Outputs]] = {name: [] for name in expected}
    for name, _ in rows:
        found[name].append(_Outputs(forced=next(outputs), greedy=next(outputs)))
    return found


def _compare(
    name: str | None, expected: PeftAnswers, outputs: Sequence[_Outputs], measure: Measure
) -> Comparison:
    differences: list[tuple[float, Spot]] = []
    others: list[OtherToken] = []
    broken: list[str] = []
    for prompt, (answer, output) in enumerate(zip(expected.answers, outputs, strict=True)):
        if output.broken:
            broken.append(f"the answer to prompt {prompt + 1} ended with an error")
            continue
        place = _parting(answer, output.greedy)
        if place is not None:
            token = output.greedy.completions[0].token_ids[place]
            others.append(_other_token(answer[place], Spot(prompt, place), token, measure))
        for spot, theirs, ours in _places(prompt, answer, place, output):
            differences.append((_difference(theirs.compared(measure.num_likeliest), ours), spot))
    largest, spot = max(differences, key=lambda found: found[0], default=(math.inf, None))
    agrees = not broken and largest <= measure.tolerance and all(other.near_tie for other in others)
    return Comparison(
        adapter=name,
        verdict="agrees" if agrees else "differs",
        reasons=tuple(broken),
        remarks=expected.remarks,
        largest_difference=largest if math.isfinite(largest) else None,
        largest_at=spot,
        first_other_token=next((o for o in others if not o.near_tie), next(iter(others), None)),
    )


def _parting(answer: Answer, greedy: RequestOutput) -> int | None:
    """The first place where the tokens differ."""
    pairs = zip(answer, greedy.completions[0].token_ids, strict=True)
    return next((i for i, (place, token) in enumerate(pairs) if place.token_id != token), None)


def _other_token(place: Place, spot: Spot, token_id: int, measure: Measure) -> OtherToken:
    lead = place.lead_over(token_id)
    return OtherToken(
        spot=spot,
        token_id=token_id,
        peft_token_id=place.token_id,
        peft_lead=lead,
        near_tie=lead < 2 * measure.tolerance,
    )


def _places(
    prompt: int, answer: Answer, parting: int | None, output: _Outputs
) -> Iterator[tuple[Spot, Place, TokenLogprobs]]:
    """Each place of PEFT's answer with our log-probabilities, once more where ours still agrees.

    The first come from reading a prompt, the second from steps of one token.
    """
    assert output.forced.prompt_logprobs is not None, "it was asked for"
    forced = output.forced.prompt_logprobs[-len(answer) :]
    common = answer if parting is None else answer[: parting + 1]
    greedy = output.greedy.completions[0].logprobs[: len(common)]
    for places, found in ((answer, forced), (common, greedy)):
        for token, (place, ours) in enumerate(zip(places, found, strict=True)):
            assert ours is not None, "only a prompt's first token has no log-probability"
            yield Spot(prompt, token), place, ours


def _difference(expected: Mapping[int, float], ours: TokenLogprobs) -> float:
    """The largest one; a token that is not among our likeliest is at most as likely as the last."""
    known = {ours.token_id: ours.logprob, **dict(ours.top)}
    last = min(known.values())
    differences = [abs(known.get(token, last) - logprob) for token, logprob in expected.items()]
    return max(d if math.isfinite(d) else math.inf for d in differences)
