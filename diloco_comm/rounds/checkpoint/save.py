"""Save the state that DiLoCo keeps; ``load`` takes it in.

The layout of a saved state (a ``torch.distributed.checkpoint`` Stateful):

    version, inner_step, overlap
    layout                  the run that saved the state, as JSON text: see ``changes.Run``
    parts/<fragment>        round, last_sent, num_steps, weight_sum, step norms, last_lr, ended_at,
                            extra (what the outer optimizer adds), flights (rounds under way, see
                            ``flights``)
    outer/<parameter>       fp32, the parameter's shape
    buffers/<buffer>/<parameter>            momentum and the like, fp32
    flights/<fragment>/<k>/<term>           payloads of rounds under way
    replica_<r>/residual/<parameter>        only with error feedback
    replica_<r>/reduce_residual/<fragment>  <fragment>.1 for odd rounds when two may be under way
    replica_<r>/residual_before, reduce_residual_before     should the rounds under way be lost
    replica_<r>/own/<fragment>              own numbers of rounds under way and lost
    replica_<r>/payloads/<fragment>/<k>, corrected/<fragment>/<i>, owed/<parameter>

All keys but ``replica_<r>`` hold the same values on every replica; where outer parameters differ
(``Eager``, and ``Streaming`` with unequal delays), ``parts``, ``outer``, ``buffers`` and
``flights`` are below ``replica_<r>``. Tensors are views of the live buffers or copies: save them
before the next step. The user's local parameters and inner optimizer differ between replicas too
and need keys of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...base.errors import NonFiniteError, SyncError
from ...methods.overlap import Overlap, Own
from ...ops.residuals import drop_bad
from ..flights import RoundInFlight
from ..synced import SyncedFragment, SyncedPart
from . import flights as saved_flights
from .changes import Run

VERSION = 1
_HOME = ("parts", "outer", "buffers", "flights")


@dataclass(frozen=True)
class Scope:
    """The replica, group and model that a saved state belongs to.

    Attributes:
        replica: Number of this replica.
        members: Numbers of all replicas of the group.
        layout: Hash of names, shapes, fragments and schedule.
        is_shared: Whether outer parameters and rounds are the same on all replicas.
        worker: Name of this worker among the replica's workers, such as "1of4".
        run: The description of the present run that states hold; None where no state is saved.
    """

    replica: int
    members: tuple[int, ...]
    layout: int
    overlap: Overlap
    is_shared: bool
    worker: str = ""
    run: Run | None = None

    def key(self, part: SyncedPart) -> str:
        """Name the entries of a part that are not cut along its parameters."""
        return self.key_of(part.index)

    def key_of(self, index: int | None) -> str:
        """As ``key``, by the index of a part."""
        return f"{index}@{self.worker}" if self.worker else str(index)

    @property
    def flights(self) -> str:
        """Name the numbers of rounds under way."""
        return f"flights@{self.worker}" if self.worker else "flights"

    @property
    def depth(self) -> int:
        """Rounds of a part that may be under way between two inner steps."""
        return self.overlap.rounds or int(self.overlap.steps() > 0)

    @property
    def kind(self) -> dict[str, Any]:
        return {"name": type(self.overlap).__name__, "rounds": self.overlap.rounds}


def collect(
    parts: Sequence[SyncedPart], scope: Scope, *, inner_step: int, shared: bool
) -> dict[str, Any]:
    """Build the saved state; waits for the network, applies nothing and changes nothing.

    Raises:
        ValueError: If ``shared`` but something differs between replicas.
    """
    assert scope.run is not None
    home: dict[str, Any] = {key: {} for key in _HOME}
    own: dict[str, Any] = {"residual": {}, "reduce_residual": {}}
    if scope.overlap.rounds:
        own |= {"own": {}, "payloads": {}, "corrected": {}, "owed": {}}
    differs = not scope.is_shared
    for part in parts:
        view = _look_at(part, scope)
        _collect_shared(part, view, scope, home)
        differs = _collect_own(part, view, scope, own) or differs
    if shared and differs:
        raise ValueError(
            "error feedback, rounds under way or the outer parameters themselves differ between "
            "replicas: save on every replica, not on one alone"
        )
    state = {
        "version": VERSION,
        "layout": scope.run.to_text(),
        "inner_step": inner_step,
        "overlap": scope.kind,
    }
    if not scope.is_shared:
        return {**state, f"replica_{scope.replica}": {**home, **own}}
    if any(own.values()) and not shared:
        state[f"replica_{scope.replica}"] = own
    return {**state, **home}


@dataclass
class _View:
    """A part as it will be when its failed rounds are lost.

    Attributes:
        added: The values that the next encoding adds.
    """

    flights: list[RoundInFlight]
    added: Tensor | None
    corrections: list[Own]
    owes: bool


def _look_at(part: SyncedPart, scope: Scope) -> _View:
    arrived, failed, is_bad = [], [], False
    for flight in part.in_flight:
        try:
            flight.wait()
            arrived.append(flight)
        except SyncError as error:
            failed.append(flight)
            is_bad = is_bad or isinstance(error, NonFiniteError)
    # A round that has arrived may have moved the residual on.
    added = part.buffers.residuals.added if part.buffers else None
    view = _View(arrived, added, list(part.corrections), part.owes)
    if scope.overlap.rounds and isinstance(part, SyncedFragment):
        for flight in failed:
            _lose(part, flight, view)
        if is_bad and view.added is not None and part.buffers is not None:
            view.added = view.added.clone()
            drop_bad(view.added, part.buffers.wire)
    return view


def _lose(part: SyncedFragment, flight: RoundInFlight, view: _View) -> None:
    assert part.buffers is not None
    if flight.is_local_kept:
        view.added = part.buffers.residuals.added_before
        return
    if flight.own is None or flight.is_reset:
        return
    sent = part.decode(flight.own, flight.layout, "")
    view.added = sent if view.added is None else view.added + sent
    view.owes = True
    if flight.coefficient:
        view.corrections.append(Own(flight.own, flight.coefficient, flight.layout))


def _collect_shared(part: SyncedPart, view: _View, scope: Scope, home: dict[str, Any]) -> None:
    key = str(part.index)
    home["parts"][key] = numbers_of(part)
    if part.buffers is not None and (scope.depth or view.flights or not scope.is_shared):
        flights, payloads = saved_flights.pack_shared(
            view.flights, part.buffers, scope.members, scope.depth, part.history
        )
        home["parts"][key][scope.flights] = flights
        home["flights"][scope.key(part)] = payloads
    if isinstance(part, SyncedFragment):
        home["outer"].update(part.fragment.views(part.outer))
        for name, flat in part.state.tensors().items():
            home["buffers"].setdefault(name, {}).update(part.fragment.views(flat))


def _collect_own(part: SyncedPart, view: _View, scope: Scope, own: dict[str, Any]) -> bool:
    """Return whether the part has something that differs between replicas."""
    buffers, key = part.buffers, scope.key(part)
    if buffers is None:
        return False
    if buffers.residual is not None and isinstance(part, SyncedFragment):
        _collect_residuals(part, view, scope, own)
    if not scope.overlap.rounds:
        return buffers.residual is not None
    numbers, payloads = saved_flights.pack_own(view.flights, buffers, scope.members, scope.depth)
    corrections, corrected = saved_flights.pack_corrections(view.corrections)
    has_owed = buffers.residual is None and view.added is not None
    if has_owed and view.added is not None and isinstance(part, SyncedFragment):
        own["owed"].update(part.fragment.own_views(view.added))
    own["own"][key] = json.dumps(
        {
            "owes": view.owes,
            "is_ahead": part.is_ahead,
            "flights": numbers,
            "corrections": corrections,
            "has_owed": has_owed,
        }
    )
    if payloads:
        own["payloads"][key] = payloads
    if corrected:
        own["corrected"][key] = corrected
    return bool(buffers.residual is not None or view.flights or view.owes or has_owed)


def _collect_residuals(
    part: SyncedFragment, view: _View, scope: Scope, own: dict[str, Any]
) -> None:
    assert part.buffers is not None
    residuals, key = part.buffers.residuals, scope.key(part)
    wholes, chains = {"residual": view.added}, {"reduce_residual": residuals.reductions()}
    if scope.depth:
        wholes["residual_before"] = residuals.before()
        chains["reduce_residual_before"] = residuals.reductions_before()
    for name, values in wholes.items():
        if values is not None:
            own.setdefault(name, {}).update(part.fragment.own_views(values))
    for name, tensors in chains.items():
        runs = {chain_key(key, chain): tensor for chain, tensor in enumerate(tensors)}
        own.setdefault(name, {}).update(runs)


def chain_key(key: str, chain: int) -> str:
    """Name the residual of one chain of a part's reductions; see ``Residuals``."""
    return f"{key}.{chain}" if chain else key


