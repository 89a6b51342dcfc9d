"""The inner optimizer's state of a donor reaches a newcomer under the names of its parameters."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from choice_groups import grouped
from elastic_replicas import SUSPECT_AFTER_S
from elastic_replicas import registry as registry
from exchange_helpers import connect_replica
from fault_replicas import BLOCK, connect, hash_of
from registries import Host
from torch import Tensor, nn
from workers import Crew, Pool
from zygote import Zygote

from diloco_comm import (
    Blocking,
    DiLoCo,
    Elastic,
    Link,
    ReplicaMismatch,
    Streaming,
    SyncError,
)
from diloco_comm.elastic.events import ViewChanged
from diloco_comm.exchange.membership import member
from diloco_comm.training import inner_state
from diloco_comm.training.inner_state import InnerStates

WIDTH = 16
NUM_PARAMETERS = 3 * (WIDTH * WIDTH + WIDTH)
# Less than a moment of a weight: each travels in several pieces.
PIECE_BYTES = 1000


@pytest.fixture(scope="module")
def pools(zygote: Zygote) -> Iterator[Callable[[int], Pool]]:
    """Processes of this module, without a process group."""
    crew = Crew(zygote)
    yield lambda world: crew.pool(world, init_group=False)
    crew.close()


def make_model() -> nn.Sequential:
    """Make a model in which many parameters have one shape."""
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def make_optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    params = list(model.parameters())
    if kind == "other order":
        biases = [param for param in params if param.ndim == 1]
        groups = [{"params": biases[::-1], "weight_decay": 0.0}]
        groups += [{"params": [p for p in params[::-1] if p.ndim == 2], "lr": 1e-4}]
        return torch.optim.AdamW(groups)
    makers: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
        "AdamW": lambda ps: torch.optim.AdamW(ps),
        "amsgrad": lambda ps: torch.optim.AdamW(ps, amsgrad=True),
        "fused": lambda ps: torch.optim.AdamW(ps, fused=True),
        "Adam": lambda ps: torch.optim.Adam(ps),
        "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1),
        "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
        "Adafactor": lambda ps: torch.optim.Adafactor(ps),
        "LBFGS": lambda ps: torch.optim.LBFGS(ps, max_iter=2),
    }
    return makers[kind](params)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, steps: int = 2) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randn(4, WIDTH, generator=generator)

        def loss(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            value = model(batch).square().mean()
            value.backward()
            return value

        optimizer.step(loss)


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of each parameter by name: digests of tensors, and numbers."""
    states = {name: optimizer.state.get(p, {}) for name, p in model.named_parameters()}
    return {name: {k: shown(v) for k, v in state.items()} for name, state in states.items()}


