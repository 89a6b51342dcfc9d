"""Residuals of one fragment: values added to the next encoding.

A *residual* holds the rounding errors of an encoding (error feedback), and with ``carries`` the
values of lost rounds, too. There are two ways to treat a lost round:

* The values of a lost round stay in the parameters, and the next encoding sees them again. Then
  residuals take their new values when a round is agreed on.
* The caller moves the parameters at each send, and returns a lost round's values by ``owe``
  (``carries``). Then the residual of the encoding takes its new value when a round is encoded, and
  several rounds may be under way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..base.memory import CPU, persistent
from .wire import WireFormat, mean_wire


def drop_bad(residual: Tensor, wire: WireFormat) -> None:
    """Set elements to zero that are NaN, or so large that they or their mean could not be encoded.

    An encoding takes magnitudes up to 2^126. A scale that is rounded up makes the decoded values a
    little larger, and the encoding of their mean would refuse them: the limit here is half as much.
    On fp16, whose largest number is 65504, the limit is 60000.
    A rotated encoding takes magnitudes up to 2^116, and its decoded elements are below 2^10 times
    the largest of their block. The mean of sparse payloads may be rotated, too (``mean_wire``).
    """
    is_rotated = mean_wire(wire).is_rotated
    limit = 6e4 if wire.name == "fp16" else 2.0**106 if is_rotated else 2.0**125
    residual.masked_fill_(~(residual.abs() <= limit), 0.0)


@dataclass
class Residual:
    """The rounding errors of one chain of encodings, and the buffer that the next one writes."""

    value: Tensor
    new: Tensor

    @classmethod
    def zero(cls, count: int, dtype: torch.dtype, device: torch.device) -> Residual:
        return cls(persistent(count, dtype, device), persistent(count, dtype, device))

    def swap(self) -> None:
        self.value, self.new = self.new, self.value


class Residuals:
    """Residuals of one fragment: of this replica's payloads, and of the means that it encodes.

    The encoding of a mean, a *reduction*, adds the rounding errors of an earlier reduction, which
    count only if that round was agreed on. So there are as many chains of reductions as rounds may
    be under way, and each chain takes every ``num_under_way``-th round: no reduction adds the
    errors of a round that may still be voted down.

    Args:
        error_feedback: Keep the rounding errors.
        dtype: fp32 or bf16, of the residuals.
        carries: Whether the caller returns lost rounds by ``owe``; see the module's docstring.
        decay: Factor of the rounding errors before the next encoding adds them.
        num_under_way: Rounds that may be under way at a time.
        device, reduces_on: The device of the fragment, and the device of the reduction.

    Attributes:
        is_kept: Whether an encoding may have values to add: rounding errors, or owed values.
        value: The residual of the encoding, [num_elements], or None.
        new: The residual that the next encoding writes.
        owed: Without error feedback, the values of lost rounds that the next encoding adds, fp32
            [num_elements], or None. With error feedback ``value`` includes them.
    """

    def __init__(
        self,
        num_elements: int,
        *,
        error_feedback: bool,
        dtype: torch.dtype,
        carries: bool,
        decay: float = 1.0,
        num_under_way: int = 1,
        device: torch.device = CPU,
        reduces_on: torch.device = CPU,
    ) -> None:
        self.num_elements, self.device, self.reduces_on = num_elements, device, reduces_on
        self.error_feedback, self.dtype, self.carries = error_feedback, dtype, carries
        self.is_kept = error_feedback or carries
        self.decay = decay
        self.num_chains = num_under_way
        self.value = persistent(num_elements, dtype, device) if error_feedback else None
        self.new = persistent(num_elements, dtype, device) if error_feedback else None
        self.owed: Tensor | None = None
        self._reductions: list[Residual] = []
        self._spent: Tensor | None = None

    @property
    def added(self) -> Tensor | None:
        """The values that the next encoding adds to the pseudo-gradient, or None."""
        return self.owed if self.value is None else self.value

    @property
    def added_before(self) -> Tensor | None:
        """The values that the last encoding added; see ``rewind``."""
        return self._spent if self.value is None else self.new

    def owe(self, values: Tensor) -> None:
        """Let the next encoding add ``values`` (fp32 [num_elements]), too."""
        self.is_kept = True
        if self.added is None:
            self.owed = torch.zeros(self.num_elements, dtype=torch.float32, device=self.device)
        assert self.added is not None
        self.added.add_(values)

    def rewind(self) -> None:
        """Set ``added`` back to its value before the last encoding.

        For a caller that did not move the parameters: the next encoding sees the same values again.
        """
        assert self.carries
        if self.error_feedback:
            self._swap()
        else:
            self.owed, self._spent = self._spent, None

    def forgo(self, wire: WireFormat) -> None:
        """Undo the last encoding's effect on residuals: the next encoding adds the same values.

        Values that cannot be encoded are dropped.
        Then it makes no difference whether the round is agreed on or taken back.
        """
        if self.carries:
            self.rewind()
        if self.added is not None:
            drop_bad(self.added, wire)
        if self.value is not None and self.new is not None:
            self.new.copy_(self.value)

    def forget(self) -> None:
        """Drop the owed values, before a saved state brings its own."""
        self.owed = self._spent = None

    # ----------------------------------------------------------------------- of the reduction

    def plan_reduction(self, count: int) -> None:
        """Make the residuals of reductions anew, all zero.

        Args:
            count: Elements whose mean this replica encodes; 0 if it encodes none.
        """
        num_chains = self.num_chains if self.error_feedback and count else 0
        self._reductions = [
            Residual.zero(count, self.dtype, self.reduces_on) for _ in range(num_chains)
        ]

    def reduction(self, number: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the residual that a round's reduction adds, and the buffer for its new errors."""
        if not self._reductions:
            return None, None
        chain = self._reductions[number % self.num_chains]
        return chain.value, chain.new

    def reductions(self) -> list[Tensor]:
        """List the residuals of the reductions, one tensor a chain."""
        return [chain.value for chain in self._reductions]

    # ------------------------------------------------------------------------ in a saved state

    def before(self) -> Tensor | None:
        """For saved states: the residual that ``turn()`` replaced, and to which it can return.

        None if ``carries``, or without error feedback.
        """
        return None if self.carries else self.new

    def reductions_before(self) -> list[Tensor]:
        """List the ``reductions`` from before the rounds under way were agreed on."""
        return [chain.new for chain in self._reductions]

    # --------------------------------------------------------------------- the end of a round

    def encoded(self) -> None:
        """Record that a round is encoded: let ``new`` decay; with ``carries``, take it now."""
        if self.new is not None and self.decay != 1.0:
            self.new.mul_(self.decay)
        if self.carries:
            self._spent, self.owed = self.owed, None
            self._swap()

    def turn(self, number: int) -> None:
        """Take the new residuals of a round that is agreed on.

        The old ones are kept meanwhile, so that a second call undoes the first.
        """
        if not self.carries:
            self._swap()
        if self._reductions:
            self._reductions[number % self.num_chains].swap()

    def _swap(self) -> None:
        self.value, self.new = self.new, self.value
