"""Let a trainer evaluate the outer parameters, save them, and choose among them."""

from __future__ import annotations

import warnings
from contextlib import ExitStack

from ..ops.digests import digest_of
from ..rounds.agreement import handshake
from ..training.diloco import DiLoCo
from .attaching import parameters_of, write_parameters

CHOICES = ("local", "outer")


class Swap:
    """The outer parameters in the model, between two hooks of a trainer.

    Args:
        diloco: Whose outer parameters; under ``shard_group`` all workers enter and leave together.
    """

    def __init__(self, diloco: DiLoCo) -> None:
        self._diloco = diloco
        self._block = ExitStack()
        self.is_entered = False

    @property
    def is_outer(self) -> bool:
        """Whether the model holds the outer parameters, by whomever they were put there."""
        return self._diloco._is_swapped

    @property
    def is_over(self) -> bool:
        """Whether the training is: its DiLoCo is closed, and may still be looked at."""
        return self._diloco._is_closed

    def enter(self) -> None:
        """Put the outer parameters into the model, if they are not there already."""
        if not self.is_entered:
            self._block.enter_context(self._diloco.outer_parameters())
            self.is_entered = True

    def leave(self, *, keep: bool = False) -> None:
        """Put the local parameters back bit by bit, if they are not there already.

        Args:
            keep: Leave the model as it is: the trainer has loaded other parameters into it.
        """
        if not self.is_entered:
            return
        kept = {n: tensor.clone() for n, tensor in parameters_of(self._diloco).items() if keep}
        self.is_entered = False
        self._block.close()
        if keep:
            write_parameters(self._diloco, kept)


def share_best(diloco: DiLoCo, step: int | None) -> bool:
    """Give all replicas the same best model; a collective call at the end of training.

    Args:
        step: Of the checkpoint whose outer parameters the trainer has put into the model; None if
            it has put none.

    Returns:
        Whether a replica had one. The models are equal then: where they were not, that of the
        lowest replica which had one is taken, with a warning.

    Raises:
        SyncError: If the group fails.
    """
    tensors = list(parameters_of(diloco).values())
    own = [step, 0 if step is None else digest_of(tensors)]
    views = handshake.gather_json(diloco.exchange, own)
    ranks = [rank for rank, view in enumerate(views) if view[0] is not None]
    if not ranks:
        return False
    if any(view != views[ranks[0]] for view in views):
        members = diloco.exchange.members
        found = zip(members, views, strict=True)
        steps = ", ".join(f"step {view[0]} on replica {replica}" for replica, view in found)
        warnings.warn(
            f"the best model differs between replicas ({steps}): all take that of replica "
            f"{members[ranks[0]]}; evaluate on the same data everywhere",
            stacklevel=2,
        )
        diloco.exchange.broadcast(tensors, ranks[0])
    return True
