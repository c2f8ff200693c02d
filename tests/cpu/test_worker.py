"""The worker through plans: what it answers hangs on a sequence's tokens and adapter alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loramux.errors import AdapterRefused, ConfigError
from loramux.lora.host_memory import HostBlock
from loramux.lora.weights import HostCopy
from loramux.ops.layout import OFFSET_A, OFFSET_B, RANK
from loramux.plan import PENDING_TOKEN, SequenceStep, SlotClear, StepPlan
from loramux.testing import random_adapter
from loramux.types import Slot
from tests.cpu.placed import each_of
from tests.cpu.served import ADAPTERS, BASE, TARGETS, Served, part

PROMPT = [(37 * i + 11) % 160 for i in range(21)]
OTHER = [(53 * i + 5) % 160 for i in range(9)]


@pytest.fixture
def served(tmp_path: Path) -> Served:
    return Served(tmp_path)


def assert_close(got: Sequence[float], wanted: Sequence[float]) -> None:
    assert got == pytest.approx(wanted, abs=1e-4)


def all_loaded(served: Served) -> None:
    served.worker.apply([served.load(slot, name) for slot, name in enumerate(ADAPTERS)])


@pytest.mark.parametrize("name", [None, *ADAPTERS])
def test_logprobs_are_those_of_peft(served: Served, name: str | None) -> None:
    all_loaded(served)
    slot = BASE if name is None else ADAPTERS.index(name)
    assert_close(served.run(part(PROMPT, slot))[0], served.expected(name, PROMPT))


@pytest.mark.parametrize("name", [None, *ADAPTERS])
def test_adapters_share_a_step(served: Served, name: str | None) -> None:
    all_loaded(served)
    slot = BASE if name is None else ADAPTERS.index(name)
    company = [part(OTHER, s, blocks=[10 + s]) for s in (2, BASE, 0, 1)]
    got = served.run(*company[:2], part(PROMPT, slot), *company[2:])
    assert_close(got[2], served.expected(name, PROMPT))


@pytest.mark.parametrize("cuts", [[1], [20], [16], [5, 6, 17], [*range(1, 21)]], ids=str)
def test_a_prompt_read_in_chunks_is_as_good_as_at_once(served: Served, cuts: list[int]) -> None:
    all_loaded(served)
    got: list[float] = []
    for start, end in zip([0, *cuts], [*cuts, 21], strict=True):
        got += served.run(part(PROMPT, 1, start=start, end=end), part(OTHER, 0, blocks=[9]))[0]
    assert_close(got, served.expected("two", PROMPT))


def test_order_of_sequences_in_a_plan_does_not_matter(served: Served) -> None:
    all_loaded(served)
    parts = [part(PROMPT[4 * i :], i, blocks=[3 * i, 3 * i + 1]) for i in range(4)]
    forward = served.run(*parts)
    backward = served.run(*reversed(parts))
    for one, other in zip(forward, reversed(backward), strict=True):
        assert_close(one, other)


def test_base_rows_keep_every_bit_whoever_is_beside_them(served: Served) -> None:
    all_loaded(served)
    prompts = [PROMPT, OTHER, PROMPT[3:]]

    def base_answers(slots: Sequence[int]) -> list[list[float]]:
        parts = [
            part(p, s, blocks=[3 * i, 3 * i + 1])
            for i, (p, s) in enumerate(zip(prompts, slots, strict=True))
        ]
        return served.run(*parts)

    alone = base_answers([BASE, BASE, BASE])
    assert base_answers([0, BASE, 1])[1] == alone[1]
    assert base_answers([BASE, 2, 1])[0] == alone[0]


def test_prompt_logprobs_are_those_of_the_whole_softmax(served: Served) -> None:
    all_loaded(served)
    plan = StepPlan((), (part(OTHER, 2, blocks=[1], top=4), part(PROMPT, 0, top=4)))
    result = served.worker.launch(plan).result().sequences[1]
    full = served.logprobs("one", PROMPT)
    assert len(result.prompt_logprobs) == len(PROMPT) - 1
    for row, entry in enumerate(result.prompt_logprobs):
        best = full[row].topk(4)
        assert entry.token_id == PROMPT[row + 1]
        assert entry.logprob == pytest.approx(float(full[row, entry.token_id]), abs=1e-4)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_rows_of_sampling_and_prompt_logprobs_are_not_mixed_up(served: Served) -> None:
    """Sequences that sample, that do not, and that want no log-probabilities, in turn."""
    parts = [
        part(PROMPT, BASE, end=8, blocks=[0, 1]),
        part(OTHER, BASE, blocks=[2]),
        part(PROMPT, BASE, end=1, blocks=[3, 4]),
        part(PROMPT, BASE, blocks=[5, 6]),
    ]
    got = served.run(*parts)
    whole = served.expected(None, PROMPT)
    assert_close(got[0], whole[:8])
    assert_close(got[1], served.expected(None, OTHER))
    assert_close(got[2], whole[:1])
    assert_close(got[3], whole)


def test_a_chunk_that_asks_for_nothing_reports_nothing(served: Served) -> None:
    quiet = part(PROMPT, BASE, end=5)
    quiet = type(quiet)(quiet.request_id, quiet.token_ids, 0, quiet.block_table, BASE)
    result = served.worker.launch(StepPlan((), (quiet,))).result().sequences[0]
    assert (result.token_id, result.logprobs, result.prompt_logprobs) == (None, None, ())


def test_a_slot_may_be_given_to_another_adapter_between_steps(served: Served) -> None:
    for name in ("one", "three", "one", "two"):
        got = served.run(part(PROMPT, 1), orders=[served.load(1, name)])
        assert_close(got[0], served.expected(name, PROMPT))


def test_a_cleared_slot_is_as_good_as_the_base(served: Served) -> None:
    all_loaded(served)
    got = served.run(part(PROMPT, 1), orders=[SlotClear(Slot(1))])
    assert_close(got[0], served.expected(None, PROMPT))


def test_clearing_an_empty_slot_does_nothing(served: Served) -> None:
    served.worker.apply([SlotClear(Slot(0)), SlotClear(Slot(0)), served.load(0, "one")])
    assert_close(served.run(part(PROMPT, 0))[0], served.expected("one", PROMPT))


def test_one_adapter_may_sit_in_two_slots(served: Served) -> None:
    served.worker.apply([served.load(0, "one"), served.load(2, "one")])
    got = served.run(part(PROMPT, 0), part(PROMPT, 2, blocks=[8, 9]))
    assert_close(got[0], got[1])


def test_weights_that_move_in_the_middle_of_a_sequence_change_nothing(
    served: Served, tmp_path: Path
) -> None:
    sizes = {name: served.prepared[name].num_bytes for name in ADAPTERS}
    tight = Served(tmp_path / "tight", arena_bytes=sum(sizes.values()))
    tight.add("wide", rank=9, seed=4)
    assert tight.prepared["wide"].num_bytes > max(sizes["one"], sizes["three"])
    all_loaded(tight)
    store = tight.worker._device
    before = store.start_of(Slot(1))
    got = tight.run(part(PROMPT, 1, end=9))[0]

    orders = [SlotClear(Slot(0)), SlotClear(Slot(2)), tight.load(0, "wide")]
    rest = tight.run(part(PROMPT, 1, start=9), part(OTHER, 0, blocks=[1]), orders=orders)

    assert store.start_of(Slot(1)) != before, "nothing has moved"
    assert_close(got + rest[0], tight.expected("two", PROMPT))
    assert_close(rest[1], tight.expected("wide", OTHER))


def test_moving_blocks_leaves_tables_and_weights_of_every_slot_right(
    served: Served, tmp_path: Path
) -> None:
    """In the very step that uses those that move, the new one, and one that stays."""
    sizes = {name: served.prepared[name].num_bytes for name in ADAPTERS}
    arena_bytes = sum(sizes.values()) + sizes["one"]
    tight = Served(tmp_path / "tight", arena_bytes=arena_bytes, max_tokens=128)
    tight.add("wide", rank=9, seed=4)
    tight.worker.apply([tight.load(slot, name) for slot, name in ((0, "three"), (1, "one"))])
    tight.worker.apply([tight.load(2, "two"), SlotClear(Slot(1))])
    worker = tight.worker
    store, tables = worker._device, worker._tables
    starts = {slot: store.start_of(Slot(slot)) for slot in (0, 2)}
    versions = list(tables.version)

    got = tight.run(
        part(PROMPT, 2, blocks=[0, 1]),
        part(PROMPT, 0, blocks=[2, 3]),
        part(PROMPT, 1, blocks=[4, 5]),
        part(PROMPT, BASE, blocks=[6, 7]),
        orders=[tight.load(1, "wide")],
    )

    assert store.start_of(Slot(0)) == starts[0]
    assert store.start_of(Slot(2)) < starts[2], "nothing has moved"
    store.check()
    for slot, name in enumerate(("three", "wide", "two")):
        copy = tight.prepared[name].content
        assert isinstance(copy, HostCopy)
        start = store.start_of(Slot(slot))
        assert torch.equal(store.arena[start : start + copy.block.whole.numel()], copy.block.whole)
        for placement in each_of(copy.placements):
            record = tables.table[placement.module, slot]
            assert record[OFFSET_A] == start // store.unit + placement.offset_a
            assert record[OFFSET_B] == start // store.unit + placement.offset_b
            assert record[RANK] == placement.rank
    changed = [new != old for new, old in zip(tables.version, versions, strict=True)]
    assert changed == [False, True, True, False]
    for rows, name in zip(got, ("two", "three", "wide", None), strict=True):
        assert_close(rows, tight.expected(name, PROMPT))


def test_nan_of_one_adapter_ends_its_sequence_alone(served: Served) -> None:
    """Over several steps, so that NaN is in the KV cache too, also in its first block."""
    served.add_poisoned("sick")
    served.worker.apply([served.load(0, "sick"), served.load(1, "one")])
    sound: list[float] = []
    for start, end in ((0, 7), (7, 8), (8, 9), (9, 21)):
        parts = (
            part(PROMPT, 0, start=start, end=end, blocks=[0, 1]),
            part(PROMPT, 1, start=start, end=end, blocks=[2, 3]),
        )
        sick, healthy = served.worker.launch(StepPlan((), parts)).result().sequences
        assert healthy.error is None
        sound += [entry.logprob for entry in healthy.prompt_logprobs]
    assert sick.token_id is None
    assert "not finite" in (sick.error or "")
    assert_close(sound, served.expected("one", PROMPT)[:-1])


def test_a_pending_token_is_the_one_chosen_in_the_step_before(served: Served) -> None:
    """Also beside a sequence that has failed, whose row is there but wasted."""
    served.add_poisoned("sick")
    served.worker.apply([served.load(0, "sick"), served.load(1, "one")])
    sick, sound = part(PROMPT, 0, blocks=[0, 1]), part(OTHER, 1, blocks=[2])
    first = served.worker.launch(StepPlan((), (sick, sound))).result().sequences[1]
    assert first.token_id is not None
    follow = StepPlan((), (following(sick), following(sound)))
    second = served.worker.launch(follow).result().sequences[1]
    assert second.logprobs is not None
    wanted = served.expected("one", [*OTHER, first.token_id])[-1]
    assert_close([second.logprobs.logprob], [wanted])


def following(step: SequenceStep) -> SequenceStep:
    """The step after one that has read a whole prompt."""
    assert step.sample is not None
    return step._replace(
        token_ids=[PENDING_TOKEN],
        start=len(step.token_ids),
        sample=step.sample._replace(position=1),
        prompt_logprobs=None,
        next_prompt_tokens=(),
    )


def test_an_adapter_in_a_slot_cannot_be_dropped(served: Served) -> None:
    served.worker.apply([served.load(0, "one")])
    with pytest.raises(AssertionError, match="still holds the adapter"):
        served.worker.drop(served.prepared["one"].adapter_id)
    served.worker.apply([SlotClear(Slot(0))])
    served.worker.drop(served.prepared["one"].adapter_id)


def test_what_is_read_tells_its_size_rank_and_identity(served: Served) -> None:
    one, three = served.prepared["one"], served.prepared["three"]
    assert (one.max_rank, three.max_rank) == (6, 9)
    assert one.adapter_id != three.adapter_id
    assert one.num_bytes % 16 == 0


def test_an_adapter_that_would_give_nan_is_refused(served: Served, tmp_path: Path) -> None:
    """DoRA divides by the norm of a row that its delta makes zero."""
    folder = random_adapter(tmp_path / "sick", served.layout, rank=32, targets=["q_proj"], seed=1,
                            dora=True, alpha=32)  # fmt: skip
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    key = "base_model.model.model.layers.0.self_attn.q_proj."
    weight = served.worker._base_weight(0)
    tensors[f"{key}lora_A.weight"] = torch.eye(32)
    tensors[f"{key}lora_B.weight"] = -weight.contiguous()
    save_file(tensors, file)
    with pytest.raises(AdapterRefused, match="not finite"):
        served.worker.read_adapter("sick", folder)


def test_an_adapter_for_which_there_is_no_host_memory_is_refused(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(block: HostBlock) -> HostBlock:
        raise ConfigError("no memory: start with a smaller --host-cache")

    monkeypatch.setattr(served.worker.host_memory, "keep", full)
    random_adapter(tmp_path / "late", served.layout, rank=2, targets=TARGETS, seed=9)
    with pytest.raises(AdapterRefused, match="--host-cache"):
        served.worker.read_adapter("late", tmp_path / "late")
