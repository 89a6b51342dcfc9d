"""States with a round under way: loaded with another wire or group, saved again, loaded again."""

from __future__ import annotations

import copy
import zlib
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from choice_groups import grouped
from problems import Regression, train_step
from torch import Tensor

from diloco_comm import SGD, Delayed, DiLoCo, Streaming
from diloco_comm.exchange.round import decode_terms
from diloco_comm.methods.overlap import Overlap
from diloco_comm.rounds.round_log import RoundLog, replay

WIDTH = 7  # of a model with 246 parameters: one block of 256, two blocks of 128


@dataclass(frozen=True)
class Group:
    """Replicas, and how they send."""

    size: int
    wire: str
    block_size: int | None = None
    overlap: Overlap = field(default_factory=Delayed)


@dataclass(frozen=True)
class Save:
    """A state, and what its round under way is.

    Attributes:
        end: Hash of the outer parameters once the round is applied.
        mean: Checksum of its decoded mean.
        own: Checksum of the decoded own payload; None without one.
    """

    state: Any
    end: str
    mean: int
    own: int | None


def attach(group: Group) -> tuple[Any, Any, DiLoCo]:
    model = Regression(WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    options: dict[str, Any] = {"wire": group.wire, "block_size": group.block_size}
    options |= {"overlap": group.overlap, "outer": SGD(1.0), "chunk_bytes": 64}
    return model, optimizer, DiLoCo(model, optimizer, sync_every=3, fragments=1, **grouped(options))


def save(rank: int, world: int, group: Group, state: Any, num_steps: int) -> Save:
    """Go on from a state, or from the start, save, and apply what is under way."""
    model, optimizer, diloco = attach(group)
    with diloco:
        if state is not None:
            diloco.load_state_dict(state, strict=False)
        for step in range(num_steps):
            train_step(model, optimizer, rank, step, WIDTH)
        saved = copy.deepcopy(diloco.state_dict())
        (part,) = diloco.parts
        (flight,) = part.in_flight
        mean, own = flight.wait(), None
        values = torch.empty(part.num_elements)
        decode_terms(mean.terms, mean.layout, [values])
        if flight.own is not None:
            own = checksum(part.decode(flight.own, flight.layout, ""))
        diloco.flush()
        return Save(saved, diloco.outer_hash(), checksum(values), own)


def checksum(values: Tensor) -> int:
    return zlib.crc32(values.numpy().tobytes())


def merged(saves: list[Save]) -> Any:
    """One state with what each replica has of its own."""
    state = dict(saves[0].state)
    for rank, one in enumerate(saves):
        state.update({key: one.state[key] for key in one.state if key == f"replica_{rank}"})
    return state


def untrained_hash(rank: int, world: int, group: Group) -> str:
    _, _, diloco = attach(group)
    with diloco:
        return diloco.outer_hash()


@pytest.mark.nightly(
    "1 s each; two wires with scales, one of all bits", but=["first0-second0", "first5-second5"]
)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Group(5, "sub2"), Group(4, "sub2")),
        (Group(5, "sub2"), Group(2, "sub2")),
        (Group(4, "sub2"), Group(5, "sub2")),
        (Group(3, "int8"), Group(2, "int8")),
        # The payloads of both block sizes have the same number of bytes.
        (Group(1, "int8", 128), Group(1, "int8", 256)),
        (Group(3, "int8", 128), Group(3, "int8", 256)),
        (Group(1, "int8", 128), Group(1, "int4", 256)),
        (Group(2, "int8"), Group(2, "int4")),
        (Group(3, "int8"), Group(3, "int4")),
        (Group(4, "int8", 64), Group(5, "sub2")),
        (Group(5, "sub2"), Group(3, "int8")),
    ],
)
def test_a_round_under_way_is_saved_again(first: Group, second: Group, workers) -> None:
    old = workers(first.size).run(save, first, None, 7)
    again = workers(second.size).run(save, second, merged(old), 0)
    third = workers(second.size).run(save, second, merged(again), 0)
    hashes = {one.end for one in again + third}
    assert len(hashes) == 1
    # The round under way counts: without it, the outer parameters are others.
    assert workers(second.size).run(untrained_hash, second)[0] not in hashes
    assert len({one.mean for one in old + again + third}) == 1
    for one, two, three in zip(old, again, third, strict=False):
        assert one.own == two.own == three.own


def take_again(rank: int, world: int, state: Any, group: Group) -> tuple[list[int], bool]:
    """Log the rounds that follow a state; take their outer steps again, from the state on."""
    parts, log = [], RoundLog(1 << 20)
    for is_logged in (True, False):
        _, _, diloco = attach(group)
        with closing(diloco):
            diloco.load_state_dict(state)
            parts += diloco.parts
            if is_logged:
                diloco._rounds.log = log
                diloco.flush()
    for entry in log.rounds():
        replay(parts[1], entry, torch.cat(log.payloads(0, entry.number)))
    block_sizes = [entry.block_size for entry in log.rounds()]
    return block_sizes, torch.equal(parts[0].outer, parts[1].outer)


def test_a_logged_round_keeps_its_block_size(workers) -> None:
    first = Group(1, "int8", 128, Streaming(2, 0.5))
    second = replace(first, block_size=256)
    (old,) = workers(1).run(save, first, None, 7)
    ((block_sizes, is_equal),) = workers(1).run(take_again, old.state, second)
    assert block_sizes[0] == 128 and is_equal
