"""What a model gives to its head: the hidden states behind its last norm."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from loramux.model.stack import decoder_layers


class FinalStates:
    """Keeps the hidden states of the newest forward pass until they are taken.

    They are seen where the module that holds the decoder layers returns them, so the head and
    whatever the model does to its logits take no part.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._states: Tensor | None = None
        stack = decoder_layers(model)
        assert stack is not None, "the examination has found attention in layers"
        parent, _ = stack
        parent.register_forward_hook(self._note)

    def take(self) -> Tensor:
        """``[T, hidden]`` of a pass that has just run."""
        states, self._states = self._states, None
        assert states is not None, "no pass has run since the last one was taken"
        return states[0]

    def _note(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # The first of a tuple, and of transformers' own outputs.
        self._states = output[0]
