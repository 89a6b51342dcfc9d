"""Makes the state that ``DiLoCo.state_dict`` returns; the module ``load`` loads it.

The layout of a saved state (a ``torch.distributed.checkpoint`` Stateful):

    version, inner_step, overlap
    layout                  the run that saved the state, as JSON text: see ``Run``
    parts/<fragment>        round, last_sent, num_steps, weight_sum, step norms, last_lr, ended_at,
                            is_mean, extra (the outer optimizer's own values), flights (rounds under
                            way, see ``pack_shared``)
    outer/<parameter>       fp32, the parameter's shape
    buffers/<buffer>/<parameter>            momentum and the like, fp32
    flights/<fragment>/<k>/<term>           payloads of rounds under way
    replica_<r>/residual/<parameter>        only with error feedback
    replica_<r>/reduce_residual/<fragment>  <fragment>.k for rounds k mod n if n may be under way
    replica_<r>/residual_before, reduce_residual_before     in case the rounds under way are lost
    replica_<r>/own/<fragment>              own numbers of rounds under way and of lost rounds
    replica_<r>/payloads/<fragment>/<k>, corrected/<fragment>/<i>, owed/<parameter>

All keys but ``replica_<r>`` hold the same values on every replica; where outer parameters differ
(``Eager``, and ``Streaming`` with unequal delays), ``parts``, ``outer``, ``buffers`` and
``flights`` are below ``replica_<r>``. Tensors are views of the live buffers or copies: save them
before the next step. The user's local parameters and inner optimizer differ between replicas too
and need keys of their own.

Payloads are saved in a layout with a single run (``canonical``), so that a group of any size can
read them. The payloads of each round's mean, and a list of numbers, are the same on all replicas.
Each replica saves its own payload apart if that is not part of the mean. A checkpoint that is read
in place must have the same entries whatever is under way. So numbers are JSON text, and there are
always ``depth`` sets of payloads: zeros if no round is under way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..base.errors import NonFiniteError, SyncError
from ..exchange.buffers import ExchangeBuffers
from ..exchange.round import Header, Mean, Terms
from ..methods.overlap import Overlap, Own
from ..methods.settings import Settings
from ..ops.residuals import drop_bad
from ..ops.wire import Layout, WireFormat
from ..replica.fragments import Schedule, describe
from .part import RoundInFlight, StepNorms, SyncedFragment, SyncedPart, weight_sum

VERSION = 1
_HOME = ("parts", "outer", "buffers", "flights")


@dataclass(frozen=True)
class SavedFragment:
    """One fragment of the run that saved a state.

    Attributes:
        names: The parameters, in order.
        forms: Shape, strides and dtype of each parameter, in words.
        wire: Name of the wire, and elements of a block.
        offset: Inner step of the first send.
        alignment: See ``Fragment``.
    """

    names: tuple[str, ...]
    forms: tuple[str, ...]
    wire: tuple[str, int]
    offset: int
    alignment: int


@dataclass(frozen=True)
class Run:
    """The description of the run that saved a state, kept in the state.

    Attributes:
        layout: Hash of names, shapes, fragments and schedule; see ``Plan.saved_layout``.
        outer: Class and arguments of the outer optimizer, without its learning rate.
        has_buffers: Whether buffers are averaged; they are the last part then.
        members: Numbers of all replicas of the group.
    """

    layout: int
    sync_every: int
    fragments: tuple[SavedFragment, ...]
    outer: dict[str, Any]
    has_buffers: bool
    error_feedback: bool
    members: tuple[int, ...]

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Run:
        values = json.loads(text)
        fragments = tuple(
            SavedFragment(
                tuple(one["names"]),
                tuple(one["forms"]),
                (one["wire"][0], one["wire"][1]),
                one["offset"],
                one["alignment"],
            )
            for one in values.pop("fragments")
        )
        return cls(**{**values, "fragments": fragments, "members": tuple(values["members"])})

    @property
    def names(self) -> list[str]:
        """The names of the parameters of all fragments."""
        return [name for fragment in self.fragments for name in fragment.names]

    @property
    def offsets(self) -> list[int]:
        return [fragment.offset for fragment in self.fragments]

    @property
    def outer_name(self) -> str:
        """Name of the outer optimizer's class; for ``FromTorch``, of torch's optimizer in it."""
        return str(self.outer.get("optimizer", self.outer["name"]))


def read_run(state: Any) -> Run:
    """Return the run that saved a state.

    Raises:
        ValueError: If the state has another format.
        TypeError: If the state is no mapping.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"the saved state must be a dictionary, got {type(state).__name__}")
    if state.get("version") != VERSION:
        raise ValueError(f"saved state has version {state.get('version')}, {VERSION} expected")
    if not isinstance(state.get("layout"), str):
        raise ValueError(
            "the saved state has the format of a version before 0.2, without a description of its "
            "run, and this version reads the format of 0.2: load the state with 0.2 and the "
            "arguments of its save, and save it again"
        )
    return Run.from_text(state["layout"])


