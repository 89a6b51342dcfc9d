"""Keep the steps of a trainer, of its schedules and of DiLoCo alike."""

from __future__ import annotations

import warnings
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..base.checks import logger_of
from ..training.diloco import DiLoCo

_logger = logger_of(__name__)


def move_schedule(schedule: Any, num_steps: int) -> None:
    """Take steps of a learning-rate schedule that others have taken before this replica came.

    Args:
        schedule: A scheduler, or the wrapper of accelerate around a scheduler; None does nothing.
    """
    # A scheduler of the user's may keep another one as ``scheduler``.
    is_own = isinstance(schedule, LRScheduler)
    inner = schedule if is_own else getattr(schedule, "scheduler", schedule)
    if num_steps < 1 or inner is None:
        return
    if isinstance(inner, ReduceLROnPlateau) or not isinstance(inner, LRScheduler):
        _logger.warning(
            "the learning rate of this replica begins anew, and the group has taken %d steps: a "
            "%s cannot be moved there",
            num_steps,
            type(inner).__name__,
        )
        return
    with warnings.catch_warnings():
        # The optimizer has not taken these steps.
        warnings.simplefilter("ignore")
        for _ in range(num_steps):
            inner.step()


def leave_schedules(diloco: DiLoCo) -> None:
    """Say that a callback has moved the schedules: they may count epochs or batches."""
    if diloco._elastic is not None:
        diloco._elastic.leave_schedules()


class TrainerSteps:
    """Keep DiLoCo's count of inner steps equal to the trainer's count.

    After an overflow a GradScaler does not call an optimizer that is not fused, so no hook counts
    the step. The trainer counts that step, and all replicas have agreed on a number of steps.

    Args:
        diloco: A DiLoCo with one optimizer: a trainer does not count the steps of several.
        num_steps: Steps that the trainer has counted so far.
    """

    def __init__(self, diloco: DiLoCo, num_steps: int) -> None:
        self._diloco = diloco
        self._missing = num_steps - self._num_hooked()

    def _num_hooked(self) -> int:
        hooks = self._diloco._hooks
        return 0 if hooks is None else hooks.num_steps

    def follow(self, num_steps: int) -> None:
        """Count the inner steps that no hook has counted, as skipped steps.

        Args:
            num_steps: Steps that the trainer has counted so far, skipped steps included.

        Raises:
            SyncError: As ``DiLoCo.step``.
        """
        # Without hooks (attach=False) the user counts the steps.
        if self._diloco._hooks is None:
            return
        while num_steps - self._num_hooked() > self._missing:
            self._missing += 1
            self._diloco._step(is_skipped=True)
