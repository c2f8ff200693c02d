"""What becomes known of a request on its way, for whoever tells of it when it is over."""

from __future__ import annotations

from dataclasses import dataclass

from loramux.server.answer import Answer
from loramux.server.schema import GenerationFields, PromptFields
from loramux.types import SamplingParams


@dataclass(slots=True)
class Facts:
    """One request to a model. None of it holds a key, or text of a prompt or an answer.

    Handlers find it as ``request.state.facts``; what a request has not come to stays as it is.
    """

    key: str | None = None
    """The name of the caller's key."""
    model: str | None = None
    """As the request calls it, whether it exists or not."""
    stream: bool = False
    params: SamplingParams | None = None
    """Known once they have been checked."""
    adapter: str | None = None
    """Known once the request is submitted; None for the base."""
    answer: Answer | None = None
    """Known from then on, too."""
    error: str | None = None
    """The type of the error that has ended it: the error's text may quote the request."""

    def note_body(self, body: PromptFields) -> None:
        """The request has been read."""
        self.model = body.model
        self.stream = isinstance(body, GenerationFields) and bool(body.stream)

    def note_error(self, error: BaseException) -> None:
        """The first one counts: later ones follow from it."""
        if self.error is None:
            self.error = type(error).__name__
