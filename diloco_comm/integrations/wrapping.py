"""Refuse to exchange between replicas whose gradients a trainer already averages at every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from ..base import env
from ..base.checks import timeout_seconds
from ..replica import wrappers
from ..replica.messages import WorkerMessages
from ..replica.wrappers import Wrapper
from ..rounds.agreement import handshake


def refuse_if_spans_replicas(model: nn.Module, arguments: Mapping[str, Any], remedy: str) -> None:
    """Raise if DDP or FSDP averages gradients over several replicas at every step.

    With a store this is a collective call of the workers whose gradients are averaged.

    Args:
        model: The model, wrapped by the trainer.
        arguments: Arguments of ``DiLoCo``.
        remedy: What to write instead, for the error.

    Raises:
        ValueError: The message names the ranks and the remedy.
    """
    for wrapper in wrappers.around(model):
        ranks = _several_replicas(wrapper, arguments)
        if ranks:
            raise ValueError(
                f"{wrapper.name} averages gradients over ranks {ranks} at every step, but these "
                f"are different replicas, which DiLoCo averages every sync_every steps: {remedy}"
            )


def refuse_if_alone_in_a_job(num_processes: int, arguments: Mapping[str, Any], remedy: str) -> None:
    """Raise if the trainer knows of one process, in a job of several.

    Such a trainer gives all replicas the same data and the same folder. On a CPU this happens to
    transformers and accelerate under torchrun, unless they are told to use the CPU.

    Args:
        num_processes: Number of processes that the trainer knows of.
        arguments: Arguments of ``DiLoCo``. If they name the replicas the check is skipped.
        remedy: What to write instead, for the error.

    Raises:
        ValueError: The message names the remedy.
    """
    named = ("group", "mesh", "store", "num_replicas", "membership")
    if any(arguments.get(name) is not None for name in named) or not dist.is_initialized():
        return
    world = dist.get_world_size()
    if num_processes == 1 and world > 1:
        raise ValueError(
            f"the trainer knows of one process, in a job of {world}: all of them would train on "
            f"the same data and write the same files: {remedy}, or give DiLoCo the group= of the "
            "replicas"
        )


def _several_replicas(wrapper: Wrapper, arguments: Mapping[str, Any]) -> list[int]:
    """Return the wrapper's ranks that are different replicas; [] if all are one replica."""
    if arguments.get("membership") is not None:
        # The processes of one launch are the workers of one replica.
        return []
    if arguments.get("store") is None:
        names = ("group", "mesh", "store", "num_replicas")
        group = handshake.replica_group(*(arguments.get(name) for name in names))
        replicas = [] if group is None else dist.get_process_group_ranks(group)
        shared = sorted(wrapper.ranks.intersection(replicas))
        return shared if len(shared) > 1 else []
    given = arguments.get("timeout")
    seconds = timeout_seconds(env.timeout_s() if given is None else given)
    # Workers that hold DTensors compare their replicas elsewhere.
    for group in wrapper.groups:
        replicas = WorkerMessages(group, seconds).gather(arguments.get("replica"))
        if len(set(replicas)) > 1:
            return dist.get_process_group_ranks(group)
    return []
