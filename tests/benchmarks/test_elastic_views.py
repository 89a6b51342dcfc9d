"""Views form one after another, nothing is left of them, and what is left would be found."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.elastic.checks import Resources
from benchmarks.elastic.views import Formed, Views, ViewSettings, results_of, run, violations

RSS_MIB = 8.0


@pytest.mark.nightly("30 s; test_elastic_training changes views, other tests measure")
@pytest.mark.timeout(300)
def test_nothing_is_left_of_many_views(tmp_path: Path) -> None:
    views = run(ViewSettings(num_replicas=3, num_views=40), tmp_path)
    assert violations(views, RSS_MIB) == []
    results = results_of(views, RSS_MIB)
    assert results["views"] >= 40
    assert views.samples.keys() == {"the registry", "replica 0", "replica 1", "replica 2"}


def formed(number: int, members: tuple[int, ...] = (0, 1)) -> Formed:
    return Formed(0.0, number, members, 0.1, 0.01 * number)


def test_what_is_wrong_is_named() -> None:
    views = Views(ViewSettings(2, 30))
    views.formed = {0: [formed(n) for n in range(31)], 1: [formed(n) for n in range(31)]}
    for name in ("replica 0", "replica 1", "the registry"):
        views.samples[name] = [Resources(2, 40, 9, 100.0)] * 29
    assert violations(views, RSS_MIB) == []
    views.formed[1] = [formed(n) for n in range(30)]
    views.formed[0][3] = formed(3, members=(0,))
    views.samples["replica 0"] = [Resources(2, 40 + n, 9, 100.0) for n in range(60)]
    views.samples["the registry"].pop()
    assert [line.split(" ")[0] for line in violations(views, RSS_MIB)] == [
        "a",
        "replica",
        "I7:",
        "28",
    ]
