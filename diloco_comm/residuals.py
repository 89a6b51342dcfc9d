"""What encoding loses, and what lost rounds owe: added to the next encoding of a fragment.

Either a lost round stays in the parameters, which the next encoding sees again: then residuals go
on when a round is agreed on. Or the caller moves the parameters at each send and gives a lost round
back by ``owe`` (``carries``): then they go on when a round is encoded, and several rounds may be
under way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .memory import CPU, persistent


class Residuals:
    """Residuals of the encoding and of the reduction of one fragment.

    Args:
        error_feedback: Keep what encoding loses.
        dtype: Of what is kept, fp32 or bf16.
        carries: See above.
        device, reduces_on: Of the fragment, and where the reduction is done.

    Attributes:
        value: Of the encoding, [num_elements], or None.
        reduce: Of the reduction of the runs that this rank owns, or None.
        new, new_reduce: What the next round writes.
        owed: fp32 [num_elements] that the next encoding adds, or None; with error feedback,
            ``value`` holds it.
    """

    def __init__(
        self,
        num_elements: int,
        *,
        error_feedback: bool,
        dtype: torch.dtype,
        carries: bool,
        device: torch.device = CPU,
        reduces_on: torch.device = CPU,
    ) -> None:
        self.num_elements, self.device, self.reduces_on = num_elements, device, reduces_on
        self.error_feedback, self.dtype, self.carries = error_feedback, dtype, carries
        self.value = persistent(num_elements, dtype, device) if error_feedback else None
        self.new = persistent(num_elements, dtype, device) if error_feedback else None
        self.reduce: Tensor | None = None
        self.new_reduce: Tensor | None = None
        self.owed: Tensor | None = None
        self._spent: Tensor | None = None
        self._is_reduction_stale = False

    def plan_reduction(self, count: int) -> None:
        """Start anew with ``count`` elements to reduce; 0 for none."""
        is_kept = self.error_feedback and count
        self.reduce = persistent(count, self.dtype, self.reduces_on) if is_kept else None
        self.new_reduce = persistent(count, self.dtype, self.reduces_on) if is_kept else None

    @property
    def added(self) -> Tensor | None:
        """What the next encoding adds to the pseudo-gradient, or None."""
        return self.owed if self.value is None else self.value

    @property
    def added_before(self) -> Tensor | None:
        """What the last encoding added; see ``rewind``."""
        return self._spent if self.value is None else self.new

    def owe(self, values: Tensor) -> None:
        """Add ``values`` (fp32 [num_elements]) to what the next encoding adds."""
        if self.added is None:
            self.owed = torch.zeros(self.num_elements, device=self.device)
        assert self.added is not None
        self.added.add_(values)

    def rewind(self) -> None:
        """Take back what the last encoding did to ``added``: the caller did not move the
        parameters, so that the next encoding sees the same values again."""
        assert self.carries
        if self.error_feedback:
            self.value, self.new = self.new, self.value
        else:
            self.owed, self._spent = self._spent, None

    def forget(self) -> None:
        """Owe nothing; a saved state brings what is owed."""
        self.owed = self._spent = None
        self._is_reduction_stale = False

    # ------------------------------------------------------------------- what becomes of a round

    def encoded(self) -> None:
        """A round is encoded and under way."""
        if self.carries:
            self._spent, self.owed = self.owed, None
            self.swap()

    def agreed(self) -> None:
        """A round is agreed on: what its encodings lost is owed to the next one."""
        if self.carries:
            self._is_reduction_stale = False
        else:
            self.swap()

    def dropped(self, *, is_last: bool) -> None:
        """A round is voted down, or its group died before the vote.

        Args:
            is_last: No later round is under way.
        """
        if not self.carries:
            return
        # The reduction of a later round under way started from this one's residual. If that round
        # is lost as well, two steps back lead to the buffer in use.
        if is_last and not self._is_reduction_stale:
            self._swap_reduce()
        self._is_reduction_stale = not is_last

    def given_up(self, num_rounds: int) -> None:
        """With ``carries``: the group is no more, and so many rounds under way with it."""
        if (num_rounds + self._is_reduction_stale) % 2:
            self._swap_reduce()
        self._is_reduction_stale = False

    def swap(self) -> None:
        self.value, self.new = self.new, self.value
        self._swap_reduce()

    def _swap_reduce(self) -> None:
        self.reduce, self.new_reduce = self.new_reduce, self.reduce
