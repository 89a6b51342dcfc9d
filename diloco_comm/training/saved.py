"""What an attached model gives away and takes back: outer parameters, saved states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from ..base.memory import memory_order
from ..methods.overlap import Blocking
from ..replica.fragments import all_parameters
from ..rounds.agreement.consensus import mean_outer
from ..rounds.checkpoint import save
from ..rounds.checkpoint.changes import run_of
from ..rounds.checkpoint.flights import saved_writes
from ..rounds.checkpoint.load import Restore
from ..rounds.synced import SyncedFragment
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
        return save.collect(self.parts, self._scope(), inner_step=self.inner_step, shared=shared)

    def _scope(self) -> save.Scope:
        scope = self._agreement.scope()
        run = run_of(
            self.parts,
            self.schedule,
            self.settings,
            layout=scope.layout,
            members=scope.members,
        )
        return replace(scope, run=run)

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
        """Take over a saved state, in place; local parameters come with the user's model.

        The state goes by the names of parameters, and follows other settings of the same model:
        ``sync_every``, fragments, offsets, wire, error feedback, overlap policy, numbers of the
        outer optimizer, averaged buffers, group, and parameters that were frozen or unfrozen. A
        parameter that was not exchanged before begins without outer momentum, from the weights
        that the model has at the next step. All replicas must load with the same settings: replicas
        whose outer state differs raise a ReplicaMismatch at the next exchange.

        Args:
            strict: Raise when what this replica had for itself is missing and the change does not
                explain it, instead of doing without: residuals start at zero, outer parameters that
                differ between replicas are those of the lowest one.

        Rounds under way are dropped; those of the state take their place.

        Raises:
            ValueError: If the state was saved with another model, other shapes or another kind of
                outer optimizer, has rounds under way that cannot follow a change, or lacks
                something; nothing is changed.
            RuntimeError: Inside ``outer_parameters()``, or after ``close()``; with ``Elastic``,
                if this replica has joined a group that trains, whose state it has.
        """
        self._refuse_if_closed()
        if self._elastic is not None:
            self._elastic.refuse_to_load()
        self._refuse_if_unfit()
        self._refuse_changes(self.parts)
        model = all_parameters(self._model)
        restore = Restore(self.parts, state_dict, self._scope(), model, strict=strict)
        with self._recorder.deferred_callbacks(), self._rounds.uninterruptible():
            self._rounds.drop()
            restore.write()
            self.inner_step = restore.inner_step
            self._saved_writes = saved_writes(self.parts)
        if self._rounds.same_data.is_wanted:
            self._rounds.same_data.begin(self.parts, self.inner_step)
        if self._watch is not None:
            is_shared = not restore.has_new and self._has_just_exchanged()
            lost = self._differs_from_outer if is_shared else None
            late = restore.read_new if restore.has_new else None
            self._watch.expect_load(self._agreement.overwritten, lost, late)

    def _has_just_exchanged(self) -> bool:
        """Whether the local parameters are the outer ones, by the numbers of a state."""
        is_blocking = type(self._rounds.settings.overlap) is Blocking
        return is_blocking and self.inner_step > 0 and not self._rounds.has_unsent(self.inner_step)

    def _differs_from_outer(self) -> bool:
        """Whether any local parameter is not the outer one."""
        for part in self.parts:
            if not isinstance(part, SyncedFragment) or part.outer is None:
                continue
            offset = 0
            for _, piece in part.fragment.pieces():
                flat = memory_order(piece)
                outer = part.outer[offset : offset + flat.numel()]
                if not torch.equal(outer.to(flat.device, flat.dtype), flat):
                    return True
                offset += flat.numel()
        return False
