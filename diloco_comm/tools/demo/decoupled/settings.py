"""What the demo of decoupled training trains, and who is slow and who is killed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ....asynchronous.decoupled.settings import DecoupledSettings
from ..model import ModelConfig

LEAST_LEARNERS = 3


@dataclass(frozen=True)
class DecoupledDemo:
    """Settings of all learners.

    The last learner is killed in the middle, and the one before it is slow.

    Attributes:
        num_steps: Inner steps of a learner that is neither slow nor killed.
        step_s: Seconds that an inner step takes at least: learners of one machine then train at
            their own speed, and not at that of the processor that they share.
        slow_factor: The slow learner's step over ``step_s``.
        timeout_s: Seconds of the server's silence, and of a learner's start, that are an error.
    """

    num_learners: int = 4
    num_steps: int = 300
    sync_every: int = 10
    step_s: float = 0.1
    slow_factor: float = 3.0
    batch_size: int = 8
    inner_lr: float = 2e-3
    warmup_steps: int = 50
    outer_lr: float = 0.7
    outer_momentum: float = 0.8
    timeout_s: float = 240.0
    seed: int = 0
    model: ModelConfig = field(default_factory=lambda: ModelConfig(context=32, width=64))
    data: Path | None = None

    def __post_init__(self) -> None:
        if self.num_learners < LEAST_LEARNERS:
            raise ValueError(
                f"--replicas must be at least {LEAST_LEARNERS} with --decoupled, got "
                f"{self.num_learners}"
            )
        if self.sync_every < 1:
            raise ValueError(f"--sync-every must be at least 1, got {self.sync_every}")
        if self.num_steps < 2 * self.sync_every:
            raise ValueError(
                f"--steps must be at least twice --sync-every {self.sync_every}, got "
                f"{self.num_steps}"
            )

    @property
    def slow(self) -> int:
        """The learner whose steps are slow."""
        return self.num_learners - 2

    @property
    def killed(self) -> int:
        """The learner that is killed."""
        return self.num_learners - 1

    @property
    def seconds(self) -> float:
        """Seconds of training."""
        return self.num_steps * self.step_s

    def step_s_of(self, learner: int) -> float:
        return self.step_s * (self.slow_factor if learner == self.slow else 1.0)

    @property
    def run(self) -> DecoupledSettings:
        """What the syncer prescribes: three fragments, a quorum of one, int4 both ways."""
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


DEFAULT = DecoupledDemo()
QUICK = DecoupledDemo(num_steps=100)
