"""A replica that goes from view to view: each time its view breaks off, and the members meet again.

Nobody dies, and there is one round in each view. So the time of a change is that of its own steps:
the others hear of it, the seals, the answers of all members, one swap of the registry, and the
settling.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import nn

from benchmarks.support.namespaces import opened_connections
from diloco_comm import DiLoCo, SyncError
from diloco_comm.elastic.events import Happening, ViewChanged
from diloco_comm.elastic.options import Elastic
from diloco_comm_tools.demo.crew import DONE, Ended, Place


@dataclass(frozen=True)
class ViewSettings:
    """Of all replicas.

    Attributes:
        num_views: That follow the first one.
        is_insecure: The registry is on another host, and has no keys.
    """

    num_replicas: int
    num_views: int
    suspect_after_s: float = 60.0
    quorum_wait_s: float = 300.0
    is_insecure: bool = False


@dataclass(frozen=True)
class Formed:
    """The process trains in a view.

    Attributes:
        seconds: From the end of the last view to the beginning of this one, here.
        cpu_s: Of processor time that this process has taken, all its threads together.
        opened: TCP connections that were opened in the network namespace of this process.
    """

    at: float
    view: int
    members: tuple[int, ...]
    seconds: float
    cpu_s: float
    opened: int = 0


def meet_again_and_again(pipe: Connection, place: Place, settings: ViewSettings) -> None:
    """Form ``num_views`` views with the same members, after the first one."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def tell(happening: Happening) -> None:
        if isinstance(happening, ViewChanged):
            who = happening.number, happening.members
            seconds = happening.seconds, time.process_time()
            pipe.send(Formed(time.monotonic(), *who, *seconds, opened_connections()))

    diloco = DiLoCo(
        model,
        optimizer,
        sync_every=1,
        peers=Elastic(
            place.registry,
            run="views",
            replica=place.number,
            min_replicas=settings.num_replicas,
            suspect_after=settings.suspect_after_s,
            quorum_wait=settings.quorum_wait_s,
            insecure=settings.is_insecure,
            on_event=tell,
        ),
    )
    elastic, last_view = diloco._elastic, diloco.view + settings.num_views
    assert elastic is not None
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    while diloco.view < last_view:
        # A round that all members complete: all of them have begun this view.
        optimizer.step()
        if diloco.view < last_view:
            # What a member does whose round has failed, from here on.
            elastic._go_on(diloco, SyncError("this view is to end", stage="view"))
    diloco.close()
    pipe.send(Ended(time.monotonic(), DONE))
