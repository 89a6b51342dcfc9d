"""What decoupled training needs of its links, and how long the grace window is.

M learners train, and a syncer calls each of P fragments of equal size once every H inner steps.
Each learner then sends a report to the syncer, which merges the first K reports and sends a commit
to every learner. With T seconds a step and R a round trip, the parts of a fragment's round last

    quorum  R/2 + T * K / M + report / uplink + R/2    from the call to the K-th report
    sync    commit / downlink + R/2                    from the merge to the new parameters

because a call follows the end of one learner's step, and the steps of the other M - 1 learners end
at times that are spread evenly. The grace window is
``QuorumRule.window`` of these: min(gamma * max(tau * T - quorum - sync, 0), T).

The syncer's link carries M times as much as a learner's. Where that is more than the link has, the
syncer is the bottleneck, and several syncers divide the fragments among them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from diloco_comm.asynchronous.decoupled.syncer import QuorumRule
from diloco_comm.ops.wire import WireFormat

from ..common.console import plain_table, print_whole
from ..common.sizes import at_least, not_negative, positive
from .report import format_bytes, print_program
from .request import DAY_S, MOST_SYNC_EVERY

GBIT = 1e9 / 8


@dataclass(frozen=True)
class DecoupledRequest:
    """What is planned.

    Attributes:
        params: Parameters of the model.
        step_time: Seconds of an inner step (T).
        learners: Learners (M), of equal speed.
        sync_every: Inner steps between two calls of a fragment (H).
        fragments: Fragments of equal size (P).
        wire, wire_down: Formats of the reports and of the commits.
        rule: Quorum K, gamma and tau.
        rtt_ms: Round trip between a learner and the syncer (R).
    """

    params: float
    step_time: float
    learners: int = 2
    sync_every: int = 24
    fragments: int = 24
    wire: str = "int4"
    wire_down: str = "fp32"
    rule: QuorumRule = field(default_factory=lambda: QuorumRule(delay=2))
    rtt_ms: float = 0.0

    def __post_init__(self) -> None:
        counts = {"replicas": self.learners, "fragments": self.fragments}
        at_least(1, **counts, sync_every=self.sync_every)
        if self.sync_every > MOST_SYNC_EVERY or self.fragments > self.params:
            raise ValueError(
                f"--sync-every must be at most {MOST_SYNC_EVERY} and --fragments at most the "
                f"parameters, got {self.sync_every} and {self.fragments}"
            )
        positive(params=self.params, step_time=self.step_time)
        not_negative(rtt_ms=self.rtt_ms)
        if self.rule.quorum > self.learners:
            raise ValueError(
                f"--quorum must be at most --replicas {self.learners}, got {self.rule.quorum}"
            )

    @property
    def report_bytes(self) -> float:
        """Bytes of one report on one fragment."""
        return self._bytes_of(self.wire)

    @property
    def commit_bytes(self) -> float:
        """Bytes of one commit of one fragment to one learner."""
        return self._bytes_of(self.wire_down)

    def _bytes_of(self, wire: str) -> float:
        return self.params / self.fragments * WireFormat(wire).bits_per_element / 8

    @property
    def call_every_s(self) -> float:
        """Seconds from the call of one fragment to that of the next one."""
        return self.step_time * self.sync_every / self.fragments

    @property
    def rtt_s(self) -> float:
        return self.rtt_ms / 1e3

    @property
    def boundary_s(self) -> float:
        """Seconds until K learners have ended the inner step in which the call came."""
        return self.step_time * self.rule.quorum / self.learners

    def sustained_gbps(self, num_bytes: float) -> float:
        """Return the Gbit/s that carry so many bytes in every round of a fragment."""
        return num_bytes / self.call_every_s / GBIT

    def quorum_s(self, gbps: float) -> float:
        """Return the seconds from a call to the quorum on links of this bandwidth."""
        return self.rtt_s + self.boundary_s + self.report_bytes / (gbps * GBIT)

    def sync_s(self, gbps: float) -> float:
        """Return the seconds that a commit takes to a learner."""
        return self.rtt_s / 2 + self.commit_bytes / (gbps * GBIT)

    def in_time_gbps(self) -> float | None:
        """Return the Gbit/s with which a fragment is back tau steps after its call, with no window.

        None: no bandwidth is enough.
        """
        left_s = self.rule.delay * self.step_time - self.boundary_s - 1.5 * self.rtt_s
        return (self.report_bytes + self.commit_bytes) / left_s / GBIT if left_s > 0 else None


def make_report(
    request: DecoupledRequest,
    gbps: float | None,
    syncer_gbps: float | None = None,
    tokens: int | None = None,
) -> dict[str, Any]:
    """Return what ``plan decoupled`` prints, as JSON types.

    Args:
        gbps: Bandwidth of each learner's link in each direction, Gbit/s.
        syncer_gbps: The same of the syncer's link; None: ``gbps``.
        tokens: Tokens of an inner step, for the learner's line.

    Raises:
        ValueError: If a link or the number of tokens is impossible.
    """
    at_least(1, tokens_per_step=1 if tokens is None else tokens)
    positive(gbps=gbps, syncer_gbps=syncer_gbps)
    syncer_gbps = gbps if syncer_gbps is None else syncer_gbps
    syncers = _syncers(request, syncer_gbps)
    up, down = request.report_bytes, request.commit_bytes
    one_up, one_down = request.sustained_gbps(up), request.sustained_gbps(down)
    asked = asdict(request)
    rule = asked.pop("rule")
    return {
        "schema": 1,
        "decoupled": {
            "request": {**asked, **rule},
            "report_bytes": up,
            "commit_bytes": down,
            "call_every_s": request.call_every_s,
            "learner_gbps": {"up": one_up, "down": one_down},
            "syncer_gbps": {"in": request.learners * one_up, "out": request.learners * one_down},
            "learner_bytes_per_day": {
                "up": one_up * GBIT * DAY_S,
                "down": one_down * GBIT * DAY_S,
            },
            "in_time_gbps": request.in_time_gbps(),
            "link": None if gbps is None else _on_link(request, gbps),
            "syncer": {
                "gbps": syncer_gbps,
                "load": None if syncer_gbps is None else _syncer_load(request, syncer_gbps),
                "syncers": syncers,
            },
            "serve": _serve_lines(request, syncers or request.fragments),
            "program": _learner_lines(syncers or request.fragments, tokens),
        },
    }


def _syncer_load(request: DecoupledRequest, gbps: float) -> float:
    """Return the share of the syncer's link that its busier direction needs."""
    busiest = max(request.report_bytes, request.commit_bytes)
    return request.learners * request.sustained_gbps(busiest) / gbps


