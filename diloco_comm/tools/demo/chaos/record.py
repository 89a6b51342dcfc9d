"""What happened in a chaos demo: the life of each process, the views and the events."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from .crew import Replica
from .messages import LEFT_BEHIND, Copying, Ended, Entered, Message, Stepped

# What a replica does, as the bands of the figure show it.
STARTING, TRAINING, WAITING, STOPPED = "starting or copying", "training", "waiting", "stopped"


@dataclass
class Track:
    """The life of one process. Times are seconds since the first view.

    Attributes:
        steps: Time, inner step and loss.
        entered: When it entered a view.
        stopped: When it was stopped; None if it was not.
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
    """What a process did from ``begin`` to ``end``."""

    begin: float
    end: float
    what: str


@dataclass
class View:
    """A view, as its members told of it; ``seconds``: the longest that one of them stood still."""

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
        replica: -1 for all, or for the registry.
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
        track, at = self.track_of(replica), message.at - self.begin
        if isinstance(message, Stepped):
            track.steps.append((at, message.step, message.loss))
        elif isinstance(message, Copying):
            track.copied = message.received_bytes, message.total_bytes
        elif isinstance(message, Entered):
            self._add_view(track, at, message)
        elif isinstance(message, Ended):
            track.ended, track.how = at, message.how
            track.outer_hash, track.inner_step = message.outer_hash, message.inner_step
            self.num_parameters = max(self.num_parameters, message.num_parameters)

    def _add_view(self, track: Track, at: float, message: Entered) -> None:
        track.entered.append(at)
        # A newcomer's seconds are those of its own start.
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
            bands = [Band(begin, stopped, TRAINING), Band(stopped, resumed, STOPPED)]
            return [*bands, Band(resumed, end, WAITING)]
        is_change = any(begin < at <= end for at in track.entered)
        is_last = end == track.ended and track.how == LEFT_BEHIND
        return [Band(begin, end, WAITING)] if is_change or is_last else []

    def mean_loss(self, window_s: float, every_s: float) -> list[tuple[float, float]]:
        """Return times, and the mean loss of all steps in the window before each of them."""
        steps = sorted((at, loss) for track in self.tracks for at, _, loss in track.steps)
        times = [at for at, _ in steps]
        points = []
        for i in range(1, int(self.duration / every_s) + 1):
            end = i * every_s
            chosen = steps[bisect.bisect(times, end - window_s) : bisect.bisect(times, end)]
            if chosen:
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
