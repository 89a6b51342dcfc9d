"""``diloco-comm demo --chaos``: replicas are killed, suspended and started while they train."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from diloco_comm.elastic.events import JoinProgress

from ..common import plots
from ..common.console import Claim, plain_table, print_whole
from ..common.ranks import WITH_OPTIMIZER
from .crew import DONE, LEFT_BEHIND, Crew, Ended, Entered, Replica, Stepped
from .data import load_corpus
from .replica import come_and_go
from .settings import FOUNDERS, KILLED, NEWCOMER, STOPPED, Chaos

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Message = Stepped | Entered | JoinProgress | Ended
# The states of a replica, as the bands of the figure show them.
STARTING, TRAINING, WAITING, STANDING = "starting or copying", "training", "waiting", "stopped"
# Curves leave out points that would be the mean of fewer steps, because such a mean says little.
_LEAST_STEPS = 5

COLOURS = (plots.BLUE, plots.ORANGE, plots.GREEN, plots.PURPLE, plots.SKY)
_RED = plots.VERMILION
# Seconds over which a point of a curve, and the loss at the begin and the end, are means.
_SPAN_S = 2.0
# Seconds between two points of a curve.
_EVERY_S = 0.25
_LABELS = {
    "kill": "killed",
    "registry down": "registry\nkilled",
    "registry up": "and back",
    "join": "started",
    "stop": "stopped",
    "resume": "wakes up",
}
_HEIGHT = 0.62
# The JSON file has every fifth step.
_KEPT_STEPS = 5


@dataclass
class Track:
    """The life of one process. Times are seconds since the first view.

    Attributes:
        steps: Time, inner step and loss of each step.
        entered: Times at which the process entered a view.
        stopped: When the process was suspended (SIGSTOP); None if it was not.
    """

    number: int
    process: int
    started: float
    steps: list[tuple[float, int, float]] = field(default_factory=list)
    entered: list[float] = field(default_factory=list)
    copied: tuple[int, int] = (0, 0)
    stopped: float | None = None
    resumed: float | None = None
    ended: float | None = None
    how: str = ""
    outer_hash: str = ""
    inner_step: int = 0


@dataclass(frozen=True)
class Band:
    """The state of a process from ``begin`` to ``end``."""

    begin: float
    end: float
    what: str


@dataclass
class View:
    """A view (a group of replicas that train together), as its members told of it.

    ``seconds`` is the longest time for which an older member stood still in the change to it.
    """

    number: int
    at: float
    members: tuple[int, ...]
    joined: tuple[int, ...]
    left: tuple[int, ...]
    seconds: float
    copied_bytes: int


@dataclass(frozen=True)
class Happened:
    """An event of the script.

    Attributes:
        kind: "begin", "kill", "join", "stop", "resume", "registry down", "registry up" or "end".
        replica: Number of the replica; -1 for all replicas, or for the registry.
    """

    at: float
    kind: str
    replica: int
    text: str


class Record:
    """Collect what the processes say.

    Attributes:
        begin: ``time.monotonic()`` of the first view; all other times count from it.
    """

    def __init__(self, began: float, step_s: float) -> None:
        self.begin = began
        self._step_s = step_s
        self.tracks: list[Track] = []
        self.views: dict[int, View] = {}
        self.events: list[Happened] = []
        self.num_parameters = 0
        self._by_process: dict[int, Track] = {}

    def began(self, at: float) -> None:
        """Count all times from ``at``."""
        shift, self.begin = at - self.begin, at
        for track in self.tracks:
            track.started -= shift
            track.steps = [(time - shift, step, loss) for time, step, loss in track.steps]
            track.entered = [time - shift for time in track.entered]
        for view in self.views.values():
            view.at -= shift

    def started(self, replica: Replica) -> None:
        track = Track(replica.number, replica.place.process, replica.started - self.begin)
        self.tracks.append(track)
        self._by_process[track.process] = track

    def track_of(self, replica: Replica) -> Track:
        return self._by_process[replica.place.process]

    def note(self, now: float, kind: str, replica: int, text: str) -> Happened:
        event = Happened(now - self.begin, kind, replica, text)
        self.events.append(event)
        return event

    def add(self, replica: Replica, message: Message) -> None:
        """Take in what a process has said."""
        track = self.track_of(replica)
        if isinstance(message, JoinProgress):
            track.copied = message.received_bytes, message.total_bytes
            return
        at = message.at - self.begin
        if isinstance(message, Stepped):
            track.steps.append((at, message.step, message.loss))
        elif isinstance(message, Entered):
            self._add_view(track, at, message)
        elif isinstance(message, Ended):
            track.ended, track.how = at, message.how
            track.outer_hash, track.inner_step = message.outer_hash, message.inner_step
            self.num_parameters = max(self.num_parameters, message.num_parameters)

    def _add_view(self, track: Track, at: float, message: Entered) -> None:
        track.entered.append(at)
        # A newcomer's seconds are the seconds of its own start.
        seconds = 0.0 if track.number in message.joined else message.seconds
        known = self.views.get(message.view)
        if known is None:
            who = message.members, message.joined, message.left
            self.views[message.view] = View(message.view, at, *who, seconds, message.copied_bytes)
        else:
            known.seconds = max(known.seconds, seconds)
            known.copied_bytes = max(known.copied_bytes, message.copied_bytes)

    # ------------------------------------------------------------------------------- figures

    @property
    def newest_view(self) -> View | None:
        return self.views[max(self.views)] if self.views else None

    @property
    def duration(self) -> float:
        """Seconds from the first view to the last thing that happened."""
        ends = [
            track.ended or (track.steps[-1][0] if track.steps else 0.0) for track in self.tracks
        ]
        return max([0.0, *ends])

    def bands(self, track: Track) -> list[Band]:
        """Return what a process did, from its start to its end."""
        end = self.duration if track.ended is None else track.ended
        times = [at for at, _, _ in track.steps]
        if not times:
            return [Band(track.started, end, STARTING)]
        found = [Band(track.started, times[0], STARTING)]
        begin = times[0]
        for before, after in zip(times, [*times[1:], end], strict=True):
            pause = self._pause(track, before, after)
            if pause:
                found += [Band(begin, before, TRAINING), *pause]
                begin = after
        found.append(Band(begin, end, TRAINING))
        return [band for band in found if band.end > band.begin]

    def _pause(self, track: Track, begin: float, end: float) -> list[Band]:
        """Return the bands between two steps; none where the replica only waited for a round."""
        if track.stopped is not None and begin - self._step_s <= track.stopped < end:
            stopped, resumed = max(begin, track.stopped), track.resumed
            resumed = end if resumed is None else min(end, resumed)
            bands = [Band(begin, stopped, TRAINING), Band(stopped, resumed, STANDING)]
            return [*bands, Band(resumed, end, WAITING)]
        is_change = any(begin < at <= end for at in track.entered)
        is_last = end == track.ended and track.how == LEFT_BEHIND
        return [Band(begin, end, WAITING)] if is_change or is_last else []

    def mean_loss(self, window_s: float, every_s: float) -> list[tuple[float, float]]:
        """Return times, and the mean loss of all steps in the window before each of them.

        Times with fewer than five steps are left out.
        """
        steps = sorted((at, loss) for track in self.tracks for at, _, loss in track.steps)
        times = [at for at, _ in steps]
        points = []
        for i in range(1, int(self.duration / every_s) + 1):
            end = i * every_s
            chosen = steps[bisect.bisect(times, end - window_s) : bisect.bisect(times, end)]
            if len(chosen) >= _LEAST_STEPS:
                points.append((end, sum(loss for _, loss in chosen) / len(chosen)))
        return points

    def rate(self, tokens_per_step: int, width_s: float) -> list[tuple[float, float]]:
        """Return times, and the tokens a second of all replicas in the interval around each."""
        times = [at for track in self.tracks for at, _, _ in track.steps]
        num_bins = int(self.duration / width_s)
        counts = [0] * num_bins
        for at in times:
            if 0 <= at < num_bins * width_s:
                counts[int(at / width_s)] += 1
        scale = tokens_per_step / width_s
        return [((i + 0.5) * width_s, scale * count) for i, count in enumerate(counts)]

    def num_steps_between(self, begin: float, end: float) -> int:
        """Return the steps that all replicas took in a span of time."""
        return sum(begin < at < end for track in self.tracks for at, _, _ in track.steps)

    def tracks_of(self, number: int) -> Sequence[Track]:
        return [track for track in self.tracks if track.number == number]


@dataclass(frozen=True)
class Row:
    """An event, and the first view that shows its effect; None if an event changes no view."""

    event: Happened
    view: View | None


@dataclass
class Results:
    """Everything that a run of the script has shown."""

    settings: Chaos
    record: Record
    source: str
    unigram_entropy: float
    name = "chaos"

    def rows(self) -> list[Row]:
        """Return the events, each with the first view after it that shows its effect."""
        return [Row(event, self._effect_of(event)) for event in self.record.events]

    def _effect_of(self, event: Happened) -> View | None:
        replica = event.replica
        wanted: dict[str, Callable[[View], bool]] = {
            "kill": lambda view: replica in view.left,
            "stop": lambda view: replica in view.left,
            "join": lambda view: replica in view.joined,
            "resume": lambda view: replica in view.joined,
        }
        is_effect = wanted.get(event.kind)
        if is_effect is None:
            return None
        views = [self.record.views[number] for number in sorted(self.record.views)]
        return next((view for view in views if view.at > event.at and is_effect(view)), None)

    def event(self, kind: str) -> Happened:
        return next(event for event in self.record.events if event.kind == kind)

    def claims(self) -> list[Claim]:
        """Return what elastic membership promises, and whether this run confirms it."""
        record = self.record
        effects = {row.event.kind: row.view for row in self.rows()}
        last = [track for track in record.tracks if track.how == DONE]
        hashes = {track.outer_hash for track in last}
        down, up = self.event("registry down").at, self.event("registry up").at
        away_steps = record.num_steps_between(down, up)
        beside = [effects["join"], effects["resume"]]
        copied = sum(view.copied_bytes for view in beside if view is not None)
        first, final = self.losses()
        is_back = any(track.how == LEFT_BEHIND for track in record.tracks_of(STOPPED))
        return [
            Claim(
                f"the others went on without replica {KILLED}, which was killed, and without "
                f"replica {STOPPED}, which was stopped",
                effects["kill"] is not None and effects["stop"] is not None,
            ),
            Claim(
                f"replica {STOPPED} was left behind when it woke up, and came again",
                is_back and effects["resume"] is not None,
            ),
            Claim(
                f"replicas {NEWCOMER} and {STOPPED} joined, and the others waited for {copied} "
                "bytes of state (0)",
                None not in beside and copied == 0,
            ),
            Claim(
                f"the replicas took {away_steps} inner steps while the registry was away "
                f"(more than {self.settings.sync_every})",
                away_steps > self.settings.sync_every,
            ),
            Claim(
                f"replicas {sorted(track.number for track in last)} end at one inner step, "
                "bit-identical",
                len(hashes) == 1 and len({track.inner_step for track in last}) == 1,
            ),
            Claim(
                f"the loss fell from {first:.2f} to {final:.2f} nats a byte, below the unigram "
                f"entropy of the text, {self.unigram_entropy:.2f}",
                final < self.unigram_entropy < first,
            ),
        ]

    def losses(self) -> tuple[float, float]:
        """Return the mean training loss in the first and in the last two seconds."""
        points = self.record.mean_loss(_SPAN_S, _SPAN_S)
        if not points:
            return float("nan"), float("nan")
        return points[0][1], points[-1][1]

    def content(self) -> dict[str, Any]:
        """Return what ``chaos.json`` has beside the head and the claims."""
        record = self.record
        events = [
            {**dataclasses.asdict(row.event), "view": row.view and row.view.number}
            for row in self.rows()
        ]
        return {
            "text": self.source,
            "unigram_entropy_nats": self.unigram_entropy,
            "num_parameters": record.num_parameters,
            "events": events,
            "views": [dataclasses.asdict(record.views[number]) for number in sorted(record.views)],
            "processes": [self._track_as_dict(track) for track in record.tracks],
            "loss": record.mean_loss(_SPAN_S, 0.5),
            "tokens_per_second": record.rate(self.settings.tokens_per_step, 1.0),
        }

    def show(self, console: Console) -> None:
        """Print what each event cost the others."""
        heads = ("at (s)", "event", "view", "others stood still (s)")
        table = plain_table(heads, "what each event cost the others", ("event", "view"))
        for row in self.rows():
            view = "" if row.view is None else f"{row.view.number}: {list(row.view.members)}"
            seconds = "" if row.view is None else f"{row.view.seconds:.1f}"
            table.add_row(f"{row.event.at:.1f}", row.event.text, view, seconds)
        print_whole(console, table)

    def draw(self, path: Path) -> None:
        """Draw loss, membership and tokens a second over time."""
        record = self.record
        figure = plots.new_figure(10.5, 7.6)
        panels = figure.subplots(3, 1, sharex=True, height_ratios=[3, 3.2, 1.8])
        loss, bands, rate = panels
        for axes in panels:
            plots.tidy(axes, "x" if axes is bands else "both")
            for event in record.events:
                if event.kind in _LABELS:
                    axes.axvline(event.at, color="0.55", linewidth=0.9, linestyle=":")
        _draw_loss(loss, self)
        _draw_bands(bands, record)
        _draw_rate(rate, self)
        rate.set_xlabel("seconds since the first view")
        rate.set_xlim(0.0, record.duration)
        figure.suptitle(
            "Replicas are killed, stopped and started while they train "
            f"({record.num_parameters / 1e6:.2f} million parameters, wire {self.settings.wire})"
        )
        plots.save(figure, path)

    def _track_as_dict(self, track: Track) -> dict[str, Any]:
        values = dataclasses.asdict(track)
        values["steps"] = values["steps"][::_KEPT_STEPS]
        values["copied"] = {"received_bytes": track.copied[0], "total_bytes": track.copied[1]}
        bands = [dataclasses.asdict(band) for band in self.record.bands(track)]
        return {**values, "bands": bands}


def run(settings: Chaos, console: Console) -> Results:
    """Train, let everything happen, and return what was seen.

    Raises:
        ValueError: If the text is missing or too short.
        ReplicaError: If a replica failed, or an event did not have its effect. All processes have
            ended then, as after an interrupt.
    """
    corpus = load_corpus(settings.data, settings.num_replicas)
    console.print(
        "[bold]4 replicas[/] train a byte-level transformer, while replicas and the registry are "
        f"killed, stopped and started; wire {settings.wire}, an exchange every "
        f"{settings.sync_every} inner steps"
    )
    modules = [come_and_go.__module__, *WITH_OPTIMIZER]
    with (
        tempfile.TemporaryDirectory(prefix="diloco-chaos-") as folder,
        Crew(come_and_go, settings, Path(folder), modules) as crew,
    ):
        script = Script(settings, crew, console)
        script.run()
        return Results(settings, script.record, corpus.source, corpus.unigram_entropy)


class Script:
    """One run of the script."""

    def __init__(self, settings: Chaos, crew: Crew, console: Console) -> None:
        self._settings, self._crew, self._console = settings, crew, console
        self.record = Record(time.monotonic(), settings.step_s)

    def run(self) -> None:
        everyone = set(range(FOUNDERS))
        for number in everyone:
            self._start(number)
        view = self._until_members(everyone, "replicas 0 to 3 begin")
        self.record.began(self.record.begin + view.at)
        self._note("begin", -1, "replicas 0 to 3 begin")
        self._train()

        self._note("kill", KILLED, f"replica {KILLED} is killed")
        self._crew.kill(KILLED)
        self._until_members(everyone - {KILLED}, f"the others go on without replica {KILLED}")
        self._train()

        self._note("registry down", -1, "the registry is killed")
        self._crew.kill_registry()
        self._wait(self._settings.outage_s)
        self._crew.start_registry()
        self._note("registry up", -1, "the registry is back with its journal")
        self._train()

        everyone = everyone - {KILLED} | {NEWCOMER}
        self._note("join", NEWCOMER, f"replica {NEWCOMER} is started")
        self._start(NEWCOMER)
        self._until_members(everyone, f"replica {NEWCOMER} joins")
        self._train()

        self._note("stop", STOPPED, f"replica {STOPPED} is stopped")
        self._crew.stop(STOPPED)
        self._track(STOPPED).stopped = self._now()
        self._until_members(everyone - {STOPPED}, f"the others go on without replica {STOPPED}")
        self._train()

        self._note("resume", STOPPED, f"replica {STOPPED} wakes up: left behind, it starts again")
        self._track(STOPPED).resumed = self._now()
        self._crew.resume(STOPPED)
        self._until_members(everyone, f"replica {STOPPED} comes again")
        self._train()
        self._end()

    def _end(self) -> None:
        """Let all replicas end at one inner step, which none of them has reached."""
        steps = [track.steps[-1][1] for track in self.record.tracks if track.steps]
        every = self._settings.sync_every
        last_step = (max(steps) // every + 3) * every
        self._note("end", -1, f"all replicas end at inner step {last_step}")
        for number in self._crew.replicas:
            self._crew.tell(number, last_step)
        assert self.record.newest_view is not None
        members = self.record.newest_view.members
        self._until(
            lambda: all(self._crew.replicas[number].has_ended for number in members),
            "the replicas end",
        )

    # ------------------------------------------------------------------------------- waiting

    def _train(self) -> None:
        self._wait(self._settings.pause_s)

    def _wait(self, seconds: float) -> None:
        self._crew.hear(self._hear, seconds)

    def _until_members(self, members: set[int], what: str) -> View:
        """Wait for a view of these members in which each of them has taken a step."""

        def is_so() -> bool:
            view = self.record.newest_view
            return (
                view is not None
                and set(view.members) == members
                and all(self._has_stepped_since(number, view.at) for number in members)
            )

        self._until(is_so, what)
        view = self.record.newest_view
        assert view is not None
        return view

    def _has_stepped_since(self, number: int, at: float) -> bool:
        steps = self._track(number).steps
        return bool(steps) and steps[-1][0] > at

    def _until(self, is_so: Callable[[], bool], what: str) -> None:
        view = self.record.newest_view
        seen = "no view" if view is None else f"the members {view.members}"
        self._crew.hear(self._hear, self._settings.timeout_s, is_so, f"{what}, after {seen}")

    def _hear(self, replica: Replica, message: Message) -> None:
        self.record.add(replica, message)
        if isinstance(message, Ended) and message.how == LEFT_BEHIND:
            self._start(replica.number)

    # ------------------------------------------------------------------------------- helpers

    def _start(self, number: int) -> None:
        self.record.started(self._crew.start(number))

    def _track(self, number: int) -> Track:
        return self.record.track_of(self._crew.replicas[number])

    def _now(self) -> float:
        return time.monotonic() - self.record.begin

    def _note(self, kind: str, replica: int, text: str) -> None:
        event = self.record.note(time.monotonic(), kind, replica, text)
        self._console.print(f"{event.at:6.1f} s  {text}")


def _draw_loss(axes: Axes, results: Results) -> None:
    record = results.record
    for track in record.tracks:
        points = [(at, loss) for at, _, loss in track.steps if at > 0]
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(x, y, ".", color=COLOURS[track.number], alpha=0.3, markersize=2.5)
    x, y = zip(*_with_gaps(record.mean_loss(_SPAN_S, _EVERY_S)), strict=True)
    axes.plot(x, y, color=plots.BLACK, linewidth=1.6, label="mean of all replicas")
    plots.level(axes, results.unigram_entropy, "unigram entropy of the text")
    axes.set_ylabel("training loss\n(nats a byte)")
    plots.legend(axes, loc="lower left")
    height = axes.get_ylim()[1]
    for event in record.events:
        if event.kind in _LABELS:
            who = f"replica {event.replica}\n" if event.replica >= 0 else ""
            axes.annotate(
                f"{who}{_LABELS[event.kind]}",
                (event.at, height),
                xytext=(3, -2),
                textcoords="offset points",
                va="top",
                fontsize="small",
                color="0.25",
            )


def _with_gaps(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Add a NaN point in each span in which nobody took a step, so that the line has a gap."""
    found = points[:1]
    for before, after in itertools.pairwise(points):
        if after[0] - before[0] > 1.5 * _EVERY_S:
            found.append((before[0], math.nan))
        found.append(after)
    return found


