"""What an attached model gives away and takes back: outer parameters, saved states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from ..rounds.agreement.consensus import mean_outer
from ..rounds.checkpoint import load, save
from ..rounds.checkpoint.flights import saved_writes
from .agreement import Agreement
from .attached import Attached
from .evaluation import swapped_in


class Saved(Attached):
    """A model whose outer state can be looked at, saved and restored."""

    _agreement: Agreement
    _saved_writes: dict[int, set[int]]

    # ------------------------------------------------------------------- outer parameters

    @contextmanager
    def outer_parameters(self, *, consensus: bool = False) -> Iterator[None]:
        """Put the outer parameters into the model, to evaluate them; restore it bit by bit.

        Args:
            consensus: Take their mean over the replicas, see ``consensus()``; a collective call.
        """
        if consensus or self._plan.shard_group is not None:
            self._refuse_if_alone()
        self._refuse_if_unfit()
        parts = self._look_at_parts()
        outers = [part.outer for part in parts]
        if consensus:
            outers = mean_outer(self.exchange, parts, self.impl)
        # Workers with shards of their own need nothing from each other here.
        writing = nullcontext() if self._plan.shard_group is None else self._all_workers(parts)
        guard = self._rounds.uninterruptible
        self._is_swapped = True
        watching = nullcontext() if self._watch is None else self._watch.paused()
        try:
            with (
                watching,
                swapped_in(parts, outers, impl=self.impl, writing=writing, uninterruptible=guard),
            ):
                yield
        finally:
            self._is_swapped = False

    # ------------------------------------------------------------------- saving, resuming

    def state_dict(self, *, shared: bool = False) -> dict[str, Any]:
        """Return what a resumed run needs besides the model and the inner optimizer.

        **With** ``shard_group`` **this is a collective call**: it gathers what its workers own, so
        all of them must call it, also when only one of them writes the file
        (``if rank == 0: torch.save(diloco.state_dict(), ...)`` hangs). Otherwise, under FSDP2 too,
        it calls no collective.

        Tensors are views of the live buffers, under the parameters' names, fp32. What differs
        between replicas is keyed ``replica_<r>``: every replica must save its own. Waits for rounds
        under way, and applies nothing: they are part of the state. A round that failed is not: the
        state is that before the round.

        Args:
            shared: Refuse if something differs between replicas, for a save by one of them alone.
        """
        if self._plan.shard_group is not None:
            self._refuse_if_alone()
        self._rounds.uninterruptible.refuse_if_broken()
        self._look_at_parts()
        scope = self._agreement.scope()
        return save.collect(self.parts, scope, inner_step=self.inner_step, shared=shared)

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
        """Take over a saved state, in place; local parameters come with the user's model.

        Args:
            strict: Raise when what this replica had for itself is missing, instead of doing
                without: residuals start at zero, outer parameters that differ between replicas are
                those of the lowest one.

        Rounds under way are dropped; those of the state take their place.

        Raises:
            ValueError: If the state was saved with another model, schedule or set of fragments, or
                lacks something; nothing is changed.
            RuntimeError: Inside ``outer_parameters()``, or after ``close()``; with ``membership=``,
                if this replica has joined a group that trains, whose state it has.
        """
        self._refuse_if_closed()
        if self._elastic is not None:
            self._elastic.refuse_to_load()
        self._refuse_if_unfit()
        self._refuse_changes(self.parts)
        write = load.restore(self.parts, state_dict, self._agreement.scope(), strict=strict)
        with self._recorder.deferred_callbacks(), self._rounds.uninterruptible():
            self._rounds.drop()
            self.inner_step = write()
            self._saved_writes = saved_writes(self.parts)
        if self._watch is not None:
            self._watch.expect_load(self._agreement.overwritten)
