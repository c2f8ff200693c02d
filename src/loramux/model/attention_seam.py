"""Where transformers' attention modules meet our attention backend.

transformers calls one registered function for every attention layer. Each attention module of a
model that we serve carries what computes its layer, so there is no global state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from loramux.errors import ModelNotServable
from loramux.ops.attention import (
    Attend,
    AttentionLayer,
    AttentionParams,
    KvShape,
)

IMPLEMENTATION = "loramux"
_HANDLER = "loramux_attention"

_INERT = frozenset(
    {
        "cache_position", "dropout", "is_causal", "logits_to_keep", "output_attentions",
        "output_hidden_states", "output_router_logits", "position_ids", "use_cache",
    }
)  # fmt: skip
"""Arguments that do not change what attention computes over a causal sequence."""


_PARAMS = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})
"""Arguments that become ``AttentionParams``."""

Handler = Callable[[Tensor, Tensor, Tensor, dict[str, Any]], Tensor]
"""Computes one layer: q, k, v ``[T, heads, dim]`` and options -> ``[T, heads, value dim]``."""


class AttentionSeam:
    """One model's attention: a recorder while the model is examined, then the backend."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._attention: list[tuple[int, nn.Module]] = [
            (cast(int, module.layer_idx), module)
            for module in model.modules()
            if hasattr(module, "layer_idx")
        ]

    def use(self, implementation: str) -> None:
        """Switch between our function and transformers' own (``eager``), for comparison."""
        self._model.set_attn_implementation(implementation)

    def connect(self, handler_of: Callable[[int], Handler]) -> None:
        """Give every attention module what computes its layer."""
        for layer, module in self._attention:
            setattr(module, _HANDLER, handler_of(layer))


class Recorder:
    """Plain causal attention that notes each layer's shapes and parameters."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.layers: dict[int, AttentionLayer] = {}

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> Tensor:
        if layer in self.layers:
            raise ModelNotServable(self._model_name, f"layer {layer} attends more than once a step")
        params = self._params(layer, q, options)
        shape = KvShape(k.shape[1], k.shape[2], v.shape[2])
        self.layers[layer] = AttentionLayer(q.shape[1], shape, params)
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        # Values do not matter here, shapes do: window, softcap and sinks are left out.
        answer = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=params.scale, enable_gqa=True
        )
        return answer.transpose(0, 1)

    def _params(self, layer: int, q: Tensor, options: dict[str, Any]) -> AttentionParams:
        live = {
            name
            for name, value in options.items()
            if value is not None and name not in _INERT | _PARAMS
        }
        if live:
            raise ModelNotServable(
                self._model_name,
                f"the attention of layer {layer} uses {', '.join(sorted(live))}, "
                "which the paged attention does not support",
            )
        if options.get("is_causal") is False:
            raise ModelNotServable(self._model_name, f"layer {layer} attends to later tokens")
        scale = options.get("scaling")
        return AttentionParams(
            scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
            window=options.get("sliding_window"),
            softcap=options.get("softcap"),
            sinks=_sinks(options.get("s_aux")),
        )


def _sinks(scores: Tensor | None) -> tuple[float, ...] | None:
    """On the meta device, where there are no values, zeros stand for them."""
    if scores is None:
        return None
    return tuple((torch.zeros(scores.shape) if scores.is_meta else scores).float().tolist())


class PagedLayer(nn.Module):
    """Leaves out the options, which the examination has seen.

    A module, so that what a layer's attention owns (its keys and values) is an input of a compiled
    layer and no constant: then all layers share one compilation.
    """

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        return self.attend(q, k, v)


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """query ``[1, heads, T, dim]`` -> ``[1, T, heads, dim]``, as transformers wants it."""
    assert attention_mask is None, "a registered function without a mask function gets no mask"
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    return getattr(module, _HANDLER)(q, k, v, options).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, _attention_forward)
