"""Replicas of a changed group tell each other more, beside the end of training."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_comm.rounds import consensus


@pytest.mark.parametrize(
    ("ends", "is_older"),
    [
        ([(3, False), (3, False)], False),
        ([(3, True), (3, True)], False),
        # The replicas are at different steps, so that no one ends as the other has.
        ([(3, True), (4, False)], False),
        ([(3, True), (3, False)], True),
    ],
)
def test_values_beside_count_unless_a_replica_ends(
    ends: list[tuple[int, bool]], is_older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange: Any = SimpleNamespace(members=(0, 1), replica=0, joined=())
    part: Any = SimpleNamespace(index=0)
    told = [[[[step, has_ended, True, None, None]], f"of {step}"] for step, has_ended in ends]
    monkeypatch.setattr(consensus, "gather_json", lambda *_: told)
    found = consensus.end_like_others(exchange, [part], "", lambda _: nullcontext(), "own")
    assert found == (None if is_older else [f"of {step}" for step, _ in ends])
