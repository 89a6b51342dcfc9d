"""Sharded parameters (DTensors), and wrappers that join ranks: DDP, FSDP and ZeRO.

The local shard is exchanged with the same shard of the other replicas. The shard is looked up anew
at each use, because FSDP may give a parameter other memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether the tensor is a DTensor."""
    # A program that has not imported the module has no DTensor, and the import takes seconds.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_whole(tensor: Tensor) -> bool:
    """Whether each worker holds all elements of the tensor."""
    if not is_sharded(tensor):
        return True
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    placements = enumerate(tensor.placements)  # type: ignore[attr-defined]
    return all(one.is_replicate() or mesh.size(dim) == 1 for dim, one in placements)


def local(tensor: Tensor) -> Tensor:
    """Return this worker's shard of a tensor, or all of it, detached; it shares the memory."""
    with torch.no_grad():
        return (tensor.to_local() if is_sharded(tensor) else tensor).detach()  # type: ignore[attr-defined]


def like(shard: Tensor, tensor: Tensor) -> Tensor:
    """Return ``shard`` as the local part of a tensor that is distributed like ``tensor``."""
    if not is_sharded(tensor):
        return shard
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        shard,
        tensor.device_mesh,  # type: ignore[attr-defined]
        tensor.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def part_of(saved: Tensor, tensor: Tensor) -> Tensor:
    """Return this worker's part of a saved tensor, a DTensor or the whole, for ``tensor``."""
    if not is_sharded(tensor) or is_sharded(saved):
        return local(saved)
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    # Without a source rank nothing is sent: every worker has the whole tensor.
    return local(distribute_tensor(saved.detach(), mesh, placements, src_data_rank=None))


def misfit(saved: Tensor, tensor: Tensor) -> str:
    """Return why ``part_of`` cannot take a saved tensor; "" if it can."""
    if saved.shape != tensor.shape:
        return f"has shape {tuple(saved.shape)}, {tuple(tensor.shape)} expected"
    if not is_sharded(saved):
        return ""
    if is_sharded(tensor) and _split(saved) == _split(tensor):
        return ""
    return (
        "was sharded in another way: read it with torch.distributed.checkpoint, or give the whole "
        "tensor (full_tensor())"
    )


def _split(tensor: DTensor | Any) -> tuple[Any, ...]:
    return tuple(tensor.device_mesh.shape), tuple(tensor.placements)


def position(tensor: Tensor) -> str:
    """Return words for the part of a tensor that this worker holds; "" for all of it."""
    if not is_sharded(tensor):
        return ""
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    placements = ", ".join(str(one) for one in tensor.placements)  # type: ignore[attr-defined]
    where = list(mesh.get_coordinate() or [])
    return f"part {where} of {list(mesh.shape)} ({placements}) of {list(tensor.shape)}"


def worker(tensors: Sequence[Tensor]) -> str:
    """Name this worker among the workers that hold the shards of a replica, as "1of4"; "" alone.

    Parameters may have meshes of different sizes, where several workers hold the same shard. The
    largest mesh tells all workers apart.
    """
    mesh = _largest_mesh(tensors)
    if mesh is None or mesh.size() == 1:
        return ""
    ranks = mesh.mesh.flatten().tolist()
    return f"{ranks.index(dist.get_rank())}of{len(ranks)}"


def _largest_mesh(tensors: Sequence[Tensor]) -> Any:
    meshes: list[Any] = [t.device_mesh for t in tensors if is_sharded(t)]  # type: ignore[attr-defined]
    return max(meshes, key=lambda one: one.size(), default=None)


def workers_group(tensors: Sequence[Tensor], timeout: float) -> dist.ProcessGroup | None:
    """Return a group of all workers that hold the shards of a replica; None without DTensors.

    A mesh of several dimensions has no group of all its members: a group is made in a collective
    call.

    Args:
        timeout: Seconds that an exchange may take. Collectives of the group made here wait twice as
            long, see ``WorkerMessages``.
    """
    mesh = _largest_mesh(tensors)
    if mesh is None:
        return None
    wide = [dim for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    if len(wide) <= 1:
        return mesh.get_group(wide[0] if wide else 0)
    ranks = sorted(mesh.mesh.flatten().tolist())
    return dist.new_group(
        ranks,
        timeout=timedelta(seconds=2 * timeout),
        use_local_synchronization=True,
        group_desc="diloco_comm/replica",
    )


def held_part(tensor: Tensor) -> Any:
    """Return a key of plain values, equal on workers that hold the same elements of a tensor."""
    if not is_sharded(tensor):
        return None
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    where = zip(mesh.get_coordinate() or [], tensor.placements, strict=False)  # type: ignore[attr-defined]
    return [None if placement.is_replicate() else place for place, placement in where]


def spanned_ranks(tensors: Sequence[Tensor]) -> set[int]:
    """Return the global ranks that the tensors are distributed over."""
    meshes: list[Any] = [t.device_mesh for t in tensors if is_sharded(t)]  # type: ignore[attr-defined]
    return {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}


# ---------------------------------------------------------------------------------------- FSDP


def fsdp_modules(model: nn.Module) -> tuple[Any, ...]:
    """List the modules that ``fully_shard`` was called on."""
    module = sys.modules.get("torch.distributed.fsdp")
    if module is None:
        return ()
    return tuple(m for m in model.modules() if isinstance(m, module.FSDPModule))


def reshard(modules: Sequence[Any]) -> None:
    """Free the gathered copies that a forward without a backward left behind.

    The next forward would use the copies, and would not see what is written to the shards.
    """
    for module in modules:
        module.reshard()


# ------------------------------------------------------------------------ modules that join ranks


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
    ranks = spanned_ranks(list(model.parameters()))
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


def batch_norms(model: nn.Module) -> Iterator[Wrapper]:
    """Find the SyncBatchNorm layers, which average each batch's statistics over ranks."""
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm):
            group = module.process_group or dist.group.WORLD
            yield _over("SyncBatchNorm", group, does="averages the statistics of each batch over")


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
