"""Make each process of a launch a replica, although trainers would join the processes."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..base import recording
from ..base.launch import Launch, find, hidden
from ..options import StorePeers

# The variables by which trainers find other processes. Similar names such as LOCAL_DATA_DIR belong
# to the site, and a failed worker writes its error for torchrun into TORCHELASTIC_ERROR_FILE.
_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
)
# Lightning reads SLURM's variables; accelerate reads those of ``srun --mpi=pmi2``.
_SRUN = ("SLURM_NTASKS", "SLURM_PROCID", "PMI_RANK", "PMI_SIZE")


def replica_per_process(*, timeout_s: float = 300.0) -> dict[str, Any]:
    """Make this process its own replica, and hide the launch from the trainer.

    Under ``torchrun --nproc-per-node 4`` a trainer takes the four processes for one data-parallel
    group and averages their gradients at every step. This function, called before a trainer is
    made, removes the launcher's variables from the environment, so that each process trains alone.
    Each process sees only the GPU of its local rank, or no GPU if all are hidden.

    Args:
        timeout_s: Seconds to wait for the store of rank 0.

    Returns:
        The argument ``peers`` of ``DiLoCo`` and of the callbacks in this package, by its name.
        Empty if no launcher started this process, the only replica then.

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
    # A recording names its file by the rank that is hidden below.
    recording.start_if_asked()
    store = _connect(launch, timeout_s)
    for name in (*_TORCHRUN, *_SRUN):
        os.environ.pop(name, None)
    _show_one_device(launch.local_rank)
    hidden.world_size, hidden.pid = launch.world_size, os.getpid()
    if launch.world_size > 1:
        _note_training()
        atexit.register(hidden.warn_if_unused)
    return {"peers": StorePeers(store, launch.rank, of=launch.world_size)}


def _note_training() -> None:
    """Note the first step of any optimizer of this process."""

    def note(*_: Any) -> None:
        hidden.has_trained = True

    # A hook cannot remove itself while torch goes through the hooks.
    register_optimizer_step_post_hook(note)


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
    # Workers that torchrun has restarted must not read entries of their predecessors.
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
