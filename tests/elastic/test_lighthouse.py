"""Signs from a real lighthouse of torchft."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from lighthouses import Lighthouse
from registries import Host

from diloco_comm import DiLoCo, Elastic
from diloco_comm.elastic.lighthouse import LighthouseDetector

pytest.importorskip(
    "torchft.coordination", reason="torchft is not installed: pip install torchft-nightly"
)
PATIENCE_S = 60.0


@pytest.fixture
def lighthouse() -> Iterator[Lighthouse]:
    one = Lighthouse()
    yield one
    one.kill()


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end, f"not so within {PATIENCE_S:g} s"
        time.sleep(0.05)


def test_who_sends_no_heartbeats_has_ended(lighthouse: Lighthouse) -> None:
    all_of = {name: LighthouseDetector(lighthouse.address) for name in "abc"}
    silent = dict.fromkeys("abc", "")
    for name, one in all_of.items():
        one.begin(name)
    try:
        until(lambda: all(one._seen == set("abc") for one in all_of.values()))
        assert all_of["a"].look(silent) == ()
        all_of["c"].close()
        until(lambda: all_of["a"].look(silent) == all_of["b"].look(silent) == ("c",))
        assert all_of["a"].look({"b": ""}) == ()
    finally:
        for one in all_of.values():
            one.close()


def test_without_an_answer_there_is_no_sign(lighthouse: Lighthouse) -> None:
    one, other = (LighthouseDetector(lighthouse.address) for _ in range(2))
    one.begin("a")
    other.begin("b")
    try:
        until(lambda: one._seen == {"a", "b"})
        other.close()
        until(lambda: one.look({"b": ""}) == ("b",))
        lighthouse.kill()
        until(lambda: one.look({"b": ""}) == ())
    finally:
        one.close()
    with pytest.raises(RuntimeError, match="another DiLoCo"):
        one.begin("c")


def test_a_replica_tells_the_lighthouse_that_it_lives(
    lighthouse: Lighthouse, tmp_path: Path
) -> None:
    registry = Host(journal=tmp_path / "journal")
    detector = LighthouseDetector(lighthouse.address)
    watcher = LighthouseDetector(lighthouse.address)
    watcher.begin("watcher")
    try:
        membership = Elastic(registry.address, founding_wait=0.0, detector=detector)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with DiLoCo(model, optimizer, sync_every=1, peers=membership):
            until(lambda: len(watcher._seen) == 2)
        until(lambda: len(watcher.look(dict.fromkeys(watcher._seen, ""))) == 1)
    finally:
        watcher.close()
        registry.kill()
