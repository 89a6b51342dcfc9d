"""Rounds under way in a saved state: when each is due, its mean, and the own payload.

Payloads are saved in one run (``canonical``), so that a group of any size can read them. All
replicas have in common one list of numbers and, for each round, the payloads of its mean. Each
replica has another list, with its own payload where that is not part of the mean. Numbers are JSON
text: a checkpoint that is read in place needs the same entries whatever is under way. So there are
always ``depth`` sets of payloads, of zeros where no round is under way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...exchange.buffers import ExchangeBuffers
from ...exchange.round import Header, Mean, Terms
from ...methods.overlap import Own
from ...ops.wire import Layout, WireFormat
from ..flights import RoundInFlight, weight_sum
from ..synced import SyncedPart

_SHARED = ("number", "kind", "sent_step", "apply_step", "lr")
_OWN = ("weight", "norm", "coefficient")


def canonical(num_elements: int, wire: WireFormat) -> Layout:
    """Return the layout of a saved payload."""
    return Layout.plan(num_elements, 1, 1, wire)


# --------------------------------------------------------------------------------------- saving


def pack_shared(
    flights: Sequence[RoundInFlight],
    buffers: ExchangeBuffers,
    members: Sequence[int],
    depth: int,
    history: int,
) -> tuple[str, dict[str, dict[str, Tensor]]]:
    """Return numbers and payloads of rounds that have arrived, equal on all replicas.

    Args:
        depth: Rounds that may be under way between two inner steps.
        history: The history of the part.
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
            "digest": mean.digest if flight.has_digest else None,
        }
        # The mean of short payloads may be on another wire (``phases``), and so may a round that
        # was under way when the wire was changed.
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
    """Return a wire of a saved state.

    Raises:
        ValueError: If the state does not say the block size of a wire that leaves the choice.
    """
    wire = WireFormat(saved) if isinstance(saved, str) else WireFormat(*saved)
    if isinstance(saved, str) and wire.has_element_codes:
        raise ValueError(
            f"the saved state has a round under way on wire {saved} with blocks of unknown size: "
            "an older version loaded and saved this state; load the state from before that save"
        )
    return wire


def _usual_senders(members: Sequence[int], wire: WireFormat) -> tuple[int, ...]:
    """The senders of a round that does not name them; see ``RoundInFlight.senders``."""
    return tuple(members) if len(members) <= 2 or wire.is_gathered else ()


def pack_own(
    flights: Sequence[RoundInFlight], buffers: ExchangeBuffers, members: Sequence[int], depth: int
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Return this replica's numbers, and its own payloads that are no terms of a mean."""
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
    """The rounds that ``unpack`` found for one part, checked and not yet put in flight."""

    flights: list[RoundInFlight] = field(default_factory=list)
    corrections: list[Own] = field(default_factory=list)

    def install(self, part: SyncedPart) -> None:
        """Put the rounds in flight, as if they had just arrived."""
        part.corrections = self.corrections
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
    """Read the rounds of one part.

    Args:
        shared, payloads: As ``pack_shared`` made them.
        own: This replica's ``flights``, ``payloads``, ``corrections`` and ``corrected``, or None.
        replica: Number of this replica.
        must_fit: Old and new payloads will be added up, so their wires must be equal.

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
        flight = _flight_of(part.index, numbers, mine, kept, terms, layouts, replica)
        flight.members = senders
        saved.flights.append(flight)
    for i, coefficient in enumerate(own["corrections"] if own else []):
        payload = reader.read(own["corrected"].get(str(i)) if own else None)
        saved.corrections.append(Own(payload, coefficient, reader.target))
    return saved


def _flight_of(
    fragment: int,
    numbers: Mapping[str, Any],
    mine: Mapping[str, Any],
    own: Tensor | None,
    terms: Terms,
    layouts: tuple[Layout, Layout],
    replica: int,
) -> RoundInFlight:
    """Return a round that has arrived: one header carries the numbers that all replicas share.

    Args:
        numbers, mine: Of the round, as ``pack_shared`` and ``pack_own`` made them.
        layouts: Of the own payload, and of those of the mean.
    """
    header = Header(
        numbers["kind"],
        fragment=fragment,
        round=numbers["number"],
        weight=numbers["weight_sum"],
        outer_lr=numbers["outer_lr"],
        gap=numbers["gap"],
    )
    # States of older versions have no digest.
    digest, reset = numbers.get("digest"), tuple(numbers.get("reset", ()))
    mean = Mean(terms, layouts[1], [header], [1.0], {}, 0, 0, digest=digest or 0)
    return RoundInFlight(
        **{name: numbers[name] for name in _SHARED},
        **mine,
        own=own,
        layout=layouts[0],
        is_reset=replica in reset,
        mean=mean,
        has_digest=digest is not None,
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
    """Reads payloads of one wire.

    Attributes:
        layout: Of the payloads in the state.
        target: Of what ``read`` returns: where the wire is that of the buffers, as these have.
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
