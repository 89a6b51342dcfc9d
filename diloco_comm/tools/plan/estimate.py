"""``diloco-comm plan``: what a training run needs of its link, predicted by a simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from . import wires
from .request import AUTO, DAY_S, TARGETS, Request, needed_gbps
from .settings import WIRES_CHOSEN, Setting, as_arguments, choose
from .simulator import GRID_GBPS

__all__ = ["TARGETS", "Request", "find_settings", "make_plan", "needed_gbps"]

LATENCIES_MS = (0.0, 10.0, 50.0, 100.0, 200.0)
ROUNDS_TRIED = (10, 20, 30, 50, 100, 200, 500, 1000)
WIRES_TRIED = ("fp32", "bf16", "int8", "int4", "int2r", "int1r", "sub8")


def make_plan(
    request: Request,
    gbps: float | None = None,
    target: float = 0.95,
    *,
    chosen_wires: Sequence[str] = WIRES_CHOSEN,
) -> dict[str, Any]:
    """Return all that is known about a request, as JSON types; docs/reference/plan.md has them.

    Args:
        gbps: Bandwidth of a link to look at, Gbit/s.
        target: Compute utilisation that settings for this link must reach, below 1.
        chosen_wires: Wires that settings may be chosen with, the first ones first.

    Raises:
        ValueError: If the link or the target is impossible, or a wire is wanted for no link.
    """
    if gbps is not None and not 0 < gbps < float("inf"):
        raise ValueError(f"--gbps must be a positive number, got {gbps:g}")
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
        "link": None if gbps is None else _on_link(request, gbps, target, is_auto, chosen_wires),
    }


def _on_link(
    request: Request, gbps: float, target: float, is_auto: bool, chosen_wires: Sequence[str]
) -> dict[str, Any]:
    link = np.array([gbps])
    share = float(request.utilisation(link, "step")[0])
    tried = dict.fromkeys([*WIRES_TRIED, *chosen_wires])
    settings = find_settings(request, gbps, target, list(tried))
    chosen = choose(settings, chosen_wires)
    if is_auto:
        chosen = request.setting(share) if share >= target else None
    return {
        "gbps": gbps,
        "rtt_ms": request.rtt_ms,
        "utilisation": share,
        "layer_utilisation": float(request.utilisation(link, "layer")[0]),
        "lost_s_per_day": (1 - share) * DAY_S,
        "bytes_per_day": request.bytes_per_day(share),
        "target": target,
        "wires_tried": list(tried),
        "chosen_wires": list(chosen_wires),
        "settings": [asdict(setting) for setting in settings],
        "chosen": None if chosen is None else as_arguments(chosen, request.block_size),
    }


def find_settings(
    request: Request, gbps: float, target: float, tried: Sequence[str] = WIRES_TRIED
) -> list[Setting]:
    """Find, for each method and wire, the smallest of ``ROUNDS_TRIED`` that reaches the target.

    In ``step`` granularity; ``sync_every`` is 1 for data parallel. Other arguments, such as the
    round trip, are the request's.
    """
    fragment = request.fragment_layers or min(3, request.layers)
    ways = [("diloco", 0, 0), ("streaming", 1, fragment), ("streaming", 5, fragment)]
    ways += [("eager", 0, request.fragment_layers)]
    found = []
    for wire in tried:
        base = wires.with_wire(request, wire)
        candidates = [[replace(base, method="dp", delay=0, fragment_layers=0)]]
        for method, delay, layers in ways:
            steps = [h for h in ROUNDS_TRIED if h > delay]
            change = {"method": method, "delay": delay, "fragment_layers": layers}
            candidates.append([replace(base, sync_every=h, **change) for h in steps])  # type: ignore[arg-type]
        for way in candidates:
            found += _first_that_reaches(way, gbps, target)
    return found


def _first_that_reaches(tried: list[Request], gbps: float, target: float) -> list[Setting]:
    for way in tried:
        share = float(way.utilisation(np.array([gbps]), "step")[0])
        if share >= target:
            steps = way.steps_a_round
            return [Setting(way.method, way.delay, way.wire, steps, way.fragment_layers, share)]
    return []