def _draw_bands(axes: Axes, record: Record) -> None:
    numbers = sorted({track.number for track in record.tracks})
    for track in record.tracks:
        for band in record.bands(track):
            begin = max(0.0, band.begin)
            if band.end > begin:
                style = _style(band.what, COLOURS[track.number])
                width = band.end - begin
                axes.barh([track.number], [width], left=begin, height=_HEIGHT, **style)
        if track.ended is not None and track.how != DONE:
            axes.plot([track.ended], [track.number], "x", color=_RED, markersize=9, mew=2)
    _draw_registry(axes, record, row=len(numbers))
    axes.set_yticks([*numbers, len(numbers)], [*[f"replica {n}" for n in numbers], "registry"])
    axes.invert_yaxis()
    axes.set_ylabel("membership")
    for what in (TRAINING, WAITING, STARTING, STANDING):
        axes.barh([0], [0], **_style(what, "0.4"), label=what)
    axes.legend(
        frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 0.99), fontsize="small"
    )


def _style(what: str, colour: str) -> dict[str, Any]:
    styles: dict[str, dict[str, Any]] = {
        TRAINING: {"color": colour},
        WAITING: {"color": colour, "alpha": 0.3},
        STARTING: {"facecolor": "white", "edgecolor": colour, "hatch": "////", "linewidth": 0.6},
        STANDING: {"facecolor": "0.93", "edgecolor": _RED, "hatch": "xx", "linewidth": 0.6},
    }
    return styles[what]


def _draw_registry(axes: Axes, record: Record, row: int) -> None:
    begin = 0.0
    for event in record.events:
        if event.kind == "registry down":
            axes.barh([row], [event.at - begin], left=begin, height=_HEIGHT, color="0.6")
            axes.plot([event.at], [row], "x", color=_RED, markersize=9, mew=2)
        elif event.kind == "registry up":
            begin = event.at
    axes.barh([row], [record.duration - begin], left=begin, height=_HEIGHT, color="0.6")


def _draw_rate(axes: Axes, results: Results) -> None:
    points = results.record.rate(results.settings.tokens_per_step, 1.0)
    x, y = zip(*points, strict=True)
    axes.fill_between(x, y, step="mid", color=plots.GREY, alpha=0.35)
    axes.step(x, y, where="mid", color=plots.BLACK, linewidth=1.2)
    axes.set_ylim(bottom=0.0)
    axes.set_ylabel("tokens a second,\nall replicas")
