"""A comparison with PEFT as text: the verdict first, then facts, then a row for each adapter."""

from __future__ import annotations

from collections.abc import Iterator

from loramux.adapters.report import printable
from loramux.cli.plain_text import columns, harmless
from loramux.engine.verified import Comparison, Verification

_BASE = "(base)"


def lines(found: Verification) -> Iterator[str]:
    """Everything, for any output."""
    yield _verdict(found)
    yield ""
    yield f"{'base':12}{printable(found.base, 400)}"
    yield f"{'compared':12}{_compared(found)}"
    adapters = len(found.comparisons) - 1
    yield f"{'batch':12}{found.adapters_in_one_step} of {adapters} adapters in one step"
    yield ""
    yield from columns([_HEAD, *(_row(comparison) for comparison in found.comparisons)])
    for comparison in found.comparisons:
        for reason in (*comparison.reasons, *comparison.remarks):
            yield f"  - {_name(comparison)}: {harmless(reason)}"


_HEAD = ("adapter", "verdict", "largest difference", "at", "first other token")


def _verdict(found: Verification) -> str:
    if found.agrees:
        return f"agrees with PEFT within {found.tolerance:g}"
    names = [_name(c) for c in found.comparisons if c.verdict != "agrees"]
    return f"does not agree with PEFT within {found.tolerance:g}: {', '.join(names)}"


def _compared(found: Verification) -> str:
    tokens = "PEFT's tokens"
    if found.num_likeliest:
        tokens += f" and its {found.num_likeliest} likeliest"
    return (
        f"log-probabilities of {tokens} at {found.max_tokens} places behind each of "
        f"{len(found.prompts)} prompts, {found.dtype}"
    )


def _name(comparison: Comparison) -> str:
    return _BASE if comparison.adapter is None else printable(comparison.adapter)


def _row(comparison: Comparison) -> tuple[str, ...]:
    largest, at = comparison.largest_difference, comparison.largest_at
    return (
        _name(comparison),
        comparison.verdict,
        "-" if largest is None else f"{largest:.2g}",
        "-" if at is None else f"prompt {at.prompt + 1}, token {at.token + 1}",
        _other_token(comparison),
    )


def _other_token(comparison: Comparison) -> str:
    other = comparison.first_other_token
    if other is None:
        return "none" if comparison.largest_at is not None else "-"
    place = f"prompt {other.spot.prompt + 1}, token {other.spot.token + 1}"
    tokens = f"{other.token_id} where PEFT has {other.peft_token_id}"
    kind = "near tie, PEFT leads" if other.near_tie else "PEFT leads"
    return f"{place}: {tokens} ({kind} by {other.peft_lead:.2g})"
