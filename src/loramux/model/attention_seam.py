"""Where transformers' attention modules meet our attention backend.

transformers calls one registered function for every attention layer. Each attention module of a
model that we serve carries a reference to its model's seam, so there is no global state.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from loramux.errors import ModelNotServable
from loramux.ops.attention import AttentionBackend, AttentionParams, KvShape

IMPLEMENTATION = "loramux"
_SEAM = "loramux_seam"

_INERT = frozenset(
    {
        "cache_position", "dropout", "is_causal", "logits_to_keep", "output_attentions",
        "output_hidden_states", "output_router_logits", "position_ids", "use_cache",
    }
)  # fmt: skip
"""Arguments that do not change what attention computes over a causal sequence."""


class AttentionHandler(Protocol):
    """Computes one layer: q, k, v ``[T, heads, dim]`` -> ``[T, heads, value dim]``."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> Tensor: ...


class AttentionSeam:
    """One model's attention: a recorder while the model is examined, then the backend."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.handler: AttentionHandler | None = None
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, _SEAM, self)

    def use(self, implementation: str) -> None:
        """Switch between our function and transformers' own (``eager``), for comparison."""
        self._model.set_attn_implementation(implementation)


class Recorder:
    """Plain causal attention that notes each layer's shapes and parameters."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.layers: dict[int, tuple[KvShape, AttentionParams]] = {}

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> Tensor:
        if layer in self.layers:
            raise ModelNotServable(self._model_name, f"layer {layer} attends more than once a step")
        params = self._params(layer, q, options)
        self.layers[layer] = (KvShape(k.shape[1], k.shape[2], v.shape[2]), params)
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        # Values do not matter here, shapes do: window and softcap are left out.
        answer = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=params.scale, enable_gqa=True
        )
        return answer.transpose(0, 1)

    def _params(self, layer: int, q: Tensor, options: dict[str, Any]) -> AttentionParams:
        live = {
            name
            for name, value in options.items()
            if value is not None and name not in _INERT | {"scaling", "sliding_window", "softcap"}
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
        )


class PagedHandler:
    """The backend, with each layer's recorded parameters."""

    def __init__(
        self, backend: AttentionBackend, layers: dict[int, tuple[KvShape, AttentionParams]]
    ) -> None:
        self._backend = backend
        self._params = {layer: params for layer, (_, params) in layers.items()}

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> Tensor:
        return self._backend.attend(layer, q, k, v, self._params[layer])


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
    handler = getattr(module, _SEAM).handler
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    layer: int = module.layer_idx  # type: ignore[assignment]
    return handler(layer, q, k, v, options).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, _attention_forward)