# ------------------------------------------------------------------------------------- numbers


def numbers_of(part: SyncedPart) -> dict[str, Any]:
    """Return the numbers of a part, equal on replicas that have applied the same rounds."""
    numbers: dict[str, Any] = {
        "round": part.round,
        "last_sent": part.last_sent,
        "weight_sum": part.weight_sum,
    }
    if isinstance(part, SyncedFragment):
        numbers |= {
            "num_steps": part.state.num_steps,
            "step_norm": part.step_norm,
            "largest_norm": part.largest_norm,
            "extra": part.state.extra(),
        }
        # Left out of the state of a fresh part: torch.distributed.checkpoint looks in a file for
        # each key of a fresh state, and files of older versions lack these.
        if part.state.last_lr is not None:
            numbers |= {"last_lr": part.state.last_lr, "ended_at": part.ended_at}
    return numbers


def set_numbers(part: SyncedPart, numbers: Mapping[str, Any]) -> None:
    """Take over the numbers; the optimizer's ``extra`` is loaded with its buffers."""
    part.round, part.last_sent = int(numbers["round"]), int(numbers["last_sent"])
    part.weight_sum = float(numbers.get("weight_sum", 0.0))
    if isinstance(part, SyncedFragment):
        part.state.num_steps = int(numbers.get("num_steps", part.round))
        part.step_norm = float(numbers.get("step_norm", 0.0))
        part.largest_norm = float(numbers.get("largest_norm", 0.0))
        part.state.last_lr = numbers.get("last_lr")
        part.ended_at = int(numbers.get("ended_at", -1))
