"""The demo's answers while they arrive, and what is said of them at the end. Pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field

from loramux.stats import EngineStats
from loramux.types import Delta

BASE_ROW = "base"


@dataclass
class Answer:
    """One answer of one model to one prompt."""

    model: str | None
    """The adapter's name; None is the base model."""
    prompt: str
    text: str = ""
    num_tokens: int = 0
    finished: bool = False
    error: str | None = None

    @property
    def row(self) -> str:
        return BASE_ROW if self.model is None else self.model

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.num_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.finished = True
        if delta.finish_reason in ("error", "abort"):
            self.error = delta.error or f"the request ended with {delta.finish_reason!r}"

    def fail(self, reason: str) -> None:
        self.finished = True
        self.error = reason

    @property
    def shown(self) -> str:
        """The text, or the error, on one line that is safe to print on a terminal."""
        return one_line(self.text if self.error is None else f"error: {self.error}")

    @property
    def line(self) -> str:
        return f"[{self.row}] {one_line(self.prompt)} -> {self.shown}"


@dataclass(frozen=True)
class Grid:
    """All answers: one row for the base model and each adapter, one column for each prompt."""

    adapters: tuple[str, ...]
    prompts: tuple[str, ...]
    rows: tuple[tuple[Answer, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        rows = (
            tuple(Answer(model, prompt) for prompt in self.prompts)
            for model in (None, *self.adapters)
        )
        object.__setattr__(self, "rows", tuple(rows))

    @property
    def answers(self) -> Iterable[Answer]:
        return (answer for row in self.rows for answer in row)


@dataclass(frozen=True)
class Summary:
    """The whole run in numbers. ``seconds`` is from the first submission to the last token."""

    num_requests: int
    num_failed: int
    num_adapters: int
    step_adapters: int
    """Most distinct adapters that were in one step, without the base."""
    num_tokens: int
    seconds: float
    slots_used: int
    slots_total: int
    adapter_bytes: int

    @property
    def ok(self) -> bool:
        """Every request finished, and one step held all adapters."""
        return self.num_failed == 0 and self.step_adapters == self.num_adapters

    @property
    def line(self) -> str:
        parts = [
            f"{self.num_requests} requests",
            f"adapters in the same step: {self.step_adapters} + base",
            f"{self.num_tokens / self.seconds:.1f} tokens/s",
            f"slots used: {self.slots_used} of {self.slots_total}",
            f"adapter weights: {self.adapter_bytes / 1e6:.1f} MB",
        ]
        if self.num_failed:
            parts.insert(1, f"{self.num_failed} failed")
        if self.step_adapters < self.num_adapters:
            parts.append(f"expected {self.num_adapters} adapters in one step")
        return " | ".join(parts)


def summarise(grid: Grid, stats: EngineStats, seconds: float) -> Summary:
    """``stats`` are the engine's after the last answer; an unfinished answer counts as failed."""
    answers = list(grid.answers)
    return Summary(
        num_requests=len(answers),
        num_failed=sum(a.error is not None or not a.finished for a in answers),
        num_adapters=len(grid.adapters),
        step_adapters=stats.max_step_adapters,
        num_tokens=sum(a.num_tokens for a in answers),
        seconds=max(seconds, 1e-9),
        slots_used=stats.slots_used,
        slots_total=stats.slots_total,
        adapter_bytes=stats.adapter_bytes,
    )


def one_line(text: str) -> str:
    """White space joined to single spaces and control characters dropped: models write them too."""
    printable = "".join(c for c in text if c.isspace() or unicodedata.category(c) != "Cc")
    return " ".join(printable.split())
