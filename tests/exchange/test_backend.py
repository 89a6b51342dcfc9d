"""The backend "diloco": large fp32 all-reduces are quantised, and what may go wrong."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from problems import Regression, batch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from workers import Pool

import diloco_comm
from diloco_comm import SyncError
from diloco_comm.backend import DilocoProcessGroup


def close(a: Tensor, b: Tensor) -> bool:
    """Equal but for the order of an fp32 sum."""
    return torch.allclose(a, b, atol=1e-5)


def large_and_small(
    rank: int, world: int, address: tuple[str, int], backend: str, wire: str
) -> dict[str, Any]:
    with group(rank, world, address, f"{backend} {wire}", backend, BACKEND_WIRE=wire):
        total, mean, work_total = numbers(rank), numbers(rank), numbers(rank)
        dist.all_reduce(total)
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        work = dist.all_reduce(work_total, async_op=True)
        work.wait()
        expected = diloco_comm.all_reduce(numbers(rank), wire=wire)
        exact = sum(numbers(r) for r in range(world))
        small, largest = numbers(rank, LARGE - 4), numbers(rank)
        whole = torch.arange(LARGE) * (rank + 1)
        dist.all_reduce(small)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        dist.all_reduce(whole)
        digest = total.numpy().tobytes()
        return {
            "digest": digest,
            "quantised": torch.equal(total, expected * world) and torch.equal(mean, expected),
            "async": torch.equal(work_total, total) and work.is_completed(),
            "is_exact": torch.equal(total, exact),
            "error": float((total - exact).norm() / exact.norm()),
            "small": close(small, sum(numbers(r, LARGE - 4) for r in range(world))),
            "max": torch.equal(largest, torch.stack([numbers(r) for r in range(world)]).amax(0)),
            "integers": torch.equal(whole, torch.arange(LARGE) * (world * (world + 1) // 2)),
        }


@pytest.mark.parametrize(
    ("world", "backend", "wire", "bound"),
    [(2, "diloco", "int8", 0.0102), (3, "cpu:diloco", "int4", 0.185), (2, "diloco", "fp32", 1e-7)],
)
def test_large_fp32_sums_are_quantised(
    world: int, backend: str, wire: str, bound: float, pools: Callable[[int], Pool]
) -> None:
    pool = pools(world)
    results = pool.run(large_and_small, pool.store, backend, wire)
    assert len({result.pop("digest") for result in results}) == 1
    for result in results:
        error, is_exact = result.pop("error"), result.pop("is_exact")
        assert error <= bound
        assert is_exact == (wire == "fp32" and world == 2)
        assert all(result.values()), result


def short_wire(rank: int, world: int, address: tuple[str, int], wire: str) -> tuple[bytes, float]:
    with group(rank, world, address, wire, BACKEND_WIRE=wire):
        total, exact = numbers(rank), sum(numbers(r) for r in range(world))
        dist.all_reduce(total)
        return total.numpy().tobytes(), float((total - exact).norm() / exact.norm())


@pytest.mark.parametrize(("wire", "error"), [("int2r", 0.363), ("sub2", 1.46)])
def test_blocks_of_a_wire_have_their_own_size(
    wire: str, error: float, pools: Callable[[int], Pool]
) -> None:
    """The error is that of one encoding, as the ranks have independent values and signs."""
    pool = pools(2)
    (one, found), (other, _) = pool.run(short_wire, pool.store, wire)
    assert one == other
    assert found == pytest.approx(error, rel=0.1)


def test_a_sparse_wire_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_COMM_BACKEND_WIRE", "topk64")
    with pytest.raises(ValueError, match="DILOCO_COMM_BACKEND_WIRE=topk64 needs error feedback"):
        DilocoProcessGroup(dist.HashStore(), 0, 1, timedelta(seconds=5))


def in_a_subgroup(rank: int, world: int, address: tuple[str, int]) -> bool:
    with group(rank, world, address, "subgroup"):
        mine = numbers(rank)
        pair = dist.new_group([0, 1])
        in_pair = mine.clone()
        if rank < 2:
            dist.all_reduce(in_pair, group=pair)
            mine = 2 * diloco_comm.all_reduce(mine, pair)
            assert dist.get_backend(pair) == "diloco"
        return torch.equal(in_pair, mine)


def test_a_subgroup_quantises_too(pools: Callable[[int], Pool]) -> None:
    pool = pools(3)
    assert pool.run(in_a_subgroup, pool.store) == [True] * 3


def values_out_of_range(rank: int, world: int, address: tuple[str, int]) -> list[bool]:
    """One rank has a NaN; several sums are under way and waited for in another order each."""
    with group(rank, world, address, "nan"):
        bad, good = numbers(rank), numbers(rank)
        if rank == 1:
            bad[7], bad[8] = float("nan"), float("inf")
        works = [dist.all_reduce(t, async_op=True) for t in (bad, good)]
        dist.barrier()
        for index in range(world):
            works[(rank + index) % 2].wait()
        mean = numbers(rank)
        mean[0] = float("inf")
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        exact = sum(numbers(r) for r in range(world))
        return [
            bool(bad[7].isnan()) and float(bad[8]) == float("inf"),
            close(bad[9:], exact[9:]),
            bool(good.isfinite().all()) and not torch.equal(good, exact),
            float(mean[0]) == float("inf") and close(mean[1:], exact[1:] / world),
        ]


def wait_for_a_late_peer(rank: int, world: int, address: tuple[str, int]) -> bool:
    with group(rank, world, address, "late"):
        dist.all_reduce(numbers(rank))  # the first one connects
        tensor = torch.full((LARGE,), float(rank))
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            store.wait(["waited"])
        work = dist.all_reduce(tensor, async_op=True)
        if rank == 0:
            with pytest.raises(dist.DistBackendError, match=r"not done after 0\.05 s"):
                work.wait(timedelta(milliseconds=50))
            store.set("waited", "")
        work.wait(timedelta(seconds=30))
        return bool(tensor.allclose(torch.ones(()), rtol=0.01))


def test_a_wait_has_its_timeout(pools: Callable[[int], Pool]) -> None:
    pool = pools(2)
    assert pool.run(wait_for_a_late_peer, pool.store) == [True, True]


def test_nan_and_inf_spread_as_usual(pools: Callable[[int], Pool]) -> None:
    pool = pools(2)
    assert pool.run(values_out_of_range, pool.store) == [[True] * 4] * 2


def train_ddp(
    rank: int, world: int, address: tuple[str, int], backend: str
) -> tuple[list[float], bytes]:
    with group(rank, world, address, f"ddp {backend}", backend, BACKEND_MIN_BYTES="4000"):
        model = DistributedDataParallel(Regression(width=40))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        losses = []
        for step in range(12):
            x, y = batch(rank, step % 3, 40)
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        # DDP before its group: freed later, it was seen to hang now and then in its destructor.
        del model, optimizer, loss
        gc.collect()
        return losses, weights.numpy().tobytes()


def test_ddp_trains_over_it(pools: Callable[[int], Pool]) -> None:
    pool = pools(2)
    (losses, first), (_, second) = pool.run(train_ddp, pool.store, "diloco")
    (exact_losses, exact), _ = pool.run(train_ddp, pool.store, "gloo")
    assert first == second != exact
    assert losses == pytest.approx(exact_losses, rel=0.02)
    assert losses[-1] < 0.5 * losses[0]


def lose_a_peer(rank: int, world: int, address: tuple[str, int]) -> list[str]:
    with group(rank, world, address, "death", BACKEND_MIN_BYTES="4000"):
        model = DistributedDataParallel(Regression(width=40))
        x, y = batch(rank, 0, 40)
        # In the second forward DDP makes its buckets anew, over gloo.
        for _ in range(3):
            nn.functional.mse_loss(model(x), y).backward()
        if rank == 1:
            os._exit(3)
        errors = []
        tensor = numbers(rank)
        for attempt in (
            lambda: nn.functional.mse_loss(model(x), y).backward(),
            lambda: dist.all_reduce(tensor),
        ):
            try:
                attempt()
            except (RuntimeError, SyncError) as error:
                errors.append(f"{type(error).__name__}: {error}")
        return [*errors, str(torch.equal(tensor, numbers(rank)))]


def test_a_dead_peer_is_an_error_not_a_crash(fresh_workers) -> None:
    pool = fresh_workers(2, init_group=False)
    [(in_backward, alone, unchanged), _] = pool.run(lose_a_peer, pool.store, expect_exit={1})
    assert in_backward.startswith("RuntimeError") and "all_reduce" in in_backward
    assert alone.startswith("SyncError") and unchanged == "True"


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"BACKEND_WIRE": "int3"}, "unknown wire 'int3'"),
        ({"BACKEND_MIN_BYTES": "-1"}, "DILOCO_COMM_BACKEND_MIN_BYTES must be a positive number"),
    ],
)
def test_bad_environment_is_one_sentence(
    env: dict[str, str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in env.items():
        monkeypatch.setenv(f"DILOCO_COMM_{key}", value)
    with pytest.raises(ValueError, match=sentence):
        DilocoProcessGroup(dist.HashStore(), 0, 1, timedelta(seconds=5))


# ------------------------------------ What the backend "diloco" does not quantise is what gloo does


def reduce_scatter(x: Tensor, world: int) -> list[Tensor]:
    out = torch.empty_like(x)
    dist.reduce_scatter(out, [x * (r + 1) for r in range(world)])
    return [out]


def uneven_exchange(x: Tensor, rank: int, world: int) -> list[Tensor]:
    """Rank r gets r + 1 elements of everybody."""
    counts = list(range(1, world + 1))
    out = torch.empty(world * (rank + 1))
    dist.all_to_all_single(out, x[: sum(counts)].clone(), [rank + 1] * world, counts)
    return [out]


def around(x: Tensor, rank: int, world: int, way: str) -> list[Tensor]:
    """Send to the next rank."""
    out = torch.empty_like(x)
    peers = (rank + 1) % world, (rank - 1) % world
    if way == "blocking":
        first, second = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
        for call in (first, second):
            call(*((x, peers[0]) if call is dist.send else (out, peers[1])))
        return [out]
    if way == "batch":
        pairs = [(dist.isend, x, peers[0]), (dist.irecv, out, peers[1])]
        works = dist.batch_isend_irecv([dist.P2POp(*pair) for pair in pairs])
    else:
        works = [dist.irecv(out, None if way == "any" else peers[1]), dist.isend(x, peers[0])]
    for work in works:
        work.wait()
    return [out]


def objects(rank: int, world: int) -> list[Any]:
    mine: Any = {"rank": rank, "words": "abc" * rank}
    everyone, gathered, scattered = [None] * world, [None] * world, [None]
    dist.all_gather_object(everyone, mine)
    dist.gather_object(mine, gathered if rank == 0 else None)
    dist.scatter_object_list(scattered, everyone if rank == 1 else None, src=1)
    given = [mine] if rank == 1 else [None]
    dist.broadcast_object_list(given, src=1)
    return [everyone, gathered, scattered, given]


def filled(call: Callable[..., Any], out: Tensor | list[Tensor], *args: Any, **kw: Any) -> Any:
    """What a call writes into its first argument."""
    call(out, *args, **kw)
    return out


def collectives(rank: int, world: int) -> dict[str, Callable[[], Any]]:
    x = numbers(rank)
    every = [torch.empty(LARGE) for _ in range(world)]
    rows = [x * (r + 1) for r in range(world)]
    flat, blank = torch.cat(rows), torch.empty(LARGE)
    group: Any = dist.group.WORLD
    return {
        "broadcast": lambda: filled(dist.broadcast, x.clone(), 1),
        "all_gather": lambda: filled(dist.all_gather, every, x),
        "all_gather_into_tensor": lambda: filled(dist.all_gather_into_tensor, flat.clone(), x),
        "gather": lambda: dist.gather(x, every if rank == 1 else None, 1) or every * (rank == 1),
        "scatter": lambda: filled(dist.scatter, blank, rows if rank == 1 else None, 1),
        "reduce": lambda: filled(dist.reduce, x.clone(), 1) if rank == 1 else dist.reduce(x, 1),
        "reduce_scatter": lambda: reduce_scatter(x, world),
        "reduce_scatter_tensor": lambda: filled(dist.reduce_scatter_tensor, blank, flat),
        "all_to_all": lambda: filled(dist.all_to_all, every, rows),
        "all_to_all_single": lambda: filled(dist.all_to_all_single, torch.empty_like(flat), flat),
        "uneven": lambda: uneven_exchange(x, rank, world),
        "all_reduce": lambda: filled(dist.all_reduce, x[:-4].clone(), op=dist.ReduceOp.MAX),
        "all_reduce_coalesced": lambda: filled(dist.all_reduce_coalesced, [x.clone(), x[:7] + 1]),
        "send, recv": lambda: around(x, rank, world, "blocking"),
        "isend, irecv": lambda: around(x, rank, world, "named"),
        "irecv of any": lambda: around(x, rank, world, "any"),
        "batch_isend_irecv": lambda: around(x, rank, world, "batch"),
        "objects": lambda: objects(rank, world),
        "barrier": dist.barrier,
        "functional": lambda: [
            *functional.all_gather_into_tensor_coalesced([x, x[:9]], group),
            *functional.reduce_scatter_tensor_coalesced([flat], "sum", [0], group),
            functional.all_to_all_single(flat, None, None, group),
            functional.broadcast(x, 1, group),
        ],
    }


def all_collectives(rank: int, world: int, address: tuple[str, int], backend: str) -> Any:
    # What autograd's wrappers of functional results hold does not travel between processes.
    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.numpy().tobytes()
        return [plain(item) for item in value] if isinstance(value, list) else value

    results = {}
    with group(rank, world, address, f"all {backend}", backend):
        assert dist.get_backend() == backend
        if backend != "gloo" and torch.__version__ < "2.14":  # torch asks for the name
            with pytest.raises(ValueError, match="only implemented for GLOO"):
                dist.monitored_barrier()
        else:
            dist.monitored_barrier()
        for name, call in collectives(rank, world).items():
            results[name] = plain(call())
    return results


@pytest.mark.parametrize("world", [2, 3])
def test_all_else_is_what_gloo_does(world: int, pools: Callable[[int], Pool]) -> None:
    pool = pools(world)
    ours = pool.run(all_collectives, pool.store, "diloco")
    assert ours == pool.run(all_collectives, pool.store, "gloo")
    everyone = [numbers(rank).numpy().tobytes() for rank in range(world)]
    assert all(result["all_gather"] == everyone for result in ours)


def start_and_forget(operation: str, rank: int, i: int) -> dist.Work | None:
    """Start an operation of two ranks on tensors that nobody else holds."""
    x = torch.ones(1000)
    if operation == "broadcast":
        dist.broadcast(x, i % 2, async_op=True)
    elif operation == "all_gather":
        dist.all_gather([torch.empty(1000), torch.empty(1000)], x, async_op=True)
    elif operation == "all_to_all_single":
        dist.all_to_all_single(torch.empty(1000), x, async_op=True)
    elif operation == "all_reduce_coalesced":
        dist.all_reduce_coalesced([x], async_op=True)
    elif operation == "barrier":
        dist.all_reduce(x, async_op=True)
        dist.barrier(async_op=True)
    else:
        # gloo wants these works held, not their tensors.
        return (dist.isend, dist.irecv)[rank](x, 1 - rank)
    return None


def forget_tensors(rank: int, world: int, address: tuple[str, int], operation: str) -> bool:
    with group(rank, world, address, operation):
        for work in [start_and_forget(operation, rank, i) for i in range(1000)]:
            if work is not None:
                work.wait()
        dist.barrier()
        return True


@pytest.mark.nightly("1 s each; two kinds of collectives", but=["all_to_all_single", "isend"])
@pytest.mark.parametrize(
    "operation",
    ["broadcast", "all_gather", "all_to_all_single", "all_reduce_coalesced", "barrier", "isend"],
)
def test_tensors_may_die_on_a_thread_of_gloo(operation: str, pools: Callable[[int], Pool]) -> None:
    """The GIL is wanted there to free their Python objects, under the lock of gloo's queue.

    An operation that is started with the GIL held then waits for ever.
    """
    pool = pools(2)
    assert pool.run(forget_tensors, pool.store, operation, timeout=30) == [True] * 2


def test_every_method_that_torch_calls_with_the_gil_gives_it_up() -> None:
    """torch's list of what a Python class may override, from its own header."""
    headers = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"
    (header,) = headers.rglob("PyProcessGroup.hpp")
    text = header.read_text().split("getSize", 1)[1]
    names = set(re.findall(r"intrusive_ptr<Work> (\w+)\(", text))
    assert len(names) >= 10
    # torch looks for this one by another name. A group of ours has no reconfigure().
    spelled = {"endCoalescing": "end_coalescing"}
    names = {spelled.get(name, name) for name in names - {"reconfigure"}}
    assert names <= vars(DilocoProcessGroup).keys()


# ---------- Process groups of a backend by its name, as the tests of the backend "diloco" make them


LARGE = 5003  # fp32 elements; 20,012 bytes
MIN_BYTES = 20_000


@contextmanager
def group(
    rank: int, world: int, address: tuple[str, int], name: str, backend: str = "diloco", **env: str
) -> Iterator[None]:
    settings = {"BACKEND_MIN_BYTES": str(MIN_BYTES), **env}
    os.environ |= {f"DILOCO_COMM_{key}": value for key, value in settings.items()}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=30))
    store = dist.PrefixStore(f"{name}/{world}", store)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
        try:
            yield
        finally:
            dist.destroy_process_group()
    finally:
        for key in settings:
            del os.environ[f"DILOCO_COMM_{key}"]


def numbers(rank: int, count: int = LARGE) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))
