"""How many round trips one after another an unplanned change of an elastic group takes.

    sudo python -m benchmarks.elastic.round_trips --replicas 2,8

Each replica and the registry have a network namespace of their own, and a process of the benchmark
delays the packets between them. The views of ``benchmarks.elastic.views`` form over a short and
over a long round trip: the slope of the seconds is the number of round trips, whatever the
processors cost. The exit status is 1 beyond the bars: 8 round trips, and no connection opened
between members that stay.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from benchmarks.elastic.views import Formed, Views, ViewSettings, meet_again_and_again
from benchmarks.exchange.netns import INTERFACE, LongNetwork, missing_tun
from benchmarks.support import common
from benchmarks.support.namespaces import address, enter
from diloco_comm.elastic.registry.server import RegistryServer
from diloco_comm.group import driver as group_driver
from diloco_comm.group import state as st
from diloco_comm_tools.common.ranks import WITH_OPTIMIZER
from diloco_comm_tools.common.workers import die_with_launcher
from diloco_comm_tools.demo.crew import DONE, Ended, Place

SHORT_MS, LONG_MS = 4.0, 60.0
MOST_ROUND_TRIPS, MOST_OPENED = 8.0, 0.0
_MBITS = 150.0
_PORT = 29400
# Seconds in which the next view must have formed, on any machine.
_PATIENCE_S = 60.0
# The processes have no threads yet when they are forked.
_forks = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Step:
    """One step of the agreement at replica 0.

    Attributes:
        at: By the monotonic clock, in seconds.
    """

    at: float
    name: str


@dataclass(frozen=True)
class Changes:
    """The changes of a group over one round trip.

    Attributes:
        seconds: The longest standstill of a member in each change.
        opened: TCP connections that a member has opened for one change, the highest of all members.
        steps: The steps of replica 0.
    """

    seconds: list[float]
    opened: float
    steps: list[Step]


def changes_over(round_trip_ms: float, num_replicas: int, num_changes: int, log: Path) -> Changes:
    """Let a group form views over a round trip.

    Raises:
        RuntimeError: If a replica fails, or no view forms for ``_PATIENCE_S`` seconds.
    """
    for module in WITH_OPTIMIZER:
        importlib.import_module(module)
    settings = ViewSettings(num_replicas, num_changes, is_insecure=True)
    network = LongNetwork(_MBITS, world=num_replicas + 1, round_trip_ms=round_trip_ms, queue_s=5.0)
    with network, tempfile.TemporaryDirectory(prefix="diloco-trips-") as folder:
        registry = f"tcp://{address(num_replicas)}:{_PORT}"
        home = network.names[num_replicas]
        processes = [_forks.Process(target=_registry, args=(home, registry, folder), daemon=True)]
        pipes: dict[Connection, int] = {}
        for number, name in enumerate(network.names[:num_replicas]):
            ours, theirs = _forks.Pipe()
            pipes[ours] = number
            given = theirs, Place(number, number, registry), settings, name, str(log)
            processes.append(_forks.Process(target=_replica, args=given, daemon=True))
        try:
            for process in processes:
                process.start()
            return _listen(pipes, settings)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _listen(pipes: Mapping[Connection, int], settings: ViewSettings) -> Changes:
    views, steps, ended = Views(settings), [], set()
    views.formed = {number: [] for number in pipes.values()}
    while len(ended) < len(pipes):
        ready = wait([pipe for pipe, number in pipes.items() if number not in ended], _PATIENCE_S)
        if not ready:
            raise RuntimeError(f"no view has formed for {_PATIENCE_S:g} s")
        for pipe in ready:
            number, message = pipes[pipe], pipe.recv()
            if isinstance(message, Formed):
                views.formed[number].append(message)
            elif isinstance(message, list):
                steps += message if number == 0 else []
                ended.add(number)
            elif message.how != DONE:
                raise RuntimeError(f"replica {number} {message.how}: {message.detail}")
    opened = [own[-1].opened - own[0].opened for own in views.formed.values()]
    return Changes(views.seconds, max(opened) / settings.num_views, steps)


def _registry(namespace: str, at: str, folder: str) -> None:
    die_with_launcher()
    enter(namespace, INTERFACE)
    RegistryServer(at, journal=Path(folder) / "journal", insecure=True).serve()


def _replica(pipe: Connection, place: Place, settings: ViewSettings, name: str, log: str) -> None:
    die_with_launcher()
    enter(name, INTERFACE)
    torch.set_num_threads(1)
    file = os.open(f"{log}-{place.number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", force=True)
    steps = _noted_steps()
    try:
        meet_again_and_again(pipe, place, settings)
    except BaseException as error:
        pipe.send(Ended(time.monotonic(), "failed", f"{type(error).__name__}: {error}"))
    pipe.send(steps)


def _noted_steps() -> list[Step]:
    """Note the steps of this process's driver from now on."""
    steps: list[Step] = []
    step = group_driver.step

    def noted(state: st.State, event: st.Event) -> tuple[st.State, tuple[st.Action, ...]]:
        at = time.monotonic()
        after, actions = step(state, event)
        if not isinstance(event, st.Passed | st.Life):
            heard = event.message if isinstance(event, st.Heard) else event
            steps.append(Step(at, f"{'hears' if heard is not event else 'is told'} {_name(heard)}"))
        told = [action.message if isinstance(action, st.Send) else action for action in actions]
        for name in dict.fromkeys(_name(one) for one in told if not isinstance(one, st.Wait)):
            steps.append(Step(time.monotonic(), f"does {name}"))
        return after, actions

    group_driver.step = noted  # type: ignore[assignment]
    return steps


