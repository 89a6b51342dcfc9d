"""``diloco-comm serve``: servers and rules by name, and the status of a server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from diloco_comm.asynchronous.decoupled.server import DecoupledServer
from diloco_comm.asynchronous.decoupled.settings import DecoupledSettings
from diloco_comm.asynchronous.link import read_status
from diloco_comm.asynchronous.rules import Buffered, DelayedNesterov, Immediate, ServerRule
from diloco_comm.methods.outer import SGD, HeavyBall, Nesterov, OuterOptimizer
from diloco_comm.monitor.status import Snapshot

from ..common.console import show_table

_OUTERS = ("nesterov", "heavy-ball", "sgd")


def make_rule(
    name: str, lr: float, momentum: float, period: int, activation: float, **common: Any
) -> ServerRule:
    """Return the rule that has a name on the command line.

    Raises:
        ValueError: If no rule has this name, or a number is out of its range.
    """
    if name == "delayed":
        more = {"period": period, "activation": activation, **common}
        return DelayedNesterov(lr=lr, momentum=momentum, **more)
    if name == "buffer":
        return Buffered(period=period, outer=Nesterov(lr, momentum), **common)
    rules = ("delayed", *_OUTERS, "buffer")
    return Immediate(outer=_outer(name, lr, momentum, rules, ""), **common)


def _outer(
    name: str,
    lr: float,
    momentum: float,
    names: Sequence[str] = _OUTERS,
    where: str = " for decoupled training",
) -> OuterOptimizer:
    if name == "sgd":
        return SGD(lr)
    kinds: dict[str, Any] = {"nesterov": Nesterov, "heavy-ball": HeavyBall}
    if name not in kinds:
        raise ValueError(f"rule must be one of {', '.join(names)}{where}, got {name!r}")
    return kinds[name](lr, momentum)


def show_status(address: str, *, as_json: bool, watch: bool, **options: Any) -> None:
    """Print a server's status, once or every second.

    Args:
        options: Arguments of ``read_status``.

    Raises:
        ServerLost: If the server does not answer.
    """
    if as_json:
        print(json.dumps(read_status(address, **options)))
        return
    show_table(lambda: status_table(address, read_status(address, **options)), watch=watch)


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
        return _decoupled_table(address, report)
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
    kept, style = kept_text(report["storage"])
    waits = [Text(report["problem"], "bold red")] if report["problem"] else []
    return Group(table, Text(kept, style), *waits)


def _order(item: tuple[str, int]) -> int:
    return int(item[0].rstrip("+"))


def make_server(
    given: dict[str, Any], outer: dict[str, Any], options: dict[str, Any]
) -> DecoupledServer:
    """Return the server that the options of the command line describe.

    Raises:
        ValueError, TypeError: If an option is out of its range.
    """
    text = given["fragments"]
    fragments = int(text) if text.isdecimal() else text
    settings = DecoupledSettings(
        **{**given, "fragments": fragments, "by_mean": tuple(given["by_mean"] or ())}
    )
    return DecoupledServer(settings, outer=_outer(**outer), **options)


def _decoupled_table(address: str, report: dict[str, Any]) -> Any:
    """Return a rich table of the learners and the fragments."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    settings = report["settings"]
    refused = ", ".join(f"{kind} {count}" for kind, count in report["refused"].items()) or "none"
    table = Table(
        title=(
            f"{address}  decoupled  {report['parameters']:,} parameters  {report['commits']} merges"
        ),
        caption=(
            f"quorum {settings['quorum']}, every {settings['sync_every']} steps, reports in "
            f"{settings['wire']}, commits in {settings['wire_down']}, shard {settings['shard']}\n"
            f"refused: {refused}; learners lost: {report['lost']}\n"
            f"received {report['received_bytes']:,} bytes, sent {report['sent_bytes']:,}, "
            f"merged in {report['apply_s']:.3f} s, up {report['uptime_s']:.0f} s"
        ),
    )
    for name in ("learner", "steps", "s/step", "merged reports"):
        table.add_column(name, justify="left" if name == "learner" else "right")
    for name, row in report["learners"].items():
        seconds = "-" if row["step_s"] is None else f"{row['step_s']:.3f}"
        table.add_row(name, str(row["steps"]), seconds, str(row["merged"]))
    rounds = Table()
    for name in ("fragment", "version", "waits for", "reported"):
        rounds.add_column(name)
    waits = {"idle": "the call", "called": "the quorum", "grace": "the grace window"}
    for number, row in enumerate(report["fragments"]):
        waiting = waits.get(row["phase"], "the disk")
        shown = ", ".join(row["reported"])
        hidden = row["num_reported"] - len(row["reported"])
        reported = f"{shown}{', and ' if shown else ''}{hidden} more" if hidden else shown
        rounds.add_row(str(number), str(row["version"]), waiting, reported)
    hidden = [
        f"{report[f'num_{kind}'] - len(report[kind])} more {kind} are not shown"
        for kind in ("learners", "fragments")
        if report[f"num_{kind}"] > len(report[kind])
    ]
    return Group(table, rounds, *hidden, Text(*kept_text(report["storage"])))


def kept_text(storage: dict[str, Any] | None) -> tuple[str, str]:
    """Return one sentence on what a server keeps on its disk, and the style to print it in."""
    if storage is None:
        return "nothing is kept on disk", ""
    if storage["problem"]:
        return f"{storage['problem']} (for {storage['problem_s']:.0f} s)", "bold red"
    return f"version {storage['snapshot_version']} is saved in {storage['folder']}", ""
