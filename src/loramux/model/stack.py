"""The decoder layers as a stack: which of them can run as one.

What stands at the end of a layer (adding to the residual stream) and at the beginning of the next
(its norm) becomes one kernel only if both are compiled together. Layers whose calls differ in
nothing but the hidden states, each taking what the one before returns, may run as one module. That
is seen in the examination pass, so it needs no list of architectures.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

_TOGETHER = (4, 3, 2)
"""Layers of one compilation, the best number first: more leave fewer seams, and take longer to
compile."""


@dataclass
class LayerCall:
    """How the model has called one layer."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    output: Any = None

    def follows(self, other: LayerCall) -> bool:
        """Whether the two could be one call: this one takes the other's output and the same."""
        return (
            isinstance(other.output, Tensor)
            and len(self.args) == len(other.args) > 0
            and self.args[0] is other.output
            and all(map(_same, self.args[1:], other.args[1:]))
            and self.kwargs.keys() == other.kwargs.keys()
            and all(_same(self.kwargs[name], other.kwargs[name]) for name in self.kwargs)
        )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (Tensor, tuple, list, dict)):
        return one is other
    return one is other or bool(one == other)


def decoder_layers(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList] | None:
    """The list of modules that have attention inside, and the module that it belongs to.

    None for a model whose attention is in no list, which the examination refuses.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and any(
            hasattr(part, "layer_idx") for part in module.modules()
        ):
            return model.get_submodule(name.rpartition(".")[0]), module
    return None


@contextmanager
def recorded_calls(layers: Sequence[nn.Module]) -> Iterator[list[LayerCall]]:
    """Note how each layer is called; a layer that is not called once takes no part in a run."""
    calls = [LayerCall() for _ in layers]

    def before(call: LayerCall) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call.args, call.kwargs = args, kwargs

        return note

    def after(call: LayerCall) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            call.output = output

        return note

    hooks = [
        hook
        for layer, call in zip(layers, calls, strict=True)
        for hook in (
            layer.register_forward_pre_hook(before(call), with_kwargs=True),
            layer.register_forward_hook(after(call)),
        )
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def runs_of(calls: Sequence[LayerCall]) -> tuple[tuple[int, ...], ...]:
    """Layers, by index, that can run as one module: consecutive ones, a few at a time.

    Runs of one length share their compilation, so alike layers are cut into equal runs if they can.
    """
    alike: list[list[int]] = []
    for i, call in enumerate(calls):
        if alike and call.follows(calls[i - 1]):
            alike[-1].append(i)
        else:
            alike.append([i])
    return tuple(itertools.chain.from_iterable(map(_cut, alike)))


def _cut(layers: Sequence[int]) -> list[tuple[int, ...]]:
    length = next((n for n in _TOGETHER if len(layers) % n == 0), _TOGETHER[0])
    return [tuple(layers[i : i + length]) for i in range(0, len(layers), length)]


class _Stands(nn.Module):
    """Stands in the list for a layer, and has its attributes, which the model may ask for."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


class FirstOfRun(_Stands):
    """Computes all layers of a run."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__(layers[0])
        self.run = nn.ModuleList(layers)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for layer in self.run:
            hidden = layer(hidden, *args, **kwargs)
        return hidden


class RestOfRun(_Stands):
    """Passes on what the first of its run has computed."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden


def join_runs(layers: nn.ModuleList, runs: Sequence[Sequence[int]]) -> list[nn.Module]:
    """Let each run be computed by one module; those modules, in order."""
    joined: list[nn.Module] = []
    for run in runs:
        members = [layers[i] for i in run]
        if len(run) == 1:
            joined += members
            continue
        layers[run[0]] = FirstOfRun(members)
        for i, member in zip(run[1:], members[1:], strict=True):
            layers[i] = RestOfRun(member)
        joined.append(layers[run[0]])
    return joined


@contextmanager
def alike_left_out(model: PreTrainedModel, runs: Sequence[Sequence[int]]) -> Iterator[None]:
    """Inside, only the first of alike runs of layers computes anything.

    Hidden states pass through the others: what is launched for these has been launched before.
    """
    stack = decoder_layers(model)
    assert stack is not None, "the examination has found attention in layers"
    _, layers = stack
    originals = list(layers)
    seen: set[Hashable] = set()
    try:
        for first, *rest in runs:
            kind = _kind(layers[first])
            # What a layer alone returns may be more than hidden states.
            if rest and kind in seen:
                layers[first] = RestOfRun(layers[first])
            seen.add(kind)
        yield
    finally:
        for i, layer in enumerate(originals):
            layers[i] = layer


def _kind(module: nn.Module) -> Hashable:
    """The same for modules that differ in nothing but what their tensors hold, and their place."""
    parts = [(name, type(part), _plain_attributes(part)) for name, part in module.named_modules()]
    tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    return tuple(parts), tuple((name, t.shape, t.dtype) for name, t in tensors)


def _plain_attributes(module: nn.Module) -> Hashable:
    return tuple(
        (name, repr(value))
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, str, list, tuple)) and name != "layer_idx"
    )
