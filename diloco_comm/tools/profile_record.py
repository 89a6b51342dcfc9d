"""Record a trace of this process with torch.profiler, without a change to its program.

``diloco-comm profile run`` sets ``DILOCO_COMM_PROFILE``; a process that imports ``diloco_comm`` and
steps an optimizer then writes ``rank<r>.json.gz``.
"""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.hooks import RemovableHandle


class Recorder:
    """Counts the steps of the first optimizer that steps, and records some of them."""

    def __init__(self, folder: Path, skip: int, steps: int) -> None:
        self.folder = folder
        self._optimizer: Optimizer | None = None
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # The step in which recording is warmed up is the last of the skipped ones.
        plan = schedule(wait=skip - 1, warmup=1, active=steps, repeat=1)
        self._profile = profile(
            activities=activities, schedule=plan, on_trace_ready=self._write, acc_events=False
        )
        self._is_running = False

    def attach(self) -> RemovableHandle:
        """Listen to all optimizers, until the handle is removed."""
        return register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Optimizer, *arguments: Any) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
            self._profile.start()
            self._is_running = True
        if optimizer is self._optimizer and self._is_running:
            self._profile.step()

    def stop(self) -> None:
        """Write what was recorded if training ends before the last step to record."""
        if self._is_running:
            self._is_running = False
            self._profile.stop()

    def _write(self, finished: profile) -> None:
        self._is_running = False
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank{_rank()}.json.gz"
        finished.export_chrome_trace(str(path))


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))


def record(folder: str, skip: int, steps: int) -> None:
    """Arrange for a trace of this process; nothing is started before its first step."""
    recorder = Recorder(Path(folder), skip, steps)
    recorder.attach()
    atexit.register(recorder.stop)
