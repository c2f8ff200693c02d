"""Which names exist, and who holds which adapter."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from loramux.adapters.catalog import Catalog, Entry
from loramux.errors import AdapterExists, InvalidRequest, UnknownAdapter, UnknownModel
from loramux.types import AdapterId

A, B = AdapterId("id-a"), AdapterId("id-b")


def entry(name: str, adapter_id: AdapterId, **fields: Any) -> Entry:
    return Entry(name, adapter_id, source="here", num_bytes=1, max_rank=8, **fields)


@pytest.fixture
def catalog() -> Catalog:
    """One name, ``a``."""
    catalog = Catalog("base")
    catalog.add(entry("a", A))
    return catalog


@pytest.mark.parametrize("model", [None, "base"])
def test_the_base_is_no_adapter(catalog: Catalog, model: str | None) -> None:
    assert catalog.hold(model) is None


def refuse(entry: Entry | None) -> None:
    raise InvalidRequest("not there" if entry is None else entry.name)


@pytest.mark.parametrize(("model", "told"), [("a", "a"), ("base", "not there")])
def test_what_does_not_pass_the_check_is_not_held(catalog: Catalog, model: str, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        catalog.hold(model, check=refuse)
    assert catalog.in_flight(A) == 0


def test_no_name_changes_between_the_check_and_the_hold(catalog: Catalog) -> None:
    replaced = threading.Event()

    def replace() -> None:
        catalog.add(entry("a", B), replace=True)
        replaced.set()

    def check(found: Entry | None) -> None:
        threading.Thread(target=replace, daemon=True).start()
        assert not replaced.wait(0.2)

    assert catalog.hold("a", check=check) == A
    assert replaced.wait(5)
    assert catalog.id_of("a") == B
    assert catalog.release(A) == [A]


def test_a_name_leads_to_its_adapter(catalog: Catalog) -> None:
    assert catalog.hold("a") == A


def test_an_unknown_name_is_refused(catalog: Catalog) -> None:
    with pytest.raises(UnknownModel, match="'b'"):
        catalog.hold("b")


@pytest.mark.parametrize("name", ["", " a", "a ", "base"])
@pytest.mark.parametrize("replace", [False, True])
def test_a_name_that_cannot_be_given_is_refused(catalog: Catalog, name: str, replace: bool) -> None:
    with pytest.raises(AdapterExists):
        catalog.add(entry(name, B), replace=replace)


def test_a_taken_name_keeps_its_adapter(catalog: Catalog) -> None:
    with pytest.raises(AdapterExists, match="load_inplace"):
        catalog.add(entry("a", B))
    assert catalog.hold("a") == A


def test_a_replaced_name_leads_to_the_new_adapter(catalog: Catalog) -> None:
    catalog.add(entry("a", B), replace=True)
    assert catalog.hold("a") == B


def test_replacing_lets_go_of_an_idle_adapter(catalog: Catalog) -> None:
    assert catalog.add(entry("a", B), replace=True) == [A]


def test_replacing_by_the_same_adapter_lets_go_of_nothing(catalog: Catalog) -> None:
    assert catalog.add(entry("a", A), replace=True) == []


def test_replacing_keeps_an_adapter_that_a_request_holds(catalog: Catalog) -> None:
    catalog.hold("a")
    assert catalog.add(entry("a", B), replace=True) == []
    assert catalog.release(A) == [A]


def test_removing_lets_go_of_an_idle_adapter(catalog: Catalog) -> None:
    assert catalog.remove("a") == [A]
    assert list(catalog) == []


def test_removing_an_unknown_name_is_refused(catalog: Catalog) -> None:
    with pytest.raises(UnknownAdapter, match="'b'"):
        catalog.remove("b")


def test_an_adapter_lives_until_its_last_sequence_ends(catalog: Catalog) -> None:
    catalog.hold("a", 3)
    assert catalog.remove("a") == []
    assert [catalog.release(A), catalog.release(A, 2)] == [[], [A]]


def test_an_adapter_lives_until_its_last_name_goes(catalog: Catalog) -> None:
    catalog.add(entry("b", A))
    assert [catalog.remove("a"), catalog.remove("b")] == [[], [A]]


def test_a_named_adapter_outlives_its_sequences(catalog: Catalog) -> None:
    catalog.hold("a")
    assert catalog.release(A) == []


def test_a_removed_name_takes_no_new_requests(catalog: Catalog) -> None:
    catalog.hold("a")
    catalog.remove("a")
    with pytest.raises(UnknownModel):
        catalog.hold("a")


def test_sequences_in_flight_are_counted(catalog: Catalog) -> None:
    catalog.hold("a", 3)
    catalog.release(A)
    assert catalog.in_flight(A) == 2


def test_an_adapter_is_held_by_names_and_by_sequences(catalog: Catalog) -> None:
    catalog.add(entry("b", B))
    catalog.hold("a")
    catalog.remove("a")
    assert catalog.held() == {A, B}


def test_releasing_more_than_was_held_is_a_bug(catalog: Catalog) -> None:
    with pytest.raises(AssertionError, match="more often"):
        catalog.release(A)


def test_a_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(AdapterExists, match="whole characters"):
        Catalog("base").check_name("half-\ud83d", replace=False)


def test_names_and_pins_of_an_id_are_those_of_its_entries(catalog: Catalog) -> None:
    catalog.add(entry("b", A, pinned=True))
    catalog.add(entry("c", B))
    assert catalog.names_of([B, A]) == ["a", "b", "c"]
    assert catalog.pinned() == {A}
    assert catalog.pinned(beside="b") == set()
    catalog.set_pinned("a", True)
    assert catalog.pinned(beside="b") == {A}
    assert catalog.remove("b") == []
    assert catalog.add(entry("a", B), replace=True) == [A]
    assert (catalog.names_of([A]), catalog.names_of([B]), catalog.pinned()) == (
        [],
        ["a", "c"],
        set(),
    )
    assert [e.name for e in catalog] == ["a", "c"], "a name keeps its place"
    assert catalog.held() == {B}


def test_what_a_request_costs_does_not_hang_on_the_number_of_names(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(2_000):
        catalog.add(entry(f"name-{i}", AdapterId(f"id-{i}")))
    compared = 0

    class Noted(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    noted = AdapterId(Noted("id-7"))
    catalog.hold("name-7")
    assert catalog.release(noted) == []
    assert compared < 20
