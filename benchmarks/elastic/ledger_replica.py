"""A replica of ``storms``, whose outer parameters say who has learned what.

Each process owns one element of the model, and each of its inner steps adds one to that element.
The outer step is plain averaging on the fp32 wire. So a round of W replicas adds to the element of
each member its inner steps in that round, divided by W, and to no other element.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Literal

import torch
from torch import nn

from benchmarks.elastic.schedules import Fault
from benchmarks.support.namespaces import enter
from diloco_comm import SGD, DiLoCo, Link, SyncMetrics
from diloco_comm.elastic.events import Happening, ViewChanged
from diloco_comm.elastic.options import Elastic
from diloco_comm_tools.demo.crew import DONE, LEFT, Ended, Entered, Place

RUN = "storm"
LEAVE = "leave"
# Fewer replicas do not train.
LEAST = 2
# The network of a replica that has a namespace of its own.
INTERFACE = "dlstorm"


@dataclass(frozen=True)
class LedgerSettings:
    """Settings of all replicas.

    Attributes:
        num_slots: Processes that may take part.
        num_elements: Elements of the rest of the model.
        step_s: Seconds of an inner step; the exchange takes its time from them.
        backend: "gloo" or "tcp".
        meeting: Address of the store at which all views meet, and of a relay; with them no replica
            can be dialled, and the backend is "tcp".
        namespaces: The network namespace of each replica; none: all are in that of the program.
    """

    num_slots: int = 1024
    num_elements: int = 20_000
    sync_every: int = 10
    step_s: float = 0.1
    suspect_after_s: float = 8.0
    busy_after_s: float = 120.0
    quorum_wait_s: float = 240.0
    backend: Literal["gloo", "tcp"] = "tcp"
    meeting: tuple[str, str] | None = None
    namespaces: tuple[str, ...] = ()


@dataclass(frozen=True)
class Taking:
    """The process takes an inner step: its number in the group, which a change may set back."""

    at: float
    inner_step: int


@dataclass(frozen=True)
class Paused:
    """The replica begins a pause of so many seconds."""

    at: float
    seconds: float


@dataclass(frozen=True)
class Applied:
    """The process has applied an outer step.

    Attributes:
        view: Of the process when it said so: that of the round, or the one after it.
        num_discarded: Rounds that this process has sent, and that count for nobody.
        ledger: Elements of the processes that have learned something: slot and value.
    """

    at: float
    round: int
    view: int
    num_discarded: int
    outer_hash: str
    ledger: tuple[tuple[int, float], ...]


class Ledger(nn.Module):
    """Parameters that are never used, only written: the ledger and some more to carry."""

    def __init__(self, settings: LedgerSettings) -> None:
        super().__init__()
        self.ledger = nn.Parameter(torch.zeros(settings.num_slots))
        self.rest = nn.Parameter(torch.zeros(settings.num_elements))


def pause(pipe: Connection, diloco: DiLoCo, fault: Fault) -> None:
    """Do nothing for some seconds, in an evaluation or with the interpreter's lock in hand."""
    pipe.send(Paused(time.monotonic(), fault.seconds))
    if fault.fault == "evaluation":
        with diloco.doing("evaluation"):
            time.sleep(fault.seconds)
    else:
        ctypes.PyDLL(None).usleep(ctypes.c_uint(round(1e6 * fault.seconds)))


def train(pipe: Connection, place: Place, settings: LedgerSettings) -> None:
    """Take inner steps until the parent names the last one, or asks this replica to leave.

    The parent's other orders are faults: pauses, and a slow link.
    """
    if settings.namespaces:
        enter(settings.namespaces[place.number], INTERFACE)
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

    link = Link(settings.backend, suspect_after=settings.suspect_after_s)
    store, round_log_bytes = None, None
    if settings.meeting is not None:
        store, relay = settings.meeting
        link, round_log_bytes = replace(link, relay=relay), 0
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
            min_replicas=LEAST,
            suspect_after=settings.suspect_after_s,
            busy_after=settings.busy_after_s,
            insecure=True,
            quorum_wait=settings.quorum_wait_s,
            on_event=tell,
            store=store,
            round_log_bytes=round_log_bytes,
        ),
    )
    (part,) = diloco._plan.parameter_parts()
    next_round = part.round  # the first round that the parent has not heard of

    def tell_of(round: int, view: int) -> None:
        nonlocal next_round
        with diloco.outer_parameters():
            values = model.ledger.detach().tolist()
        ledger = tuple((slot, value) for slot, value in enumerate(values) if value)
        now, discarded = time.monotonic(), diloco.elastic_totals().rounds_discarded
        pipe.send(Applied(now, round, view, discarded, diloco.outer_hash(), ledger))
        next_round = round + 1

    def note(metrics: SyncMetrics) -> None:
        if metrics.is_applied:
            tell_of(metrics.round, diloco.view)

    diloco.on_sync(note)
    last_step: int | None = None
    slow_until = 0.0
    while not diloco.is_done:
        began = time.monotonic()
        while pipe.poll():
            order = pipe.recv()
            if order == LEAVE:
                diloco.leave()
            elif isinstance(order, int):
                last_step = order
            elif order.fault == "slow":
                slow_until, slow_gbps = began + order.seconds, order.mbps / 1e3
            else:
                pause(pipe, diloco, order)
        if last_step is not None and diloco.inner_step >= last_step:
            break
        if slow_until:
            # A change of the group makes a link that is not slow.
            diloco.emulate_link(slow_gbps if began < slow_until else 0.0)
            slow_until = slow_until if began < slow_until else 0.0
        pipe.send(Taking(time.monotonic(), diloco.inner_step + 1))
        view = diloco.view
        optimizer.step()
        # A round that counts, although a member died in it, is applied while the group changes:
        # on_sync does not tell of that round.
        if part.round > next_round:
            tell_of(part.round - 1, view)
        time.sleep(max(0.0, settings.step_s - (time.monotonic() - began)))
    is_left = diloco.is_done
    if not is_left:
        diloco.flush()
    how = LEFT if is_left or diloco.is_done else DONE
    diloco.close()
    pipe.send(Ended(time.monotonic(), how, "", diloco.inner_step, diloco.outer_hash()))