def shown(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return repr(value)
    return hash_of([value]), str(value.dtype), value.stride()


def share(
    rank: int, world: int, store: tuple[str, int], donor: str, newcomer: str, name: str
) -> Any:
    """Replicas 0 and 1 have trained, and replica 2 comes; return what each has at the end."""
    inner_state._PIECE_BYTES = PIECE_BYTES
    is_new = rank == 2
    model = make_model()
    optimizer = make_optimizer(model, newcomer if is_new else donor)
    if not is_new:
        train(model, optimizer, rank)
    exchange = connect_replica(store, rank, [0, 1, 2] if is_new else [0, 1], join=is_new, name=name)
    if not is_new:
        exchange.change_group([0, 1, 2], last_rounds={})
    states = InnerStates(list(model.named_parameters()), [optimizer])
    warnings: list[str] = []
    finish, received = member.Member._finish, 0

    def count(self: Any, job: Any) -> None:
        nonlocal received
        finish(self, job)
        received += job.counters["received_bytes"]

    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    inner_state.logger.addHandler(handler)
    member.Member._finish = count  # type: ignore[method-assign]
    try:
        states.share(exchange)
    finally:
        inner_state.logger.removeHandler(handler)
        member.Member._finish = finish  # type: ignore[method-assign]
    after = held(model, optimizer)
    states.forget()
    forgotten = held(model, optimizer)
    exchange.close()
    return after, forgotten, warnings, states.copied_bytes, received, states.describe()


@pytest.mark.parametrize(
    ("donor", "newcomer"),
    [
        ("AdamW", "other order"),
        ("AdamW", "fused"),
        ("momentum", "momentum"),
        ("Adafactor", "Adafactor"),
    ],
)
def test_each_parameter_has_the_state_of_the_donor(
    pools: Callable[[int], Pool], donor: str, newcomer: str
) -> None:
    pool = pools(3)
    ends = pool.run(share, pool.store, donor, newcomer, f"{donor} {newcomer}")
    (given, *_), (other, *_, other_received, _), end = ends
    after, forgotten, warnings, copied_bytes, received, _ = end
    assert after == given != other and all(given.values())
    assert not any(forgotten.values()) and not warnings
    assert all(end[5] == ends[0][5] for end in ends)
    # A replica that trains hears of sizes and digests only.
    if donor == "AdamW":
        assert copied_bytes == 8 * NUM_PARAMETERS + 4 * len(after)
        assert received - other_received > 0.9 * copied_bytes


@pytest.mark.parametrize(
    ("donor", "newcomer", "why"),
    [
        ("AdamW", "Adam", "trained by torch.optim.adam.Adam here and by torch.optim.adamw.AdamW"),
        ("LBFGS", "LBFGS", "LBFGS keeps 'old_dirs' of '0.weight', a list"),
    ],
)
def test_else_a_newcomer_goes_on_with_its_own_state(
    pools: Callable[[int], Pool], donor: str, newcomer: str, why: str
) -> None:
    pool = pools(3)
    ends = pool.run(share, pool.store, donor, newcomer, f"{donor} {newcomer}")
    after, _, _, copied_bytes, _, _ = ends[2]
    assert not any(after.values()) and copied_bytes == 0
    for _, _, warnings, _, _, _ in ends:
        (warning,) = warnings
        assert warning.startswith("replica 2 is not given the inner state of replica 0")
        assert why in warning


def test_what_the_registry_compares() -> None:
    model = make_model()

    def described(kind: str) -> dict[str, str]:
        optimizer = make_optimizer(model, kind)
        return InnerStates(list(model.named_parameters()), [optimizer]).describe()

    assert described("AdamW") == described("other order") == described("fused")
    kinds = ("AdamW", "amsgrad", "Adam", "SGD", "momentum")
    assert len({described(kind)["0.weight"] for kind in kinds}) == len(kinds)


def test_a_count_of_steps_lies_where_the_newcomer_wants_it() -> None:
    param = nn.Parameter(torch.empty(3, device="meta"))
    for fused, device in ((True, "meta"), (False, "cpu")):
        optimizer = torch.optim.AdamW([param], capturable=fused)
        owner = inner_state._Owner(param, optimizer, optimizer.param_groups[0])
        form = inner_state._Form([], [], torch.float32, False, True)
        room = inner_state._room(param, "step", form)
        assert room.device.type == "cpu"
        assert inner_state._placed(owner, "step", room).device.type == device


def lose_the_donor(rank: int, world: int, store: tuple[str, int]) -> Any:
    """The donor dies when it has sent a piece; the newcomer has trained in another run before."""
    inner_state._PIECE_BYTES = PIECE_BYTES
    model = make_model()
    optimizer = make_optimizer(model, "AdamW")
    train(model, optimizer, rank)
    before = held(model, optimizer)
    exchange = connect_replica(store, rank, [0, 1] if rank == 1 else [0], join=rank == 1)
    if rank == 0:
        exchange.change_group([0, 1], last_rounds={})
        copy_to, num_pieces = exchange.copy_to, iter(range(3))

        def copy_or_die(*arguments: Any) -> None:
            if next(num_pieces) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            copy_to(*arguments)

        exchange.copy_to = copy_or_die  # type: ignore[method-assign]
    states = InnerStates(list(model.named_parameters()), [optimizer])
    with pytest.raises(SyncError):
        states.share(exchange)
    is_kept = held(model, optimizer) == before
    states.forget()
    exchange.close()
    return is_kept and held(model, optimizer) == before


def test_a_donor_dies_while_the_state_travels(fresh_workers: Callable[..., Pool]) -> None:
    pool = fresh_workers(2, init_group=False)
    assert pool.run(lose_the_donor, pool.store, expect_exit={0}) == [None, True]


def differ(rank: int, world: int, store: tuple[str, int], registry: str) -> Any:
    """Replica 1 comes with two other optimizers, and then with another order of parameters."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    signs = connect(store)
    seen: dict[int, Any] = {}

    def attach(kind: str) -> tuple[DiLoCo, nn.Module, torch.optim.Optimizer]:
        model = make_model()
        optimizer = make_optimizer(model, kind)

        def note(happening: Any) -> None:
            if isinstance(happening, ViewChanged):
                seen[len(happening.members)] = held(model, optimizer)

        membership = Elastic(
            registry,
            run="test",
            replica=rank,
            founding_wait=0.0,
            quorum_wait=25,
            suspect_after=SUSPECT_AFTER_S,
            inner_state=True,
            on_event=note,
        )
        options = {"sync_every": 4, "block_size": BLOCK, "timeout": 40.0}
        return (
            DiLoCo(model, optimizer, **grouped({"membership": membership, **options})),
            model,
            optimizer,
        )

    if rank == 0:
        diloco, model, optimizer = attach("AdamW")
        signs.set("begun", "now")
        while not signs.check(["joined"]):
            train(model, optimizer, diloco.inner_step, 1)
        diloco.close()
        return seen
    signs.wait(["begun"])
    errors = []
    for kind in ("SGD", "amsgrad"):
        with pytest.raises(ReplicaMismatch) as caught:
            attach(kind)
        errors.append(str(caught.value))
    diloco, _, _ = attach("other order")
    signs.set("joined", "now")
    diloco.close()
    return errors, seen


@pytest.mark.nightly("5 s; the first tier has other refusals of a state")
def test_another_optimizer_is_refused_before_it_comes(
    fresh_workers: Callable[..., Pool], registry: Host
) -> None:
    pool = fresh_workers(2, init_group=False)
    donor, (errors, newcomer) = pool.run(differ, pool.store, registry.address, timeout=60)
    there = '" on replica 1 and "torch.optim.adamw.AdamW decoupled_weight_decay" on replica 0: '
    for error, kind in zip(errors, ("sgd.SGD", "adamw.AdamW amsgrad"), strict=True):
        assert f'inner_optimizer.0.bias is "torch.optim.{kind}' in error and there in error
    assert donor[2] == newcomer[2] and all(newcomer[2].values())


def count_steps(
    rank: int, world: int, store: tuple[str, int], registry: str, options: dict[str, Any]
) -> list[tuple[int, int]]:
    """Return the inner step and AdamW's count at the end of each step, and where replica 1 comes.

    A function given to ``after_step`` reads both, in each step.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    signs = connect(store)
    if rank == 1:
        signs.wait(["begun"])
    model = make_model()
    optimizer = make_optimizer(model, "AdamW")
    elastic = Elastic(
        registry,
        run="counted",
        replica=rank,
        founding_wait=0.0,
        quorum_wait=25,
        suspect_after=SUSPECT_AFTER_S,
        inner_state=True,
        total_steps=10_000,
    )
    diloco = DiLoCo(model, optimizer, peers=elastic, link=Link(timeout=40.0), **options)
    counts: list[tuple[int, int]] = []

    def look() -> None:
        states = [optimizer.state.get(param, {}) for param in model.parameters()]
        counts.extend((diloco.inner_step, int(state.get("step", 0))) for state in states)

    if rank == 1:
        look()
        signs.set("joined", "now")
        diloco.close()
        return counts
    while not signs.check(["joined"]):
        diloco.after_step(look)
        train(model, optimizer, diloco.inner_step, 1)
        if diloco.inner_step > 8:
            signs.set("begun", "now")
    diloco.close()
    return counts


@pytest.mark.parametrize("overlap", [Blocking(), Streaming(1, 0.5)])
def test_the_state_is_of_the_inner_step_at_which_a_newcomer_begins(
    overlap: Any, fresh_workers: Callable[..., Pool], registry: Host
) -> None:
    pool = fresh_workers(2, init_group=False)
    options = {"sync_every": 4, "overlap": overlap}
    member, newcomer = pool.run(count_steps, pool.store, registry.address, options, timeout=60)
    assert len(member) > 8 and all(step == count for step, count in member)
    assert len(newcomer) == 6 and all(step == count > 0 for step, count in newcomer)


# ----------------------------------------------------------------- schedules of the learning rate


def told_of_schedules(
    optimizer: torch.optim.Optimizer, inner_step: int, caplog: pytest.LogCaptureFixture
) -> list[str]:
    caplog.clear()
    inner_state.warn_of_schedules([optimizer], inner_step)
    return caplog.messages


def test_a_schedule_that_begins_in_the_middle_of_a_run_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    schedules = torch.optim.lr_scheduler
    optimizer = make_optimizer(make_model(), "AdamW")
    assert told_of_schedules(optimizer, 24, caplog) == []
    schedule = schedules.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 40))
    # Another optimizer's schedule says nothing about this one.
    other = make_optimizer(make_model(), "SGD")
    others = schedules.StepLR(other, 1)
    other.step()
    others.step()
    assert told_of_schedules(optimizer, 0, caplog) == []
    assert told_of_schedules(optimizer, 24, caplog) == [
        "training goes on at inner step 24, and the learning rate of this replica is behind: its "
        "LambdaLR has taken 0 steps; call scheduler.step() 24 times before the first step, unless "
        "it counts epochs"
    ]
    optimizer.step()
    for _ in range(8):
        schedule.step()
    # As in a program that has resumed from a checkpoint of its own.
    [sentence] = told_of_schedules(optimizer, 24, caplog)
    assert "has taken 8 steps; call scheduler.step() 16 times" in sentence
    # A scheduler whose constructor has not come to its optimizer yet.
    half_made = schedules.StepLR.__new__(schedules.StepLR)
    for _ in range(16):
        schedule.step()
    assert told_of_schedules(optimizer, 24, caplog) == []
    del half_made


def test_a_schedule_of_parts_has_moved_with_its_first_part(
    caplog: pytest.LogCaptureFixture,
) -> None:
    schedules = torch.optim.lr_scheduler
    optimizer = make_optimizer(make_model(), "AdamW")
    parts = [schedules.ConstantLR(optimizer), schedules.ExponentialLR(optimizer, 0.9)]
    whole = schedules.SequentialLR(optimizer, parts, milestones=[10])
    [sentence] = told_of_schedules(optimizer, 3, caplog)
    assert "call scheduler.step() 3 times" in sentence
    optimizer.step()
    for _ in range(3):
        whole.step()
    assert told_of_schedules(optimizer, 3, caplog) == []
