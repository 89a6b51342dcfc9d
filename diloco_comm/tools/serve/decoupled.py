"""``diloco-comm serve --decoupled``: the syncer's server and its status."""

from __future__ import annotations

from typing import Any

from ...asynchronous.decoupled.serving.server import DecoupledServer
from ...asynchronous.decoupled.settings import DecoupledSettings
from ...methods.outer import SGD, HeavyBall, Nesterov, OuterOptimizer

RULES = ("nesterov", "heavy-ball", "sgd")


def make_outer(rule: str, lr: float, momentum: float) -> OuterOptimizer:
    """Return the outer optimizer that has a name on the command line.

    Raises:
        ValueError: If no outer optimizer of decoupled training has this name.
    """
    if rule == "nesterov":
        return Nesterov(lr, momentum)
    if rule == "heavy-ball":
        return HeavyBall(lr, momentum)
    if rule == "sgd":
        return SGD(lr)
    raise ValueError(f"rule must be one of {', '.join(RULES)} with --decoupled, got {rule!r}")


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
    return DecoupledServer(settings, outer=make_outer(**outer), **options)


def status_table(address: str, report: dict[str, Any]) -> Any:
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
    """Return what a server keeps on its disk in one sentence, and the sentence's style."""
    if storage is None:
        return "nothing is kept on disk", ""
    if storage["problem"]:
        return f"{storage['problem']} (for {storage['problem_s']:.0f} s)", "bold red"
    return f"version {storage['snapshot_version']} is saved in {storage['folder']}", ""