def _syncers(request: DecoupledRequest, gbps: float | None) -> int | None:
    """Return the fewest syncers whose links carry their fragments; None: no number does."""
    if gbps is None:
        return 1
    load = _syncer_load(request, gbps)
    # Fragments are not divided, so the first syncer has fragments / count of them, rounded up.
    enough = (
        count
        for count in range(max(math.ceil(load), 1), request.fragments + 1)
        if math.ceil(request.fragments / count) * load <= request.fragments
    )
    return next(enough, None)


def _serve_lines(request: DecoupledRequest, syncers: int) -> list[str]:
    """Return the command of each syncer; its options are named as in the request."""
    rule = request.rule
    command = (
        f"diloco-comm serve decoupled --quorum {rule.quorum} --gamma {rule.gamma:g} "
        f"--delay {rule.delay} --sync-every {request.sync_every} --fragments {request.fragments} "
        f"--wire {request.wire} --wire-down {request.wire_down} --keys keys"
    )
    if syncers == 1:
        return [f"{command} --listen HOST:29500"]
    return [f"{command} --shard {i}/{syncers} --listen HOST{i}:29500" for i in range(syncers)]


def _learner_lines(syncers: int, tokens: int | None) -> list[str]:
    """Return the lines of a learner's program."""
    hosts = [""] if syncers == 1 else [str(i) for i in range(syncers)]
    addresses = ", ".join(f'"tcp://HOST{host}:29500"' for host in hosts)
    server = addresses if syncers == 1 else f"[{addresses}]"
    counted = "" if tokens is None else f", tokens={tokens}"
    return [
        "from diloco_comm.asynchronous import DecoupledDiLoCo",
        f'diloco = DecoupledDiLoCo(model, optimizer, server={server}{counted}, keys="keys")',
    ]


