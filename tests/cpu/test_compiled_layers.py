"""Compiled layers: one compilation for all layers and batch sizes, and the answers of before.

The compiler's front runs as on a GPU; what it finds is executed by torch instead of new kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from loramux.lora.segments import padded_rows
from loramux.model.stack import alike_left_out
from loramux.ops.attention import Attend, AttentionLayer, AttentionSequence, StepKind
from loramux.ops.opaque import attend, register_attention
from loramux.ops.torch_attention import TorchAttention
from loramux.ops.triton_lora import TritonOps
from loramux.ops.upload import Uploads
from loramux.testing import tiny_model
from loramux.worker.captured_runner import CompiledOptions
from tests.cpu.served import ADAPTERS, BASE, BLOCK, SLOTS, TARGETS, Served, part
from tests.cpu.test_own_values import save

PROMPT = [(37 * i + 11) % 160 for i in range(7)]
GROWN = 165
"""Tokens of an adapter with added ones."""
OTHER = [(53 * i + 5) % 160 for i in range(4)]


CPU = torch.device("cpu")


class OpaqueAttention(TorchAttention):
    """Torch's attention behind the op that compiled layers call; padding rows come to nothing."""

    def __init__(
        self,
        layers: Mapping[int, AttentionLayer],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device = CPU,
    ) -> None:
        super().__init__(layers, num_blocks + 1, block_size, dtype, device)
        self._number = register_attention(self)
        self._spare = AttentionSequence(0, 1, 0, (num_blocks,))

    def begin_step(
        self,
        sequences: Sequence[AttentionSequence],
        num_rows: int | None = None,
        kind: StepKind = StepKind.EAGER,
    ) -> None:
        used = sum(s.num_tokens for s in sequences)
        padding = [
            AttentionSequence(row, 1, 0, self._spare.block_table)
            for row in range(used, num_rows or used)
        ]
        super().begin_step([*sequences, *padding])

    def layer(self, layer: int) -> Attend:
        return OpaqueLayer(torch.tensor(layer), self._number)

    def attend_group(
        self, group: int, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        return super().layer(int(keys))(q, k, v)


class OpaqueLayer(nn.Module):
    """Says by a tensor which layer it is, as the real one does by its keys and values."""

    def __init__(self, layer: Tensor, number: int) -> None:
        super().__init__()
        self.register_buffer("index", layer, persistent=False)
        self.number = number

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, self.index, self.index, self.number, 0)


@pytest.fixture
def compiler() -> CompileCounter:
    torch._dynamo.reset()
    return CompileCounter()


def served(folder: Path, compiler: CompileCounter) -> Served:
    device = torch.device("cpu")
    ops = TritonOps(padded_rows=padded_rows(SLOTS, 64), max_rank=16, device=device)
    options = CompiledOptions(
        ops, Uploads(device), max_num_seqs=8, compiler=compiler, capture=False
    )
    model = Served(folder, attention=OpaqueAttention, ops=ops, compiled=options)
    model.worker.apply([model.load(slot, name) for slot, name in enumerate(ADAPTERS)])
    return model


@pytest.mark.parametrize("company", [[0], [0, 2], [1], [0, 1, 2], []], ids=str)
def test_answers_are_those_of_peft(
    tmp_path: Path, compiler: CompileCounter, company: list[int]
) -> None:
    model = served(tmp_path, compiler)
    slots = [BASE, *company]
    rows = model.run(*(part(PROMPT, slot, blocks=[i]) for i, slot in enumerate(slots)))
    for slot, got in zip(slots, rows, strict=True):
        wanted = model.expected(None if slot == BASE else ADAPTERS[slot], PROMPT)
        assert got == pytest.approx(wanted, abs=1e-4)


