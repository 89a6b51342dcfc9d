"""What encoding loses, and what lost rounds owe: added to the next encoding of a fragment.

Either a lost round stays in the parameters, which the next encoding sees again: then residuals go
on when a round is agreed on. Or the caller moves the parameters at each send and gives a lost round
back by ``owe`` (``carries``): then that of the encoding goes on when a round is encoded, and
several rounds may be under way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..base.memory import CPU, persistent
from .wire import WireFormat


def drop_bad(residual: Tensor, wire: WireFormat) -> None:
    """Set to zero what is NaN or too large to be sent, or to be added up with others like it.

    A wire takes magnitudes up to 2^126, of which a scale that is rounded up makes a little more,
    and then the mean is refused: half of that is certain to pass.
    """
    limit = 6e4 if wire.name == "fp16" else 2.0**125
    residual.masked_fill_(~(residual.abs() <= limit), 0.0)


@dataclass
class Residual:
    """What one chain of encodings lost so far, and the buffer that the next one writes."""

    value: Tensor
    new: Tensor

    @classmethod
    def zero(cls, count: int, dtype: torch.dtype, device: torch.device) -> Residual:
        return cls(persistent(count, dtype, device), persistent(count, dtype, device))

    def swap(self) -> None:
        self.value, self.new = self.new, self.value


class Residuals:
    """Residuals of the encoding and of the reduction of one fragment.

    A reduction adds what an earlier one lost, and counts only if its round is agreed on. So that no
    round starts from one that may still be voted down, there are as many chains of reductions as
    rounds may be under way: each takes every ``num_under_way``-th round.

    Args:
        error_feedback: Keep what encoding loses.
        dtype: Of what is kept, fp32 or bf16.
        carries: See above.
        num_under_way: Rounds that may be under way at a time.
        device, reduces_on: Of the fragment, and where the reduction is done.

    Attributes:
        value: Of the encoding, [num_elements], or None.
        new: What the next encoding writes.
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
        num_under_way: int = 1,
        device: torch.device = CPU,
        reduces_on: torch.device = CPU,
    ) -> None:
        self.num_elements, self.device, self.reduces_on = num_elements, device, reduces_on
        self.error_feedback, self.dtype, self.carries = error_feedback, dtype, carries
        self.num_chains = num_under_way
        self.value = persistent(num_elements, dtype, device) if error_feedback else None
        self.new = persistent(num_elements, dtype, device) if error_feedback else None
        self.owed: Tensor | None = None
        self._reductions: list[Residual] = []
        self._spent: Tensor | None = None

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
            self._swap()
        else:
            self.owed, self._spent = self._spent, None

    def forgo(self, wire: WireFormat) -> None:
        """Leave out what was just encoded: the next encoding adds what this one had added.

        Whether the round is agreed on, or taken back, then makes no difference.
        """
        if self.carries:
            self.rewind()
        if self.added is not None:
            drop_bad(self.added, wire)
        if self.value is not None and self.new is not None:
            self.new.copy_(self.value)

    def forget(self) -> None:
        """Owe nothing; a saved state brings what is owed."""
        self.owed = self._spent = None

    # ----------------------------------------------------------------------- of the reduction

    def plan_reduction(self, count: int) -> None:
        """Start anew with ``count`` elements to reduce; 0 for none."""
        num_chains = self.num_chains if self.error_feedback and count else 0
        self._reductions = [
            Residual.zero(count, self.dtype, self.reduces_on) for _ in range(num_chains)
        ]

    def reduction(self, number: int) -> tuple[Tensor | None, Tensor | None]:
        """Return what the reduction of a round adds, and where it writes what it loses."""
        if not self._reductions:
            return None, None
        chain = self._reductions[number % self.num_chains]
        return chain.value, chain.new

    def reductions(self) -> list[Tensor]:
        """List what was lost by the reductions, one tensor a chain."""
        return [chain.value for chain in self._reductions]

    # ------------------------------------------------------------------------ in a saved state

    def before(self) -> Tensor | None:
        """What ``value`` was before the round under way was agreed on; None if that is owed."""
        return None if self.carries else self.new

    def reductions_before(self) -> list[Tensor]:
        """List what ``reductions`` were before the rounds under way were agreed on."""
        return [chain.new for chain in self._reductions]

    # ------------------------------------------------------------------- what becomes of a round

    def encoded(self) -> None:
        """A round is encoded and under way."""
        if self.carries:
            self._spent, self.owed = self.owed, None
            self._swap()

    def turn(self, number: int) -> None:
        """A round is agreed on, so what its encodings lost is owed; or, again, it never was."""
        if not self.carries:
            self._swap()
        if self._reductions:
            self._reductions[number % self.num_chains].swap()

    def _swap(self) -> None:
        self.value, self.new = self.new, self.value
