"""The rows of the demo's table, and the settings common to all rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from ...ops.wire import WireName
from .model import ModelConfig


@dataclass(frozen=True)
class Row:
    """One row of the table: a training method and the wire format it sends with."""

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
class Settings:
    """Settings common to all rows; every row has the same first weights and order of data."""

    num_replicas: int = 4
    num_steps: int = 350
    sync_every: int = 50
    batch_size: int = 8
    inner_lr: float = 2e-3
    warmup_steps: int = 100
    outer_lr: float = 0.7
    outer_momentum: float = 0.8
    link_gbps: float = 0.5
    link_rtt_ms: float = 10.0
    num_validation_windows: int = 256
    report_every: int = 10
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    data: Path | None = None

    def __post_init__(self) -> None:
        if self.num_replicas < 2:
            raise ValueError(f"--replicas must be at least 2, got {self.num_replicas}")
        if not 0 < self.link_gbps < math.inf:
            raise ValueError(f"--gbps must be a positive number, got {self.link_gbps:g}")
        if not 0 <= self.link_rtt_ms < math.inf:
            raise ValueError(f"--rtt-ms must be a number from 0 on, got {self.link_rtt_ms:g}")
        if self.sync_every < 1:
            raise ValueError(f"--sync-every must be at least 1, got {self.sync_every}")
        if self.num_steps < self.sync_every:
            raise ValueError(
                f"--steps must be at least --sync-every {self.sync_every}, got {self.num_steps}"
            )
        if self.num_steps % self.sync_every:
            raise ValueError(
                f"--steps must be a multiple of --sync-every {self.sync_every}, "
                f"got {self.num_steps}"
            )

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all replicas together see in one inner step."""
        return self.num_replicas * self.batch_size * self.model.context

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


DEFAULT = Settings()
# A short run has few outer steps, which converge better at a lower inner rate.
QUICK = Settings(num_steps=100, batch_size=4, inner_lr=1e-3)
