"""The process group for torchft's manager: its bits, its errors, and its run under a lighthouse."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import serving_command
from problems import Regression, batch
from torch import Tensor, nn
from workers import Pool

from diloco_comm import SyncError


def has_nightly() -> bool:
    """Whether torchft is the nightly, whose groups are configured by ``reconfigure``."""
    try:
        return bool(importlib.metadata.version("torchft-nightly"))
    except importlib.metadata.PackageNotFoundError:
        return False


needs_torchft = pytest.mark.skipif(
    not has_nightly(), reason="torchft is not installed: pip install torchft-nightly"
)
needs_torchtitan = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed"
)
WIDTH, TIMEOUT = 48, timedelta(seconds=20)
# The largest error of a mean, over the largest value of any replica.
ERRORS = {"fp32": 1e-6, "bf16": 2**-8, "int8": 2**-7, "int4": 2**-3}


def test_without_torchft_the_import_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "diloco_comm.integrations.torchft", raising=False)
    monkeypatch.setitem(sys.modules, "torchft", None)
    monkeypatch.setitem(sys.modules, "torchft.process_group", None)
    with pytest.raises(ModuleNotFoundError, match="pip install torchft-nightly"):
        import diloco_comm.integrations.torchft  # noqa: F401


@needs_torchft
def test_a_wire_that_needs_error_feedback_is_refused() -> None:
    from diloco_comm.integrations.torchft import ProcessGroupDiLoCo

    with pytest.raises(ValueError, match="needs error_feedback=True"):
        ProcessGroupDiLoCo(wire="topk64")


# ------------------------------------------------------------------------------ without a manager


def join(group: Any, place: tuple[str, int], name: str, rank: int, world: int) -> Any:
    """Let torchft configure a group by a store, as its manager does for each quorum."""
    from torchft.process_group import reconfigure_with_store

    reconfigure_with_store(group, f"{place[0]}:{place[1]}/{name}", rank, world, TIMEOUT)
    return group


def values(rank: int) -> list[Tensor]:
    """Tensors that go through the wire, one of them with gaps in memory."""
    random = torch.Generator().manual_seed(rank)
    dense = [torch.randn(size, generator=random) for size in (1, 513, 70_001)]
    return [*dense, torch.randn(40, 90, generator=random)[:, ::2]]


def averages(
    rank: int, world: int, place: tuple[str, int], name: str, wire: str
) -> tuple[list[Tensor], list[Tensor]]:
    """Means by torchft's gloo group, and by ours, as torchft's manager takes them."""
    from torchft.process_group import ProcessGroupGloo

    from diloco_comm.integrations.torchft import ProcessGroupDiLoCo

    results = []
    groups = (ProcessGroupGloo(TIMEOUT), ProcessGroupDiLoCo(TIMEOUT, wire=wire))
    for number, group in enumerate(groups):
        join(group, place, f"{name}/{number}", rank, world)
        tensors = values(rank)
        opts = dist.AllreduceOptions()
        opts.reduceOp = dist.ReduceOp.SUM
        # gloo takes no gaps in memory.
        whole = [t.contiguous() for t in tensors] if number == 0 else tensors
        works = [group.allreduce([tensor], opts) for tensor in whole]
        assert all(work.wait() for work in works)
        results.append([tensor / world for tensor in whole])
        count = torch.tensor([rank])
        group.allreduce([count], opts).wait()
        assert count.item() == sum(range(world))
        assert group.errored() is None
        group.shutdown()
    return results[0], results[1]


@needs_torchft
@pytest.mark.parametrize(
    ("world", "wire"), [(2, "fp32"), (2, "int8"), (2, "int4"), (3, "fp32"), (3, "int8")]
)
def test_means_are_those_of_gloo_and_equal_on_all_replicas(
    workers: Callable[[int], Pool], world: int, wire: str
) -> None:
    pool = workers(world)
    results = pool.run(averages, pool.store, f"means/{world}/{wire}", wire)
    sent = [values(rank) for rank in range(world)]
    for number in range(len(sent[0])):
        exact = results[0][0][number]
        ours = [one[1][number] for one in results]
        assert all(torch.equal(ours[0], other) for other in ours)
        if wire == "fp32" and world == 2:
            assert torch.equal(ours[0], exact)
        largest = max(float(one[number].abs().max()) for one in sent)
        assert float((ours[0] - exact).abs().max()) <= ERRORS[wire] * largest


def survive(rank: int, world: int, place: tuple[str, int]) -> tuple[str, Tensor]:
    """Exchange with a replica that dies, then without that replica."""
    from diloco_comm.integrations.torchft import ProcessGroupDiLoCo

    group = join(ProcessGroupDiLoCo(TIMEOUT), place, "lost/0", rank, world)
    opts = dist.ReduceOp.AVG
    group.allreduce([torch.ones(1000)], opts).wait()
    if rank == world - 1:
        time.sleep(600)
    tensor = torch.full((1000,), float(rank))
    dist.TCPStore(*place, is_master=False).set(f"lost/ready/{rank}", "")
    work = group.allreduce([tensor], opts)
    with pytest.raises(SyncError):
        work.wait()
    assert torch.equal(tensor, torch.full((1000,), float(rank)))
    found = group.errored()
    assert isinstance(found, SyncError)
    with pytest.raises(SyncError):
        group.allreduce([tensor], opts)
    join(group, place, "lost/1", rank, world - 1)
    assert group.errored() is None
    group.allreduce([tensor], opts).wait()
    group.shutdown()
    return type(found).__name__, tensor


@needs_torchft
def test_a_lost_replica_is_an_error_until_the_next_group(
    fresh_workers: Callable[..., Pool],
) -> None:
    pool = fresh_workers(3, init_group=False)
    pool.submit(survive, pool.store)
    store = dist.TCPStore(*pool.store, is_master=False)
    store.wait(["lost/ready/0", "lost/ready/1"])
    pool.kill(2)
    results = pool.collect(expect_exit={2})
    for _, tensor in results[:2]:
        assert torch.allclose(tensor, torch.full((1000,), 0.5), atol=0.01)
    assert torch.equal(results[0][1], results[1][1])


# --------------------------------------------------------------------------------- with a manager


def open_manager(lighthouse: str, rank: int, wire: str, model: nn.Module) -> Any:
    from torchft import Manager

    from diloco_comm.integrations.torchft import ProcessGroupDiLoCo

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupDiLoCo(TIMEOUT, wire=wire),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{rank}",
        hostname="127.0.0.1",
        init_sync=False,
    )
    # A replica is a job of its own, whose store lives as long as its manager.
    manager.store_of_test = store
    return manager


def open_diloco(manager: Any, model: nn.Module, inner: Any, **options: Any) -> Any:
    from torchft.local_sgd import DiLoCo

    fragments = list(model.children())
    outer = [
        torch.optim.SGD(fragment.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        for fragment in fragments
    ]
    return DiLoCo(manager, fragments, inner, outer, sync_every=4, pin_memory=False, **options)


def train(
    rank: int, world: int, lighthouse: str, folder: str, wire: str, options: dict[str, Any]
) -> None:
    """Train under torchft's DiLoCo until the test says stop; write each commit into a file."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    manager = open_manager(lighthouse, rank, wire, model)
    log = Path(folder, f"{rank}-{time.monotonic_ns()}")
    with open_diloco(manager, model, inner, **options) as diloco:
        step, committed = 0, -1
        while not Path(folder, "stop").exists():
            inputs, targets = batch(rank, step, WIDTH)
            nn.functional.mse_loss(model(inputs), targets).backward()
            inner.step()
            inner.zero_grad()
            step += 1
            time.sleep(0.01)
            if manager.current_step() > committed:
                committed = manager.current_step()
                outer = [t for f in diloco._fragments for t in f.original_parameters.values()]
                flat = torch.cat([tensor.flatten() for tensor in outer])
                bits = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
                with log.open("a") as file:
                    file.write(f"{committed} {manager.num_participants()} {bits}\n")
    manager.shutdown(wait=False)