def _on_link(request: DecoupledRequest, gbps: float) -> dict[str, Any]:
    quorum_s, sync_s = request.quorum_s(gbps), request.sync_s(gbps)
    busiest = max(request.report_bytes, request.commit_bytes)
    rule, step_s = request.rule, request.step_time
    window_s = rule.window(step_s, quorum_s, sync_s)
    return {
        "gbps": gbps,
        "load": request.sustained_gbps(busiest) / gbps,
        "quorum_s": quorum_s,
        "sync_s": sync_s,
        "slack_s": max(rule.delay * step_s - quorum_s - sync_s, 0.0),
        "window_s": window_s,
        "steps_late": (quorum_s + window_s + sync_s) / step_s,
    }


def print_decoupled(console: Console, report: dict[str, Any]) -> None:
    """Print the report of ``make_report``."""
    plan = report["decoupled"]
    request = plan["request"]
    console.print(
        f"{request['params']:.4g} parameters, {request['step_time']:g} s a step, decoupled, "
        f"{request['learners']} learners, H={request['sync_every']}, "
        f"{request['fragments']} fragments, {request['wire']} up, {request['wire_down']} down, "
        f"a call every {plan['call_every_s']:.3g} s"
    )
    print_whole(console, _traffic(plan))
    if plan["in_time_gbps"] is None:
        words = "No link brings a fragment back"
    else:
        words = f"With {plan['in_time_gbps']:.3g} Gbit/s both ways a fragment is back"
    console.print(
        f"{words} within {request['delay']} inner steps of its call, with a round trip of "
        f"{request['rtt_ms']:g} ms and before any grace window."
    )
    if plan["link"] is not None:
        _print_link(console, plan["link"], request)
    _print_syncer(console, plan["syncer"], request)
    console.print("The syncer, and each learner:")
    print_program(console, [*plan["serve"], *plan["program"]])


def _print_syncer(console: Console, syncer: dict[str, Any], request: dict[str, Any]) -> None:
    """Warn of a syncer whose link is too narrow."""
    if syncer["load"] is None or syncer["load"] <= 1:
        return
    words = (
        f"The syncer is the bottleneck: the busier direction of {request['learners']} learners "
        f"needs {syncer['load']:.0%} of its {syncer['gbps']:g} Gbit/s."
    )
    if syncer["syncers"] is None:
        advice = "Not even one syncer for each fragment is enough"
        console.print(f"{words} {advice}: raise --sync-every.")
        return
    console.print(
        f"{words} Take {syncer['syncers']} syncers on links of their own, or raise --sync-every."
    )


def _traffic(plan: dict[str, Any]) -> Table:
    heads = ("", "bytes a fragment", "learner, Gbit/s", "learner, a day", "syncer, Gbit/s")
    table = plain_table(heads, "Traffic")
    rows = (("reports, up", "report", "up", "in"), ("commits, down", "commit", "down", "out"))
    for name, kind, way, way_at_syncer in rows:
        table.add_row(
            name,
            format_bytes(plan[f"{kind}_bytes"]),
            f"{plan['learner_gbps'][way]:.3g}",
            format_bytes(plan["learner_bytes_per_day"][way]),
            f"{plan['syncer_gbps'][way_at_syncer]:.3g}",
        )
    return table


def _print_link(console: Console, link: dict[str, Any], request: dict[str, Any]) -> None:
    if link["load"] > 1:
        console.print(
            f"\n{link['gbps']:g} Gbit/s are too few: the busier direction needs "
            f"{link['load']:.0%} of them. Raise --sync-every, or take a wire of fewer bits."
        )
        return
    console.print(
        f"\nOn {link['gbps']:g} Gbit/s ({link['load']:.0%} busy): {link['quorum_s']:.3g} s from "
        f"a call to the quorum of {request['quorum']}, {link['sync_s']:.3g} s from a merge to the "
        f"learners, slack {link['slack_s']:.3g} s. The grace window lasts {link['window_s']:.3g} "
        f"s, and the new fragment is there {link['steps_late']:.3g} inner steps after the call."
    )
