"""A replica of the soak, whose outer parameters say who has learned what.

Each process owns one element of the model, and each of its inner steps adds one to that element.
The outer step is plain averaging on the fp32 wire. So a round of W replicas adds to the element of
each member its inner steps in that round, divided by W, and to no other element.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import nn

from diloco_comm import SGD, DiLoCo, Link, SyncMetrics
from diloco_comm.elastic.happenings import Happening, ViewChanged
from diloco_comm.elastic.options import Elastic
from diloco_comm.tools.demo.chaos.crew import Place
from diloco_comm.tools.demo.chaos.messages import DONE, LEFT, Ended, Entered

RUN = "soak"
LEAVE = "leave"


@dataclass(frozen=True)
class SoakSettings:
    """Of all replicas of a soak.

    Attributes:
        num_slots: Processes that may take part.
        num_elements: Of the rest of the model.
        step_s: Seconds that an inner step takes at least.
        link: "gloo" or "tcp".
        meeting: Address of the store at which all views meet, and of a relay; with them no replica
            can be dialled, and the link is "tcp".
    """

    num_slots: int = 1024
    num_elements: int = 200_000
    sync_every: int = 4
    step_s: float = 0.05
    suspect_after_s: float = 5.0
    quorum_wait_s: float = 120.0
    link: str = "tcp"
    meeting: tuple[str, str] | None = None


@dataclass(frozen=True)
class Taking:
    """The process takes its inner step number ``count``, counted from 1 over its own life.

    ``inner_step`` is that of the group, which a change may set back.
    """

    at: float
    count: int
    inner_step: int


@dataclass(frozen=True)
class Applied:
    """The process has applied an outer step.

    Attributes:
        view: Of the process when it said so: that of the round, or the one after it.
        count: Inner steps that the process has taken.
        ledger: Elements of the processes that have learned something: slot and value.
    """

    at: float
    round: int
    view: int
    count: int
    outer_hash: str
    ledger: tuple[tuple[int, float], ...]


class Ledger(nn.Module):
    """Parameters that are never used, only written: the ledger and some more to carry."""

    def __init__(self, settings: SoakSettings) -> None:
        super().__init__()
        self.ledger = nn.Parameter(torch.zeros(settings.num_slots))
        self.rest = nn.Parameter(torch.zeros(settings.num_elements))


def train(pipe: Connection, place: Place, settings: SoakSettings) -> None:
    """Take inner steps until the parent names the last one, or asks this replica to leave."""
    model = Ledger(settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.ledger.grad = torch.zeros(settings.num_slots)
    model.ledger.grad[place.process] = -1.0
    model.rest.grad = torch.full((settings.num_elements,), -1e-3 * (1 + place.process % 7))

    def tell(happening: Happening) -> None:
        if isinstance(happening, ViewChanged):
            who = happening.number, happening.members, happening.joined, happening.left
            costs = happening.seconds, happening.copied_bytes
            pipe.send(Entered(time.monotonic(), *who, *costs))

    link: str | Link = settings.link
    store, round_log_bytes = None, None
    if settings.meeting is not None:
        store, relay = settings.meeting
        link, round_log_bytes = Link("tcp", relay=relay), 0
    diloco = DiLoCo(
        model,
        optimizer,
        sync_every=settings.sync_every,
        wire="fp32",
        outer=SGD(lr=1.0),
        link=link,
        peers=Elastic(
            place.registry,
            run=RUN,
            replica=place.number,
            min_replicas=2,
            suspect_after=settings.suspect_after_s,
            quorum_wait=settings.quorum_wait_s,
            on_event=tell,
            store=store,
            round_log_bytes=round_log_bytes,
        ),
    )
    count = 0
    (part,) = diloco._plan.parameter_parts()
    next_round = part.round  # the first round that the parent has not heard of

    def tell_of(round: int, view: int) -> None:
        nonlocal next_round
        with diloco.outer_parameters():
            slots = model.ledger.detach().nonzero().flatten().tolist()
            ledger = tuple((slot, float(model.ledger[slot])) for slot in slots)
        now, hashed = time.monotonic(), diloco.outer_hash()
        pipe.send(Applied(now, round, view, count, hashed, ledger))
        next_round = round + 1

    def note(metrics: SyncMetrics) -> None:
        if metrics.is_applied:
            tell_of(metrics.round, diloco.view)

    diloco.on_sync(note)
    last_step: int | None = None
    while not diloco.is_done:
        while pipe.poll():
            order = pipe.recv()
            if order == LEAVE:
                diloco.leave()
            else:
                last_step = order
        if last_step is not None and diloco.inner_step >= last_step:
            break
        count += 1
        pipe.send(Taking(time.monotonic(), count, diloco.inner_step + 1))
        view = diloco.view
        optimizer.step()
        # A round that counts, although a member died in it, is applied while the group changes:
        # on_sync does not tell of that round.
        if part.round > next_round:
            tell_of(part.round - 1, view)
        time.sleep(settings.step_s)
    is_left = diloco.is_done
    if not is_left:
        diloco.flush()
    how = LEFT if is_left or diloco.is_done else DONE
    diloco.close()
    pipe.send(Ended(time.monotonic(), how, "", diloco.inner_step, diloco.outer_hash()))