def commits_of(folder: Path, rank: int, life: int = 0) -> dict[int, tuple[int, str]]:
    """Replicas and bits of the outer parameters, by the number of the commit."""
    logs = sorted(folder.glob(f"{rank}-*"))
    if len(logs) <= life:
        return {}
    text = logs[life].read_text()
    # The last line may be half written.
    lines = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
    return {int(step): (int(size), bits) for step, size, bits in lines}


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 100.0
    while not is_so():
        assert time.monotonic() < end, "not so within 100 s"
        time.sleep(0.05)


# Calls a replica dead after three seconds without a heartbeat.
LIGHTHOUSE = """
import sys, time
from torchft.coordination import LighthouseServer
server = LighthouseServer(
    bind="127.0.0.1:0", min_replicas=int(sys.argv[1]), join_timeout_ms=60_000,
    quorum_tick_ms=10, heartbeat_timeout_ms=3000,
)
print(server.address().rsplit(":", 1)[1], flush=True)
time.sleep(600)
"""


@pytest.fixture
def lighthouse(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a lighthouse for so many replicas; its address."""
    command = [sys.executable, "-c", LIGHTHOUSE, getattr(request, "param", 1)]
    with serving_command(command, env=os.environ | {"RUST_LOG": "error"}) as (_, port):
        yield f"http://127.0.0.1:{port}"


@needs_torchft
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "options",
    [{}, {"use_bucketization": True, "fragment_sync_delay": 1}],
    ids=["blocking", "overlapped"],
)
def test_one_replica_is_killed_and_comes_again(
    fresh_workers: Callable[..., Pool],
    lighthouse: str,
    tmp_path: Path,
    options: dict[str, Any],
) -> None:
    first, second = (fresh_workers(2, init_group=False) for _ in range(2))
    first.submit(train, lighthouse, str(tmp_path), "int8", options)

    def together(life: int) -> list[int]:
        mine, other = commits_of(tmp_path, 0), commits_of(tmp_path, 1, life)
        return [step for step in mine.keys() & other.keys() if mine[step][0] == other[step][0] == 2]

    until(lambda: len(together(0)) >= 3)
    first.kill(1)
    before = max(commits_of(tmp_path, 0))

    def goes_on_alone() -> bool:
        return any(step > before and one[0] == 1 for step, one in commits_of(tmp_path, 0).items())

    until(goes_on_alone)
    second.submit(train, lighthouse, str(tmp_path), "int8", options, ranks=[1])
    until(lambda: len(together(1)) >= 3)
    (tmp_path / "stop").touch()
    first.collect(expect_exit={1})
    second.collect()
    for life in (0, 1):
        mine, other = commits_of(tmp_path, 0), commits_of(tmp_path, 1, life)
        for step in together(life):
            assert mine[step] == other[step]


def train_by_torchtitan(rank: int, world: int, lighthouse: str) -> tuple[str, int, Tensor]:
    """Let torchtitan make manager and DiLoCo from its section, with our group as its gloo."""
    import torchft
    from torchtitan.experiments.torchft.config import FaultTolerance
    from torchtitan.experiments.torchft.manager import TorchFTManager, maybe_semi_sync_training

    from diloco_comm.integrations.torchft import ProcessGroupDiLoCo

    torchft.ProcessGroupGloo = partial(ProcessGroupDiLoCo, wire="int8")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "RANK": "0",
        "WORLD_SIZE": "1",
        "TORCHFT_LIGHTHOUSE": lighthouse,
    }
    section = FaultTolerance(
        enable=True,
        semi_sync_method="diloco",
        sync_steps=4,
        replica_id=rank,
        group_size=world,
        min_replica_size=world,
    )
    torch.manual_seed(0)
    model = Regression(WIDTH)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        ours = TorchFTManager(section)
    run: AbstractContextManager[Any] = maybe_semi_sync_training(
        section, ft_manager=ours, model=model, n_layers=0, optimizer=inner
    )
    with run:
        for step in range(12):
            inputs, targets = batch(rank, step, WIDTH)
            nn.functional.mse_loss(model(inputs), targets).backward()
            inner.step()
            inner.zero_grad()
    group = type(ours.manager._pg).__name__
    committed = ours.manager.current_step()
    ours.manager.shutdown(wait=False)
    return group, committed, torch.cat([p.detach().flatten() for p in model.parameters()])


@needs_torchft
@needs_torchtitan
@pytest.mark.timeout(200)
@pytest.mark.parametrize("lighthouse", [2], indirect=True, ids=["both"])
def test_torchtitan_makes_its_manager_with_the_group(
    fresh_workers: Callable[..., Pool], lighthouse: str
) -> None:
    pool = fresh_workers(2, init_group=False)
    results = pool.run(train_by_torchtitan, lighthouse, timeout=150)
    assert [one[:2] for one in results] == [("ProcessGroupDiLoCo", 3)] * 2
    assert torch.equal(results[0][2], results[1][2])
