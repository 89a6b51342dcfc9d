"""Measure how long a training loop waits in an outer step, for a model's size, a policy and a link.

The inner steps are sleeps of a given length: the CPU stays free for the exchange, as on the host of
an accelerator. Encoding, exchange and outer step are real.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from diloco_comm import (
    CO2,
    Blocking,
    Delayed,
    DiLoCo,
    Eager,
    HeavyBall,
    Link,
    Nesterov,
    Overlap,
    Streaming,
    Wire,
)
from diloco_comm.options import Backend

from ..common import reports
from ..common.console import progress_bar
from ..common.sizes import at_least
from .methods import format_of

POLICIES = ("blocking", "streaming", "delayed", "eager", "co2")


@dataclass(frozen=True)
class Settings:
    """A model of ``num_params`` in ``num_layers`` equal layers, and how to exchange it."""

    num_params: int = 25_000_000
    num_layers: int = 12
    step_s: float = 0.05
    sync_every: int = 10
    fragments: int = 1
    policy: str = "blocking"
    delay: int = 1
    wire: str = "int8"
    block_size: int = 256
    lanes: int = 1
    chunk_bytes: int | None = None
    rounds: int = 7
    collectives: Backend = "gloo"
    link: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        at_least(self.num_layers, params=self.num_params)
        counts = {"layers": self.num_layers, "fragments": self.fragments}
        at_least(1, **counts, sync_every=self.sync_every, rounds=self.rounds)
        if self.policy not in POLICIES:
            raise ValueError(f"--policy must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        if not 0 <= self.step_s < 3600:
            raise ValueError(f"--step-time must be in seconds, from 0 on, got {self.step_s}")
        if self.fragments > self.num_layers:
            raise ValueError(
                f"--fragments must be at most --layers {self.num_layers}, got {self.fragments}"
            )

    def overlap(self) -> Overlap:
        """Return the policy."""
        policies = {
            "blocking": Blocking(),
            "streaming": Streaming(delay=self.delay, alpha=0.5),
            "delayed": Delayed(),
            "eager": Eager(),
            "co2": CO2(clip=1.0),
        }
        return policies[self.policy]


class Layers(nn.Module):
    """A model with a given number of parameters; the caller sleeps instead of a forward pass."""

    def __init__(self, num_params: int, num_layers: int) -> None:
        super().__init__()
        sizes = [num_params // num_layers] * num_layers
        sizes[-1] += num_params - sum(sizes)
        self.layers = nn.ParameterList([nn.Parameter(torch.randn(size) * 0.02) for size in sizes])


def measure(settings: Settings) -> dict[str, Any]:
    """Train ``rounds`` rounds after one of warm-up; a collective call.

    Returns:
        Medians over the rounds of the slowest rank, in microseconds a round, and the utilisation:
        the inner steps' share of the time.
    """
    torch.manual_seed(0)
    model = Layers(settings.num_params, settings.num_layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    wire = format_of(settings.wire, settings.block_size)
    outer = HeavyBall(1.0, 0.5) if settings.policy == "co2" else Nesterov(0.7, 0.9)
    with DiLoCo(
        model,
        optimizer,
        sync_every=settings.sync_every,
        fragments=settings.fragments,
        overlap=settings.overlap(),
        outer=outer,
        wire=Wire(wire, error_feedback=wire.is_sparse),
        link=Link(
            settings.collectives,
            lanes=settings.lanes,
            chunk_bytes=settings.chunk_bytes,
            timeout=600,
        ),
        attach=False,
    ) as diloco:
        if settings.link is not None:
            diloco.emulate_link(*settings.link)
        figures = []
        with progress_bar("rounds", settings.rounds + 1) as advance:
            for _ in range(settings.rounds + 1):
                figures.append(_round(model, diloco, settings))
                advance()
        figures = figures[1:]
        diloco.flush()  # rounds may be under way
        over = diloco.exchange.collectives
    return {**_summary(figures, settings), "over": over}


def _round(model: nn.Module, diloco: DiLoCo, settings: Settings) -> dict[str, float]:
    """Run one round of inner steps; return the seconds of the loop's calls, by stage."""
    before, blocked = diloco.totals(), 0.0
    parts = {name: getattr(before, f"{name}_s") for name in ("encode", "exposed", "outer_step")}
    sent, exchange = before.sent_bytes, before.exchange_s
    with torch.no_grad():
        for param in model.parameters():
            # Every replica takes steps of its own, as on other data.
            param.mul_(0.999 - 1e-4 * (dist.get_rank() + 1))
    for _ in range(settings.sync_every):
        time.sleep(settings.step_s)
        begin = time.perf_counter()
        diloco.step()
        blocked += time.perf_counter() - begin
    after = diloco.totals()
    found = {name: getattr(after, f"{name}_s") - value for name, value in parts.items()}
    return {
        "blocked": blocked,
        **found,
        "exchange": after.exchange_s - exchange,
        "sent_bytes": after.sent_bytes - sent,
    }


def _summary(figures: list[dict[str, float]], settings: Settings) -> dict[str, Any]:
    columns = {
        name: reports.slowest_of_ranks([figure[name] for figure in figures]) for name in figures[0]
    }
    blocked = reports.summary(columns["blocked"])
    compute = settings.sync_every * settings.step_s
    result: dict[str, Any] = {
        f"{name}_us": {key: value * 1e6 for key, value in reports.summary(times).items()}
        for name, times in columns.items()
        if name != "sent_bytes"
    }
    for times in result.values():
        times["samples"] = len(figures)
    return {
        "params": settings.num_params,
        "bytes": 4 * settings.num_params,
        "sent_bytes": reports.summary(columns["sent_bytes"])["median"],
        **result,
        "utilisation": compute / (compute + blocked["median"]) if compute else 0.0,
        "workers": dist.get_world_size(),
    }


def print_table(report: reports.Report, result: dict[str, Any]) -> None:
    """Print the times of a round."""
    report.print("#")
    report.print(f"#{'':>20} {'median':>10} {'p10':>10} {'p90':>10}   (ms a round)")
    for name, shown in (
        ("blocked_us", "the loop is blocked"),
        ("encode_us", "encode"),
        ("exposed_us", "wait"),
        ("outer_step_us", "outer step"),
        ("exchange_us", "exchange"),
    ):
        row = [result[name][key] / 1e3 for key in ("median", "p10", "p90")]
        report.print(f" {shown:>20} {row[0]:10.2f} {row[1]:10.2f} {row[2]:10.2f}")
    report.print(f"# sent {result['sent_bytes'] / 1e6:.2f} MB a round and worker")
    report.print(f"# utilisation: {100 * result['utilisation']:.1f} % of the time is inner steps")
