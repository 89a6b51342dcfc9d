"""Small real replicas whose membership changes by itself, with a real registry."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from choice_groups import grouped
from fault_replicas import BLOCK, LR, MOMENTUM, connect, hash_of, make_model, make_optimizer
from fault_replicas import take_inner_step as train
from registries import Host
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from diloco_comm import DiLoCo, LeftBehind, Nesterov, SyncError
from diloco_comm.elastic.events import JoinProgress, ViewChanged
from diloco_comm.elastic.options import Elastic
from diloco_comm.exchange.membership import change
from diloco_comm.exchange.membership.follower import Follower
from diloco_comm.training import views

# Long enough for a process on a loaded machine to beat meanwhile.
SUSPECT_AFTER_S = 6.0
PACE_S = 0.01
OPTIONS: dict[str, Any] = {
    "sync_every": 4,
    "block_size": BLOCK,
    "chunk_bytes": 512,
    "timeout": 40.0,
}


def attach(
    registry: str, replica: int | None, options: Mapping[str, Any] = OPTIONS, **membership: Any
) -> tuple[DiLoCo, Any, Any]:
    """Let a small model take part in the run "test".

    Args:
        options: Choices of ``DiLoCo`` beside ``OPTIONS``.
        membership: Further arguments of ``Elastic``.
    """
    os.environ["DILOCO_COMM_REPORT_S"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    model = make_model()
    optimizer = make_optimizer(model)
    waits = {"suspect_after": 3.0, "quorum_wait": 40.0, "founding_wait": 0.0}
    elastic = Elastic(registry, run="test", replica=replica, **{**waits, **membership})
    choices = grouped({"membership": elastic, **OPTIONS, **options})
    return DiLoCo(model, optimizer, **choices), model, optimizer


def train_to(diloco: DiLoCo, model: Any, optimizer: Any, replica: int, until: int) -> None:
    """Train until a step, or until the run is done."""
    while diloco.inner_step < until and not diloco.is_done:
        train(model, optimizer, replica, diloco.inner_step + 1)


@dataclass(frozen=True)
class Fault:
    """Something that a replica does to itself at an inner step.

    Attributes:
        num_members: The replica waits for so many members.
        action: "kill" or "stop", at a stage of the next exchange; "kill in change", at a stage of
            the next change of the group: "seal", "connect" or "open"; "leave" or "kill now"; "kill
            between parts": at the next send of two parts, when the round of the first has ended.
        is_donor: The replica waits until it has sent some of its state to a newcomer.
        worker: The only worker of the replica that does it; -1: all of them.
    """

    replica: int
    inner_step: int
    action: str
    stage: str = "vote"
    num_peers: int = 0
    num_members: int = 0
    is_donor: bool = False
    worker: int = -1

    def is_of(self, replica: int, worker: int) -> bool:
        return self.replica == replica and self.worker in (worker, -1)

    def is_due(self, diloco: DiLoCo) -> bool:
        if self.is_donor and not transfer_of(diloco).served_bytes:
            return False
        return diloco.inner_step >= self.inner_step and len(diloco.members) >= self.num_members


@dataclass(frozen=True)
class Run:
    """One training with comings and goings.

    Attributes:
        founders: Replicas 0 to founders - 1 begin; the others join.
        num_workers: Of each replica, which share its outer state.
        is_sharded: The workers of a replica share its parameters too, by FSDP2.
        pace_s: Seconds for which a replica rests after each inner step.
        pace_until: The replicas rest until this one is a member, and ten times as long in the
            second half of their steps, so that they do not end without it; -1: always.
        pace_while: The replicas rest while this one is a member; -1: always.
        membership: Further arguments of ``Elastic``.
        has_tokens: The weight of a replica is a function that returns its tokens since the last
            call: one more than its number, in each inner step.
        checkpoint: File into which replica 0 saves at inner step ``saved_step``, and from which the
            others that join start; "" for none.
        interrupted: Replica that a Ctrl-C breaks off in its first wait for each round of its first
            view, and that goes on; -1: none.
        joins: Inner step of replica 0 at which each further replica is started, by number.
        joins_in_turn: A further replica is started only once the one before it is a member.
    """

    founders: int
    last_step: int = 60
    joins: dict[int, int] = field(default_factory=dict)
    joins_in_turn: bool = False
    faults: tuple[Fault, ...] = ()
    min_replicas: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    num_workers: int = 1
    is_sharded: bool = False
    pace_s: float = PACE_S
    pace_until: int = -1
    pace_while: int = -1
    membership: dict[str, Any] = field(default_factory=dict)
    has_tokens: bool = False
    checkpoint: str = ""
    saved_step: int = 0
    interrupted: int = -1


@dataclass
class End:
    """Where a replica ended, and what it went through."""

    outer: str
    local: str
    inner_step: int
    members: tuple[int, ...]
    views: list[ViewChanged]
    is_done: bool
    num_applied: int
    error: str = ""
    progress: list[JoinProgress] = field(default_factory=list)
    caught_up_bytes: int = 0
    # Weight of each applied round.
    weights: list[float] = field(default_factory=list)
    # Number of applied rounds of each fragment.
    applied: dict[int, int] = field(default_factory=dict)
    # Inner steps that it took, also those that a change of the group took back; 0 after an error.
    num_steps: int = 0


def live(rank: int, world: int, store: tuple[str, int], registry: str, run: Run) -> End:
    """Be replica ``rank`` of a run, or one of the workers that it has."""
    os.environ["DILOCO_COMM_REPORT_S"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    signs = connect(store)
    rank, worker = divmod(rank, run.num_workers)
    if rank >= run.founders:
        signs.wait([f"start {rank}"])
    group = None
    if run.num_workers > 1:
        own = dist.PrefixStore(f"workers of {rank}", signs)
        dist.init_process_group("gloo", store=own, rank=worker, world_size=run.num_workers)
        group = dist.group.WORLD
    model = make_model()
    if run.is_sharded:
        mesh = init_device_mesh("cpu", (run.num_workers,))
        for module in [*model, model]:
            fully_shard(module, mesh=mesh)
        # The parameters themselves say which workers share them.
        group = None
    optimizer = make_optimizer(model)
    views: list[ViewChanged] = []
    progress: list[JoinProgress] = []

    def note(happening: Any) -> None:
        if isinstance(happening, ViewChanged):
            views.append(happening)
        elif isinstance(happening, JoinProgress):
            progress.append(happening)

    membership = Elastic(
        registry,
        run="test",
        replica=rank,
        min_replicas=run.min_replicas,
        founding_wait=2.0,
        quorum_wait=25,
        on_event=note,
        **{"suspect_after": SUSPECT_AFTER_S, **run.membership},
        checkpoint=torch.load(run.checkpoint) if run.checkpoint and rank >= run.founders else None,
    )
    tokens = Tokens()
    diloco = DiLoCo(
        model,
        optimizer,
        shard_group=group,
        **grouped(
            {
                "membership": membership,
                "weight": tokens.take if run.has_tokens else 1.0,
                "sync_every": 4,
                "wire": "int8",
                "block_size": BLOCK,
                "chunk_bytes": 512,
                "timeout": 40.0,
                "outer": Nesterov(lr=LR, momentum=MOMENTUM),
                **run.options,
            }
        ),
    )
    num_steps = 0
    try:
        num_steps = train_to_the_end(diloco, model, optimizer, rank, worker, run, signs, tokens)
        error = ""
    except LeftBehind as left:
        error = str(left)
    except SyncError as lost:
        if lost.stage != "replica":
            raise
        error = str(lost)
    rounds = [one for one in diloco.metrics() if one.is_applied]
    end = End(
        diloco.outer_hash(),
        hash_of([local_part(one) for one in model.parameters()]),
        diloco.inner_step,
        diloco.members,
        views,
        diloco.is_done or bool(error),
        len(rounds),
        error,
        progress,
        0 if transfer_of(diloco) is None else transfer_of(diloco).caught_up_bytes,
        [one.weight for one in rounds],
        dict(Counter(one.fragment for one in rounds)),
        num_steps,
    )
    diloco.close()
    return end


class Tokens:
    """Count tokens, as a training loop may; who takes them begins to count anew."""

    def __init__(self) -> None:
        self.count = 0

    def take(self) -> float:
        count, self.count = self.count, 0
        return float(count)


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train_to_the_end(
    diloco: DiLoCo,
    model: Any,
    optimizer: Any,
    replica: int,
    worker: int,
    run: Run,
    signs: dist.Store,
    tokens: Tokens,
) -> int:
    faults = [fault for fault in run.faults if fault.is_of(replica, worker)]
    pace_s, num_steps = run.pace_s, 0
    if replica == run.interrupted:
        interrupt_waits(diloco)
    while diloco.inner_step < run.last_step and not diloco.is_done:
        for fault in [one for one in faults if one.is_due(diloco)]:
            faults.remove(fault)
            act(diloco, fault)
        if replica == 0 and run.checkpoint and diloco.inner_step == run.saved_step:
            torch.save(diloco.state_dict(), run.checkpoint)
        if replica == min(diloco.members):
            for joiner, step in run.joins.items():
                is_next = joiner - 1 in diloco.members or not run.joins_in_turn
                if diloco.inner_step >= step and is_next:
                    signs.set(f"start {joiner}", "now")
        tokens.count += replica + 1
        with suppress(*([KeyboardInterrupt] if replica == run.interrupted else [])):
            num_steps += 1
            train(model, optimizer, replica, diloco.inner_step + 1)
        is_gone = run.pace_while >= 0 and run.pace_while not in diloco.members
        if is_gone or run.pace_until in diloco.members:
            pace_s = 0.0
        elif run.pace_until >= 0 and diloco.inner_step > run.last_step // 2:
            pace_s = 10 * run.pace_s
        time.sleep(pace_s)
    diloco.flush()
    return num_steps


def transfer_of(diloco: DiLoCo) -> Any:
    """Return what copies the state beside training; None where nothing does."""
    assert diloco._elastic is not None
    return diloco._elastic.transfer


def act(diloco: DiLoCo, fault: Fault) -> None:
    if fault.action == "leave":
        diloco.leave()
    elif fault.action == "kill now":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action == "kill between parts":
        die_between_parts(diloco)
    elif fault.action == "kill in change":
        die_in_change(fault.stage)
    else:
        diloco.exchange.inject_fault(
            action=fault.action, stage=fault.stage, num_peers=fault.num_peers
        )


def interrupt_waits(diloco: DiLoCo) -> None:
    """Break each first wait for a round off, as a Ctrl-C does; the round is under way meanwhile."""
    wait, flights = diloco._rounds._wait, []

    def wait_once_more(flight: Any) -> Any:
        if not any(flight is other for other in flights):
            flights.append(flight)
            raise KeyboardInterrupt
        return wait(flight)

    diloco._rounds._wait = wait_once_more  # type: ignore[method-assign]


def die_between_parts(diloco: DiLoCo) -> None:
    """Let SIGKILL end this process before its next send of a second part, with the first shared."""
    send, flights = diloco._rounds.send, []

    def send_one(*arguments: Any) -> Any:
        if flights:
            flights[0].wait()
            # The last vote is on its way.
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        flights.append(send(*arguments))
        return flights[0]

    diloco._rounds.send = send_one  # type: ignore[method-assign]


def die_in_change(stage: str) -> None:
    """Let SIGKILL end this process in its next change of the group.

    Args:
        stage: "seal": it has sealed, and has not said so; "connect": it has said so; "open": it
            has met the others, and waits for the view to be open.
    """

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    places: dict[str, tuple[Any, str]] = {
        "seal": (views, "positions_of"),
        "connect": (change, "connect"),
        "open": (Follower, "wait_until_entered"),
    }
    setattr(*places[stage], die)


def check_one_line(ends: Sequence[End | None]) -> None:
    """Each view has the same members on all of them."""
    seen: dict[int, tuple[int, ...]] = {}
    for end in ends:
        if end is None:
            continue
        numbers = [view.number for view in end.views]
        assert numbers == sorted(set(numbers))
        for view in end.views:
            assert seen.setdefault(view.number, view.members) == view.members


@pytest.fixture
def registry(tmp_path: Any) -> Iterator[Host]:
    host = Host(journal=tmp_path / "journal")
    yield host
    host.kill()
