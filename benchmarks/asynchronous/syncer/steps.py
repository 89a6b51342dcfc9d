"""The steps of one learner: alone, beside others, while another is stopped or slow."""

from __future__ import annotations

import argparse
import signal
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.asynchronous.syncer.processes import Process, running
from benchmarks.support import common

PHASES = ("without a syncer", "alone", "beside two", "one stopped", "one slow")
# The longest p99 of a step over that of the learner alone, and the largest share of the hook.
MOST_RATIO, MOST_SHARE = 1.10, 0.01
# Seconds of a phase that are left out: what the phase before has begun is still under way.
_SETTLE_S = 0.5
_SLOWER = 3.0
# The least number of steps in a phase, over that of sleeps without a pause.
_LEAST_STEPS = 0.6


@dataclass
class Span:
    """A phase while it lasted."""

    phase: str
    begin: float
    end: float = 0.0


class Stage:
    """The phases, brought about by signals and by what learners are told.

    Args:
        learners: The measured one, one that only trains, and one that is stopped or slow.
    """

    def __init__(self, learners: list[Process], step_s: float) -> None:
        self._learners, self._step_s = learners, step_s

    def enter(self, phase: str) -> None:
        """Begin a phase from the state in which all rest or train alone."""
        measured, steady, victim = self._learners
        measured.tell("leave" if phase == PHASES[0] else "join")
        if phase in PHASES[:2]:
            return
        steady.tell("join")
        victim.tell("pace", self._step_s * (_SLOWER if phase == "one slow" else 1.0))
        victim.tell("join")
        if phase == "one stopped":
            time.sleep(_SETTLE_S)
            victim.signal(signal.SIGSTOP)

    def leave(self, phase: str) -> None:
        """End a phase."""
        measured, *others = self._learners
        if phase in PHASES[2:]:
            others[1].signal(signal.SIGCONT)
            for other in others:
                other.tell("leave")
                other.tell("rest")
        measured.tell("leave")


def measure(report: common.Report, options: argparse.Namespace) -> dict[str, Any]:
    step_s, seconds = options.step_ms / 1e3, options.seconds or 8.0
    rounds, elements = options.rounds or 6, options.elements or 1_000_000
    settings = {
        "fragments": 4, "sync_every": 20, "quorum": 2, "delay": 5, "receipt": "carry",
        "wire": "int8", "wire_down": "int4",
    }  # fmt: skip
    spans: list[Span] = []
    with running(3, settings, elements=elements, step_s=step_s) as (_, learners):
        stage = Stage(learners, step_s)
        for _ in range(rounds):
            for phase in PHASES:
                stage.enter(phase)
                time.sleep(_SETTLE_S)
                spans.append(Span(phase, time.monotonic()))
                time.sleep(seconds)
                spans[-1].end = time.monotonic()
                stage.leave(phase)
        steps = learners[0].figures()["steps"]
    return results_of(report, spans, steps, step_s)


def results_of(
    report: common.Report,
    spans: list[Span],
    steps: list[tuple[float, float, float]],
    step_s: float,
) -> dict[str, Any]:
    """Print the table; each turn of the phases is compared with itself."""
    report.print(
        f"# an inner step is a sleep of {1e3 * step_s:g} ms and an addition to all parameters; "
        "learners are processes"
    )
    report.print(
        "#  phase             steps    p50 ms    p99 ms   p99 over alone   hook, % of time"
    )
    by_phase: dict[str, list[list[tuple[float, float, float]]]] = {}
    for span in spans:
        # A step that begins here counts, however late it ends.
        inside = [each for each in steps if span.begin <= each[0] - each[1] < span.end]
        if not inside:
            raise ValueError(f"the learner has begun no step while it trained {span.phase}")
        by_phase.setdefault(span.phase, []).append(inside)
    tails = {
        phase: [common.percentile([each[1] for each in turn], 99) for turn in turns]
        for phase, turns in by_phase.items()
    }
    results: dict[str, Any] = {"phases": {}, "missed": []}
    for phase, turns in by_phase.items():
        every = [each for turn in turns for each in turn]
        p50, p99 = (1e3 * common.percentile([each[1] for each in every], p) for p in (50, 99))
        ratio = common.median_ratio(tails[phase], tails["alone"])
        share = sum(each[2] for each in every) / sum(each[1] for each in every)
        report.print(
            f"   {phase:16} {len(every):6d} {p50:9.2f} {p99:9.2f} {ratio:16.3f} {100 * share:17.2f}"
        )
        results["phases"][phase] = {
            "steps": len(every), "p50_ms": p50, "p99_ms": p99, "p99_over_alone": ratio,
            "hook_share": share, "p99_by_turn_ms": [1e3 * tail for tail in tails[phase]],
        }  # fmt: skip
        expected = sum(span.end - span.begin for span in spans if span.phase == phase) / step_s
        if len(every) < _LEAST_STEPS * expected:
            results["missed"].append(f"{phase}: {len(every)} steps of about {expected:.0f}")
        if phase in PHASES[2:] and ratio > MOST_RATIO:
            results["missed"].append(f"{phase}: p99 {ratio:.3f} of alone, at most {MOST_RATIO}")
        if share > MOST_SHARE:
            results["missed"].append(f"{phase}: hook {share:.4f} of the time, <= {MOST_SHARE}")
    return results
