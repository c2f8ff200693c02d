"""From a request to its sequences."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from loramux.adapters.catalog import Catalog, Entry
from loramux.engine.admission import Admission, Limits
from loramux.engine.languages import Language, Languages
from loramux.errors import AdapterReplaced, InvalidRequest, UnknownModel
from loramux.scheduling.request import Request
from loramux.testing import FakeCodec
from loramux.types import AdapterId, GenerationRequest, RequestId, SamplingParams

A, G = AdapterId("id-a"), AdapterId("id-g")

NAMES = {None: None, "a": A, "g": G}


@pytest.fixture
def admission() -> Admission:
    """A context of 10 tokens out of 100, an adapter ``a``, and ``g`` with 104 tokens."""
    catalog = Catalog("base")
    catalog.add(Entry("a", A, source="here", num_bytes=1, max_rank=8))
    catalog.add(Entry("g", G, source="here", num_bytes=1, max_rank=8, vocab_size=104))
    languages = Languages(Language(FakeCodec(), frozenset()), no_language)
    languages.add(G, Language(FakeCodec(key="g"), frozenset()))
    return Admission(catalog, Limits(max_model_len=10, vocab_size=100), languages)


def no_language(name: str, directory: Path, vocab_size: int) -> Language:
    raise AssertionError("no adapter is read here")


def admit(
    admission: Admission,
    prompt: Any = (1, 2, 3),
    *,
    model: str | None = None,
    request_id: str | None = None,
    codec: str | None = None,
    **params: Any,
) -> list[Request]:
    return admission.admit(
        GenerationRequest(
            prompt_token_ids=prompt,
            params=SamplingParams(**params),
            model=model,
            request_id=None if request_id is None else RequestId(request_id),
            codec=codec,
        )
    )


def test_a_sequence_begins_with_the_prompt(admission: Admission) -> None:
    (sequence,) = admit(admission, [1, 2, 3])
    assert (sequence.tokens, sequence.num_prompt_tokens) == ([1, 2, 3], 3)


def test_the_prompt_is_copied(admission: Admission) -> None:
    prompt = [1, 2, 3]
    (sequence,) = admit(admission, prompt)
    sequence.tokens.append(4)
    assert prompt == [1, 2, 3]


def test_each_completion_is_a_sequence_of_its_own(admission: Admission) -> None:
    first, second = admit(admission, n=2, request_id="x")
    assert (first.request_id, second.request_id) == ("x/0", "x/1")
    assert (first.index, second.index) == (0, 1)
    assert first.parent_id == second.parent_id == "x"
    assert first.tokens is not second.tokens


def test_each_completion_has_a_seed_of_its_own(admission: Admission) -> None:
    assert [s.seed for s in admit(admission, n=3, seed=5)] == [5, 6, 7]


def test_requests_without_a_seed_differ(admission: Admission) -> None:
    assert admit(admission)[0].seed != admit(admission)[0].seed


def test_requests_without_an_id_get_one(admission: Admission) -> None:
    assert admit(admission)[0].parent_id != admit(admission)[0].parent_id


def test_a_request_holds_its_adapter_once_for_each_completion(admission: Admission) -> None:
    sequences = admit(admission, model="a", n=3)
    assert {s.adapter_id for s in sequences} == {A}
    assert admission.catalog.in_flight(A) == 3


@pytest.mark.parametrize("model", [None, "base"])
def test_the_base_is_no_adapter(admission: Admission, model: str | None) -> None:
    assert admit(admission, model=model)[0].adapter_id is None


def test_an_unknown_model_is_refused(admission: Admission) -> None:
    with pytest.raises(UnknownModel):
        admit(admission, model="b")


def test_without_max_tokens_the_context_is_the_limit(admission: Admission) -> None:
    assert admit(admission)[0].max_total_tokens == 10


def test_max_tokens_limit_the_length(admission: Admission) -> None:
    assert admit(admission, max_tokens=2)[0].max_total_tokens == 5


def test_a_prompt_may_leave_room_for_one_token(admission: Admission) -> None:
    assert admit(admission, range(9), max_tokens=1)[0].max_total_tokens == 10


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([], {}, "prompt"),
        (range(10), {}, "prompt"),
        ([1, 100], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1.0], {}, "prompt"),
        ([True], {}, "prompt"),
        (["1"], {}, "prompt"),
        ([1, 2, 3], {"max_tokens": 8}, "max_tokens"),
        ([1, 2, 3], {"min_tokens": 8}, "min_tokens"),
        ([1, 2, 3], {"stop_token_ids": (100,)}, "stop_token_ids"),
        ([1, 2, 3], {"logit_bias": {100: 1.0}}, "logit_bias"),
    ],
)
def test_a_request_that_cannot_run_is_refused_by_the_name_of_its_field(
    admission: Admission, prompt: Any, params: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        admit(admission, prompt, model="a", **params)
    assert refusal.value.param == param


def test_a_refused_request_holds_nothing(admission: Admission) -> None:
    with pytest.raises(InvalidRequest):
        admit(admission, [], model="a")
    assert admission.catalog.in_flight(A) == 0


def test_a_prompt_that_is_too_long_is_told_the_limit(admission: Admission) -> None:
    with pytest.raises(InvalidRequest, match="shorten it to 9"):
        admit(admission, range(12))


def test_too_many_tokens_are_told_how_many_there_may_be(admission: Admission) -> None:
    with pytest.raises(InvalidRequest, match="ask for 7 tokens or less"):
        admit(admission, max_tokens=8)


def test_an_adapter_may_have_more_tokens(admission: Admission) -> None:
    (sequence,) = admit(admission, [103], model="g", stop_token_ids=(100,))
    assert (sequence.adapter_id, sequence.tokens) == (G, [103])


@pytest.mark.parametrize(("model", "token"), [(None, 100), ("base", 103), ("a", 100), ("g", 104)])
@pytest.mark.parametrize("param", ["prompt", "stop_token_ids"])
def test_tokens_of_another_vocabulary_are_refused_and_nothing_is_held(
    admission: Admission, model: str | None, token: int, param: str
) -> None:
    prompt, stops = ([1, token, 2], ()) if param == "prompt" else ([1], (3, token))
    last = 103 if model == "g" else 99
    with pytest.raises(InvalidRequest, match=f"{token} is not in 0 … {last}") as refusal:
        admit(admission, prompt, model=model, stop_token_ids=stops)
    assert refusal.value.param == param
    assert admission.catalog.in_flight(G) == admission.catalog.in_flight(A) == 0


@pytest.mark.timeout(20)
def test_a_request_is_checked_against_the_adapter_that_it_holds(admission: Admission) -> None:
    """While a name goes to and fro between a small and a large vocabulary."""
    catalog, done = admission.catalog, threading.Event()
    small = Entry("x", A, source="here", num_bytes=1, max_rank=8)
    large = Entry("x", G, source="here", num_bytes=1, max_rank=8, vocab_size=104)
    catalog.add(small)

    def replace() -> None:
        while not done.is_set():
            catalog.add(large, replace=True)
            catalog.add(small, replace=True)

    thread = threading.Thread(target=replace)
    thread.start()
    admitted = refused = 0
    try:
        while not (admitted > 200 and refused > 200):
            try:
                (sequence,) = admit(admission, [103], model="x")
            except InvalidRequest:
                refused += 1
            else:
                admitted += 1
                assert sequence.adapter_id == G
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("model", [None, "a", "g"])
def test_tokens_for_another_tokenizer_are_sent_back(
    admission: Admission, model: str | None
) -> None:
    codecs = {name: admission._languages.of(i).text.key for name, i in NAMES.items()}
    (sequence,) = admit(admission, model=model, codec=codecs[model])
    assert sequence.adapter_id == NAMES[model]
    other = codecs["a" if model == "g" else "g"]
    with pytest.raises(AdapterReplaced, match="send it again"):
        admit(admission, model=model, codec=other)
    assert admission.catalog.in_flight(G) == (model == "g")
