"""The settings of each demo, and the settings that all demos have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from diloco_comm.asynchronous.decoupled.settings import DecoupledSettings
from diloco_comm.ops.wire import WireName

from ..common.sizes import at_least, not_negative, positive
from .model import ModelConfig

LEAST_LEARNERS = 3
# Replicas 0 to 3 begin the chaos demo; replica 4 joins later.
FOUNDERS = 4
NEWCOMER = 4
KILLED, STOPPED = 3, 1


@dataclass(frozen=True)
class Row:
    """One row of the comparison: a training method and the wire format it sends with."""

    method: str
    wire: WireName

    @property
    def name(self) -> str:
        return f"{self.method} {self.wire}"


# The claims compare these rows.
BASELINE = Row("DDP", "fp32")
FEDAVG = Row("FedAvg", "fp32")
REFERENCE = Row("DiLoCo", "fp32")
SMALL = Row("DiLoCo", "int8")
TINY = Row("DiLoCo", "int4")
STREAMING = Row("Streaming", "int4")
EAGER = Row("Eager", "int4")
ROWS = (BASELINE, FEDAVG, REFERENCE, SMALL, TINY, STREAMING, EAGER)


@dataclass(frozen=True)
class Training:
    """Settings that every demo has.

    Attributes:
        step_s: Seconds that an inner step takes at least: replicas of one machine then train at
            their own speed, and not at the speed of the processor that they share.
        timeout_s: Seconds in which each event must have its effect.
    """

    num_replicas: int = 4
    sync_every: int = 10
    step_s: float = 0.1
    batch_size: int = 8
    inner_lr: float = 2e-3
    warmup_steps: int = 50
    outer_lr: float = 0.7
    outer_momentum: float = 0.8
    timeout_s: float = 120.0
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    data: Path | None = None

    def __post_init__(self) -> None:
        at_least(1, sync_every=self.sync_every)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one replica sees in one inner step."""
        return self.batch_size * self.model.context


@dataclass(frozen=True)
class Comparison(Training):
    """Settings common to all rows; every row has the same first weights and order of data."""

    sync_every: int = 50
    step_s: float = 0.0
    warmup_steps: int = 100
    num_steps: int = 350
    link_gbps: float = 0.5
    link_rtt_ms: float = 10.0
    num_validation_windows: int = 256
    report_every: int = 10

    def __post_init__(self) -> None:
        at_least(2, replicas=self.num_replicas)
        positive(gbps=self.link_gbps)
        not_negative(rtt_ms=self.link_rtt_ms)
        super().__post_init__()
        if self.num_steps < self.sync_every or self.num_steps % self.sync_every:
            must = "at least" if self.num_steps < self.sync_every else "a multiple of"
            raise ValueError(
                f"--steps must be {must} --sync-every {self.sync_every}, got {self.num_steps}"
            )

    @property
    def link(self) -> str:
        return f"{self.link_gbps:g} Gbit/s, {self.link_rtt_ms:g} ms round trip, emulated"

    def inner_lr_at(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a tenth; ``step`` counts from 0."""
        warmup = min(self.warmup_steps, self.num_steps // 4)
        if step < warmup:
            return self.inner_lr * (step + 1) / warmup
        progress = (step - warmup) / max(1, self.num_steps - warmup)
        return self.inner_lr * (0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * progress)))


@dataclass(frozen=True)
class Chaos(Training):
    """Settings of replicas that come and go, and of the script of events.

    Attributes:
        num_replicas: Founders, and the replica that comes later.
        pause_s: Seconds of training between two events.
        outage_s: Seconds for which the registry is away.
        suspect_after_s, founding_wait_s: As in ``Elastic``.
    """

    num_replicas: int = FOUNDERS + 1
    pause_s: float = 10.0
    outage_s: float = 6.0
    wire: WireName = "int8"
    suspect_after_s: float = 4.0
    founding_wait_s: float = 3.0


@dataclass(frozen=True)
class Decoupled(Training):
    """Settings of learners that never wait. The last is killed, and the one before it is slow.

    Attributes:
        num_steps: Inner steps of a learner that is neither slow nor killed.
        slow_factor: A step of the slow learner takes this many times ``step_s``.
    """

    num_steps: int = 300
    slow_factor: float = 3.0
    timeout_s: float = 240.0
    model: ModelConfig = field(default_factory=lambda: ModelConfig(context=32, width=64))

    def __post_init__(self) -> None:
        if self.num_replicas < LEAST_LEARNERS:
            raise ValueError(
                f"--replicas must be at least {LEAST_LEARNERS} with --decoupled, got "
                f"{self.num_replicas}"
            )
        super().__post_init__()
        if self.num_steps < 2 * self.sync_every:
            raise ValueError(
                f"--steps must be at least twice --sync-every {self.sync_every}, got "
                f"{self.num_steps}"
            )

    @property
    def slow(self) -> int:
        """The learner whose steps are slow."""
        return self.num_replicas - 2

    @property
    def killed(self) -> int:
        """The learner that is killed."""
        return self.num_replicas - 1

    @property
    def seconds(self) -> float:
        """Seconds of training."""
        return self.num_steps * self.step_s

    def step_s_of(self, learner: int) -> float:
        return self.step_s * (self.slow_factor if learner == self.slow else 1.0)

    @property
    def run(self) -> DecoupledSettings:
        """The syncer's prescriptions: three fragments, a quorum of one, int4 both ways."""
        return DecoupledSettings(
            fragments=3,
            sync_every=self.sync_every,
            quorum=1,
            delay=2,
            by_mean=("embedding*", "position*"),
            wire="int4",
            wire_down="int4",
            receipt="carry",
            error_feedback=True,
        )


# Each demo, and what it is with --quick. A short run of the comparison has few outer steps, which
# converge better at a lower inner rate.
DEMOS: dict[str, tuple[Training, Training]] = {
    "comparison": (Comparison(), Comparison(num_steps=100, batch_size=4, inner_lr=1e-3)),
    "chaos": (Chaos(), Chaos(pause_s=3.0, outage_s=3.0)),
    "decoupled": (Decoupled(), Decoupled(num_steps=100)),
}
# Options, by the names of their arguments, and the fields of the settings that they set.
OPTIONS = {
    "replicas": "num_replicas",
    "steps": "num_steps",
    "gbps": "link_gbps",
    "rtt_ms": "link_rtt_ms",
}
_REFUSALS = {
    "chaos": ("--chaos has replicas and times of its own", tuple(OPTIONS)),
    "decoupled": ("--decoupled has no emulated link", ("gbps", "rtt_ms")),
}


def chosen(name: str, is_quick: bool, given: Mapping[str, Any]) -> Any:
    """Return the settings of a demo.

    Args:
        name: One of ``DEMOS``.
        given: The options that the user gave, by the names of their arguments.

    Raises:
        ValueError: If a value is invalid, or the demo has no such option.
    """
    why, refused = _REFUSALS.get(name, ("", ()))
    for option in refused:
        if option in given:
            raise ValueError(f"{why}: leave out --{option.replace('_', '-')}")
    changes = {OPTIONS.get(option, option): value for option, value in given.items()}
    return replace(DEMOS[name][is_quick], **changes)
