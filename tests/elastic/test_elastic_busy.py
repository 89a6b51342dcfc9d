"""Replicas that are held up or stopped, or that die: who is left out, and when.

The beats at the registry come from a Python thread, and beats of the link do not.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from async_helpers import wait_until
from elastic_replicas import attach
from elastic_replicas import registry as registry
from fault_replicas import (
    connect,
    lines_of_the_log,
    make_model,
    make_optimizer,
    take_inner_step,
    wait_for,
)
from registries import Host
from workers import Pool

from diloco_comm import Delayed, DiLoCo, Elastic, LeftBehind
from diloco_comm.elastic.events import Suspected, ViewChanged
from diloco_comm.elastic.registry import RegistryUnavailable
from diloco_comm.elastic.registry import connect as registry_at
from diloco_comm_tools.registry.members import report

H = 4
FAULT_STEP, LAST_STEP = 2 * H + 1, 8 * H
FOUNDING: dict[str, Any] = {"founding_wait": 5.0}
LONG = {"timeout": 60.0}


@dataclass
class End:
    """How a replica ended.

    Attributes:
        views: The members of each of its views.
        slowest_s: The longest change of the group.
    """

    inner_step: int
    outer: str
    views: list[tuple[int, ...]]
    slowest_s: float
    suspected: list[tuple[int, ...]]
    lines: list[str]
    is_left_behind: bool


def hold(seconds: float) -> None:
    """Sleep as an extension does that keeps the interpreter's lock."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def live(
    rank: int,
    world: int,
    store: tuple[str, int],
    registry: str,
    fault: str,
    seconds: float,
    backend: str = "tcp",
    pace_s: float = 0.0,
    **membership: Any,
) -> End:
    """Train; the last replica does something to itself once all are there."""
    signs, lines = connect(store), lines_of_the_log()
    happenings: list[Any] = []
    membership = {"min_replicas": 2, "on_event": happenings.append, **FOUNDING, **membership}
    diloco, model, optimizer = attach(registry, rank, {"backend": backend, **LONG}, **membership)
    is_left_behind = False
    try:
        while diloco.inner_step < LAST_STEP:
            take_inner_step(model, optimizer, rank, diloco.inner_step + 1)
            if rank == world - 1 and diloco.inner_step == FAULT_STEP and fault:
                assert len(diloco.members) == world
                signs.set("pid", str(os.getpid()))
                do(fault, seconds, diloco)
                fault = ""
            time.sleep(pace_s)
        diloco.flush()
    except LeftBehind:
        is_left_behind = True
    views = [one for one in happenings if isinstance(one, ViewChanged)]
    end = End(
        diloco.inner_step,
        diloco.outer_hash(),
        [view.members for view in views],
        max(view.seconds for view in views[1:]) if views[1:] else 0.0,
        [one.replicas for one in happenings if isinstance(one, Suspected)],
        lines,
        is_left_behind,
    )
    diloco.close()
    return end


def do(fault: str, seconds: float, diloco: DiLoCo) -> None:
    if fault == "cut":
        assert diloco._elastic is not None and diloco._elastic.group._driver is not None
        driver = diloco._elastic.group._driver

        def fail(*_: Any) -> Any:
            raise RegistryUnavailable("this replica is cut off from the registry")

        driver._table._table.look = fail  # type: ignore[method-assign]
    elif fault == "hold":
        with diloco.doing("evaluation"):
            hold(seconds)
    elif fault == "hang":
        time.sleep(seconds)
    else:
        os.kill(os.getpid(), signal.SIGSTOP if fault == "stop" else signal.SIGKILL)


def test_the_registry_shows_the_phase_of_a_replica(registry: Host) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    found = registry_at(registry.address, run="test")

    def phase() -> str:
        return str(report(found, "test")["processes"][0]["phase"])

    with DiLoCo(model, optimizer, sync_every=H, peers=Elastic(registry.address, run="test")) as one:
        take_inner_step(model, optimizer, 0, 1)
        wait_until(lambda: phase() == "steps")
        with one.outer_parameters():
            wait_until(lambda: phase() == "evaluation")
        with one.doing("checkpoint"):
            wait_until(lambda: phase() == "checkpoint")
        with (
            pytest.raises(ValueError, match="phase must be one of evaluation, checkpoint"),
            one.doing("lunch"),
        ):
            pass
        wait_until(lambda: phase() == "steps")
    found.close()


def alike(ends: list[End]) -> bool:
    return len({(end.inner_step, end.outer) for end in ends}) == 1


@pytest.mark.parametrize(
    ("backend", "seconds", "suspect_after"),
    [("tcp", 4.0, 1.5), ("gloo", 4.0, 1.5), ("tcp", 12.0, 8.0)],
    ids=["tcp", "gloo", "full"],
)
@pytest.mark.nightly(
    "10 to 20 s each; they differ in the group's network and in times", but=["tcp"]
)
def test_a_replica_that_holds_the_gil_is_waited_for(
    fresh_workers: Callable[..., Pool],
    registry: Host,
    backend: str,
    seconds: float,
    suspect_after: float,
) -> None:
    pool = fresh_workers(3, init_group=False)
    arguments = pool.store, registry.address, "hold", seconds, backend
    ends = pool.run(live, *arguments, suspect_after=suspect_after, timeout=80)
    assert [(end.views, end.suspected, end.is_left_behind) for end in ends] == 3 * [
        ([(0, 1, 2)], [], False)
    ]
    assert alike(ends) and ends[0].inner_step == LAST_STEP
    for end in ends[:2]:
        (line,) = [line for line in end.lines if line.endswith("alive, and not taking part")]
        assert line.startswith("waiting for replica 2 (inner step ") and "evaluation" in line


