"""``diloco-comm demo --decoupled``: learners of unequal speed; the last one is killed."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from diloco_comm.asynchronous import DecoupledServer
from diloco_comm.methods.outer import Nesterov

from ..common import plots
from ..common.console import Claim, plain_table, print_whole, progress_bar
from ..common.ranks import WITH_OPTIMIZER
from .crew import Crew, Replica, Stepped
from .data import load_corpus
from .replica import Learned, Ready, learn
from .settings import Decoupled

# After the kill the median step may be longer by this factor: other programs share the processor.
_MARGIN = 1.1
_COLOURS = (plots.BLUE, plots.GREEN, plots.SKY, plots.PURPLE, plots.ORANGE, plots.BLACK)


@dataclass
class Track:
    """The messages of one learner."""

    ready: Ready | None = None
    steps: list[Stepped] = field(default_factory=list)
    ended: Learned | None = None

    def pace_s(self, begin: float, end: float) -> float:
        """Return the median seconds from the end of a step to the end of the next one.

        Args:
            begin, end: Steps between these times count; at least two are needed.
        """
        times = [step.at for step in self.steps if begin <= step.at <= end]
        if len(times) < 2:
            return float("nan")
        return median(after - before for before, after in pairwise(times))


@dataclass
class Results:
    """All of one demo; times are of the monotonic clock."""

    settings: Decoupled
    tracks: list[Track]
    began: float = 0.0
    killed_at: float = 0.0
    ended_at: float = 0.0
    status: dict[str, Any] = field(default_factory=dict)
    name = "decoupled"

    @property
    def others(self) -> list[int]:
        """The learners that were not killed."""
        return [i for i in range(len(self.tracks)) if i != self.settings.killed]

    def pace_s(self, learner: int) -> tuple[float, float]:
        """Return the seconds a step of a learner before and after the kill."""
        track = self.tracks[learner]
        before = track.pace_s(self.began, self.killed_at)
        return before, track.pace_s(self.killed_at, self.ended_at)

    def versions(self, learner: int) -> tuple[int, int]:
        """Return the sum of a learner's fragment versions at the kill, and at the end."""
        steps = self.tracks[learner].steps
        before = [step.step for step in steps if step.at <= self.killed_at]
        return before[-1] if before else 0, steps[-1].step if steps else 0

    def losses(self) -> tuple[float, float]:
        """Return the held-out loss of the shared model at the begin and at the end."""
        first, last = self.tracks[0].ready, self.tracks[0].ended
        assert first is not None and last is not None
        return first.loss, last.loss

    def claims(self) -> list[Claim]:
        """Return what decoupled training promises, and whether this run confirms it."""
        slow, factor = self.settings.slow, self.settings.slow_factor
        fast = [i for i in self.others if i != slow]
        pace = {i: self.pace_s(i) for i in self.others}
        longest = max(pace[i][1] / pace[i][0] for i in self.others)
        apart = pace[slow][0] / max(pace[i][0] for i in fast)
        before, after = self.versions(0)
        first, last = self.losses()
        return [
            Claim(
                f"the steps of the others last at most {longest:.2f} times as long after learner "
                f"{self.settings.killed} was killed ({_MARGIN:g})",
                longest <= _MARGIN,
            ),
            Claim(
                f"the steps of learner {slow} last {apart:.1f} times as long as steps of the fast "
                f"learners ({factor:g}): nobody waits for it",
                apart >= 0.75 * factor,
            ),
            Claim(
                f"learner 0 took {before} commits before the kill and {after - before} after it",
                0 < before < after,
            ),
            Claim(
                f"the held-out loss of the shared model fell from {first:.2f} to {last:.2f} nats a "
                "byte",
                last < first,
            ),
        ]

    def content(self) -> dict[str, Any]:
        """Return what ``decoupled.json`` has beside the head and the claims."""
        return {
            "run": self.settings.run.to_json(),
            "killed_at": self.killed_at - self.began,
            "seconds": self.ended_at - self.began,
            "losses": self.losses(),
            "learners": [self._learner(i) for i in range(len(self.tracks))],
        }

    def show(self, console: Console) -> None:
        """Print a row for each learner."""
        heads = (
            "learner", "steps", "s a step before", "after the kill", "reports merged",
            "commits taken", "share of DiLoCo", "sent", "received",
        )  # fmt: skip
        table = plain_table(heads)
        for index, track in enumerate(self.tracks):
            before, after = self.pace_s(index)
            ended = track.ended
            is_killed = index == self.settings.killed
            kind = "killed" if is_killed else "slow" if index == self.settings.slow else ""
            table.add_row(
                f"{index} {kind}".strip(),
                str(len(track.steps)),
                f"{before:.3f}",
                "-" if is_killed else f"{after:.3f}",
                "-" if ended is None else str(ended.merged),
                str(self.versions(index)[1]),
                "-" if ended is None else f"{ended.hook_s / (self.ended_at - self.began):.1%}",
                "-" if ended is None else f"{ended.sent_bytes / 1e6:.2f} MB",
                "-" if ended is None else f"{ended.received_bytes / 1e6:.2f} MB",
            )
        print_whole(console, table)

    def draw(self, path: Path) -> None:
        """Draw the steps of each learner over time, and how long each step lasted."""
        figure, panels = plots.new_panels(2, 1, 8.0, 3.0)
        above, below = panels[:, 0]
        for index, track in enumerate(self.tracks):
            times = [step.at - self.began for step in track.steps]
            colour, label = self._look_of(index)
            above.plot(times, range(1, len(times) + 1), color=colour, label=label)
            lasted = [b - a for a, b in pairwise(times)]
            below.plot(times[1:], lasted, ".", color=colour, markersize=3)
            if index == self.settings.killed and times:
                above.plot(times[-1], len(times), "X", color=colour, markersize=9)
        for axes in (above, below):
            axes.axvline(self.killed_at - self.began, color=plots.GREY, linestyle=":")
        above.set_ylabel("inner steps")
        below.set_ylabel("seconds of a step")
        below.set_xlabel("seconds")
        below.set_ylim(bottom=0.0)
        above.set_title("A learner is slow, another is killed: the steps of the others go on")
        plots.legend(above)
        plots.save(figure, path)

    def _look_of(self, index: int) -> tuple[str, str]:
        if index == self.settings.killed:
            return plots.VERMILION, f"learner {index}, killed"
        slow = ", slow" if index == self.settings.slow else ""
        return _COLOURS[index % len(_COLOURS)], f"learner {index}{slow}"

    def _learner(self, index: int) -> dict[str, Any]:
        track = self.tracks[index]
        before, after = self.pace_s(index)
        return {
            "number": index,
            "step_s_before": before if math.isfinite(before) else None,
            "step_s_after": after if math.isfinite(after) else None,
            "end": None if track.ended is None else dataclasses.asdict(track.ended),
            "steps": [
                [round(step.at - self.began, 4), round(step.loss, 4), step.step]
                for step in track.steps
            ],
        }