OWN = {
    "norms, head": {"modules_to_save": ["norm", "input_layernorm", "lm_head"]},
    "linear": {"modules_to_save": ["k_proj"], "target_modules": ["q_proj", "down_proj"]},
    "shift": {"lora_bias": True},
    "ends": {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_dora": True},
    "tokens": {"trainable_token_indices": [PROMPT[2], PROMPT[0]]},
}


@pytest.mark.parametrize("name", OWN)
def test_adapters_with_values_of_their_own_answer_as_peft_does(
    tmp_path: Path, compiler: CompileCounter, name: str
) -> None:
    model = served(tmp_path, compiler)
    targets = {"r": 4, "target_modules": list(TARGETS), "task_type": "CAUSAL_LM"}
    save(tiny_model(), LoraConfig(**(targets | OWN[name])), tmp_path / "own")
    model.add_saved("own")
    model.worker.apply([model.load(2, "own")])
    alone = [part(PROMPT, BASE, blocks=[i]) for i in range(4)]
    before = model.run(*alone)[0]

    slots = [BASE, 0, 1, 2]
    rows = model.run(*(part(PROMPT, slot, blocks=[i]) for i, slot in enumerate(slots)))

    for adapter, got in zip((None, *ADAPTERS[:2], "own"), rows, strict=True):
        assert got == pytest.approx(model.expected(adapter, PROMPT), abs=1e-4)
    assert rows[0] == before, "the base's rows must keep every bit"
    assert not counters["graph_break"]


def test_added_tokens_answer_as_with_peft_and_leave_nothing_behind(
    tmp_path: Path, compiler: CompileCounter
) -> None:
    model = served(tmp_path, compiler)
    grown = tiny_model()
    grown.resize_token_embeddings(GROWN, mean_resizing=False)
    targets = {"r": 4, "target_modules": list(TARGETS), "task_type": "CAUSAL_LM"}
    ends = {"modules_to_save": ["embed_tokens", "lm_head"]}
    save(grown, LoraConfig(**targets, **ends), tmp_path / "grown")
    model.add_saved("grown")
    model.worker.apply([model.load(2, "grown")])
    added = [GROWN - 1] * len(PROMPT)
    alone = [part(PROMPT, BASE, blocks=[i]) for i in range(4)]
    before, short = model.run(*alone)[0], model.run(part([5], BASE, blocks=[7]))

    slots = [BASE, 0, 1, 2]
    prompts = [PROMPT, PROMPT, PROMPT, added]
    rows = model.run(
        *(part(p, slot, blocks=[slot]) for p, slot in zip(prompts, slots, strict=True))
    )

    for adapter, prompt, got in zip((None, *ADAPTERS[:2], "grown"), prompts, rows, strict=True):
        assert got == pytest.approx(model.expected(adapter, prompt), abs=1e-4)
    assert rows[0] == before, "the base's rows must keep every bit"
    # Padding rows of later steps still read the buffers of this one.
    model.run(part(added, 2, blocks=[2]))
    assert model.run(part([5], BASE, blocks=[7])) == short
    assert not counters["graph_break"]


def test_layers_and_batch_sizes_share_a_compilation_of_each_form(
    tmp_path: Path, compiler: CompileCounter
) -> None:
    model = served(tmp_path, compiler)
    for slots in ([BASE], [BASE, BASE], [BASE, 0], [2, 0], [0], [1], [1, 2]):
        model.run(*(part(OTHER, slot, blocks=[i]) for i, slot in enumerate(slots)))
        model.run(*(part(PROMPT, slot, blocks=[i]) for i, slot in enumerate(slots)))
    # Layers in each form (base, beside, in place), the last norm, the rotary embedding.
    assert compiler.frame_count == 3 + 2


def test_what_the_first_of_alike_runs_compiles_is_all_that_the_others_need(
    tmp_path: Path, compiler: CompileCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.cpu.served.tiny_model", lambda: tiny_model(num_layers=9))
    model = served(tmp_path, compiler)
    companies = ([BASE], [BASE, 0], [1, 2])
    with alike_left_out(model.base.model, [(0, 1, 2), (3, 4, 5), (6, 7, 8)]):
        for slots in companies:
            model.run(*(part(PROMPT, slot, blocks=[i]) for i, slot in enumerate(slots)))
    before = compiler.frame_count
    assert before == 3 + 2
    for slots in companies:
        rows = model.run(*(part(PROMPT, slot, blocks=[i]) for i, slot in enumerate(slots)))
        for slot, got in zip(slots, rows, strict=True):
            wanted = model.expected(None if slot == BASE else ADAPTERS[slot], PROMPT)
            assert got == pytest.approx(wanted, abs=1e-4)
    assert compiler.frame_count == before


@pytest.mark.parametrize("rows", [4, 8, 32, 56], ids=["heads", "head", "hidden", "intermediate"])
def test_a_first_step_of_as_many_rows_as_the_model_has_features_holds_for_any_number(
    tmp_path: Path, compiler: CompileCounter, rows: int
) -> None:
    model = served(tmp_path, compiler)
    tokens = [i % 160 for i in range(rows)]
    blocks = range(-(-rows // BLOCK))
    model.run(part(tokens, BASE, blocks=[*blocks]))
    model.run(part(PROMPT, BASE, blocks=[0]))
    assert compiler.frame_count == 1 + 2


def test_a_step_of_one_row_is_padded_and_compiles_nothing_new(
    tmp_path: Path, compiler: CompileCounter
) -> None:
    model = served(tmp_path, compiler)
    got = model.run(part(PROMPT, 0, start=0, end=6))[0]
    before = compiler.frame_count
    got += model.run(part(PROMPT, 0, start=6, end=7))[0]
    assert compiler.frame_count == before
    assert got == pytest.approx(model.expected("one", PROMPT), abs=1e-4)
    assert not counters["graph_break"]