@pytest.mark.parametrize(
    ("fault", "seconds"), [("hold", 9.0), ("hang", 16.0)], ids=["hold", "hang"]
)
@pytest.mark.nightly("10 to 20 s each; the signs of life have both", but=["hold"])
def test_a_replica_that_is_held_up_for_too_long_is_left_out(
    fresh_workers: Callable[..., Pool], registry: Host, fault: str, seconds: float
) -> None:
    """It holds the interpreter's lock, or its data loader hangs, and its beats go on."""
    pool = fresh_workers(3, init_group=False)
    limits = {"suspect_after": 1.5, "busy_after": 3.0}
    ends = pool.run(live, pool.store, registry.address, fault, seconds, timeout=80, **limits)
    assert [end.views for end in ends[:2]] == 2 * [[(0, 1, 2), (0, 1)]]
    # The first to suspect it leads the others, who may hear of the next view before they suspect.
    suspected = [one for end in ends[:2] for one in end.suspected]
    assert suspected in ([(2,)], [(2,)] * 2)
    assert alike(ends[:2]) and ends[0].inner_step == LAST_STEP
    assert ends[2].is_left_behind and ends[2].views == [(0, 1, 2)]


def come_to_a_boundary(
    rank: int, world: int, store: tuple[str, int], registry: str
) -> tuple[tuple[int, ...], float]:
    """Replica 1 leaves at a boundary at which a round is under way; replica 2 stops in it."""
    signs, happenings = connect(store), list[Any]()
    options = {"overlap": Delayed(), "backend": "gloo", **LONG}
    membership = {"suspect_after": 3.0, "on_event": happenings.append, **FOUNDING}
    diloco, model, optimizer = attach(registry, rank, options, **membership)
    while diloco.inner_step < LAST_STEP and not diloco.is_done:
        if diloco.inner_step == H + 1 and rank == 1:
            diloco.leave()
            time.sleep(1.5)
        if diloco.inner_step == 3 * H - 1 and rank == 2:
            diloco.exchange.inject_fault(action="stop", stage="reduce")
        take_inner_step(model, optimizer, rank, diloco.inner_step + 1)
    views = [one for one in happenings if isinstance(one, ViewChanged)]
    end = diloco.members, max(view.seconds for view in views[1:]) if views[1:] else 0.0
    diloco.close()
    signs.set(f"ended/{rank}", "")
    return end


@pytest.mark.nightly("10 s; the walks have members that stop at a boundary")
def test_a_boundary_does_not_wait_for_a_silent_member(
    fresh_workers: Callable[..., Pool], registry: Host
) -> None:
    """The last rounds before a boundary are waited for, and their timeout is a minute."""
    pool = fresh_workers(3, init_group=False)
    pool.submit(come_to_a_boundary, pool.store, registry.address)
    wait_for(pool, ["ended/0", "ended/1"], timeout=50)
    pool.kill(2)
    ends = pool.collect(timeout=30, expect_exit={2})
    assert ends[0][0] == (0,) and 2.0 < ends[0][1] < 25.0, ends


def test_a_replica_that_the_registry_does_not_answer_stays(
    fresh_workers: Callable[..., Pool], registry: Host
) -> None:
    """The links of the others hear that replica, and it takes part in all rounds."""
    pool = fresh_workers(3, init_group=False)
    arguments = pool.store, registry.address, "cut", 0.0, "tcp", 0.2
    ends = pool.run(live, *arguments, suspect_after=1.5, timeout=80)
    assert [(end.views, end.suspected) for end in ends] == 3 * [([(0, 1, 2)], [])]
    assert alike(ends)


@pytest.mark.nightly("15 s; the first tier has one that holds the interpreter's lock")
def test_a_replica_that_is_stopped_for_a_while_is_waited_for(
    fresh_workers: Callable[..., Pool], registry: Host
) -> None:
    pool = fresh_workers(3, init_group=False)
    pool.submit(live, pool.store, registry.address, "stop", 0.0, suspect_after=8.0)
    wait_for(pool, ["pid"])
    time.sleep(3.0)
    os.kill(int(connect(pool.store).get("pid")), signal.SIGCONT)
    ends = pool.collect(timeout=80)
    assert [(end.views, end.suspected) for end in ends] == 3 * [([(0, 1, 2)], [])]
    assert alike(ends)


@pytest.mark.parametrize("backend", ["tcp", "gloo"])
@pytest.mark.nightly("8 s each; they differ in the group's network", but=["tcp"])
def test_a_replica_that_is_killed_is_left_out_at_once(
    fresh_workers: Callable[..., Pool], registry: Host, backend: str
) -> None:
    """Its host refuses: nobody waits for ``suspect_after``."""
    pool = fresh_workers(3, init_group=False)
    arguments = pool.store, registry.address, "kill", 0.0, backend
    ends = pool.run(live, *arguments, suspect_after=60.0, expect_exit={2}, timeout=80)
    assert [end.views for end in ends[:2]] == 2 * [[(0, 1, 2), (0, 1)]]
    assert alike(ends[:2]) and ends[0].slowest_s < 60.0
