"""``diloco-comm serve``: the rules by name, and the status of a server."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from ...asynchronous.model.rules import Buffered, DelayedNesterov, Immediate, ServerRule
from ...asynchronous.worker.link import read_status
from ...methods.outer import SGD, HeavyBall, Nesterov, OuterOptimizer
from ...monitor.status import Snapshot
from ..common.printing import print_whole
from . import decoupled

RULES = ("delayed", "nesterov", "heavy-ball", "sgd", "buffer")


def make_rule(
    name: str,
    *,
    lr: float,
    momentum: float,
    period: int,
    activation: float,
    discount: float,
    max_staleness: int | None,
) -> ServerRule:
    """Return the rule that has a name on the command line.

    Raises:
        ValueError: If no rule has this name, or a number is out of its range.
    """
    common: dict[str, Any] = {"discount": discount, "max_staleness": max_staleness}
    if name == "delayed":
        return DelayedNesterov(
            lr=lr, momentum=momentum, period=period, activation=activation, **common
        )
    if name == "buffer":
        return Buffered(period=period, outer=Nesterov(lr, momentum), **common)
    outers: dict[str, OuterOptimizer] = {
        "sgd": SGD(lr),
        "heavy-ball": HeavyBall(lr, momentum),
        "nesterov": Nesterov(lr, momentum),
    }
    if name not in outers:
        raise ValueError(f"rule must be one of {', '.join(RULES)}, got {name!r}")
    return Immediate(outer=outers[name], **common)


def show_status(
    address: str,
    *,
    as_json: bool,
    watch: bool,
    keys: Path | None,
    key_name: str,
    timeout: float,
) -> None:
    """Print a server's status, once or every second.

    Raises:
        ServerLost: If the server does not answer.
    """
    if as_json:
        print(json.dumps(read_status(address, timeout=timeout, keys=keys, key_name=key_name)))
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(file=sys.stdout)
    report = read_status(address, timeout=timeout, keys=keys, key_name=key_name)
    if not watch:
        print_whole(console, status_table(address, report))
        return
    with Live(status_table(address, report), console=console) as live:
        while True:
            time.sleep(1.0)
            report = read_status(address, timeout=timeout, keys=keys, key_name=key_name)
            live.update(status_table(address, report))


def snapshot_of(report: dict[str, Any]) -> Snapshot:
    """Return a server's status for the page and the metrics."""
    workers = report.get("workers", {}).values()
    facts = {
        "server_version": report.get("updates", report.get("commits", 0)),
        "server_parameters": report["parameters"],
        "server_workers": report.get("num_learners", sum(row["connected"] for row in workers)),
        "server_refused": sum(report["refused"].values()),
        "server_duplicates": report.get("duplicates", 0),
        "server_lost_workers": report["lost"],
        "server_received_bytes": report["received_bytes"],
        "server_sent_bytes": report["sent_bytes"],
        "server_apply_seconds": report["apply_s"],
        "server_staleness": sum(
            int(value.rstrip("+")) * count for value, count in report.get("staleness", {}).items()
        ),
    }
    if report["storage"]:
        # Those who may see the page need not know the folders of this machine.
        storage = {key: value for key, value in report["storage"].items() if key != "folder"}
        report = {**report, "storage": storage}
    return Snapshot(facts=facts, report=report)


def status_table(address: str, report: dict[str, Any]) -> Any:
    """Return a rich table of the workers, the server's numbers, and the state of the snapshots."""
    if report.get("mode") == "decoupled":
        return decoupled.status_table(address, report)
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rule = report["rule"]["name"]
    title = f"{address}  {rule}  {report['parameters']:,} parameters  {report['updates']} updates"
    refused = ", ".join(f"{kind} {count}" for kind, count in report["refused"].items()) or "none"
    staleness = ", ".join(f"{s}: {n}" for s, n in sorted(report["staleness"].items(), key=_order))
    table = Table(
        title=title,
        caption=(
            f"refused: {refused}; repeated: {report['duplicates']}; "
            f"workers lost: {report['lost']}\n"
            f"staleness: {staleness or 'none yet'}\n"
            f"received {report['received_bytes']:,} bytes, sent {report['sent_bytes']:,}, "
            f"applied in {report['apply_s']:.3f} s, up {report['uptime_s']:.0f} s"
        ),
    )
    for name in ("worker", "connected", "updates", "steps/s"):
        table.add_column(name, justify="left" if name == "worker" else "right")
    for name, row in report["workers"].items():
        speed = "-" if row["speed"] is None else f"{row['speed']:.2f}"
        table.add_row(name, "yes" if row["connected"] else "no", str(row["applied"]), speed)
    kept, style = decoupled.kept_text(report["storage"])
    waits = [Text(report["problem"], "bold red")] if report["problem"] else []
    return Group(table, Text(kept, style), *waits)


def _order(item: tuple[str, int]) -> int:
    return int(item[0].rstrip("+"))
