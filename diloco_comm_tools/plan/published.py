"""Published tables, simulated and measured, and what our simulator gives for the same settings.

Simulated are the Gbit/s to reach a compute utilisation of 50, 80, 90, 95 and 99 %: Table 4 of
Streaming DiLoCo (arXiv 2501.18512) and Table 5 of Eager Updates (arXiv 2502.12996). The first is
reproduced; the second is not, and stands here for comparison.

Measured are utilisations of real runs: DiLoCo between four GPUs on shaped links, and INTELLECT-1.
Nothing of the simulator is fitted to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .request import TARGETS, Request
from .simulator import GRID_GBPS

# The width of a parameter that fits Table 4; the paper states none. FP4 takes a quarter.
FITTED_BITS = 13.4
# Name, parameters, layers, seconds of a step.
MODELS = (("1B", 1e9, 24, 0.1), ("10B", 10e9, 48, 0.8), ("100B", 100e9, 108, 4.9))

_DATA_PARALLEL = (
    (86.8, 152.6, 184.2, 222.3, 569.0),
    (104.8, 222.3, 222.3, 268.3, 471.5),
    (184.2, 323.8, 390.7, 390.7, 471.5),
)
_FP4_OVERLAP = (
    (0.4, 0.9, 1.7, 2.0, 3.0),
    (0.4, 0.9, 1.4, 1.4, 1.7),
    (0.5, 0.9, 1.1, 1.1, 1.4),
)


@dataclass(frozen=True)
class Row:
    """One published row: what was simulated, and its numbers for the three models."""

    name: str
    options: dict[str, Any]
    bits: float
    gbps: tuple[tuple[float, ...], ...]

    def request(self, model_idx: int) -> Request:
        """Return the row's settings for one of ``MODELS``."""
        _, params, layers, step_time = MODELS[model_idx]
        return Request(params, layers, step_time, bits=self.bits, **self.options)


def _streaming(delay: int, sync_every: int = 100) -> dict[str, Any]:
    own = {"method": "streaming", "delay": delay, "fragment_layers": 3}
    return {**own, "sync_every": sync_every}


def _eager(sync_every: int) -> dict[str, Any]:
    return {"method": "eager", "fragment_layers": 3, "sync_every": sync_every}


TABLE_4 = (
    Row("data parallel", {"method": "dp"}, FITTED_BITS, _DATA_PARALLEL),
    Row(
        "vanilla DiLoCo",
        {"method": "diloco"},
        FITTED_BITS,
        (
            (1.4, 6.2, 13.3, 23.3, 86.8),
            (1.7, 7.5, 16.0, 33.9, 104.8),
            (3.0, 11.0, 23.3, 49.4, 184.2),
        ),
    ),
    Row(
        "Streaming DiLoCo",
        _streaming(0),
        FITTED_BITS,
        ((1.4, 5.2, 9.1, 16.0, 28.1), (1.7, 5.2, 9.1, 13.3, 19.3), (2.4, 6.2, 9.1, 11.0, 19.3)),
    ),
    Row(
        "with overlap",
        _streaming(1),
        FITTED_BITS,
        ((1.4, 4.3, 6.2, 9.1, 11.0), (1.7, 3.6, 5.2, 6.2, 7.5), (1.7, 3.6, 4.3, 5.2, 5.2)),
    ),
    Row("with overlap and FP4", _streaming(1), FITTED_BITS / 4, _FP4_OVERLAP),
)

TABLE_5 = (
    Row(
        "1-inner-step overlap, H=30, FP4",
        _streaming(1, 30),
        FITTED_BITS / 4,
        ((2.4, 3.6, 4.3, 4.3, 4.3), (1.4, 2.4, 2.4, 3.0, 3.0), (0.9, 1.7, 2.0, 2.0, 2.0)),
    ),
    Row("1-inner-step overlap, H=100, FP4", _streaming(1), FITTED_BITS / 4, _FP4_OVERLAP),
    Row(
        "1-outer-step overlap (eager), H=30, FP4",
        _eager(30),
        FITTED_BITS / 4,
        ((1.1, 2.0, 2.0, 2.0, 2.4), (0.7, 1.1, 1.4, 1.4, 1.4), (0.5, 0.8, 0.9, 0.9, 0.9)),
    ),
    Row(
        "1-outer-step overlap (eager), H=100, FP4",
        _eager(100),
        FITTED_BITS / 4,
        ((0.1, 0.2, 0.2, 0.2, 0.2), (0.1, 0.2, 0.2, 0.3, 0.3), (0.2, 0.3, 0.3, 0.3, 0.4)),
    ),
)


