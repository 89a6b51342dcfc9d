"""Record a trace of this process with torch.profiler; the program need not change.

``diloco-comm profile run`` sets ``DILOCO_COMM_PROFILE``. A process that then constructs ``DiLoCo``,
``AsyncDiLoCo`` or ``DecoupledDiLoCo``, or a group of the backend "diloco", and steps an optimizer
writes ``rank<r>.json.gz``.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.hooks import RemovableHandle

from . import env
from .checks import logger_of
from .files import whole_file

logger = logger_of(__name__)

# Holds the recorder of this process, once it has one.
_started: list[Recorder] = []


class Recorder:
    """Counts the steps of the first optimizer that steps, and records some of them."""

    def __init__(self, folder: Path, skip: int, steps: int) -> None:
        self.folder = folder
        # The rank is read now: ``replica_per_process`` later removes the launcher's variables.
        self._rank_at_start = _launched_rank()
        self._optimizer: Optimizer | None = None
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # The profiler warms up in the last skipped step.
        plan = schedule(wait=skip - 1, warmup=1, active=steps, repeat=1)
        self._profile = profile(
            activities=activities, schedule=plan, on_trace_ready=self._write, acc_events=False
        )
        self._is_running = False

    def attach(self) -> RemovableHandle:
        """Count the steps of all optimizers, until the handle is removed."""
        return register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Optimizer, *arguments: Any) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
            self._is_running = True
            self._attempt(self._profile.start)
        if optimizer is self._optimizer and self._is_running:
            self._attempt(self._profile.step)

    def stop(self) -> None:
        """Write the steps recorded so far, if training ends early."""
        if self._is_running:
            self._is_running = False
            self._attempt(self._profile.stop)

    def _attempt(self, action: Callable[[], None]) -> None:
        """Call a method of the profiler; an error is logged, and ends the recording alone."""
        try:
            action()
        except (OSError, RuntimeError) as error:
            self._is_running = False
            logger.error("rank %d has no trace, and training goes on: %s", self._rank(), error)

    def _write(self, finished: profile) -> None:
        self._is_running = False
        with whole_file("the trace", self.folder / f"rank{self._rank()}.json.gz") as path:
            finished.export_chrome_trace(str(path))

    def _rank(self) -> int:
        dist = torch.distributed
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return dist.get_rank()
        launched = _launched_rank()
        return (self._rank_at_start if launched is None else launched) or 0


def _launched_rank() -> int | None:
    """Return the rank of this process in its launch; None without a launcher."""
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID"))
    return None if rank is None else int(rank)


def start_if_asked() -> None:
    """Record this process from its next optimizer step on, if the environment asks for it.

    Only the first call starts a recording.
    """
    folder = env.profile_folder()
    if folder and not _started:
        recorder = Recorder(Path(folder), *env.profile_steps())
        recorder.attach()
        atexit.register(recorder.stop)
        _started.append(recorder)
