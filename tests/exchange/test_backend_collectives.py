"""What the backend "diloco" does not quantise is what gloo does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from backend_groups import LARGE, group, numbers
from torch import Tensor
from workers import Pool

from diloco_comm.backend import DilocoProcessGroup


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
