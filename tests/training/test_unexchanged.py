"""Frozen parameters and buffers, which no exchange carries, at the start of a run."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from choice_groups import grouped
from torch import Tensor, nn

from diloco_comm import DiLoCo, ReplicaMismatch
from diloco_comm.rounds import handshake


class Features(nn.Module):
    """A frozen random layer, buffers of several kinds, and a trained head."""

    def __init__(self, seed: int, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(4, width)
        self.base.requires_grad_(False)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 1)
        self.register_buffer("frequencies", torch.randn(3, width).t())
        self.register_buffer("mask", torch.rand(5) < 0.5)
        self.register_buffer("order", torch.randperm(7))
        self.register_buffer("cache", torch.randn(2), persistent=False)
        self.norm.running_mean.fill_(float(seed))


def attach(seed: int, **arguments: Any) -> tuple[nn.Module, DiLoCo]:
    model = Features(seed, arguments.pop("width", 6))
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    return model, DiLoCo(model, optimizer, sync_every=2, **grouped({"timeout": 30, **arguments}))


def begin(rank: int, world: int, seeds: list[int], arguments: dict[str, Any]) -> Any:
    """Return the tensors after the construction, or the sentence of its error."""
    try:
        model, diloco = attach(seeds[rank], **arguments)
    except ReplicaMismatch as error:
        return str(error)
    with diloco:
        return {name: tensor.clone() for name, tensor in [*model.state_dict().items()]} | {
            "cache": model.cache.clone()
        }


LOCAL = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "cache"}


@pytest.mark.parametrize("world", [2, 3])
def test_what_differs_is_copied_from_the_lowest_replica(world: int, workers) -> None:
    seeds = [5, 6, 5][:world]
    ends: list[dict[str, Tensor]] = workers(world).run(begin, seeds, {})
    truth = Features(5).state_dict()
    for seed, end in zip(seeds, ends, strict=True):
        for name in truth.keys() - LOCAL:
            assert torch.equal(end[name], truth[name]), name
        # Each replica has the statistics of its own data, and its own caches.
        assert end["norm.running_mean"].eq(float(seed)).all()
        assert torch.equal(end["cache"], Features(seed).cache)


def test_with_check_a_difference_is_named(workers) -> None:
    for text in workers(2).run(begin_with_other_base, {"init": "check"}):
        assert "buffers differ between replicas: 'base.weight'; load the same ones" in text


def begin_with_other_base(rank: int, world: int, arguments: dict[str, Any]) -> str:
    torch.manual_seed(0)
    model = Features(5)
    with torch.no_grad():
        model.base.weight[0, 0] += rank
    trained = [param for param in model.parameters() if param.requires_grad]
    try:
        DiLoCo(model, torch.optim.SGD(trained, lr=0.1), sync_every=2, **grouped(arguments)).close()
    except ReplicaMismatch as error:
        return str(error)
    return ""


def begin_beyond_the_limit(rank: int, world: int) -> str:
    limit = handshake._MOST_UNEXCHANGED_BYTES
    handshake._MOST_UNEXCHANGED_BYTES = 64
    try:
        return begin(rank, world, [1, 2], {})
    finally:
        handshake._MOST_UNEXCHANGED_BYTES = limit


def test_more_than_the_limit_is_refused_with_names(workers) -> None:
    first, second = workers(2).run(begin_beyond_the_limit)
    assert first == second
    assert "'base.bias', 'base.weight', 'frequencies' and others" in first
    assert "that are copied: load the same ones on all replicas" in first


def begin_with_another_size(rank: int, world: int) -> str:
    model = Features(5)
    model.register_buffer("mask", torch.ones(5 + rank, dtype=torch.bool))
    trained = [param for param in model.parameters() if param.requires_grad]
    try:
        DiLoCo(model, torch.optim.SGD(trained, lr=0.1), sync_every=2).close()
    except ReplicaMismatch as error:
        return str(error)
    return ""


def test_a_buffer_of_another_size_is_refused(workers) -> None:
    for text in workers(2).run(begin_with_another_size):
        assert "differ between replicas: 'mask', also in their sizes" in text


# ---------------------------------------------------------------------- neither sent nor copied


class Packed(Tensor):
    """A quantised weight as libraries have them: bytes and a scale, in one tensor class."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Packed:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(function)


class Quantised(nn.Module):
    def __init__(self, code: int) -> None:
        super().__init__()
        packed = Packed(torch.full((4, 4), code, dtype=torch.uint8), torch.ones(4))
        self.base = nn.Parameter(packed, requires_grad=False)
        torch.manual_seed(0)
        self.head = nn.Linear(4, 1)
        self.register_buffer("angles", torch.arange(3.0), persistent=False)


def begin_quantised(rank: int, world: int, codes: list[int], shift: float) -> list[str]:
    model = Quantised(codes[rank])
    model.angles += shift * rank
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        DiLoCo(model, optimizer, sync_every=2).close()
    return [str(one.message) for one in told]


@pytest.mark.parametrize(
    ("codes", "shift", "names"),
    [([3, 3], 0.0, ""), ([3, 5], 0.0, "'base.codes'"), ([3, 3], 1.0, "'angles'")],
)
def test_a_difference_that_is_not_copied_is_told(
    codes: list[int], shift: float, names: str, workers
) -> None:
    for told in workers(2).run(begin_quantised, codes, shift):
        assert [text.partition(" differ between")[0] for text in told] == [names] * bool(names)


def join_with(rank: int, world: int, address: tuple[str, int], seeds: list[int]) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        store = dist.TCPStore(*address, is_master=False)
        arguments: dict[str, Any] = {"store": store, "replica": rank}
        if rank < 2:
            diloco = attach(seeds[rank], num_replicas=2, **arguments)[1]
            diloco.change_group([0, 1, 2])
        else:
            diloco = attach(seeds[rank], init="join", members=[0, 1, 2], **arguments)[1]
        diloco.close()
    return [str(one.message) for one in told if "joins with" in str(one.message)]


@pytest.mark.parametrize("seed", [5, 6])
def test_a_newcomer_with_other_frozen_values_is_told(seed: int, workers) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for told in workers(3).run(join_with, ("127.0.0.1", store.port), [5, 5, seed]):
        names = "replica 2 joins with other values of 'base.bias', 'base.weight', 'cache' and"
        assert [text.startswith(names) for text in told] == [True] * (seed != 5), told
