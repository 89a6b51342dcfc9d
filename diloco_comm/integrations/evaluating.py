"""Let a trainer evaluate the outer parameters, save them, and choose the best."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Literal, get_args

from ..base.checks import warn
from ..ops.digests import digest_of
from ..rounds import handshake
from ..training.diloco import DiLoCo
from .attaching import parameters_of, write_parameters

Evaluate = Literal["local", "outer"]
CHOICES = get_args(Evaluate)


class Swap:
    """Put the outer parameters into the model between two hooks of a trainer.

    Args:
        diloco: Owner of the outer parameters; under ``shard_group`` all workers enter and leave
            together.
    """

    def __init__(self, diloco: DiLoCo) -> None:
        self._diloco = diloco
        self._block = ExitStack()
        self.is_entered = False

    @property
    def is_outer(self) -> bool:
        """Whether the model holds the outer parameters, by this object or by the user."""
        return self._diloco._is_swapped

    @property
    def is_over(self) -> bool:
        """Whether the training is over: DiLoCo is closed, and its parameters remain readable."""
        return self._diloco._is_closed

    def enter(self) -> None:
        """Put the outer parameters into the model, unless this object has done so already."""
        if not self.is_entered:
            self._block.enter_context(self._diloco.outer_parameters())
            self.is_entered = True

    def leave(self, *, keep: bool = False) -> None:
        """Put the local parameters back, bit by bit, if ``enter`` has replaced them.

        Args:
            keep: Leave the model as it is, because the trainer has loaded other parameters.
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
        step: Step of the checkpoint from which the trainer has loaded the best model; None if it
            has loaded none.

    Returns:
        Whether a replica has loaded a best model. All models are equal then: if they differed, all
        replicas take the model of the lowest such replica, with a warning.

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
        warn(
            f"the best model differs between replicas ({steps}): all take that of replica "
            f"{members[ranks[0]]}; evaluate on the same data everywhere"
        )
        diloco.exchange.broadcast(tensors, ranks[0])
    return True
