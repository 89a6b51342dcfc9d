"""``diloco-comm plan``: the needs of a training run of its link, and the choice of settings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeAlias

import numpy as np

from diloco_comm.methods.outer import SGD, Nesterov, OuterOptimizer
from diloco_comm.ops.wire import ELEMENT_WIRES, WIRES, WireFormat

from ..common.sizes import positive
from .request import (
    AUTO,
    CHOOSABLE,
    DAY_S,
    LEAST_BITS_FOR_MOMENTUM,
    WIRES_CHOSEN,
    Request,
    Setting,
    as_arguments,
    choose,
    needed_gbps,
)
from .simulator import GRID_GBPS

# The loss minus the loss of fp32 after 30 rounds of 10 inner steps, with SGD as outer optimizer
# (wires.json; this file and those named below are in benchmarks/results/convergence).
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
# The same with 16 replicas, which is so many that owners encode the mean (``num_phases``).
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
# H, the inner steps of a round, and the loss of fp32 with this H minus its loss with H=10, after
# 300 inner steps (wires.json).
LOSS_OF_STEPS = ((10, 0.0), (30, 0.017))
# The delay as a share of H, and the loss of Streaming minus the loss of Blocking on fp32: with
# three fragments in convergence.json, with two in wires.json.
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
    """Tell whether the recorded runs promise a loss of at most the first request's.

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
    """Return the loss that a number of inner steps a round (H) adds.

    Between the two recorded numbers, and beyond the second one, the loss is linear in log(H).
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


# ----------------------------------------------------------------------------------------- estimate


# From the most precise to the coarsest, without wires that cost more and gain nothing: the recorded
# runs lost nothing on int4. Sparse wires are left out: at equal bits they lose more than sub2 to
# sub16.
_CANDIDATES = ("int4", "int2r", "int1r", "sub2", "sub4", "sub8", "sub16")
# A function of a request and its compute utilisation, which returns the US dollars that 1e9 tokens
# cost, by kind of cost.
Cost: TypeAlias = Callable[[Request, float], dict[str, float]]
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
    """Write a share below the target with as many digits as keep its rounding below the target."""
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
        f"{words}. Its loss was {lost:+.3f} nats over fp32 in runs of a model of 118,000 "
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

    Utilisation is predicted at the granularity "step" (``simulator.py``). ``sync_every`` is 1 for
    data parallel. Other arguments, such as the round trip, are the request's.
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


LATENCIES_MS = (0.0, 10.0, 50.0, 100.0, 200.0)
MONTH_DAYS = 30


def make_plan(
    request: Request,
    gbps: float | None = None,
    target: float = 0.95,
    *,
    chosen_wires: Sequence[str] = WIRES_CHOSEN,
    prices: Cost | None = None,
    with_outer: bool = False,
) -> dict[str, Any]:
    """Return all that is known about a request, as JSON types (docs/reference/plan.md).

    Args:
        gbps: Bandwidth of a link to look at, Gbit/s.
        target: Compute utilisation that settings for this link must reach, below 1.
        chosen_wires: Wires that settings may be chosen with, the first ones first.
        prices: Prices that settings are chosen by, among those that lose no more than the choice
            without prices.
        with_outer: Choose the outer learning rate, too, and say which loss is expected.

    Raises:
        ValueError: If the link or the target is impossible, or a wire is wanted for no link.
    """
    positive(gbps=gbps)
    if not 0 < target < 1:
        raise ValueError(f"--target must be between 0 and 1, got {target:g}")
    why, is_auto = None, request.wire == AUTO
    if is_auto:
        if gbps is None:
            raise ValueError("--wire auto needs --gbps: the bandwidth of the link to choose for")
        request, why = choose_wire(request, gbps, target)
        chosen_wires = (request.wire,)
    shares = {name: request.utilisation(GRID_GBPS, name) for name in ("layer", "step")}
    return {
        "schema": 1,
        "request": asdict(request),
        "bits_per_param": request.bits_per_param,
        "bandwidth_gbps": needed_gbps(shares["layer"]),
        "step_bandwidth_gbps": needed_gbps(shares["step"]),
        "curve": {
            "gbps": [round(float(x), 4) for x in GRID_GBPS],
            **{name: [round(float(x), 6) for x in values] for name, values in shares.items()},
        },
        "by_rtt_ms": [
            {"rtt_ms": rtt_ms, "step_bandwidth_gbps": at.bandwidth_gbps("step")}
            for rtt_ms in LATENCIES_MS
            for at in (replace(request, rtt_ms=rtt_ms),)
        ],
        "bytes_per_round": request.bytes_per_round,
        "bytes_per_day": request.bytes_per_day(1.0),
        "extra_memory_bytes": request.extra_memory_bytes,
        "wires": compare(request, gbps),
        "auto": why,
        "link": None
        if gbps is None
        else _on_link(request, gbps, target, is_auto, chosen_wires, prices, with_outer),
    }


def _on_link(
    request: Request,
    gbps: float,
    target: float,
    is_auto: bool,
    chosen_wires: Sequence[str],
    prices: Cost | None,
    with_outer: bool,
) -> dict[str, Any]:
    link = np.array([gbps])
    share = float(request.utilisation(link, "step")[0])
    tried = list(dict.fromkeys([*WIRES_TRIED, *chosen_wires]))
    settings = find_settings(request, gbps, target, tried)
    chosen = choose(settings, chosen_wires)
    if is_auto:
        chosen = request.setting(share) if share >= target else None
    why = None
    if chosen is not None and prices is not None:
        if is_auto:
            candidates = settings_of_wires(request, gbps, target)
        else:
            payable = tried if tuple(chosen_wires) == WIRES_CHOSEN else chosen_wires
            candidates = choosable_settings(request, gbps, target, payable)
        chosen, why = _cheapest(request, chosen, candidates, target, prices)
    return {
        "gbps": gbps,
        "rtt_ms": request.rtt_ms,
        "efficiency": float(request.efficiency_at(link)[0]),
        "utilisation": share,
        "layer_utilisation": float(request.utilisation(link, "layer")[0]),
        "lost_s_per_day": (1 - share) * DAY_S,
        "bytes_per_day": request.bytes_per_day(share),
        "target": target,
        "wires_tried": tried,
        "chosen_wires": list(chosen_wires),
        "settings": [asdict(setting) for setting in settings],
        "chosen": None
        if chosen is None
        else {**_described(request, chosen, prices, with_outer or why is not None), "why": why},
    }


def _cheapest(
    request: Request,
    first: Setting,
    candidates: Sequence[Setting],
    target: float,
    prices: Cost,
) -> tuple[Setting, str]:
    """Return the cheapest candidate that loses no more than the first setting, and why."""

    def cost(setting: Setting) -> float:
        one = _requested(request, setting)
        return prices(one, setting.utilisation)["total"]

    allowed = _requested(request, first)
    fit = [s for s in candidates if loses_no_more(_requested(request, s), allowed)]
    cheapest = min([first, *fit], key=cost)
    lose = f"that reach {target:.0%} and lose no more"
    if cheapest == first:
        return first, f"Chosen by price: no settings {lose} are cheaper."
    return cheapest, (
        f"Chosen by price: the cheapest of {len(fit)} settings {lose} than the choice without "
        f"prices ({first.words}: {cost(first):,.2f} USD)."
    )


def _requested(request: Request, setting: Setting) -> Request:
    """Return the request with the method, the wire and the H of a setting."""
    names = ("method", "delay", "sync_every", "fragment_layers")
    own = {name: getattr(setting, name) for name in names}
    return replace(with_wire(request, setting.wire), **own)


def _described(
    request: Request, chosen: Setting, prices: Cost | None, with_outer: bool
) -> dict[str, Any]:
    """Return the chosen settings as arguments, with their traffic, memory, cost and loss."""
    one, share = _requested(request, chosen), chosen.utilisation
    outer = outer_of(chosen.wire) if with_outer else None
    return {
        **as_arguments(chosen, request.block_size, outer),
        "bytes_per_day": one.bytes_per_day(share),
        "bytes_per_month": MONTH_DAYS * one.bytes_per_day(share),
        "extra_memory_bytes": one.extra_memory_bytes,
        "usd_per_1e9_tokens": None if prices is None else prices(one, share),
        "loss": expected(one) if with_outer else None,
    }
