"""The sums of one replica's changes."""

from __future__ import annotations

from diloco_comm.elastic.events import ElasticTotals, Meter


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
