"""Times of an exchange on streams are the device's, whenever the host looks."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from device_training import METHODS, Replica
from test_gpu_streams import on_streams, use_streams
from workers import Pool

from diloco_comm.integrations.writers import Figures

SLOW_S = 0.2


def times(
    rank: int, world: int, device: str, library: str, name: str, num_steps: int, pause_s: float
) -> list[tuple[float, float, float]]:
    here = use_streams(rank, device, library)
    # One chunk is one collective.
    arguments = on_streams({**METHODS[name], "chunk_bytes": 1 << 20})
    replica = Replica(rank, here, num_steps=60, **arguments)
    figures = Figures(replica.diloco)
    make_slow()
    for step in range(num_steps):
        replica.steps(step, step + 1)
        time.sleep(pause_s)
    replica.diloco.flush()
    torch.accelerator.synchronize()
    found = [(m.exchange_s, m.exposed_s, m.overlap_fraction) for m in replica.diloco.metrics()]
    totals, shown = replica.diloco.totals(), figures.take()
    exchange_s, exposed_s, _ = map(sum, zip(*found, strict=True))
    assert (totals.exchange_s, totals.exposed_s) == pytest.approx((exchange_s, exposed_s))
    assert shown["diloco/waited_s"] == pytest.approx(exposed_s)
    assert shown["diloco/hidden_share"] == pytest.approx(totals.overlap_fraction)
    replica.diloco.close()
    return found


def make_slow() -> None:
    """Let the device take ``SLOW_S`` for each exchange of payloads."""
    from lagging_group import LaggingStream

    before = LaggingStream.enqueue

    def enqueue(self, name, function, leave=lambda: None):  # type: ignore[no-untyped-def]
        def later() -> None:
            time.sleep(SLOW_S if name == "alltoall" else 0.0)
            function()

        return before(self, name, later, leave)

    LaggingStream.enqueue = enqueue  # type: ignore[method-assign]


def test_a_stream_that_waits_for_its_exchange_hides_nothing(
    replicas: Callable[[int], Pool], stand_in: str
) -> None:
    ends = replicas(2).run(times, "lagging", stand_in, "diloco", 13, 0.1, timeout=100)
    for exchange_s, exposed_s, share in (row for end in ends for row in end):
        assert exchange_s >= SLOW_S and exposed_s > 0.5 * exchange_s and share < 0.5


def test_an_exchange_that_is_due_later_takes_no_longer(
    replicas: Callable[[int], Pool], stand_in: str
) -> None:
    """The host looks at a result of Eager(2) when that is due, after several pauses."""
    ends = replicas(2).run(times, "lagging", stand_in, "eager_2", 17, 0.5, timeout=100)
    hidden = [row for end in ends for row in end[:-2]]
    assert hidden and all(SLOW_S <= exchange_s < 3 * SLOW_S for exchange_s, *_ in hidden)
    assert all(exposed_s < 0.1 and share > 0.5 for _, exposed_s, share in hidden)