@dataclass(frozen=True)
class Measured:
    """One measured utilisation, and the request that predicts it.

    Attributes:
        row: Name of the setting.
        gbps: Bandwidth of the link, Gbit/s.
        share: Published utilisation.
        request: The setting as a request for the simulator.
    """

    row: str
    gbps: float
    share: float
    request: Request


# DiLoCo of 30.8 million parameters in fp32 over NCCL, four GPUs, TCP on links shaped by tc
# (github.com/Adnan082/diloco-measured at 07b7885, README.md): utilisation in % at each Gbit/s.
# The telemetry has 26.1 ms a step (median of the 16 runs), and in the counted part of a run fewer
# exchanges than H says: 4 in 140 steps at H=32, one in 180 at H=128.
_LINKS = (0.05, 0.2, 1.0, 5.0)
_GRID = (
    (1, 1, (0.07, 0.32, 1.74, 7.76)),
    (8, 8, (0.55, 2.48, 12.35, 40.24)),
    (32, 35, (2.41, 10.01, 36.01, 68.10)),
    (128, 180, (11.55, 36.09, 71.52, 87.00)),
)
GRID = tuple(
    Measured(
        f"H={sync_every}",
        gbps,
        percent / 100,
        Request(
            30_846_720,
            6,
            0.0261,
            workers=4,
            sync_every=counted,
            wire="fp32",
            efficiency=None,
        ),
    )
    for sync_every, counted, percents in _GRID
    for gbps, percent in zip(_LINKS, percents, strict=True)
)

# INTELLECT-1 (arXiv 2412.01152, Table 2): 10 billion parameters, int8, 100 inner steps in 38
# minutes. For each region: the median seconds of an all-reduce, and the MFU. The MFU is 43.3 %
# without communication. The rates of the links were not published; these links take the published
# seconds.
_INTELLECT = Request(10e9, 42, 38 * 60 / 100, workers=14, sync_every=100, wire="int8")
INTELLECT_1 = tuple(
    Measured(name, 8 * _INTELLECT.bytes_per_round / seconds / 1e9, mfu / 43.3, _INTELLECT)
    for name, seconds, mfu in (
        ("USA", 103.0, 41.4),
        ("USA and Europe", 382.0, 37.1),
        ("global", 469.0, 36.2),
    )
)


def compare_measured(cells: Sequence[Measured]) -> list[dict[str, Any]]:
    """Put measured and predicted utilisation side by side; ``error`` is relative to measured."""
    entries = []
    for cell in cells:
        share = float(cell.request.utilisation(np.array([cell.gbps]), "step")[0])
        entries.append(
            {
                "row": cell.row,
                "gbps": cell.gbps,
                "published": cell.share,
                "predicted": share,
                "error": share / cell.share - 1,
            }
        )
    return entries


def as_printed(gbps: float) -> float:
    """Round a bandwidth as the paper's tables do: to two decimals, then to one."""
    return round(round(float(gbps), 2), 1)


def grid_idx(printed: float) -> int:
    """Return the grid's value that a printed number stands for."""
    matches = [i for i, gbps in enumerate(GRID_GBPS) if as_printed(gbps) == printed]
    nearest = int(np.argmin(np.abs(np.log(GRID_GBPS / printed))))
    return min(matches, key=lambda i: abs(i - nearest)) if matches else nearest


def compare(rows: tuple[Row, ...]) -> list[dict[str, Any]]:
    """Put published and predicted numbers side by side, one entry a row, model and target.

    Returns:
        Entries with ``row``, ``model``, ``target``, ``published_gbps``, ``gbps`` (as the papers
        print it) and ``grid_steps`` (ours minus the published number; None where no bandwidth
        suffices).
    """
    entries = []
    for row in rows:
        for model_idx, (model, *_) in enumerate(MODELS):
            needed = row.request(model_idx).bandwidth_gbps()
            for target, published in zip(TARGETS, row.gbps[model_idx], strict=True):
                gbps = needed[f"{target:g}"]
                printed = None if gbps is None else as_printed(gbps)
                steps = None if printed is None else grid_idx(printed) - grid_idx(published)
                entries.append(
                    {
                        "row": row.name,
                        "model": model,
                        "target": target,
                        "published_gbps": published,
                        "gbps": printed,
                        "grid_steps": steps,
                    }
                )
    return entries
