"""How long a view takes to form, and whether anything is left of a thousand of them.

    python -m benchmarks.elastic.views --replicas 8 --views 1000

Eight processes on this machine break their view off and meet again, with a registry that keeps its
journal. Nobody dies, and there is one round in each view. So a change takes the time of its own
steps: the others hear of it, the seals, the answers of all members, one swap of the registry, and
the settling. The exit status is 1 if a view has other members, or if memory, descriptors or threads
grow.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.elastic.checks import Resources, are_enough, check_flat, resources
from benchmarks.support import common
from benchmarks.support.namespaces import opened_connections
from diloco_comm import DiLoCo, SyncError
from diloco_comm.elastic.events import Happening, ViewChanged
from diloco_comm.elastic.options import Elastic
from diloco_comm_tools.common.ranks import WITH_OPTIMIZER
from diloco_comm_tools.demo.crew import DONE, Crew, Ended, Place, Replica

# Seconds in which the next view must have formed, on any machine.
_PATIENCE_S = 120.0
_POLL_S = 0.05
# Looks at each process.
_LOOKS = 200


@dataclass(frozen=True)
class ViewSettings:
    """The settings of all replicas.

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
        cpu_s: Processor time that this process has taken, all its threads together.
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
            # A member whose round has failed does the same from here on.
            elastic._go_on(diloco, SyncError("this view is to end", stage="view"))
    diloco.close()
    pipe.send(Ended(time.monotonic(), DONE))


@dataclass
class Views:
    """The messages of the processes.

    Attributes:
        formed: By replica, in the order of the views.
        samples: By name of the process; the registry is one of them.
    """

    settings: ViewSettings
    formed: dict[int, list[Formed]] = field(default_factory=dict)
    samples: dict[str, list[Resources]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """The seconds of each view at the member that stood still for longest."""
        views: dict[int, float] = {}
        for own in self.formed.values():
            # The first view waits for the start of all processes.
            for one in own[1:]:
                views[one.view] = max(views.get(one.view, 0.0), one.seconds)
        return list(views.values())

    @property
    def cpu_s(self) -> float:
        """Processor time of all members together for one view, with its round."""
        spent = [own[-1].cpu_s - own[0].cpu_s for own in self.formed.values() if len(own) > 1]
        return sum(spent) / max(1, len(self.seconds))


def run(settings: ViewSettings, folder: Path) -> Views:
    """Let a crew form views until every member has formed as many as it should."""
    views = Views(settings)
    modules = ["benchmarks.elastic.views", *WITH_OPTIMIZER]
    with Crew(meet_again_and_again, settings, folder, modules) as crew:
        for number in range(settings.num_replicas):
            crew.start(number)
            views.formed[number] = []
        num_ended, heard_at = 0, time.monotonic()
        while num_ended < settings.num_replicas and not views.failures:
            for replica, message in crew.messages(_POLL_S):
                heard_at = time.monotonic()
                num_ended += _take(views, crew, replica, message)
            if time.monotonic() - heard_at > _PATIENCE_S:
                views.failures.append(f"no view has formed for {_PATIENCE_S:g} s")
    return views


def _take(views: Views, crew: Crew, replica: Replica, message: Any) -> bool:
    """Note what a process says; return whether it has ended."""
    if isinstance(message, Ended):
        if message.how != DONE:
            views.failures.append(f"replica {replica.number} {message.how}: {message.detail}")
        return True
    own = views.formed[replica.number]
    own.append(message)
    # In the last view a process may have ended when it is looked at.
    every = max(1, views.settings.num_views // _LOOKS)
    if len(own) % every == 0 and message.view < own[0].view + views.settings.num_views:
        num_members = len(message.members)
        look = {f"replica {replica.number}": replica.pid}
        if replica.number == 0:
            look["the registry"] = crew.registry_pid
        for name, pid in look.items():
            views.samples.setdefault(name, []).append(resources(pid, num_members))
    return False


def violations(views: Views, rss_mib: float) -> list[str]:
    """Return what must not be: failures, views without a member, and what has grown."""
    wrong = list(views.failures)
    everyone = tuple(range(views.settings.num_replicas))
    for number, own in views.formed.items():
        if any(one.members != everyone for one in own):
            wrong.append(f"a view of replica {number} lacks a member")
        if not views.failures and own[-1].view < own[0].view + views.settings.num_views:
            wrong.append(f"replica {number} has ended in view {own[-1].view}")
    for name in [*(f"replica {number}" for number in views.formed), "the registry"]:
        samples = views.samples.get(name, [])
        if not (views.failures or are_enough(samples)):
            wrong.append(f"{len(samples)} looks at {name} are too few: form more views")
        wrong += check_flat(name, samples, rss_mib)
    return wrong


def results_of(views: Views, rss_mib: float) -> dict[str, Any]:
    """Return the figures, as JSON types."""
    seconds = sorted(views.seconds)
    own = views.samples.get("replica 0", [])
    return {
        "views": len(seconds),
        "median_s": statistics.median(seconds) if seconds else None,
        "p95_s": common.percentile(seconds, 95) if seconds else None,
        "longest_s": seconds[-1] if seconds else None,
        "cpu_s_a_view": views.cpu_s,
        "first_sample": vars(own[0]) if own else None,
        "last_sample": vars(own[-1]) if own else None,
        "violations": violations(views, rss_mib),
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--replicas", type=int, default=8, help="members of each view")
    add("--views", type=int, default=1000, help="that are formed one after another")
    add("--rss-mib", type=float, default=8.0, help="by how much the memory may grow")
    common.add_output(parser, default=common.RESULTS / "elastic" / "views.json")
    return parser


def main() -> int:
    args = make_parser().parse_args()
    report = common.Report("elastic.views", workers=args.replicas, link="loopback")
    with common.stoppable(), tempfile.TemporaryDirectory(prefix="diloco-views-") as folder:
        views = run(ViewSettings(args.replicas, args.views), Path(folder))
    results = results_of(views, args.rss_mib)
    for name, value in results.items():
        report.print(f"{name:<12} {value}")
    common.save(report, args.json, results)
    return 1 if results["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
