"""Every conformance adapter either loads or is refused with the reason that its case expects."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from loramux.adapters.formats.reader import read_adapter
from loramux.adapters.loaded import LoadedAdapter
from loramux.errors import AdapterRefused, AdapterSourceNotFound
from tests.conformance.cases import Case, load_cases
from tests.conformance.deferred import DECLINED, DEFERRED
from tests.conformance.layout import base_layout


def load(case: Case) -> LoadedAdapter:
    assert case.adapter is not None
    return read_adapter(case.name, case.adapter, base_layout(case.base), max_rank=512)


def refusal(case: Case) -> str:
    """Text of the refusal of a case's adapter, checked for what no refusal may do."""
    marker = Path(tempfile.gettempdir(), case.marker) if case.marker else None
    if marker is not None:
        marker.unlink(missing_ok=True)
    with pytest.raises((AdapterRefused, AdapterSourceNotFound)) as caught:
        load(case)
    assert marker is None or not marker.exists()
    text = str(caught.value)
    assert case.forbid is None or case.forbid not in text
    return text


def holds_one_of(text: str, words: tuple[str, ...]) -> bool:
    return any(word.lower() in text.lower() for word in words)


SINGLE = [case for case in load_cases() if case.adapter is not None]
SERVED = [case for case in SINGLE if case.kind != "refuse" and case.name not in DEFERRED | DECLINED]
WAITING = [case for case in SINGLE if case.name in DEFERRED]
REFUSED = [case for case in SINGLE if case.kind == "refuse"]


@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_adapter_loads(case: Case):
    loaded = load(case)
    assert loaded.num_bytes == sum(t.nbytes for t in loaded.tensors.values()) > 0
    assert loaded.spec.tensor_names == set(loaded.tensors)


@pytest.mark.parametrize("case", WAITING, ids=lambda case: case.name)
def test_adapter_of_a_later_feature_is_refused_by_that_name(case: Case):
    text = refusal(case)
    assert DEFERRED[case.name] in text
    assert case.expect_reason == () or holds_one_of(text, case.expect_reason)


@pytest.mark.parametrize("name", DECLINED)
def test_adapter_that_is_refused_on_purpose_is_refused_with_its_reason(name: str):
    (case,) = (case for case in SINGLE if case.name == name)
    text = refusal(case)
    assert case.kind == "serve_or_refuse"
    assert DECLINED[name] in text
    assert holds_one_of(text, case.expect_reason)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_wrong_adapter_is_refused_with_its_reason(case: Case):
    assert holds_one_of(refusal(case), case.expect_reason)


def test_table_of_later_features_names_cases_that_exist_and_may_be_refused_today():
    assert set(DEFERRED) <= {case.name for case in SINGLE}
    assert not set(DEFERRED) & {case.name for case in REFUSED}
    must_load = {c.name for c in SINGLE if c.kind == "serve"} & set(DEFERRED)
    assert all("expert" in name for name in must_load)
