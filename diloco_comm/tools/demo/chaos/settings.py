"""What the chaos demo trains, and how much time it leaves between two events."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ....ops.wire import WireName
from ..model import ModelConfig

# Replicas 0 to 3 begin; replica 4 joins later.
FOUNDERS = 4
NEWCOMER = 4
KILLED, STOPPED = 3, 1


@dataclass(frozen=True)
class ChaosSettings:
    """Settings of all replicas, and of the script of events.

    Attributes:
        pause_s: Seconds of training between two events.
        outage_s: Seconds for which the registry is away.
        step_s: Seconds that an inner step takes at least: replicas of one machine then train at
            their own speed, and not at that of the processor that they share.
        suspect_after_s, founding_wait_s: As in ``Elastic``.
        timeout_s: Seconds in which each event must have its effect.
    """

    pause_s: float = 10.0
    outage_s: float = 6.0
    sync_every: int = 10
    step_s: float = 0.1
    batch_size: int = 8
    inner_lr: float = 2e-3
    warmup_steps: int = 50
    outer_lr: float = 0.7
    outer_momentum: float = 0.8
    wire: WireName = "int8"
    suspect_after_s: float = 4.0
    founding_wait_s: float = 3.0
    timeout_s: float = 120.0
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    data: Path | None = None

    def __post_init__(self) -> None:
        if self.sync_every < 1:
            raise ValueError(f"--sync-every must be at least 1, got {self.sync_every}")

    @property
    def num_shards(self) -> int:
        return FOUNDERS + 1

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one replica sees in one inner step."""
        return self.batch_size * self.model.context


DEFAULT = ChaosSettings()
QUICK = ChaosSettings(pause_s=3.0, outage_s=3.0)
