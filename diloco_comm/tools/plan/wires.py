"""All wires on one link: beside each other, the least H of each, and ``--wire auto``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...ops.wire import ELEMENT_WIRES, WIRES, WireFormat
from .losses import over_fp32
from .request import AUTO, CHOOSABLE, Request
from .settings import Setting

# From the most precise to the coarsest, without wires that cost more and gain nothing: the recorded
# runs lost nothing on int4. Sparse wires are left out: at equal bits they lose more than sub2 to
# sub16.
_CANDIDATES = ("int4", "int2r", "int1r", "sub2", "sub4", "sub8", "sub16")
ROUNDS_TRIED = (10, 20, 30, 50, 100, 200, 500, 1000)
WIRES_TRIED = ("fp32", "bf16", "int8", "int4", "int2r", "int1r", "sub8")


def compare(request: Request, gbps: float | None) -> list[dict[str, Any]]:
    """Return a row for each wire, most bits first, as JSON types.

    Each row has the wire's name, bits a parameter and bytes a round that a replica sends, extra
    memory in bytes, the measured loss over fp32 (None: not measured), and the utilisation on a link
    of ``gbps`` Gbit/s (None without a link).
    """
    rows = []
    for wire in WIRES:
        one = with_wire(request, wire)
        rows.append(
            {
                "wire": wire,
                "bits_per_param": one.bits_per_param,
                "bytes_per_round": one.bytes_per_round,
                "extra_memory_bytes": one.extra_memory_bytes,
                "loss_over_fp32": over_fp32(one),
                "utilisation": None if gbps is None else _utilisation(one, gbps),
            }
        )
    return sorted(rows, key=lambda row: -row["bits_per_param"])


def choose_wire(request: Request, gbps: float, target: float) -> tuple[Request, str]:
    """Return the request with the first wire that reaches the target, and why it is that one.

    The wires are tried from the most precise to the coarsest. One that sends no fewer bytes than
    the wire before it is passed over. Where none reaches the target, the one with the fewest bytes
    is taken.
    """
    refused: list[str] = []
    best, least_bits = request, float("inf")
    for wire in _CANDIDATES:
        one = with_wire(request, wire)
        if one.bits_per_param >= least_bits:
            refused.append(
                f"{wire} sends no fewer bytes than {best.wire} with {one.workers} replicas"
            )
            continue
        best, least_bits = one, one.bits_per_param
        share = _utilisation(one, gbps)
        if share >= target:
            return one, _reason(one, share, target, refused)
        refused.append(f"{wire} reaches {_below(share, target)}")
    share = _utilisation(best, gbps)
    refused.append(f"no wire reaches {target:.0%}, and {best.wire} sends the fewest bytes")
    return best, _reason(best, share, target, refused)


def _below(share: float, target: float) -> str:
    """Show a share below the target in so many digits that its words are below, too."""
    lengths = (n for n in range(1, 15) if float(f"{100 * share:.{n}f}") < 100 * target)
    digits = next(lengths, 15)
    return f"{share:.{digits}%}"


def _reason(request: Request, share: float, target: float, refused: list[str]) -> str:
    wire = request.wire
    shown = f"{share:.1%}" if share >= target else _below(share, target)
    words = f"{wire}: {request.bits_per_param:.4g} bits a parameter, utilisation {shown}"
    words += f" (wanted: {target:.0%})"
    if refused:
        words += f"; {', '.join(refused)}"
    if WireFormat(wire).has_element_codes:
        return f"{words}."
    lost, advice = over_fp32(request), "compare with int8 on your own task"
    if lost is None:
        return f"{words}. Its loss with so many replicas was not measured: {advice}."
    return (
        f"{words}. Its loss was {lost:+.3f} nats over that of fp32 in runs of a model of 118,000 "
        f"parameters: {advice}."
    )


def with_wire(request: Request, wire: str) -> Request:
    """Return the request with another wire; a block size stays where both wires have a choice."""
    has_choice = WireFormat(wire).has_element_codes
    is_choice = has_choice and request.wire in (*ELEMENT_WIRES, AUTO)
    block_size = request.block_size if is_choice else WireFormat().block_size
    return replace(request, wire=wire, bits=None, block_size=block_size)


def _utilisation(request: Request, gbps: float) -> float:
    return float(request.utilisation(np.array([gbps]), "step")[0])


def find_settings(
    request: Request, gbps: float, target: float, tried: Sequence[str] = WIRES_TRIED
) -> list[Setting]:
    """Find, for each method and wire, the smallest of ``ROUNDS_TRIED`` that reaches the target.

    In ``step`` granularity; ``sync_every`` is 1 for data parallel. Other arguments, such as the
    round trip, are the request's.
    """
    return [
        setting
        for way in _ways(request, tried)
        for setting in itertools.islice(_reaching(way, gbps, target), 1)
    ]


def choosable_settings(
    request: Request, gbps: float, target: float, tried: Sequence[str]
) -> list[Setting]:
    """Find all settings of DiLoCo and Streaming that reach the target.

    Each way and wire has every H of ``ROUNDS_TRIED`` that reaches the target.
    """
    ways = [way for way in _ways(request, tried) if way[0].method in CHOOSABLE]
    return [setting for way in ways for setting in _reaching(way, gbps, target)]


def settings_of_wires(request: Request, gbps: float, target: float) -> list[Setting]:
    """Return the request as a setting, on each wire of ``--wire auto`` that reaches the target."""
    requests = [with_wire(request, wire) for wire in _CANDIDATES]
    settings = [one.setting(_utilisation(one, gbps)) for one in requests]
    return [setting for setting in settings if setting.utilisation >= target]


def _ways(request: Request, tried: Sequence[str]) -> Iterator[list[Request]]:
    """Yield, for each method and wire, the requests that are tried, the smallest H first."""
    fragment = request.fragment_layers or min(3, request.layers)
    ways = [("diloco", 0, 0), ("streaming", 1, fragment), ("streaming", 5, fragment)]
    ways += [("eager", 0, request.fragment_layers)]
    for wire in tried:
        base = with_wire(request, wire)
        yield [replace(base, method="dp", delay=0, fragment_layers=0)]
        for method, delay, layers in ways:
            steps = [h for h in ROUNDS_TRIED if h > delay]
            change = {"method": method, "delay": delay, "fragment_layers": layers}
            yield [replace(base, sync_every=h, **change) for h in steps]  # type: ignore[arg-type]


def _reaching(tried: list[Request], gbps: float, target: float) -> Iterator[Setting]:
    for way in tried:
        share = _utilisation(way, gbps)
        if share >= target:
            steps = way.steps_a_round
            yield Setting(way.method, way.delay, way.wire, steps, way.fragment_layers, share)
