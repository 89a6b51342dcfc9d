"""Count the steps of a trainer for which its optimizer was not called."""

from __future__ import annotations

from ..training.diloco import DiLoCo


class TrainerSteps:
    """Keep DiLoCo's inner steps at the trainer's.

    A GradScaler that overflows leaves out an optimizer that is not fused, so that no hook counts
    the step; the trainer counts it, on its way to the end on which all replicas have agreed.

    Args:
        diloco: Of one optimizer: the steps of several are the user's to tell apart.
        num_steps: What the trainer has counted so far.
    """

    def __init__(self, diloco: DiLoCo, num_steps: int) -> None:
        self._diloco = diloco
        self._missing = num_steps - self._num_hooked()

    def _num_hooked(self) -> int:
        hooks = self._diloco._hooks
        return 0 if hooks is None else hooks.num_steps

    def follow(self, num_steps: int) -> None:
        """Take the inner steps, as skipped ones, that no hook has taken.

        Args:
            num_steps: What the trainer has counted so far, with those that it has skipped.

        Raises:
            SyncError: As ``DiLoCo.step``.
        """
        # Without hooks the user counts.
        if self._diloco._hooks is None:
            return
        while num_steps - self._num_hooked() > self._missing:
            self._missing += 1
            self._diloco._step(is_skipped=True)
