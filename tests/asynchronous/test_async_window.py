"""Windows of runs: which runs are asked for and when; and downloads that were ended."""

from __future__ import annotations

import random

import pytest
import torch

from diloco_comm.asynchronous.model.shared import RUN_ELEMENTS, layout_of
from diloco_comm.asynchronous.protocol.messages import MAX_BATCH, MAX_BODY, Kind, Message
from diloco_comm.asynchronous.protocol.window import (
    WINDOW_FRAGMENTS,
    Position,
    Window,
    bodies,
    is_within,
)
from diloco_comm.asynchronous.worker.downloads import Download
from diloco_comm.ops.wire import WireFormat


@pytest.mark.parametrize(("batch", "window"), [(1, 1), (40, 100), (100, 100), (1000, 1000)])
def test_everything_is_asked_for_once_and_never_too_much(batch: int, window: int) -> None:
    sizes, counts = [30, 7, 90], [5, 1, 4]
    wanted = [Position(n, f, r) for n in (0, 3) for f, c in enumerate(counts) for r in range(c)]
    runs = Window(wanted, lambda p: sizes[p.fragment], batch_bytes=batch, window_bytes=window)
    rng, asked = random.Random(batch), []
    while not runs.is_empty:
        for first, count in runs.ask():
            asked += [first._replace(run=first.run + i) for i in range(count)]
        on_their_way = sum(sizes[p.fragment] for p in runs.asked)
        assert on_their_way <= window or len(runs.asked) == 1
        assert {p for p, count in runs.ask_again() if count == 1} == set(runs.asked)
        runs.received(rng.choice(list(runs.asked)))
    assert asked == wanted


def test_the_runs_of_few_small_fragments_are_on_their_way() -> None:
    wanted = [Position(0, f, r) for f in range(3 * WINDOW_FRAGMENTS) for r in range(2)]
    runs = Window(wanted, lambda position: 4)
    rng, asked, num_asked = random.Random(0), [], []
    while not runs.is_empty:
        for first, count in runs.ask():
            asked += [first._replace(run=first.run + i) for i in range(count)]
        num_asked.append(len({position.fragment for position in runs.asked}))
        runs.received(rng.choice(list(runs.asked)))
    assert asked == wanted and max(num_asked) == WINDOW_FRAGMENTS


@pytest.mark.parametrize("wire", ["fp32", "int8", "int4"])
def test_bodies_cover_what_may_be_asked_for(wire: str) -> None:
    layout = layout_of(40 * RUN_ELEMENTS - 5, WireFormat(wire))
    most = MAX_BATCH // layout.run_bytes
    assert is_within(layout, 0, min(most, 40)) and not is_within(layout, 0, most + 1)
    assert is_within(layout, 39, 1) and not is_within(layout, 39, 2) and not is_within(layout, 0, 0)
    parts = list(bodies(layout, 3, 11))
    assert [run for first, n in parts for run in range(first, first + n)] == list(range(3, 14))
    assert all(n * layout.run_bytes <= MAX_BODY for _, n in parts)


def test_what_was_not_kept_until_the_end_is_fetched_again() -> None:
    """The server may have changed runs while it sent them; it says so when the worker asks."""
    size, said = RUN_ELEMENTS + 9, []
    download = Download(lambda message: said.append(message) or True, [torch.zeros(size)])
    download.ask()

    def send(version: int, value: float) -> None:
        download.receive(Message(Kind.READY, 0, version, meta={"steps": 5}))
        for run, count in ((0, RUN_ELEMENTS), (1, 9)):
            # A KEPT that comes before the last run does not count.
            download.receive(Message(Kind.KEPT, 0, version))
            body = torch.full((count,), value).numpy().tobytes()
            download.receive(Message(Kind.DATA, 0, version, 0, run, body=body))
        assert said[-1] == Message(Kind.DONE, 0, version)

    send(3, 1.0)
    assert not download.is_complete
    download.receive(Message(Kind.GONE, 0, 3))
    assert said[-1] == Message(Kind.PULL) and not download.is_complete
    send(4, 2.0)
    download.receive(Message(Kind.KEPT, 0, 3))
    assert not download.is_complete
    # An answer that was lost is asked for again.
    download.ask()
    assert said[-2:] == [Message(Kind.DONE, 0, 4)] * 2
    download.receive(Message(Kind.KEPT, 0, 4))
    assert download.is_complete and (download.version, download.steps) == (4, 5)
    assert torch.equal(download.outer[0], torch.full((size,), 2.0))