def _name(one: object) -> str:
    return type(one).__name__


def round_trips(short: Changes, long: Changes, ms: tuple[float, float]) -> float:
    """Return the slope of the medians, in round trips."""
    medians = [statistics.median(one.seconds) for one in (short, long)]
    return (medians[1] - medians[0]) / (ms[1] - ms[0]) * 1e3


def last_times(steps: list[Step]) -> dict[str, float]:
    """Return when each step came last in a change, as the median over the changes.

    Returns:
        Seconds since the break by the name of the step, in rising order. A step counts that
        half of the changes have.
    """
    changes: list[dict[str, float]] = []
    begin = 0.0
    for one in steps:
        if one.name == "is told Broke":
            changes.append({})
            begin = one.at
        if changes and "does Enter" not in changes[-1]:
            changes[-1][one.name] = one.at - begin
    names = {name for change in changes for name in change}
    found = {}
    for name in names:
        times = [change[name] for change in changes if name in change]
        if 2 * len(times) >= len(changes):
            found[name] = statistics.median(times)
    return dict(sorted(found.items(), key=lambda item: item[1]))


def results_of(short: Changes, long: Changes, ms: tuple[float, float]) -> dict[str, Any]:
    """Return the figures of a group, as JSON types."""
    early, late = last_times(short.steps), last_times(long.steps)
    steps = {
        name: [round(seconds, 4), round((seconds - early[name]) / (ms[1] - ms[0]) * 1e3, 2)]
        for name, seconds in late.items()
        if name in early
    }
    return {
        "round_trips": round_trips(short, long, ms),
        "short_s": short.seconds,
        "long_s": long.seconds,
        "opened": max(short.opened, long.opened),
        "steps": steps,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--replicas", default="2,8", metavar="W,W", help="members of the groups")
    add("--changes", type=int, default=5, help="of each group and round trip")
    add("--short", type=float, default=SHORT_MS, metavar="MS", help="the short round trip")
    add("--long", type=float, default=LONG_MS, metavar="MS", help="the long one")
    add(
        "--logs", default="", metavar="STEM", help="what the names of the replicas' logs begin with"
    )
    common.add_output(parser)
    args = parser.parse_args()
    if reason := missing_tun():
        print(f"# skipped: {reason}")
        return 0
    ms, results, is_passed = (args.short, args.long), {}, True
    sizes = [int(word) for word in args.replicas.split(",")]
    link = f"simulated: round trips of {ms[0]:g} and {ms[1]:g} ms; namespaces, TUN devices"
    report = common.Report("elastic.round_trips", workers=max(sizes), link=link)
    with common.stoppable(), tempfile.TemporaryDirectory(prefix="diloco-trips-") as folder:
        for size in sizes:
            stem = Path(args.logs or f"{folder}/replica")
            short, long = (changes_over(each, size, args.changes, stem) for each in ms)
            found = results[f"replicas {size}"] = results_of(short, long, ms)
            is_passed &= found["round_trips"] <= MOST_ROUND_TRIPS
            is_passed &= found["opened"] <= MOST_OPENED
            trips, opened = found["round_trips"], found["opened"]
            report.print(
                f"{size} replicas: {trips:.1f} round trips, {opened:.1f} connections opened"
            )
            for name, (seconds, at) in found["steps"].items():
                report.print(f"    {name:<20} {seconds:8.3f} s {at:6.2f} round trips")
    common.save(report, args.json, {"is_passed": is_passed, **results})
    return 0 if is_passed else 1


if __name__ == "__main__":
    sys.exit(main())
