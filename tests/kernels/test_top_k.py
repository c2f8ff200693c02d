"""The kernel that chooses experts, and compiled layers that call it in place of torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from loramux.model.compile import _inductor_options
from loramux.model.top_k_pass import ShortTopK
from loramux.ops import triton_top_k
from loramux.ops.opaque import top_k


@pytest.mark.parametrize(("size", "k"), [(1, 1), (8, 8), (60, 4), (128, 8), (256, 8), (700, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_highest_are_found_in_order(
    device: torch.device, size: int, k: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(5, size, generator=generator).to(device, dtype)
    values, index = top_k(x, k)
    assert torch.equal(values, x.sort(descending=True, stable=True).values[:, :k])
    assert torch.equal(x.gather(1, index), values)
    assert all(len(set(row)) == k for row in index.tolist())


def test_the_first_of_equals_is_taken_and_each_but_once(device: torch.device) -> None:
    low, nan = -torch.inf, torch.nan
    x = torch.tensor(
        [[2.0, 3.0, 3.0, 2.0], [low, low, 1.0, low], [low] * 4, [torch.inf, nan, 0.0, low]],
        device=device,
    )
    values, index = top_k(x, 3)
    assert index.tolist() == [[1, 2, 0], [2, 0, 1], [0, 1, 2], [0, 1, 2]]
    assert torch.equal(values.nan_to_num(5), x.gather(1, index).nan_to_num(5))


def test_leading_dimensions_and_strides_do_not_matter(device: torch.device) -> None:
    x = torch.arange(24.0, device=device).view(2, 4, 3).transpose(1, 2)
    values, index = top_k(x, 2)
    wanted = x.topk(2)
    assert torch.equal(values, wanted.values)
    assert torch.equal(index, wanted.indices)


def replaced(
    device: torch.device, *, largest: bool = True, dim: int = -1, size: int = 64, k: int = 4
) -> bool:
    """Whether the pass has put the kernel in the place of torch's."""

    def choose(x: Tensor) -> tuple[Tensor, Tensor]:
        values, index = torch.topk(x, k, dim=dim, largest=largest)
        return values * 2, index

    x = torch.randn(6, size, device=device)
    traced: GraphModule = make_fx(choose)(x)
    ShortTopK()(traced.graph)
    traced.recompile()
    for got, wanted in zip(traced(x), choose(x), strict=True):
        assert torch.equal(got, wanted)
    return any(node.target is top_k for node in traced.graph.nodes)


def test_compiled_layers_choose_by_the_kernel(device: torch.device) -> None:
    assert replaced(device)
    assert replaced(device, dim=1)


@pytest.mark.parametrize(
    "call", [{"largest": False}, {"dim": 0}, {"size": 2000}, {"k": 40}], ids=str
)
def test_what_the_kernel_does_not_find_is_left_to_torch(
    device: torch.device, call: dict[str, int]
) -> None:
    assert not replaced(device, **call)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_the_compiler_takes_the_pass(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real router, compiled with the options of the layers."""
    torch.manual_seed(0)
    sizes = {"num_experts": 16, "num_experts_per_tok": 4, "hidden_size": 32}
    router = Qwen3MoeTopKRouter(Qwen3MoeConfig(**sizes)).to(device)
    torch.nn.init.normal_(router.weight)
    asked: list[int] = []

    def counted(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        asked.append(k)
        return kernel(x, k)

    kernel = triton_top_k.top_k
    monkeypatch.setattr(triton_top_k, "top_k", counted)
    torch._dynamo.reset()
    compiled = torch.compile(router, dynamic=True, fullgraph=True, options=_inductor_options())
    x = torch.randn(6, 32, device=device)
    with torch.inference_mode():
        got, wanted = compiled(x), router(x)
    assert asked == [4]
    assert torch.equal(got[-1], wanted[-1])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, wanted, strict=True))
