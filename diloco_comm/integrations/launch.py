"""One replica for each process of a launch, under trainers that would make it one big replica."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..base.launch import Launch, find

# What tells trainers that they are several. Other names of these forms (LOCAL_DATA_DIR) are the
# site's, and TORCHELASTIC_ERROR_FILE is where a worker tells torchrun what it has died of.
_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
)
# SLURM's to Lightning, and of ``srun --mpi=pmi2`` to accelerate.
_SRUN = ("SLURM_NTASKS", "SLURM_PROCID", "PMI_RANK", "PMI_SIZE")


def replica_per_process(*, timeout_s: float = 300.0) -> dict[str, Any]:
    """Make this process a replica of its own, and hide the launch from the trainer.

    Under ``torchrun --nproc-per-node 4`` a trainer takes the four processes for one data-parallel
    group and averages their gradients at every step. Called first, before a trainer is made, this
    takes the launcher's variables out of the environment; each process then trains as if it were
    alone. Where there are GPUs, it sees only that of its local rank, or none if all are hidden.

    Args:
        timeout_s: Seconds to wait for the store of rank 0.

    Returns:
        ``store``, ``replica`` and ``num_replicas`` for ``DiLoCo`` and for the callbacks here; empty
        when nobody launched this process, which is then the only replica.

    Raises:
        RuntimeError: If ``torch.distributed`` is initialised already.
    """
    launch = find()
    if launch is None:
        return {}
    if dist.is_initialized():
        raise RuntimeError(
            "replica_per_process() must come before torch.distributed is initialised: call it "
            "first, before the trainer is made"
        )
    store = _connect(launch, timeout_s)
    for name in (*_TORCHRUN, *_SRUN):
        os.environ.pop(name, None)
    _show_one_device(launch.local_rank)
    return {"store": store, "replica": launch.rank, "num_replicas": launch.world_size}


def _connect(launch: Launch, timeout_s: float) -> dist.Store:
    """Use the store of torchrun's agent, which outlives the replicas, or host one in rank 0."""
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        launch.master_addr,
        launch.master_port,
        is_master=launch.rank == 0 and not has_agent,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )
    # Workers that torchrun has restarted must not read what their predecessors wrote.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"replica_per_process/{attempt}", store)


def _show_one_device(local_rank: int) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # An empty list hides all devices.
    if visible == "":
        return
    devices = visible.split(",") if visible else [str(index) for index in range(local_rank + 1)]
    if local_rank < len(devices):
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[local_rank]
