from __future__ import annotations

import pytest

from loramux.adapters.report import Report, printable
from loramux.errors import AdapterRefused


def test_report_without_refusals_raises_nothing():
    report = Report()
    report.warn("odd")
    report.raise_if_refused("a")
    assert report.warnings == ("odd",)


def test_all_reasons_are_told_in_one_error():
    report = Report()
    report.refuse("first")
    report.refuse("second")
    with pytest.raises(AdapterRefused) as caught:
        report.raise_if_refused("fancy")
    assert caught.value.reasons == ("first", "second")
    assert "fancy" in str(caught.value)


def test_same_reason_at_many_places_is_one_counted_line():
    report = Report()
    for i in range(32):
        report.refuse("wrong shape", f"layers.{i}")
    line = "wrong shape: layers.0, layers.1, layers.2, layers.3 and 28 more"
    assert report.reasons == (line,)


def test_very_many_reasons_are_cut_and_counted():
    report = Report()
    for i in range(100):
        report.refuse(f"reason {i}")
    assert len(report.reasons) == 41
    assert report.reasons[-1] == "and 60 findings more"


def test_very_many_warnings_are_cut_and_counted():
    report = Report()
    for i in range(100):
        report.warn(f"warning {i}")
    assert len(report.warnings) == 41
    assert report.warnings[-1] == "and 60 findings more"


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31m", "naïve", "\ud800", "two words", ""])
def test_names_that_are_not_plain_are_quoted_in_ascii(name: str):
    shown = printable(name)
    assert shown.isascii()
    assert shown.isprintable()
    assert shown.startswith("'")


def test_long_names_are_cut():
    assert len(printable("x" * 10_000)) < 140
