"""The sums of one replica's changes, and the words for settings that differ."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_comm.elastic.totals import ElasticTotals, Meter
from diloco_comm.group.differences import difference


def test_the_times_of_two_views() -> None:
    meter = Meter(100.0)
    meter.waits(101.0, True)
    meter.waits(102.0, True)
    assert meter.totals(103.0) == ElasticTotals(elapsed_s=3, joining_s=3, waiting_s=2)
    meter.waits(104.0, False)
    meter.entered(105.0, 5.0)
    meter.entered(115.0, 4.0)
    meter.discarded(2)
    totals = meter.totals(125.0)
    assert totals == ElasticTotals(25, 5, 4, 3, 2, 2)
    assert totals.goodput == 0.8
    assert ElasticTotals().goodput == 0.0


@pytest.mark.parametrize(
    ("here", "there", "said"),
    [
        ({"a": 1}, {"a": 1}, ""),
        ({"a": 1}, {"a": 2}, "a is 1 here and 2 there"),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}, "a.b[1] is 2 here and 3 there"),
        ({"a": [1]}, {"a": [1, "x"]}, 'a[1] is nothing here and "x" there'),
        ({}, {"a": None}, "a is nothing here and null there"),
    ],
)
def test_a_difference_is_named(here: Any, there: Any, said: str) -> None:
    assert difference(here, there) == said
