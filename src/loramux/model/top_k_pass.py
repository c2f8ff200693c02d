"""Where compiled layers choose experts, they do so by a kernel for short rows."""

from __future__ import annotations

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from loramux.ops import triton_top_k
from loramux.ops.opaque import top_k


class ShortTopK(CustomGraphPass):
    """Has ``torch.topk`` over a short last dimension computed by ``ops.triton_top_k``."""

    def __call__(self, graph: Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.topk.default):
            if _is_short(node):
                x, k = node.args[:2]
                with graph.inserting_before(node):
                    short = graph.call_function(top_k, (x, k))
                short.meta.update(node.meta)
                node.replace_all_uses_with(short)
                graph.erase_node(node)

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__, triton_top_k.__file__))


def _is_short(node: Node) -> bool:
    """Whether the kernel finds the same; what it calls first is free where order is."""
    names = ("x", "k", "dim", "largest", "sorted")
    given = {"dim": -1, "largest": True, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    shape = given["x"].meta["val"].shape
    size, k = shape[-1], given["k"]
    if not isinstance(size, int) or not isinstance(k, int):
        return False
    last = given["dim"] in (-1, len(shape) - 1)
    return (
        last
        and bool(given["largest"])
        and k <= triton_top_k.MAX_K
        and size <= triton_top_k.MAX_SIZE
    )
