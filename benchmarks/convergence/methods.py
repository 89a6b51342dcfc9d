"""The methods that sweep.py compares, and the candidates for the numbers of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco_comm import SGD, Adam, HeavyBall, Nesterov, Wire
from diloco_comm.methods.overlap import CO2, Blocking, Delayed, Eager, Overlap, Streaming

MOMENTUM = 0.8
Choice = Mapping[str, float]

# Each family gets three candidates, tried on a seed of their own that is not in the table, and
# judged on validation windows that are not in the table either.
FAMILIES: dict[str, tuple[dict[str, float], ...]] = {
    "sgd": ({"lr": 0.7}, {"lr": 1.0}, {"lr": 1.4}),
    "heavy_ball": ({"lr": 0.2}, {"lr": 0.4}, {"lr": 0.7}),
    "nesterov": ({"lr": 0.2}, {"lr": 0.4}, {"lr": 0.7}),
    "adam": ({"lr": 0.03}, {"lr": 0.1}, {"lr": 0.3}),
    "streaming": ({"lr": 0.2}, {"lr": 0.4}, {"lr": 0.7}),
    "delayed": ({"lr": 0.1}, {"lr": 0.2}, {"lr": 0.4}),
    "eager": ({"lr": 0.2}, {"lr": 0.4}, {"lr": 0.7}),
    "co2": ({"lr": 0.1}, {"lr": 0.2}, {"lr": 0.4}),
    "clip": ({"clip": 0.01}, {"clip": 0.03}, {"clip": 0.1}),
}


@dataclass(frozen=True)
class Row:
    """One method.

    Attributes:
        families: Where its learning rate (and clip) come from; the last one is tuned with the
            first row that ends in it, after those before it.
        overlap: Name of the policy, in lower case.
        rounds: Staleness of the policies that have one.
    """

    name: str
    families: tuple[str, ...] = ()
    outer: str = "nesterov"
    overlap: str = "blocking"
    wire: str = "fp32"
    error_feedback: bool = False
    fragments: int = 1
    rounds: int = 1
    gap: float | str = 1.0
    has_clip: bool = False

    @property
    def is_data_parallel(self) -> bool:
        return self.name == "DDP"

    def arguments(self, choice: Choice) -> dict[str, Any]:
        """Arguments of DiLoCo for this method with these numbers."""
        lr = choice.get("lr", 1.0)
        outers = {
            "sgd": SGD(lr),
            "heavy_ball": HeavyBall(lr, MOMENTUM),
            "nesterov": Nesterov(lr, MOMENTUM),
            "adam": Adam(lr),
        }
        return {
            "outer": outers[self.outer],
            "overlap": self._policy(choice),
            "wire": Wire(self.wire, error_feedback=self.error_feedback),
            "fragments": self.fragments,
        }

    def _policy(self, choice: Choice) -> Overlap:
        clip = choice["clip"] if self.has_clip else None
        policies: dict[str, Overlap] = {
            "blocking": Blocking(),
            "streaming": Streaming(delay=2, alpha=0.5),
            "delayed": Delayed(self.rounds),
            "eager": Eager(self.rounds),
            "co2": CO2(clip=clip, gap=self.gap, rounds=self.rounds),
        }
        return policies[self.overlap]


def _streaming(name: str, wire: str, error_feedback: bool = False) -> Row:
    return Row(
        name,
        ("streaming",),
        overlap="streaming",
        wire=wire,
        error_feedback=error_feedback,
        fragments=3,
    )


def _co2(name: str, rounds: int, gap: float | str = 1.0, has_clip: bool = False) -> Row:
    families = ("co2", "clip") if has_clip else ("co2",)
    return Row(name, families, "heavy_ball", "co2", rounds=rounds, gap=gap, has_clip=has_clip)


ROWS = (
    Row("DDP"),
    Row("FedAvg", outer="sgd"),
    Row("DiLoCo SGD", ("sgd",), "sgd"),
    Row("DiLoCo heavy-ball", ("heavy_ball",), "heavy_ball"),
    Row("DiLoCo Nesterov", ("nesterov",)),
    Row("DiLoCo Nesterov int4", ("nesterov",), wire="int4"),
    Row("DiLoCo Nesterov e3m0", ("nesterov",), wire="e3m0"),
    Row("DiLoCo Adam", ("adam",), "adam"),
    _streaming("Streaming", "fp32"),
    _streaming("Streaming int4", "int4"),
    _streaming("Streaming int4 feedback", "int4", True),
    _streaming("Streaming e3m0", "e3m0"),
    _streaming("Streaming e3m0 feedback", "e3m0", True),
    Row("Delayed", ("nesterov",), overlap="delayed"),
    Row("Delayed own lr", ("delayed",), overlap="delayed"),
    Row("Eager", ("nesterov",), overlap="eager"),
    Row("Eager own lr", ("eager",), overlap="eager"),
    Row("Eager int4", ("nesterov",), overlap="eager", wire="int4"),
    Row("Eager streaming", ("nesterov",), overlap="eager", fragments=3),
    _co2("CO2", 1),
    _co2("CO2 penalty", 1, "gap-aware"),
    _co2("CO2 clip", 1, has_clip=True),
    _co2("CO2 penalty clip", 1, "gap-aware", True),
    _co2("CO2 stale 2", 2),
    _co2("CO2 stale 2 penalty", 2, "gap-aware"),
    _co2("CO2 stale 2 clip", 2, has_clip=True),
    _co2("CO2 stale 2 penalty clip", 2, "gap-aware", True),
)
ROW_OF = {row.name: row for row in ROWS}


def tuning_row(family: str) -> Row:
    """The row with which a family's candidates are tried."""
    return next(row for row in ROWS if row.families and row.families[-1] == family)
