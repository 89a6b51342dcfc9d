"""The rank of this process among the processes that torchrun or srun started."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

_TORCHRUN = ("RANK", "WORLD_SIZE")
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS")
# Rank 0's port under srun without MASTER_PORT is this one plus the job's number modulo 1000.
_SLURM_FIRST_PORT = 15000
# SLURM gives step numbers from here on to batch scripts and interactive shells, not to srun.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class Launch:
    """One process of a launch.

    Attributes:
        rank, world_size: Rank and number of all processes.
        local_rank, local_world_size: Rank and number of the processes on this host.
        master_addr, master_port: Address at which rank 0 listens.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int

    def variables(self) -> dict[str, str]:
        """Return the environment variables that torchrun sets and ``init_process_group`` reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def find(environ: Mapping[str, str] | None = None) -> Launch | None:
    """Read the launcher's variables; None for a process that no launcher started.

    torchrun's variables win over srun's, so that torchrun may run inside an srun task.

    Raises:
        ValueError: If a variable is not a number, or the first host is not known.
    """
    environ = os.environ if environ is None else environ
    if all(name in environ for name in _TORCHRUN):
        return Launch(
            _number(environ, "RANK"),
            _number(environ, "WORLD_SIZE"),
            _number(environ, "LOCAL_RANK", 0),
            _number(environ, "LOCAL_WORLD_SIZE", 1),
            environ.get("MASTER_ADDR", "127.0.0.1"),
            _number(environ, "MASTER_PORT", 29500),
        )
    return _slurm(environ) if _is_task(environ) else None


@dataclass
class Hidden:
    """The launch that ``replica_per_process`` has taken out of this process's environment.

    Attributes:
        world_size: Number of the launch's processes; 1 if no launch was taken out.
        pid: The process that has called ``replica_per_process``.
        is_used: Whether a DiLoCo of this process was told which replicas there are.
        has_trained: Whether an optimizer has taken a step in this process.
    """

    world_size: int = 1
    pid: int = 0
    is_used: bool = False
    has_trained: bool = False

    def warn_if_unused(self) -> None:
        """Warn at the end of a process that has trained without the others."""
        has_failed, is_forked = hasattr(sys, "last_value"), self.pid != os.getpid()
        if self.has_trained and not (self.is_used or has_failed or is_forked):
            print(
                f"replica_per_process() has made this process one of {self.world_size} replicas, "
                "but no DiLoCo was told of the others: what this process has trained is shared "
                "with none of them. Give **replicas to DiLoCo or to its callback, and the callback "
                "to the trainer",
                file=sys.stderr,
            )


hidden = Hidden()


def refuse_if_forgotten(environ: Mapping[str, str] | None = None) -> None:
    """Raise if a launcher has started several processes that are in no process group.

    Raises:
        RuntimeError: The message says which function to call.
    """
    environ = os.environ if environ is None else environ
    if hidden.world_size > 1:
        raise RuntimeError(
            f"replica_per_process() has made this process one of {hidden.world_size} replicas, "
            "but peers= is not given, so that each process would train alone: write `replicas = "
            "replica_per_process()`, and give **replicas to DiLoCo or to its callback"
        )
    if all(name in environ for name in _TORCHRUN):
        launcher, number = "torchrun", _number(environ, "WORLD_SIZE")
    elif _is_task(environ):
        launcher, number = "srun", _number(environ, "SLURM_NTASKS")
    else:
        return
    if number > 1:
        raise RuntimeError(
            f"{launcher} has started {number} processes, but torch.distributed is not initialised "
            "and peers= is not given, so that each process would train alone: call "
            "torch.distributed.init_process_group() first (in a trainer: replica_per_process()), "
            'or give peers="alone" if this process is meant to be the only replica'
        )


def _is_task(environ: Mapping[str, str]) -> bool:
    """Whether srun has started this process."""
    # A batch script or an interactive shell also has SLURM_NTASKS, but is a single process.
    has_all = all(name in environ for name in (*_SLURM, "SLURM_STEP_ID"))
    return has_all and _number(environ, "SLURM_STEP_ID") < _FIRST_SPECIAL_STEP


def _slurm(environ: Mapping[str, str]) -> Launch:
    job = _number(environ, "SLURM_JOB_ID", 0)
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    # A list such as "4(x2),3": the first host's number is taken on all hosts. Only the last hosts
    # may have fewer tasks, and there the number is too high.
    here = re.match(r"\d+", tasks)
    return Launch(
        _number(environ, "SLURM_PROCID"),
        _number(environ, "SLURM_NTASKS"),
        _number(environ, "SLURM_LOCALID", 0),
        int(here[0]) if here else 1,
        environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_STEP_NODELIST", "")),
        _number(environ, "MASTER_PORT", _SLURM_FIRST_PORT + job % 1000),
    )


def first_host(node_list: str) -> str:
    """Return the first host of SLURM's list, such as node07 of ``node[07-09,12],login1``.

    Raises:
        ValueError: If the list has no host.
    """
    match = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\]([^,]*))?", node_list)
    if match is None:
        raise ValueError(
            f"cannot tell the first host of the list {node_list!r}: set MASTER_ADDR to rank 0's"
        )
    return "".join(part or "" for part in match.groups())


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ValueError(f"{name} must be a whole number, got {text!r}") from None
