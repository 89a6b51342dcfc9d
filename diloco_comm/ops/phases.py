"""In how many phases the payloads of the replicas become a mean, and on which wire that travels.

With two replicas, each gets the payload of the other. With more there are two ways. In the first,
all payloads go to all replicas: one phase, and the mean is the sum of the payloads. In the second,
each replica owns a part of the elements: the owner reduces that part of all payloads and encodes
the mean once more. That is a reduce-scatter and an all-gather, hence two phases.

``sub2`` to ``sub16`` and ``topk32`` to ``topk256`` take the first way while it costs no more than
two phases of the wire on which an owner would encode their mean: the noise of these short wires is
averaged over the replicas, that of an owner's encoding is not. The bytes of the first way grow with
the number of replicas. From that number on, owners encode the mean of ``sub`` payloads on
``int1r``, and of ``topk`` payloads on ``int2r``.
"""

from __future__ import annotations

from dataclasses import replace

from .wire import Layout, WireFormat

_OWNER_OF_ROTATED, _OWNER_OF_SPARSE = WireFormat("int1r"), WireFormat("int2r")


def mean_wire(wire: WireFormat) -> WireFormat:
    """Return the wire on which the owner of a part encodes the mean of payloads on ``wire``."""
    if wire.is_sparse:
        return _OWNER_OF_SPARSE
    return _OWNER_OF_ROTATED if wire.is_gathered else wire


def num_phases(wire: WireFormat, num_replicas: int, *, must_gather: bool = False) -> int:
    """Return 0 for one replica, 1 if all payloads go to all, 2 if owners reduce them.

    Args:
        must_gather: A wire that ``is_gathered`` stays so with any number of replicas.
    """
    if num_replicas == 1:
        return 0
    if num_replicas == 2:
        return 1
    if not wire.is_gathered:
        return 2
    # What a replica receives, over (W - 1) / W: W payloads, or two of the owner's wire.
    costs_more = num_replicas * wire.bits_per_element > 2 * mean_wire(wire).bits_per_element
    return 2 if costs_more and not must_gather else 1


def mean_layout(layout: Layout, num_replicas: int, *, must_gather: bool = False) -> Layout:
    """Return how the payloads of a mean are laid out: in the same runs, on the mean's wire."""
    is_reduced = num_phases(layout.wire, num_replicas, must_gather=must_gather) == 2
    return replace(layout, wire=mean_wire(layout.wire)) if is_reduced else layout


def received_bits(wire: WireFormat, num_replicas: int, *, must_gather: bool = False) -> float:
    """Return the bits that a replica receives, and sends, for each element of an exchange."""
    others = num_replicas - 1
    if num_phases(wire, num_replicas, must_gather=must_gather) < 2:
        return others * wire.bits_per_element
    both = wire.bits_per_element + mean_wire(wire).bits_per_element
    return both * others / num_replicas


def held_bits(wire: WireFormat, num_replicas: int, *, must_gather: bool = False) -> float:
    """Return the bits of all payloads that a replica holds for each element of an exchange."""
    phases = num_phases(wire, num_replicas, must_gather=must_gather)
    if phases < 2:
        return num_replicas * wire.bits_per_element
    return wire.bits_per_element + mean_wire(wire).bits_per_element
