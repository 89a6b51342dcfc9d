"""Modules and optimizers that join ranks at every step: DDP, FSDP and ZeRO, and the ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from . import sharding


@dataclass(frozen=True)
class Wrapper:
    """A module that averages gradients of several ranks, or an optimizer that steps for them.

    Attributes:
        name: Name of the class or function in torch.
        argument: The argument of that class that sets the ranks.
        ranks: Global numbers of the ranks that are joined.
        groups: The process groups of these ranks; none for the mesh of DTensors.
        does: A verb phrase, which the ranks follow in messages.
    """

    name: str
    argument: str
    ranks: frozenset[int]
    groups: tuple[dist.ProcessGroup, ...] = ()
    does: str = "averages gradients over"


def around(model: nn.Module, optimizers: Iterable[Any] = ()) -> Iterator[Wrapper]:
    """Find the wrappers of this module, of the modules inside it, and ZeRO among the optimizers."""
    ranks = sharding.spanned_ranks(list(model.parameters()))
    if ranks:
        yield Wrapper("FullyShardedDataParallel", "mesh", frozenset(ranks))
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            yield _over("DistributedDataParallel", module.process_group)
        elif _is_fsdp1(module):
            yield _over("FullyShardedDataParallel", *_fsdp1_groups(module))
        elif _is_replicated(module):
            yield _over("replicate()", _replicate_group(module))
    for optimizer in optimizers:
        if _is_zero(optimizer):
            name = "ZeroRedundancyOptimizer"
            yield _over(name, optimizer.process_group, does="divides one optimizer step among")


def _over(name: str, *groups: Any, does: str = Wrapper.does) -> Wrapper:
    ranks = [rank for group in groups for rank in dist.get_process_group_ranks(group)]
    return Wrapper(name, "process_group", frozenset(ranks), groups, does)


# The modules of torch are not imported here, because an import takes long: a program that has not
# imported a module has no objects of that module.


def _is_fsdp1(module: nn.Module) -> bool:
    """Whether the module is the first FSDP's wrapper, whose parameters are no DTensors."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def _fsdp1_groups(module: Any) -> list[Any]:
    # With a hybrid strategy the second group averages the sums of the first group.
    groups = [module.process_group, getattr(module, "_inter_node_pg", None)]
    return [group for group in groups if group is not None]


def _is_zero(optimizer: Any) -> bool:
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return zero is not None and isinstance(optimizer, zero.ZeroRedundancyOptimizer)


def _is_replicated(module: nn.Module) -> bool:
    """Whether ``torch.distributed._composable.replicate`` was called on the module."""
    composable = sys.modules.get("torch.distributed._composable.replicate")
    return composable is not None and isinstance(module, composable.DDP)


def _replicate_group(module: nn.Module) -> Any:
    """Return the group of the module's DDP; before the first forward, the group it will have."""
    state = sys.modules["torch.distributed._composable.replicate"].replicate.state(module)
    if state.has_initialized:
        return state._ddp.process_group
    mesh = state._init_kwargs.get("device_mesh")
    if mesh is not None:
        return mesh.get_group()
    return state._init_kwargs.get("process_group") or dist.group.WORLD
