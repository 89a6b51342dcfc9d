"""``diloco-comm plan``: what a training run needs of its link, predicted by a simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..common.sizes import at_least, positive
from . import losses, wires
from .request import AUTO, DAY_S, TARGETS, Request, needed_gbps
from .settings import WIRES_CHOSEN, Setting, as_arguments, choose
from .simulator import GRID_GBPS
from .wires import find_settings

__all__ = ["TARGETS", "Prices", "Request", "find_settings", "make_plan", "needed_gbps"]

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
        for name in ("egress-usd-per-gb", "gpu-usd-per-hour"):
            usd = getattr(self, name.replace("-", "_"))
            if not 0 <= usd < float("inf"):
                raise ValueError(f"--{name} must be a number of at least 0, got {usd:g}")

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
    """Return all that is known about a request, as JSON types (docs/reference/plan-json.md).

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
        request, why = wires.choose_wire(request, gbps, target)
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
        "wires": wires.compare(request, gbps),
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
    tried = list(dict.fromkeys([*wires.WIRES_TRIED, *chosen_wires]))
    settings = find_settings(request, gbps, target, tried)
    chosen = choose(settings, chosen_wires)
    if is_auto:
        chosen = request.setting(share) if share >= target else None
    why = None
    if chosen is not None and prices is not None:
        if is_auto:
            candidates = wires.settings_of_wires(request, gbps, target)
        else:
            payable = tried if tuple(chosen_wires) == WIRES_CHOSEN else chosen_wires
            candidates = wires.choosable_settings(request, gbps, target, payable)
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
    return replace(wires.with_wire(request, setting.wire), **own)


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
