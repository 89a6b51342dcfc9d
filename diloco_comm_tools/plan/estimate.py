"""``diloco-comm plan``: the needs of a training run of its link, and the choice of settings."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from diloco_comm.ops.wire import ELEMENT_WIRES, WIRES, WireFormat

from ..common.sizes import at_least, not_negative, positive
from . import losses
from .request import (
    AUTO,
    CHOOSABLE,
    DAY_S,
    WIRES_CHOSEN,
    Request,
    Setting,
    as_arguments,
    choose,
    needed_gbps,
)
from .simulator import GRID_GBPS

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
                "loss_over_fp32": losses.over_fp32(one),
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
    lost, advice = losses.over_fp32(request), "compare with int8 on your own task"
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


LATENCIES_MS = (0.0, 10.0, 50.0, 100.0, 200.0)
MONTH_DAYS = 30


@dataclass(frozen=True)
class Prices:
    """The price of traffic and machines, and the tokens of an inner step.

    Attributes:
        tokens_per_step: Tokens that one replica takes in an inner step.
        egress_usd_per_gb: For each 1e9 bytes that a replica sends.
        gpu_usd_per_hour: For each GPU.
        gpus: GPUs of one replica.
    """

    tokens_per_step: int
    egress_usd_per_gb: float = 0.0
    gpu_usd_per_hour: float = 0.0
    gpus: int = 1

    def __post_init__(self) -> None:
        at_least(1, tokens_per_step=self.tokens_per_step, gpus_per_replica=self.gpus)
        not_negative(egress_usd_per_gb=self.egress_usd_per_gb)
        not_negative(gpu_usd_per_hour=self.gpu_usd_per_hour)

    def per_billion_tokens(self, request: Request, share: float) -> dict[str, float]:
        """Return the dollars that 1e9 tokens cost at a compute utilisation, in all and by part."""
        steps = 1e9 / self.tokens_per_step
        gpu_hours = steps * request.step_time / share * self.gpus / 3600
        sent_gb = steps / request.steps_a_round * request.bytes_per_round / 1e9
        parts = {
            "gpus": gpu_hours * self.gpu_usd_per_hour,
            "egress": sent_gb * self.egress_usd_per_gb,
        }
        return {**parts, "total": sum(parts.values())}


def make_plan(
    request: Request,
    gbps: float | None = None,
    target: float = 0.95,
    *,
    chosen_wires: Sequence[str] = WIRES_CHOSEN,
    prices: Prices | None = None,
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
    prices: Prices | None,
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
    prices: Prices,
) -> tuple[Setting, str]:
    """Return the cheapest candidate that loses no more than the first setting, and why."""

    def cost(setting: Setting) -> float:
        one = _requested(request, setting)
        return prices.per_billion_tokens(one, setting.utilisation)["total"]

    allowed = _requested(request, first)
    fit = [s for s in candidates if losses.loses_no_more(_requested(request, s), allowed)]
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
    request: Request, chosen: Setting, prices: Prices | None, with_outer: bool
) -> dict[str, Any]:
    """Return the chosen settings as arguments, with their traffic, memory, cost and loss."""
    one, share = _requested(request, chosen), chosen.utilisation
    outer = losses.outer_of(chosen.wire) if with_outer else None
    return {
        **as_arguments(chosen, request.block_size, outer),
        "bytes_per_day": one.bytes_per_day(share),
        "bytes_per_month": MONTH_DAYS * one.bytes_per_day(share),
        "extra_memory_bytes": one.extra_memory_bytes,
        "usd_per_1e9_tokens": None if prices is None else prices.per_billion_tokens(one, share),
        "loss": losses.expected(one) if with_outer else None,
    }
