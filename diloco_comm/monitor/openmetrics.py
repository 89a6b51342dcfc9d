"""Metrics as text that Prometheus and OpenTelemetry read: OpenMetrics 1.0.

The labels are the run and the number of the replica, which a process keeps when it starts again. A
counter can fall only if its ``_created`` changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from .status import SILENT_S, Process, Run, State

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PREFIX = "diloco_"


class Family(NamedTuple):
    """One metric.

    Attributes:
        name: The name without ``PREFIX``; ends with the unit, if there is one. The samples of a
            counter have "_total" behind the name.
        kind: "counter" or "gauge".
    """

    name: str
    kind: str
    unit: str
    help: str


def _counter(name: str, unit: str, help: str) -> Family:
    return Family(name, "counter", unit, help)


def _gauge(name: str, unit: str, help: str) -> Family:
    return Family(name, "gauge", unit, help)


# Metrics of each replica, and the name of the figure with the value.
OF_REPLICAS: Mapping[Family, str] = {
    _counter("rounds", "", "Rounds of one fragment that were applied."): "rounds",
    _counter("skipped_rounds", "", "Rounds that were voted down."): "skipped",
    _counter(
        "discarded_rounds", "", "Rounds that count for no replica, because a member was lost."
    ): "discarded",
    _counter("sent_bytes", "bytes", "Sent in rounds."): "sent_bytes",
    _counter("received_bytes", "bytes", "Received in rounds."): "received_bytes",
    _counter(
        "exchange_seconds", "seconds", "From the first byte sent to the last one received."
    ): "exchange_s",
    _counter(
        "waited_seconds", "seconds", "The training loop waited for results, doing nothing else."
    ): "waited_s",
    _counter(
        "changing_seconds", "seconds", "Without training because of changes of the group."
    ): "changing_s",
    _counter(
        "retransmitted_segments", "", "Segments that TCP has sent again to other replicas."
    ): "retransmits",
    _gauge("inner_step", "", "Inner steps of the training."): "inner_step",
    _gauge("view", "", "Number of the group that the replica is in."): "view",
    _gauge("group_size", "", "Members of that group; 0 outside a group."): "group_size",
    _gauge("wait_seconds", "seconds", "Since the replica waits; 0 if it does not."): "waits_s",
    _gauge(
        "hidden_ratio", "ratio", "Part of the exchange during which the training went on."
    ): "hidden",
    _gauge(
        "goodput_ratio", "ratio", "Part of the time in which changes did not stop the training."
    ): "goodput",
    _gauge(
        "round_trip_seconds", "seconds", "Smoothed round trip to the slowest member."
    ): "round_trip_s",
    _gauge("link_bytes_per_second", "bytes_per_second", "Rate of the last round."): "rate",
    _gauge("pseudo_gradient_norm", "", "L2 norm of the last pseudo-gradient."): "norm",
}
# Metrics of each replica that the host computes.
JUDGED: Mapping[Family, Callable[[Process], float]] = {
    _gauge("silence_seconds", "seconds", "Since the last message of the replica."): lambda one: (
        one.silent_s
    ),
    _gauge("awaited_by", "", "Replicas that wait for this one."): lambda one: len(one.awaited_by),
    _gauge("cut_from", "", "Replicas from which this one is cut off."): lambda one: len(
        one.cut_from
    ),
    _gauge("inner_steps_per_second", "", "Speed of the training, without waits."): lambda one: (
        one.speed if one.silent_s <= SILENT_S else math.nan
    ),
}
OF_RUNS: Mapping[Family, Callable[[Run], float]] = {
    _gauge("members", "", "Members of the last view, or replicas of a fixed group."): lambda run: (
        len(run.replicas) if run.seen.view is None else len(run.seen.members)
    ),
    _gauge("heard_replicas", "", "Replicas that are not silent."): lambda run: sum(
        one.silent_s <= SILENT_S for one in run.replicas.values()
    ),
    _gauge("last_view", "", "Number of the last view; 0 for a fixed group."): lambda run: (
        0 if run.seen.view is None else run.seen.view.number
    ),
    _counter("view_changes", "", "Changes of the view since the run was first seen."): lambda run: (
        run.changes
    ),
}
# Metrics of the host itself, of its relay and of its server, if the snapshot has their values.
OF_HOST = (
    _gauge("host_runs", "", "Runs with messages at the host."),
    _gauge("unshown_runs", "", "Runs left out, as there are too many processes; absent for 0."),
    _gauge("unshown_processes", "", "Processes with messages in those runs."),
    _gauge("host_connections", "", "Connections to the store or registry."),
    _counter("host_requests", "", "Requests that the store or registry has answered."),
    _counter("host_received_bytes", "bytes", "Received by the store or registry."),
    _counter("host_sent_bytes", "bytes", "Sent by the store or registry."),
    _counter("host_refused_posts", "", "Messages with figures for which there was no room."),
    _gauge("relay_waiting", "", "Processes that wait at the relay."),
    _gauge("relay_pairs", "", "Pairs of connections between which the relay copies."),
    _counter("relay_copied_bytes", "bytes", "Copied by the relay, in both directions."),
    _gauge("server_version", "", "Updates or merges in the shared model."),
    _gauge("server_parameters", "", "Parameters of the shared model."),
    _gauge("server_workers", "", "Workers or learners that are connected."),
    _counter("server_refused", "", "Messages and updates that were refused."),
    _counter("server_duplicates", "", "Updates that came twice, and were applied once."),
    _counter("server_lost_workers", "", "Workers that were lost."),
    _counter("server_received_bytes", "bytes", "Received by the server."),
    _counter("server_sent_bytes", "bytes", "Sent by the server."),
    _counter("server_apply_seconds", "seconds", "Applying updates or merging."),
    _counter(
        "server_staleness", "", "Sum over the updates of the versions that each one came late."
    ),
)


def names() -> set[str]:
    """Return the names of all samples but ``_created``."""
    families = (*OF_REPLICAS, *JUDGED, *OF_RUNS, *OF_HOST)
    return {_name(family) for family in families} | {f"{PREFIX}build_info"}


def render(state: State, version: str) -> str:
    """Return all metrics of a state as OpenMetrics text."""
    lines = [
        f"# TYPE {PREFIX}build info",
        f"# HELP {PREFIX}build The version of the package that hosts.",
        f'{PREFIX}build_info{{version="{_escaped(version)}"}} 1',
    ]
    runs = [(f'run="{_escaped(name)}"', run) for name, run in state.runs.items()]
    # Leave runs that have ended out of these metrics, where their silence would look like a fault.
    live = [(labels, run) for labels, run in runs if not run.has_ended]
    figures = [(labels, one.figures) for labels, one in _replicas(runs) if one.figures is not None]
    for family, name in OF_REPLICAS.items():
        values = [(labels, getattr(one, name), one.created) for labels, one in figures]
        lines += _family(family, values)
    for family, judge in JUDGED.items():
        lines += _family(family, [(labels, judge(one), 0.0) for labels, one in _replicas(live)])
    for family, count in OF_RUNS.items():
        lines += _family(family, [(labels, count(run), run.since) for labels, run in live])
    facts = {"host_runs": len(live), **state.facts}
    for family in OF_HOST:
        if family.name in facts:
            lines += _family(family, [("", facts[family.name], state.began)])
    return "\n".join([*lines, "# EOF\n"])


def _replicas(runs: Iterable[tuple[str, Run]]) -> list[tuple[str, Process]]:
    return [
        (f'{labels},replica="{number}"', process)
        for labels, run in runs
        for number, process in run.replicas.items()
    ]


def _name(family: Family) -> str:
    return PREFIX + family.name + "_total" * (family.kind == "counter")


def _family(family: Family, values: Iterable[tuple[str, float, float]]) -> list[str]:
    """Return the lines of a metric; none if there are no samples.

    Args:
        values: The labels, the value, and the Unix time in seconds at which a counter began.
    """
    name, sample = PREFIX + family.name, _name(family)
    lines = [f"# TYPE {name} {family.kind}", f"# HELP {name} {family.help}"]
    lines += [f"# UNIT {name} {family.unit}"] * bool(family.unit)
    num_before = len(lines)
    for labels, value, created in values:
        if value == value:
            braced = f"{{{labels}}}" if labels else ""
            lines.append(f"{sample}{braced} {value}")
            if family.kind == "counter":
                lines.append(f"{name}_created{braced} {created}")
    return lines if len(lines) > num_before else []


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