def with_run(
    scope: Scope, parts: Sequence[SyncedPart], schedule: Schedule, settings: Settings
) -> Scope:
    """Return the scope with a description of the present run, equal on all replicas and workers."""
    fragments = [part for part in parts if isinstance(part, SyncedFragment)]
    outer = {k: v for k, v in settings.outer.shared_config().items() if k != "lr"}
    run = Run(
        scope.layout,
        schedule.sync_every,
        tuple(_described(part, schedule.offsets[part.index]) for part in fragments),
        outer,
        len(parts) > len(fragments),
        settings.error_feedback,
        scope.members,
    )
    return replace(scope, run=run)


def _described(part: SyncedFragment, offset: int) -> SavedFragment:
    fragment = part.fragment
    forms = tuple(describe("", param, whole=True).strip() for param in fragment.params)
    wire = part.wire.name, part.wire.block_size
    return SavedFragment(fragment.names, forms, wire, offset, fragment.alignment)


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
        """Return the key, in a state, of a part's entries that are not saved by parameter."""
        return self.key_of(part.index)

    def key_of(self, index: int | None) -> str:
        """Return the same as ``key``, for the index of a part."""
        return f"{index}@{self.worker}" if self.worker else str(index)

    @property
    def flights(self) -> str:
        """The key, in a part's numbers, of the rounds under way."""
        return f"flights@{self.worker}" if self.worker else "flights"

    @property
    def depth(self) -> int:
        """The most rounds of a part that may be under way between two inner steps."""
        return self.overlap.rounds or int(self.overlap.steps() > 0)

    @property
    def kind(self) -> dict[str, Any]:
        return {"name": type(self.overlap).__name__, "rounds": self.overlap.rounds}


def collect(
    parts: Sequence[SyncedPart], scope: Scope, *, inner_step: int, shared: bool
) -> dict[str, Any]:
    """Return the state to save. This waits for rounds under way, but applies and changes nothing.

    Args:
        shared: Return only values that are the same on all replicas.

    Raises:
        ValueError: If ``shared``, but some values differ between replicas.
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
    """The state of a part as it will be once its failed rounds are given up.

    Attributes:
        flights: The rounds in flight that have not failed.
        added: The values that the next encoding adds; None for none.
        corrections: See ``Owed``.
        owes: See ``Owed.is_lost``.
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
    # Only now: waiting for a round may have changed the residual.
    added = part.buffers.residuals.added if part.buffers else None
    view = _View(arrived, added, list(part.owed.corrections), part.owed.is_lost)
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
    view.corrections += flight.own_share()


def _collect_shared(part: SyncedPart, view: _View, scope: Scope, home: dict[str, Any]) -> None:
    key = str(part.index)
    home["parts"][key] = numbers_of(part)
    if part.buffers is not None and (scope.depth or view.flights or not scope.is_shared):
        flights, payloads = pack_shared(
            view.flights, part.buffers, scope.members, scope.depth, part.history
        )
        home["parts"][key][scope.flights] = flights
        home["flights"][scope.key(part)] = payloads
    if isinstance(part, SyncedFragment):
        home["outer"].update(part.fragment.views(part.outer))
        for name, flat in part.state.tensors().items():
            views, absent = part.fragment.views(flat), part.state.without(name)
            kept = {param: view for param, view in views.items() if param not in absent}
            home["buffers"].setdefault(name, {}).update(kept)


