"""Replicas with outer states and donors, in one process with real sockets, and their rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from diloco_comm import _C, WireFormat
from diloco_comm.elastic.transfer.newcomer import Newcomer
from diloco_comm.exchange.round import Header, Mean
from diloco_comm.group.beats import Way
from diloco_comm.methods.outer import OuterOptimizer, Update
from diloco_comm.ops.digests import digest_of
from diloco_comm.ops.wire import Layout
from diloco_comm.replica.fragments import make_fragments, trainable_parameters
from diloco_comm.rounds import history
from diloco_comm.rounds.part import SyncedFragment
from diloco_comm.rounds.round_log import RoundLog, Standing, state_tensors

# Two fragments of three pieces each, with the momentum of Nesterov.
WIDTH = 1100
WIRE = WireFormat("fp32")
SERVICE = "transfer group"


def place_of(link: _C.Link) -> Way:
    return Way(link.nonce, link.address, "", "")


class Replica:
    """The outer state of one replica, its log, and the link at which it serves."""

    def __init__(
        self,
        outer: OuterOptimizer,
        seed: int,
        log_bytes: int,
        width: int,
        address: str = "127.0.0.1:0",
    ) -> None:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fragments = make_fragments(model, trainable_parameters(model, [optimizer]), 2)
        self.parts = [SyncedFragment(one, outer, WIRE, False, carries=False) for one in fragments]
        for part in self.parts:
            part.read_local()
            history.begin(part, is_shared=True)
        self.link = _C.Link(address, address)
        self.source = _C.StateSource([state_tensors(part) for part in self.parts])
        self.log = RoundLog(log_bytes, self.source)

    def serve(self) -> None:
        self.link.serve(SERVICE, self.source)

    def open(self) -> None:
        self.source.open([Standing.of(part).numbers() for part in self.parts])

    def close(self) -> None:
        self.link.close()
        self.source.close()

    def take_round(self, fragment: int) -> None:
        """Take an outer step on a gradient that follows from fragment and round."""
        part = self.parts[fragment]
        number = part.round
        generator = torch.Generator().manual_seed(1000 * fragment + number)
        layout = Layout.plan(part.num_elements, 1, 1, WIRE)
        payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
        gradient = torch.randn(part.num_elements, generator=generator)
        payload[: 4 * part.num_elements] = gradient.view(torch.uint8)
        header, digest = Header(outer_lr=0.7), digest_of([payload])
        mean = Mean([(payload, 1.0)], layout, [header], [1.0], {}, 0, 0, digest=digest)
        with self.log.writing(part):
            part.state.step(Update(mean.terms, part.tensors(), layout, 0.7))
            before = part.history
            part.applied(number, mean)
            self.log.add(part, number, before, mean)

    def shown(self) -> Any:
        """Return all that replicas compare."""
        return [
            (part.round, part.history, part.state.num_steps, digest_of(state_tensors(part)))
            for part in self.parts
        ]


class Group:
    """Replicas that train together, and one that wants to join.

    Args:
        bytes_per_s, seed: The newcomer has them; the others have the seed 1.
        donor_address: The donors listen there; "": nobody can dial them.
    """

    def __init__(
        self,
        outer: Callable[[], OuterOptimizer],
        size: int,
        *,
        log_bytes: int = 1 << 27,
        width: int = WIDTH,
        bytes_per_s: float | None = None,
        seed: int = 2,
        donor_address: str = "127.0.0.1:0",
    ) -> None:
        more = log_bytes, width, donor_address
        self.replicas = [Replica(outer(), 1, *more) for _ in range(size)]
        for replica in self.replicas:
            replica.serve()
            replica.open()
        self.places = {f"{i}": place_of(one.link) for i, one in enumerate(self.replicas)}
        self.fresh = Replica(outer(), seed, log_bytes, width)
        link, parts = self.fresh.link, self.fresh.parts
        self.newcomer = Newcomer(link, SERVICE, parts, self.donors, bytes_per_s)

    def donors(self) -> dict[str, Way]:
        return self.places

    def train(self, num_rounds: int = 1) -> None:
        for _ in range(num_rounds):
            for replica in self.replicas:
                for fragment in range(2):
                    replica.take_round(fragment)

    def train_newcomer(self, num_rounds: int) -> None:
        """Let the newcomer hold a state like that of a checkpoint."""
        for _ in range(num_rounds):
            for fragment in range(2):
                self.fresh.take_round(fragment)
        self.newcomer.use_saved()

    def turn_until(self, is_done: Callable[[], bool], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not is_done():
            self.newcomer.turn(0.02)
            assert time.monotonic() < deadline, self.newcomer.received_bytes

    def is_ready(self) -> bool:
        """Whether the newcomer is ready, and has heard of the rounds that were taken last."""
        status = self.newcomer._newest()
        rounds = [part.round for part in self.replicas[0].parts]
        has_heard = status is not None and [at.round for at in status.standings] == rounds
        return has_heard and self.newcomer.is_ready

    def kill(self, number: int) -> None:
        """End a donor; its replica goes on training."""
        self.replicas[number].close()

    def check(self) -> None:
        """Let the newcomer take the last rounds; it must then equal the others."""
        truth = self.replicas[0].shown()
        self.newcomer.catch_up({index: one[0] for index, one in enumerate(truth)})
        assert self.fresh.shown() == truth


@contextmanager
def training(*arguments: Any, **options: Any) -> Iterator[Group]:
    group = Group(*arguments, **options)
    with ExitStack() as stack:
        for replica in [group.fresh, *group.replicas]:
            stack.callback(replica.close)
        stack.callback(group.newcomer.close)
        yield group