def run(settings: Decoupled, console: Console) -> Results:
    """Train, kill one learner in the middle, and return what the learners said.

    Raises:
        ValueError: If the text is missing or too short.
        ReplicaError: If a learner failed. All processes have ended then, as after an interrupt.
    """
    load_corpus(settings.data, settings.num_replicas)
    results = Results(settings, [Track() for _ in range(settings.num_replicas)])
    outer = Nesterov(settings.outer_lr, settings.outer_momentum)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(DecoupledServer(settings.run, outer=outer))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="diloco-demo-")))
        modules = [learn.__module__, *WITH_OPTIMIZER]
        crew = Crew(learn, (settings, server.address), folder, modules)
        stack.callback(crew.close)
        console.print(
            f"the syncer listens on {server.address}, {len(results.tracks)} learners attach"
        )

        def note(replica: Replica, said: Any) -> None:
            track = results.tracks[replica.number]
            if isinstance(said, Stepped):
                track.steps.append(said)
            elif isinstance(said, Ready):
                track.ready = said
            elif isinstance(said, Learned):
                track.ended = said

        def tell(what: str) -> None:
            for number in crew.replicas:
                crew.tell(number, what)

        def until(is_so: Callable[[], bool], what: str) -> None:
            crew.hear(note, settings.timeout_s, is_so, what)

        def train(when: str) -> float:
            with progress_bar(f"{when} the kill", settings.seconds / 2) as advance:
                crew.hear(note, settings.seconds / 2, advance=advance)
            return time.monotonic()

        for number in range(settings.num_replicas):
            crew.start(number)
        until(lambda: all(track.ready for track in results.tracks), "all learners attach")
        results.began = time.monotonic()
        tell("begin")
        slower = f"learner {settings.slow} takes {settings.slow_factor:g} times as long for a step"
        console.print(slower)
        results.killed_at = train("before")
        crew.kill(settings.killed)
        console.print(f"learner {settings.killed} is killed")
        results.ended_at = train("after")
        tell("end")
        rest = [results.tracks[index] for index in results.others]
        until(lambda: all(track.ended for track in rest), "the learners end")
        results.status = server.report()
    return results