def _collect_own(part: SyncedPart, view: _View, scope: Scope, own: dict[str, Any]) -> bool:
    """Add this replica's own values of a part to ``own``; return whether replicas differ in any."""
    buffers, key = part.buffers, scope.key(part)
    if buffers is None:
        return False
    if buffers.residual is not None and isinstance(part, SyncedFragment):
        _collect_residuals(part, view, scope, own)
    if not scope.overlap.rounds:
        return buffers.residual is not None
    numbers, payloads = pack_own(view.flights, buffers, scope.members, scope.depth)
    corrections, corrected = pack_corrections(view.corrections)
    has_owed = buffers.residual is None and view.added is not None
    if has_owed and view.added is not None and isinstance(part, SyncedFragment):
        own["owed"].update(part.fragment.own_views(view.added))
    own["own"][key] = json.dumps(
        {
            "owes": view.owes,
            "is_ahead": part.owed.is_ahead,
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
    """Return the key of the residual of one chain of a part's reductions; see ``Residuals``."""
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
        last, largest = part.step_norms.read()
        numbers |= {
            "num_steps": part.state.num_steps,
            "step_norm": last,
            "largest_norm": largest,
            "extra": part.state.extra(),
        }
        # A part without outer steps leaves these out. To load, torch.distributed.checkpoint asks a
        # file for each key of the present state, and older files lack some of these.
        if part.state.last_lr is not None:
            numbers |= {"last_lr": part.state.last_lr, "ended_at": part.state.ended_at}
            numbers["is_mean"] = part.state.is_mean
        if part.state.last_momentum is not None:
            numbers["last_momentum"] = part.state.last_momentum
    return numbers


def set_numbers(part: SyncedPart, numbers: Mapping[str, Any]) -> None:
    """Set the numbers of a part from a saved state, but not the optimizer's ``extra``.

    A missing number gets the value of a new part.
    """
    part.round, part.last_sent = int(numbers["round"]), int(numbers["last_sent"])
    part.weight_sum = float(numbers.get("weight_sum", 0.0))
    if isinstance(part, SyncedFragment):
        part.state.num_steps = int(numbers.get("num_steps", part.round))
        part.step_norms = StepNorms(
            float(numbers.get("step_norm", 0.0)), float(numbers.get("largest_norm", 0.0))
        )
        part.state.last_lr = numbers.get("last_lr")
        part.state.last_momentum = numbers.get("last_momentum")
        part.state.ended_at = int(numbers.get("ended_at", -1))
        part.state.is_mean = bool(numbers.get("is_mean", False))


_SHARED = ("number", "kind", "sent_step", "apply_step", "lr")
_OWN = ("weight", "norm", "coefficient")


def canonical(num_elements: int, wire: WireFormat) -> Layout:
    """Return the layout of saved payloads: a single run, whatever the size of the group."""
    return Layout.plan(num_elements, 1, 1, wire)


# --------------------------------------------------------------------------------------- saving


def pack_shared(
    flights: Sequence[RoundInFlight],
    buffers: ExchangeBuffers,
    members: Sequence[int],
    depth: int,
    history: int,
) -> tuple[str, dict[str, dict[str, Tensor]]]:
    """Return the numbers and the means' payloads of rounds in flight, equal on all replicas.

    Args:
        flights: Rounds whose means have come.
        buffers: The part's buffers.
        members: All members of the group.
        depth: The most rounds that may be under way between two inner steps.
        history: The history of the part.

    Returns:
        The numbers as JSON text; and the payloads by index of the round, and index of the term.
    """
    rounds: list[dict[str, Any]] = []
    payloads: dict[str, dict[str, Tensor]] = {}
    num_terms = 1 if buffers.num_phases == 2 else len(members)
    zeros = canonical(buffers.num_elements, buffers.mean_layout.wire)
    for flight in flights:
        mean = flight.wait()
        numbers = {name: getattr(flight, name) for name in _SHARED}
        numbers |= {
            "outer_lr": mean.headers[0].outer_lr,
            "gap": mean.headers[0].gap,
            "weight_sum": weight_sum(mean),
            "digest": mean.digest,
        }
        # The mean may be on another wire than the payloads (``mean_layout``), and so may a round
        # that was under way when the wire was changed.
        wire = mean.layout.wire
        numbers |= {} if wire == buffers.wire else {"mean_wire": _named(wire)}
        # A round may be of a larger or smaller group than the present one.
        usual = _usual_senders(members, buffers.wire)
        numbers |= {} if flight.senders == usual else {"senders": list(flight.senders)}
        reset = flight.reset_replicas()
        numbers |= {"reset": list(reset)} if reset else {}
        rounds.append({**numbers, "coefficients": [c for _, c in mean.terms]})
        packed = [_pack(payload, mean.layout) for payload, _ in mean.terms]
        payloads[str(len(payloads))] = {str(i): payload for i, payload in enumerate(packed)}
    for k in range(len(flights), depth):
        empty = [_zeros(zeros, buffers) for _ in range(num_terms)]
        payloads[str(k)] = {str(i): payload for i, payload in enumerate(empty)}
    text = {
        "members": list(members),
        "wire": buffers.wire.name,
        "block_size": buffers.wire.block_size,
    }
    return json.dumps({**text, "history": history, "rounds": rounds}), payloads


def _named(wire: WireFormat) -> str | list[Any]:
    return [wire.name, wire.block_size] if wire.has_element_codes else wire.name


def _wire_of(saved: str | Sequence[Any]) -> WireFormat:
    """Return a wire of a saved state."""
    return WireFormat(saved) if isinstance(saved, str) else WireFormat(*saved)


def _usual_senders(members: Sequence[int], wire: WireFormat) -> tuple[int, ...]:
    """Return the senders of a saved round that names none; see ``RoundInFlight.senders``."""
    return tuple(members) if len(members) <= 2 or wire.is_gathered else ()


def pack_own(
    flights: Sequence[RoundInFlight], buffers: ExchangeBuffers, members: Sequence[int], depth: int
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Return this replica's numbers of rounds in flight, and its own payloads outside the means."""
    for flight in flights:
        flight.measured_norm()
    numbers: list[dict[str, Any]] = [
        {name: getattr(flight, name) for name in _OWN} for flight in flights
    ]
    payloads: dict[str, Tensor] = {}
    zeros = canonical(buffers.num_elements, buffers.wire)
    is_reduced = buffers.num_phases == 2
    for k, flight in enumerate(flights):
        if is_reduced or not flight.senders:
            own = flight.own
            payloads[str(k)] = _zeros(zeros, buffers) if own is None else _pack(own, flight.layout)
            if own is not None and flight.layout.wire != buffers.wire:
                numbers[k]["wire"] = _named(flight.layout.wire)
    for k in range(len(flights), depth if is_reduced else 0):
        payloads[str(k)] = _zeros(zeros, buffers)
    return numbers, payloads


def pack_corrections(corrections: Sequence[Own]) -> tuple[list[float], dict[str, Tensor]]:
    payloads = {str(i): _pack(own.payload, own.layout) for i, own in enumerate(corrections)}
    return [own.coefficient for own in corrections], payloads


def _zeros(layout: Layout, buffers: ExchangeBuffers) -> Tensor:
    return torch.zeros(layout.payload_bytes, dtype=torch.uint8, device=buffers.device)


def _pack(payload: Tensor, layout: Layout) -> Tensor:
    return layout.rearrange(payload, canonical(layout.num_elements, layout.wire))


# -------------------------------------------------------------------------------------- loading


@dataclass
class Saved:
    """The checked rounds of a part that a state has under way; ``install`` puts them in flight."""

    flights: list[RoundInFlight] = field(default_factory=list)
    corrections: list[Own] = field(default_factory=list)

    def install(self, part: SyncedPart) -> None:
        """Put the rounds in flight, as if their means had just come."""
        part.owed.corrections = self.corrections
        for flight in self.flights:
            assert part.buffers is not None and flight.mean is not None
            part.in_flight.append(flight)
            terms = flight.mean.terms
            own, layout = flight.own, flight.layout
            if own is None:
                own, layout = terms[0][0], flight.mean.layout
            part.buffers.adopt(flight.mean.headers[0], layout, own, flight.mean.layout, terms)


def unpack(
    part: SyncedPart,
    shared: str,
    payloads: Mapping[str, Mapping[str, Tensor]],
    own: Mapping[str, Any] | None,
    *,
    replica: int,
    must_fit: bool,
) -> Saved:
    """Read the rounds of one part that a state has under way.

    Args:
        part: The part.
        shared, payloads: The results of ``pack_shared``.
        own: This replica's ``flights``, ``payloads``, ``corrections`` and ``corrected``, or None.
        replica: Number of this replica.
        must_fit: Raise if the saved wire is not the present one: payloads of both are added up.

    Raises:
        ValueError: If something is missing or does not fit.
    """
    meta = json.loads(shared)
    buffers = part.buffers
    if buffers is None or not (meta["rounds"] or (own and own["corrections"])):
        return Saved()
    wire = WireFormat(meta["wire"], meta["block_size"])
    if must_fit and wire != buffers.wire:
        raise ValueError(
            f"the saved state has rounds of fragment {part.index} under way on wire {wire.name} "
            f"with blocks of {wire.block_size}, this one has {buffers.wire.name} with "
            f"{buffers.wire.block_size}: flush() before the save to change them"
        )
    reader = _Reader.of(part.index, buffers, wire)
    saved = Saved()
    for k, numbers in enumerate(meta["rounds"]):
        coefficients = numbers.pop("coefficients")
        found = payloads.get(str(k), {})
        mean_reader = reader
        if "mean_wire" in numbers:
            mean_reader = _Reader.of(part.index, buffers, _wire_of(numbers.pop("mean_wire")))
        tensors = [mean_reader.read(found.get(str(i))) for i in range(len(coefficients))]
        terms = list(zip(tensors, coefficients, strict=True))
        mine: dict[str, Any] = {"weight": 1.0}
        if own and k < len(own["flights"]):
            mine = dict(own["flights"][k])
        own_reader = reader
        if "wire" in mine:
            own_reader = _Reader.of(part.index, buffers, _wire_of(mine.pop("wire")))
        usual = _usual_senders(meta["members"], wire)
        senders = tuple(numbers.pop("senders", usual))
        if replica in senders:
            own_reader = mean_reader
            kept: Tensor | None = tensors[senders.index(replica)]
        else:
            apart = own["payloads"] if own and not senders else {}
            kept = own_reader.read(apart[str(k)]) if str(k) in apart else None
        layouts = own_reader.target, mean_reader.target
        flight = _flight_of(part, numbers, mine, kept, terms, layouts, replica)
        flight.members = senders
        saved.flights.append(flight)
    for i, coefficient in enumerate(own["corrections"] if own else []):
        payload = reader.read(own["corrected"].get(str(i)) if own else None)
        saved.corrections.append(Own(payload, coefficient, reader.target))
    return saved


def _flight_of(
    part: SyncedPart,
    numbers: Mapping[str, Any],
    mine: Mapping[str, Any],
    own: Tensor | None,
    terms: Terms,
    layouts: tuple[Layout, Layout],
    replica: int,
) -> RoundInFlight:
    """Return a round in flight whose mean has come, from its saved numbers and payloads.

    Args:
        numbers, mine: The round's numbers, from ``pack_shared`` and ``pack_own``.
        own: The own payload, or None.
        terms: The mean.
        layouts: The layouts of the own payload and of the mean's payloads.
    """
    header = Header(
        numbers["kind"],
        fragment=part.index,
        round=numbers["number"],
        weight=numbers["weight_sum"],
        outer_lr=numbers["outer_lr"],
        gap=numbers["gap"],
    )
    digest, reset = numbers["digest"], tuple(numbers.get("reset", ()))
    if digest is None:  # 0.2 passes on such a round from a state of a version before 0.2.
        raise ValueError(
            f"the saved state has a round of fragment {part.index} under way that began before "
            "0.2, and this version reads rounds of 0.2: load the state with 0.2, flush() and save "
            "again"
        )
    mean = Mean(terms, layouts[1], [header], [1.0], {}, 0, 0, digest=digest)
    return RoundInFlight(
        part=part,
        **{name: numbers[name] for name in _SHARED},
        **mine,
        own=own,
        layout=layouts[0],
        state="agreed",
        is_reset=replica in reset,
        mean=mean,
        saved_resets=reset,
    )


def saved_writes(parts: Sequence[SyncedPart]) -> dict[int, set[int]]:
    """Return the parts with a round in flight, by the inner step after which it is applied."""
    writes: dict[int, set[int]] = {}
    for part in parts:
        for flight in part.in_flight:
            writes.setdefault(flight.apply_step, set()).add(part.index)
    return writes


@dataclass
class _Reader:
    """Reads the saved payloads of one wire.

    Attributes:
        fragment: Index of the part.
        layout: Layout of the payloads in the state.
        target: Layout of the tensors that ``read`` returns: the buffers' layout if they have this
            wire, else ``layout``.
        device: Device of the tensors that ``read`` returns.
    """

    fragment: int
    layout: Layout
    target: Layout
    device: torch.device

    @classmethod
    def of(cls, fragment: int, buffers: ExchangeBuffers, wire: WireFormat) -> _Reader:
        layout = canonical(buffers.num_elements, wire)
        target = buffers.layout if wire == buffers.wire else layout
        return cls(fragment, layout, target, buffers.device)

    def read(self, payload: Tensor | None) -> Tensor:
        if payload is None or payload.dtype != torch.uint8:
            raise ValueError(f"the saved state lacks a payload of fragment {self.fragment}")
        if payload.numel() != self.layout.payload_bytes:
            raise ValueError(
                f"a saved payload of fragment {self.fragment} has {payload.numel()} bytes, "
                f"{self.layout.payload_bytes} expected"
            )
        laid_out = self.layout.rearrange(payload.reshape(-1), self.target)
        return laid_out.to(self.device, copy=True)
