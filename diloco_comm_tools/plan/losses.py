"""The loss that the recorded convergence runs let expect, and where they say nothing.

All differences are in nats a byte, at equal tokens, over Blocking on fp32 with H=10. Each one is a
mean over the seeds of runs with 4 replicas; the wires whose mean is encoded by owners had 16. Tests
compare every number here with the records in ``benchmarks/results/convergence``.

The runs are small: a byte-level transformer of 118,000 parameters (``wires.json``,
``long-run.json``) or 428,000 (``convergence.json``). ``expected`` names what lies beyond them.
"""

from __future__ import annotations

import math
from typing import Any

from diloco_comm.methods.outer import SGD, Nesterov, OuterOptimizer
from diloco_comm.ops.wire import WireFormat

from .request import LEAST_BITS_FOR_MOMENTUM, Request

# Loss over fp32 after 30 rounds of 10 inner steps, SGD as outer optimizer (wires.json).
LOSS_OVER_FP32: dict[str, float] = {
    "fp32": 0.0,
    "int4": 0.0,
    "int2r": -0.002,
    "int1r": 0.004,
    "sub2": 0.002,
    "topk256": 0.019,
    "sub4": 0.018,
    "topk128": 0.059,
    "topk64": 0.09,
    "sub8": 0.036,
    "topk32": 0.13,
    "sub16": 0.068,
}
# The same with 16 replicas, among which owners encode the mean on these wires (``phases``).
LOSS_BY_OWNERS: dict[str, float] = {
    "sub2": 0.003,
    "sub4": 0.002,
    "sub8": 0.021,
    "topk256": 0.0,
}
# The outer learning rates that were found: for Nesterov with a momentum of 0.9 under Blocking with
# 2 and with 4 replicas (long-run.json), and for SGD on the wires below two bits (wires.json).
NESTEROV_LR = 0.4
SGD_LR: dict[str, float] = {
    "int1r": 1.4,
    "sub2": 1.4,
    "topk256": 2.0,
    "sub4": 1.4,
    "topk128": 2.8,
    "topk64": 2.8,
    "sub8": 1.4,
    "topk32": 2.8,
    "sub16": 1.4,
}
# H, and the loss of fp32 there over the loss with H=10, 300 inner steps each (wires.json).
LOSS_OF_STEPS = ((10, 0.0), (30, 0.017))
# The delay as a share of H, and the loss of Streaming over Blocking on fp32: three fragments in
# convergence.json, two in wires.json.
LOSS_OF_DELAY = ((2 / 15, -0.005), (0.5, 0.047))
PARAMETERS = (118e3, 428e3)
REPLICAS, REPLICAS_OF_OWNERS = 4, 16


def over_fp32(request: Request) -> float | None:
    """Return the recorded loss of the wire over the loss of fp32; None if there is none."""
    return (LOSS_BY_OWNERS if request.has_owners else LOSS_OVER_FP32).get(request.wire)


def outer_of(wire: str) -> OuterOptimizer:
    """Return the outer optimizer with the learning rate that was found for a wire."""
    if WireFormat(wire).bits_per_element < LEAST_BITS_FOR_MOMENTUM:
        return SGD(SGD_LR[wire])
    return Nesterov(NESTEROV_LR)


def expected(request: Request) -> dict[str, Any]:
    """Return the loss to expect with settings of DiLoCo or Streaming, as JSON types.

    Args:
        request: The chosen settings, the model and the replicas.

    Returns:
        ``terms`` has the parts by ``sync_every``, ``wire`` and ``overlap``; None: not recorded.
        ``nats`` is their sum, None where a term is. ``extrapolated`` has a phrase for each way in
        which the request lies beyond the recorded runs; the terms are continued there.
    """
    terms = {
        "sync_every": _of_steps(request.sync_every),
        "wire": _of_wire(request),
        "overlap": _of_delay(request),
    }
    parts = [nats for nats in terms.values() if nats is not None]
    return {
        "nats": round(sum(parts), 3) if len(parts) == len(terms) else None,
        "terms": {name: None if nats is None else round(nats, 3) for name, nats in terms.items()},
        "extrapolated": _beyond(request),
    }


def loses_no_more(request: Request, first: Request) -> bool:
    """Tell whether the records let expect at most the loss of the first request.

    False where the records do not say: of two wires one was never run, or a wire below four bits
    has longer rounds than the recorded rounds, and than the first request on the same wire.
    """
    own, allowed, most_steps = _of_wire(request), _of_wire(first), LOSS_OF_STEPS[0][0]
    if request.wire == first.wire:
        own, allowed, most_steps = 0.0, 0.0, max(most_steps, first.sync_every)
    is_recorded = request.wire_format.has_element_codes or request.sync_every <= most_steps
    if own is None or allowed is None or not is_recorded:
        return False
    lost, most = (_of_steps(one.sync_every) + _of_delay(one) for one in (request, first))
    return lost + own <= most + allowed


def _of_steps(sync_every: int) -> float:
    """Return the loss of a number of inner steps a round.

    Between the two records, and beyond the second one, along the logarithm of H.
    """
    (few, low), (many, high) = LOSS_OF_STEPS
    return max(low + (high - low) * math.log(sync_every / few) / math.log(many / few), low)


def _of_wire(request: Request) -> float | None:
    """Return the recorded loss, or the loss on int4 for a wire of codes with more bits."""
    return LOSS_OVER_FP32["int4"] if _is_finer_than_int4(request) else over_fp32(request)


def _is_finer_than_int4(request: Request) -> bool:
    wire = request.wire_format
    return wire.has_element_codes and wire.bits_per_element > WireFormat("int4").bits_per_element


def _of_delay(request: Request) -> float:
    """Take the first record with at least this delay; a shorter delay loses no more."""
    if request.method != "streaming":
        return 0.0
    share = request.delay / request.sync_every
    return next((nats for most, nats in LOSS_OF_DELAY if share <= most), LOSS_OF_DELAY[-1][1])


def _beyond(request: Request) -> list[str]:
    least, most = PARAMETERS
    found = []
    if not least <= request.params <= most:
        found.append(
            f"{request.params:.4g} parameters (recorded: {least:,.0f} and {most:,.0f} parameters)"
        )
    few, many = (steps for steps, _ in LOSS_OF_STEPS)
    if not few <= request.sync_every <= many:
        found.append(f"H={request.sync_every} (recorded: {few} and {many})")
    recorded = REPLICAS_OF_OWNERS if request.has_owners else REPLICAS
    if request.workers != recorded:
        found.append(f"{request.workers} replicas (recorded: {recorded})")
    if request.method == "streaming":
        longest = LOSS_OF_DELAY[-1][0]
        if request.delay > longest * request.sync_every:
            found.append(
                f"a delay of {request.delay} of {request.sync_every} steps (recorded: up to "
                f"{longest:g} of H)"
            )
    if not request.wire_format.has_element_codes and request.sync_every > few:
        found.append(
            f"{request.wire} with H={request.sync_every} (recorded: {few}; longer rounds lose more)"
        )
    if request.wire != "fp32" and _is_finer_than_int4(request):
        found.append(f"{request.wire} (recorded: int4, which has fewer bits)")
    return found
