"""The demo's results: a row for each method, the claims about the rows, and the JSON file."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .... import __version__
from ....ops.wire import WireFormat
from ..events import Event, Finished, Progress, Validation
from ..settings import BASELINE, REFERENCE, SMALL, TINY, Row, Settings


@dataclass(frozen=True)
class Point:
    """Mean loss over the replicas after ``step`` steps and ``seconds`` of training."""

    step: int
    seconds: float
    loss: float


@dataclass
class RowResult:
    """Events of all replicas about one row."""

    row: Row
    num_replicas: int
    training: list[Point] = field(default_factory=list)
    validation: list[Point] = field(default_factory=list)
    finished: dict[int, Finished] = field(default_factory=dict)
    _pending: dict[tuple[bool, int], list[Progress | Validation]] = field(default_factory=dict)

    def add(self, replica: int, event: Event) -> None:
        """Record an event; a step becomes a point when every replica has reported the step."""
        if isinstance(event, Finished):
            self.finished[replica] = event
        elif isinstance(event, Progress | Validation):
            self._add_to_curve(event)

    def _add_to_curve(self, event: Progress | Validation) -> None:
        is_training = isinstance(event, Progress)
        reports = self._pending.setdefault((is_training, event.step), [])
        reports.append(event)
        if len(reports) == self.num_replicas:
            weight = sum(report.weight for report in reports)
            loss = sum(report.weight * report.loss for report in reports) / weight
            seconds = max(report.seconds for report in reports)
            curve = self.training if is_training else self.validation
            curve.append(Point(event.step, seconds, loss))
            del self._pending[is_training, event.step]

    @property
    def is_finished(self) -> bool:
        return len(self.finished) == self.num_replicas

    @property
    def step(self) -> int:
        ends = [*self.training[-1:], *self.validation[-1:]]
        return max((point.step for point in ends), default=0)

    @property
    def initial_loss(self) -> float:
        return self.validation[0].loss

    @property
    def final_loss(self) -> float:
        return self.validation[-1].loss

    @property
    def seconds(self) -> float:
        """Training seconds of the slowest replica."""
        return max((one.seconds for one in self.finished.values()), default=0.0)

    @property
    def sent_bytes(self) -> float:
        """Bytes sent by a replica, mean over the replicas."""
        return _mean([one.sent_bytes for one in self.finished.values()])

    @property
    def exposed_s(self) -> float:
        """Seconds for which a replica's training loop waited, mean over the replicas."""
        return _mean([one.exposed_s for one in self.finished.values()])

    @property
    def hashes(self) -> list[str]:
        return [self.finished[replica].outer_hash for replica in sorted(self.finished)]

    @property
    def is_identical(self) -> bool:
        return self.is_finished and len(set(self.hashes)) == 1


@dataclass(frozen=True)
class Claim:
    """One statement about the results, with the number that decides it."""

    text: str
    holds: bool


@dataclass
class Results:
    """All rows of one demo."""

    settings: Settings
    source: str
    unigram_entropy: float
    rows: dict[Row, RowResult] = field(default_factory=dict)
    total_seconds: float = 0.0

    @property
    def bytes_ratio(self) -> float:
        """Bytes sent by data parallel over bytes sent by DiLoCo int8."""
        return self.rows[BASELINE].sent_bytes / max(1.0, self.rows[SMALL].sent_bytes)

    def claims(self) -> list[Claim]:
        """Return the claims of low-communication training, and whether the rows confirm them."""
        fp32, int8, int4 = (self.rows[row] for row in (REFERENCE, SMALL, TINY))
        share = fp32.final_loss / fp32.initial_loss
        settings = self.settings
        # 32 bits an element at every step, against the wire's bits with scales every H steps.
        ideal = settings.sync_every * 32 / WireFormat(SMALL.wire).bits_per_element
        least = 3 * settings.sync_every
        return [
            Claim(
                f"{REFERENCE.name} ends at {share:.0%} of its initial loss (below 60%)",
                share < 0.6,
            ),
            Claim(
                f"{REFERENCE.name} ends at {fp32.final_loss:.3f} nats a byte, below the unigram "
                f"entropy of the text, {self.unigram_entropy:.3f}",
                fp32.final_loss < self.unigram_entropy,
            ),
            _close_to(int8, fp32, limit=0.01),
            _close_to(int4, fp32, limit=0.03),
            Claim(
                f"{SMALL.name} sends {self.bytes_ratio:.0f}x fewer bytes than {BASELINE.name} "
                f"(at least {least}x; {ideal:.0f}x without headers)",
                self.bytes_ratio >= least,
            ),
            Claim(
                f"after every run the {settings.num_replicas} replicas are bit-identical",
                all(result.is_identical for result in self.rows.values()),
            ),
        ]

    def as_json(self) -> str:
        """Return settings, machine, rows, curves and claims."""
        return json.dumps(self._as_dict(), indent=1, default=str)

    def _as_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "diloco_comm": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
            "settings": dataclasses.asdict(self.settings),
            "link": self.settings.link,
            "text": self.source,
            "unigram_entropy_nats": self.unigram_entropy,
            "total_seconds": self.total_seconds,
            "bytes_ratio": self.bytes_ratio,
            "rows": [_row_as_dict(result) for result in self.rows.values()],
            "claims": [dataclasses.asdict(claim) for claim in self.claims()],
        }


def _row_as_dict(result: RowResult) -> dict[str, Any]:
    return {
        "name": result.row.name,
        "method": result.row.method,
        "wire": result.row.wire,
        "initial_loss": result.initial_loss,
        "final_loss": result.final_loss,
        "sent_bytes": result.sent_bytes,
        "seconds": result.seconds,
        "exposed_s": result.exposed_s,
        "is_identical": result.is_identical,
        "replicas": [dataclasses.asdict(result.finished[r]) for r in sorted(result.finished)],
        "training": [dataclasses.asdict(point) for point in result.training],
        "validation": [dataclasses.asdict(point) for point in result.validation],
    }


def _close_to(result: RowResult, reference: RowResult, limit: float) -> Claim:
    difference = result.final_loss / reference.final_loss - 1.0
    return Claim(
        f"{result.row.name} ends {difference:+.2%} from {reference.row.name} (within {limit:.0%})",
        abs(difference) < limit,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.{0 if num_bytes >= 1e8 else 1}f} MB"
