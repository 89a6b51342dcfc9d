"""The state of all runs at a host, from the last messages of their processes; see ``advance``.

The host is a store or a registry. It keeps a record and one beat of each process of an elastic run,
and the figures of each process. A fixed group has only figures. Any of these texts may come from a
stranger, so its content is not trusted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median_high
from typing import Any, NamedTuple, Protocol

from ..group.beats import TRAINING, Beat, Way, evicted, name_of
from ..group.records import Key, Record, cause_of
from ..group.signs import EXCHANGE, STEPS
from .figures import MOST_NAMED, Figures

# Seconds without a message until a process is silent, of a wait until it is reported, and without a
# message until a run is forgotten. A process sends its figures every five seconds.
SILENT_S, AWAITED_S, FORGET_S = 12.0, 5.0, 60.0
# A process holds others up only if it has reported, at least so many seconds after their wait
# began, that it does not wait itself.
SPOKEN_S = 2.0
# The speed of a replica is measured over at most so many seconds, and at least so many inner steps,
# if the replica has trained for at least this share of the time.
SPEED_S, MIN_STEPS, MIN_BUSY = 60.0, 5, 0.2
# Higher speeds, in inner steps per second, are not believed.
MOST_SPEED = 1e5
# A replica becomes slow below the first share of the median speed, and stops above the second one.
SLOW, NOT_SLOW = 0.6, 0.75
MAX_EVENTS, MAX_POINTS, FIRST_STEP_S = 50, 120, 5.0
# The page and the metrics show at most so many processes.
MAX_PROCESSES = 2048
_NAME = re.compile(r"(0|[1-9][0-9]{0,9})\.([0-9a-f]{32})")
# Characters to escape although Python calls them printable: the backslash, and the ones that
# Unicode 16 lists as Default_Ignorable_Code_Point.
_ESCAPED = re.compile(
    r"[\\\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
COUNTERS = (
    "rounds", "skipped", "discarded", "sent_bytes", "received_bytes", "exchange_s", "waited_s",
    "changing_s", "retransmits",
)  # fmt: skip

# Conditions of a replica, the *marks*: an event is noted when one begins or ends.
SILENT, CUT, AWAITED, SLOW_ONE = "silent", "cut off", "awaited", "slow"
BEGINS = {
    SILENT: "replica {} is silent",
    CUT: "replica {} is cut off from {}",
    AWAITED: "others wait for replica {}",
    SLOW_ONE: "replica {} is slow",
}
ENDS = {
    SILENT: "replica {} is heard again",
    CUT: "replica {} reaches all of the others again",
    AWAITED: "nobody waits for replica {} any more",
    SLOW_ONE: "replica {} is slow no more",
}

# A run, the member as REPLICA.NONCE, its last text, and the seconds since the text came.
Text = tuple[str, str, bytes, float]


class Source(Protocol):
    """The methods of a store's or registry's host that the monitor reads."""

    def posted(self) -> list[Text]:
        """Return the last figures of each process."""
        ...

    def beats(self) -> list[Text]: ...

    def records(self) -> dict[str, bytes]:
        """Return the record of each run."""
        ...

    def facts(self) -> dict[str, int]:
        """Return numbers such as "connections" and "received_bytes"."""
        ...


class Snapshot(NamedTuple):
    """The last messages of all runs, and numbers of the process that hosts them.

    Attributes:
        posted: The figures of all processes.
        beats: The beats of all processes.
        records: The record of each run.
        facts: Numbers of the host, by the name of the metric without "diloco_" and "_total".
        report: The status of a server of asynchronous or decoupled training.
    """

    posted: Sequence[Text] = ()
    beats: Sequence[Text] = ()
    records: Mapping[str, bytes] = {}
    facts: Mapping[str, float] = {}
    report: Mapping[str, Any] | None = None


# ------------------------------------------------------------------------ records and beats


@dataclass(frozen=True)
class Seen:
    """The contents of a table for an elastic run.

    Attributes:
        view: The last record; None if there is none.
        beats: The last beat of each process, by rising replica number.
        evicted: Names of the processes that are asked to leave.
    """

    view: Record | None = None
    beats: Sequence[Beat] = ()
    evicted: frozenset[str] = frozenset()

    @classmethod
    def of(cls, record: bytes, texts: Mapping[str, bytes]) -> Seen:
        """Return the contents with this record and these texts of beats, by name.

        Raises:
            ValueError: If the record is none of this version.
        """
        named = [(name, Beat.from_bytes(text)) for name, text in texts.items()]
        # A beat under another process's name does not count.
        beats = [beat for name, beat in named if beat is not None and name_of(beat.key) == name]
        beats.sort(key=lambda beat: beat.key)
        return cls(Record.from_bytes(record) if record else None, beats, evicted(texts))

    def is_evicted(self, key: Key) -> bool:
        return name_of(key) in self.evicted

    @cached_property
    def living(self) -> dict[bytes, int]:
        """The replicas' numbers of the processes that are members or may become some, by nonce."""
        newcomers = [one.key for one in self.beats if not (one.is_gone or one.place.entered)]
        return {key.nonce: key.number for key in (*newcomers, *self.members)}

    @property
    def members(self) -> tuple[Key, ...]:
        return () if self.view is None else self.view.members

    @property
    def asked(self) -> tuple[int, ...]:
        """Numbers of the replicas that the last record leaves out because they were asked to go."""
        return () if self.view is None else self.view.evicted

    @cached_property
    def member_set(self) -> frozenset[Key]:
        return frozenset(self.members)

    def cut_from(self, beat: Beat) -> list[bytes]:
        """Return the nonces of the living processes that a process cannot reach."""
        return [nonce for nonce in beat.place.cut if nonce in self.living]

    def beat_report(self, beat: Beat) -> dict[str, Any]:
        """Return a beat as JSON types."""
        way, place = Way.from_text(beat.ways[0]) if beat.ways else None, beat.place
        return {
            "id": beat.key.number,
            "nonce": beat.key.nonce.hex(),
            "address": "" if way is None else way.address,
            "workers": len(beat.ways),
            "is_member": self.view is not None and self.view.is_member(beat.key),
            "stage": beat.stage,
            "view": place.entered,
            "inner_step": place.inner_step,
            "phase": beat.phase,
            "is_leaving": place.is_leaving or self.is_evicted(beat.key),
            "unreachable": [nonce.hex() for nonce in self.cut_from(beat)],
            "counter": beat.counter,
        }


# -------------------------------------------------------------------------------- the state


class Sample(NamedTuple):
    """The progress of a process at one time.

    Attributes:
        at: Unix time of the message.
        view: Number of the group.
        inner_step: Inner steps of the training.
        idle_s: Seconds without training since the process began.
    """

    at: float
    view: int
    inner_step: int
    idle_s: float


@dataclass(frozen=True)
class Process:
    """One process of a replica.

    Attributes:
        is_member: Whether the process is in the last record.
        beat, figures: Its last beat and figures; None without any.
        silent_s: Seconds since its last text of any kind; if none was seen, since the host began.
        figures_s: Seconds since its figures came.
        rounds: Rounds that this process has applied since its first figures here, plus the run's
            rounds before these.
        cut_from: Numbers of replicas that this one cannot reach, and that reach at least as many
            others as this one does. So this one counts as cut off.
        cannot_reach: Numbers of replicas that this one cannot reach, and that count as cut off
            themselves.
        awaited_by: Numbers of the replicas that wait for this one.
        awaited_s: Seconds since the first of these began to wait.
        samples: The latest samples of its progress, for the speed.
        speed: Inner steps per second, without the time of waits; NaN if unknown.
        median: The median speed of all replicas; NaN if unknown.
        marks: Its present conditions, the keys of ``BEGINS``.
    """

    key: Key
    is_member: bool
    beat: Beat | None
    figures: Figures | None
    silent_s: float
    figures_s: float
    rounds: int = 0
    cut_from: tuple[int, ...] = ()
    cannot_reach: tuple[int, ...] = ()
    awaited_by: tuple[int, ...] = ()
    awaited_s: float = 0.0
    samples: tuple[Sample, ...] = ()
    speed: float = math.nan
    median: float = math.nan
    marks: frozenset[str] = frozenset()

    @property
    def is_gone(self) -> bool:
        return self.beat is not None and self.beat.is_gone

    @property
    def cut(self) -> tuple[bytes, ...]:
        """The nonces of the processes that this one cannot reach, as its beat says."""
        return () if self.beat is None else self.beat.place.cut

    @property
    def phase(self) -> str:
        """The work of the training loop, as the newest message says."""
        phase = "" if self.beat is None else self.beat.phase
        return phase or ("" if self.figures is None else self.figures.phase)

    @property
    def is_waiting(self) -> bool:
        """Whether this process waits for replicas by name, and not only for a moment."""
        if self.figures is None or self.figures_s >= SILENT_S:
            return False
        if self.silent_s < self.figures_s and self.phase == STEPS:
            # The wait has ended since, as the newer beat says.
            return False
        return bool(self.figures.waits_for) and self.figures.waits_s >= AWAITED_S

    @property
    def waited_s(self) -> float:
        """Seconds since this process began to wait for others; 0 if it waits for none by name."""
        return self.figures.waits_s + self.figures_s if self.figures and self.is_waiting else 0.0


class Event(NamedTuple):
    """A change, at a Unix time in seconds."""

    at: float
    text: str


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        seen: The contents of the table; empty for a fixed group.
        replicas: For each replica, by number, the process that stands for it now.
        others: Further processes, such as one that is to replace a member that was killed.
        cause: Why the last view came, in words.
        changes: How many records have followed the first one seen.
        events: The latest events, oldest first.
        rounds: Rounds applied since the run was first seen, by the replica with the most.
        points: Pairs of Unix time, in whole seconds, and ``rounds``; at most ``MAX_POINTS``.
        step_s: Seconds between two points, which doubles when the points are too many.
        has_ended: The host has no message of the run any more: the run shows its last ones.
        is_over: With ``has_ended``: all replicas have ended, and not only fallen silent.
        since: Unix time at which the run was first seen.
    """

    seen: Seen
    replicas: Mapping[int, Process]
    others: Sequence[Process] = ()
    cause: str = ""
    changes: int = 0
    events: tuple[Event, ...] = ()
    rounds: int = 0
    points: tuple[tuple[int, int], ...] = ()
    step_s: float = FIRST_STEP_S
    has_ended: bool = False
    is_over: bool = False
    since: float = 0.0

    @property
    def is_finished(self) -> bool:
        return self.seen.view is not None and self.seen.view.is_finished

    @property
    def silent_s(self) -> float:
        """Seconds since the last message of any replica; infinite without replicas."""
        return min((one.silent_s for one in self.replicas.values()), default=math.inf)

    def counts(self, process: Process) -> bool:
        """Whether a process is a member; without a record, as in a fixed group, each one is."""
        return process.is_member or self.seen.view is None

    @cached_property
    def processes(self) -> dict[Key, Process]:
        return {one.key: one for one in (*self.replicas.values(), *self.others)}


@dataclass(frozen=True)
class State:
    """All runs of a host.

    Attributes:
        began: Unix time in seconds at which the host's own counters began.
        now: Unix time in seconds of the snapshot.
        runs: By name, as ``printable`` shows the name.
    """

    began: float
    now: float
    runs: Mapping[str, Run] = field(default_factory=dict)
    facts: Mapping[str, float] = field(default_factory=dict)
    report: Mapping[str, Any] | None = None


def advance(before: State, snapshot: Snapshot, now: float) -> State:
    """Return the state after another snapshot.

    Args:
        now: Unix time in seconds.
    """
    posted, beats = _by_run(snapshot.posted), _by_run(snapshot.beats)
    records = {printable(run): record for run, record in snapshot.records.items()}
    names = sorted({*posted, *beats, *records})
    runs = {
        name: _next_run(
            before.runs.get(name, Run(Seen(), {})),
            records.get(name, b""),
            beats.get(name, {}),
            posted.get(name, {}),
            before,
            now,
        )
        for name in names
    }
    if "unshown_runs" not in snapshot.facts:
        runs |= _ended_runs(before, runs, now)
    return State(before.began, now, runs, snapshot.facts, snapshot.report)


def _ended_runs(before: State, runs: Mapping[str, Run], now: float) -> dict[str, Run]:
    """Return the runs that ended at most ``FORGET_S`` ago, as far as present runs leave room."""
    found: dict[str, Run] = {}
    room = MAX_PROCESSES - sum(len(run.processes) for run in runs.values())
    for name in sorted(before.runs.keys() - runs.keys()):
        ended = _ended(before.runs[name], now - before.now, now)
        if ended.silent_s <= FORGET_S and len(ended.replicas) <= room:
            found[name] = ended
            room -= len(ended.replicas)
    return found


def _ended(run: Run, seconds: float, now: float) -> Run:
    replicas = {
        number: Process(
            one.key,
            one.is_member,
            one.beat,
            one.figures and replace(one.figures, waits_for=(), waits_s=0.0),
            one.silent_s + seconds,
            one.figures_s + seconds,
            one.rounds,
        )
        for number, one in run.replicas.items()
    }
    run = replace(run, replicas=replicas, others=())
    if run.has_ended:
        return run
    # A process of a fixed group that ends removes its figures at the host while they are new.
    is_over = run.is_finished or all(
        one.is_gone or (one.beat is None and one.silent_s <= SILENT_S) for one in replicas.values()
    )
    words = "the run has ended" if is_over else "nothing is heard of the run any more"
    events = (*run.events, Event(now, words))[-MAX_EVENTS:]
    return replace(run, events=events, has_ended=True, is_over=is_over)


def _by_run(texts: Iterable[Text]) -> dict[str, dict[str, tuple[bytes, float]]]:
    found: dict[str, dict[str, tuple[bytes, float]]] = {}
    for run, member, text, age_s in texts:
        found.setdefault(printable(run), {})[member] = (text, max(age_s, 0.0))
    return found


def printable(text: str) -> str:
    """Return a text of a stranger, with escapes for backslashes and for all that does not print.

    Line separators and controls of the direction of writing do not print, nor do the letters and
    marks that Unicode calls ignorable, such as a variation selector.
    """
    if text.isprintable() and _ESCAPED.search(text) is None:
        return text
    return "".join(
        one.encode("unicode_escape").decode()
        if _ESCAPED.match(one) or not one.isprintable()
        else one
        for one in text
    )


def _next_run(
    before: Run,
    record: bytes,
    beats: Mapping[str, tuple[bytes, float]],
    posted: Mapping[str, tuple[bytes, float]],
    state: State,
    now: float,
) -> Run:
    texts = {name: text for name, (text, _) in beats.items()}
    try:
        seen = Seen.of(record, texts)
    except ValueError:
        # The record is damaged, or of another version: go on with the last one that could be read.
        seen = replace(Seen.of(b"", texts), view=before.seen.view)
    found = [
        _process(key, seen, beat, figures, before, state, now)
        for key, beat, figures in _messages(seen, beats, posted, now)
    ]
    if seen.view is None or not seen.view.is_finished:
        found = _with_cuts(found, seen, before.processes)
    # A member that is heard counts first, then the newest message; a member that says nothing
    # counts where no other process is.
    found.sort(
        key=lambda one: (
            not (one.is_member and one.silent_s <= SILENT_S),
            one.figures_s,
            one.silent_s,
            one.key,
        )
    )
    replicas: dict[int, Process] = {}
    for one in found:
        replicas.setdefault(one.key.number, one)
    # A second process of a replica, if no member, is shown for a while after its last message:
    # without a view for a shorter time, as nobody says which of the two has ended.
    most_s = SILENT_S if seen.view is None else FORGET_S
    others = [
        one
        for one in found
        if replicas[one.key.number] is not one and (one.is_member or one.silent_s <= most_s)
    ]
    run = Run(seen, dict(sorted(replicas.items())), others)
    judged = _judged(run, before.processes)
    replicas = {number: judged[one.key] for number, one in run.replicas.items()}
    run = replace(run, replicas=replicas, others=[judged[one.key] for one in others])
    return _continued(before, run, now)


def _messages(
    seen: Seen,
    beats: Mapping[str, tuple[bytes, float]],
    posted: Mapping[str, tuple[bytes, float]],
    now: float,
) -> Iterable[tuple[Key, tuple[Beat | None, float], tuple[Figures | None, float]]]:
    """Yield all processes with their beat, their figures and the ages of both in seconds."""
    none: tuple[None, float] = (None, math.inf)
    last = {beat.key: (beat, beats[name_of(beat.key)][1]) for beat in seen.beats}
    figures = {}
    for name, (text, age_s) in posted.items():
        match, one = _NAME.fullmatch(name), Figures.from_bytes(text)
        # Figures under another replica's name do not count.
        if match and one and one.replica == int(match[1]) and one.is_plausible(now):
            figures[Key(one.replica, bytes.fromhex(match[2]))] = (one, age_s)
    for key in sorted({*seen.members, *last, *figures}):
        yield key, last.get(key, none), figures.get(key, none)


def _process(
    key: Key,
    seen: Seen,
    beat: tuple[Beat | None, float],
    figures: tuple[Figures | None, float],
    before: Run,
    state: State,
    now: float,
) -> Process:
    former = before.processes.get(key)
    # A host drops the texts of a process that is silent for long.
    unheard_s = now - state.began if former is None else former.silent_s + now - state.now
    process = Process(
        key,
        key in seen.member_set,
        beat[0],
        _not_fallen(figures[0], None if former is None else former.figures),
        min(beat[1], figures[1]) if beat[0] or figures[0] else max(unheard_s, 0.0),
        figures[1],
    )
    process = replace(process, rounds=_rounds(process.figures, former, before.rounds))
    return _with_speed(process, former, now)


def _rounds(figures: Figures | None, former: Process | None, of_run: int) -> int:
    """Return ``Process.rounds``: a process that begins goes on from the rounds of its run."""
    old = None if former is None else former.figures
    if former is None or figures is None or old is None or figures.created != old.created:
        return of_run
    return former.rounds + figures.rounds - old.rounds


def _not_fallen(figures: Figures | None, before: Figures | None) -> Figures | None:
    """Return figures whose counters are not below those before, unless the process is another."""
    if figures is None or before is None or figures.created != before.created:
        return figures
    both = {name: (getattr(figures, name), getattr(before, name)) for name in COUNTERS}
    return replace(figures, **{name: max(both[name], key=_or_zero) for name in COUNTERS})


def _or_zero(value: float) -> float:
    return value if value == value else 0.0


def _with_speed(process: Process, former: Process | None, now: float) -> Process:
    figures, samples = process.figures, former.samples if former is not None else ()
    if figures is None:
        return process
    beat, speed = process.beat, math.nan if former is None else former.speed
    if beat is not None and (beat.stage, beat.place.entered) != (TRAINING, figures.view):
        # The figures count the seconds of a change only once the change has ended.
        return replace(process, samples=samples, speed=speed)
    if figures.phase not in ("", STEPS, EXCHANGE):
        # An evaluation or a checkpoint; the measurement begins anew after that.
        return replace(process, speed=speed)
    idle_s = figures.waited_s + _or_zero(figures.changing_s) + figures.waits_s
    sample = Sample(now - process.figures_s, figures.view, figures.inner_step, idle_s)
    if samples and abs(samples[-1].at - sample.at) < 0.5:
        # The same message as before.
        return replace(process, samples=samples, speed=speed)
    # A newcomer, and a member that was thrown back, go on from the inner step of the others: their
    # samples before that do not count.
    kept = [
        one for one in samples if one.view == figures.view and one.inner_step <= sample.inner_step
    ]
    kept = [one for one in kept if sample.at - SPEED_S <= one.at < sample.at]
    first = kept[0] if kept else sample
    if sample.inner_step - first.inner_step >= MIN_STEPS:
        whole_s = sample.at - first.at
        busy_s = whole_s - max(sample.idle_s - first.idle_s, 0.0)
        if busy_s >= MIN_BUSY * whole_s:
            speed = (sample.inner_step - first.inner_step) / busy_s
            speed = speed if speed <= MOST_SPEED else math.nan
    return replace(process, samples=(*kept, sample), speed=speed)


def _with_cuts(
    found: Sequence[Process], seen: Seen, former: Mapping[Key, Process]
) -> list[Process]:
    """Return the processes with the replicas that they cannot reach.

    The beat of a process names these once a change of the group has failed. Before that, the
    figures of two processes show that neither hears the other.
    """
    heard = [
        one
        for one in found
        if one.silent_s <= SILENT_S
        and not one.is_gone
        and (seen.view is None or seen.living.get(one.key.nonce) == one.key.number)
    ]
    by_nonce = {one.key.nonce: one for one in heard}
    members = {one.key.number: one for one in heard if one.is_member or not seen.view}
    apart: dict[Key, set[Key]] = {one.key: set() for one in heard}
    missed: dict[Key, set[Key]] = {one.key: set() for one in heard}
    for one in heard:
        old = former.get(one.key)
        were = set() if old is None else {*old.cut_from, *old.cannot_reach}
        waits = set(() if one.figures is None else one.figures.waits_for)
        others = [by_nonce[nonce] for nonce in one.cut if nonce in by_nonce]
        for number in (waits | were) & members.keys():
            if _are_deaf(one, members[number], old if number in were else None):
                others.append(members[number])
        for other in others:
            # Where a newcomer and a member are cut off from each other, the newcomer is.
            is_new = one.is_member is not other.is_member
            for this, that in ((one, other), (other, one)) if other is not one else ():
                if not (is_new and this.is_member):
                    apart[this.key].add(that.key)
        if one.is_waiting:
            missed[one.key] = {members[number].key for number in waits & members.keys()}
    most = {key: len(apart[key] | missed[key]) for key in apart}
    return [
        replace(
            one,
            cut_from=_numbers_of(k for k in apart[one.key] if most[k] <= most[one.key]),
            cannot_reach=_numbers_of(k for k in apart[one.key] if most[k] > most[one.key]),
        )
        if apart.get(one.key)
        else one
        for one in found
    ]


def _numbers_of(keys: Iterable[Key]) -> tuple[int, ...]:
    return tuple(sorted({key.number for key in keys}))


def _are_deaf(one: Process, other: Process, old: Process | None) -> bool:
    """Whether two processes are in one exchange, and each waits for the other: both are deaf.

    Args:
        old: The first process in the state before, if the two were deaf there.
    """
    mine, its = one.figures, other.figures
    if mine is None or its is None or {mine.phase, its.phase} != {EXCHANGE}:
        return False
    if max(one.figures_s, other.figures_s) > SILENT_S:
        return False
    sides = ((mine, other.key.number), (its, one.key.number))
    if old is not None and old.figures is not None and old.figures.inner_step == mine.inner_step:
        # A wait that begins anew names nobody yet.
        return all(side.waits_s < SPOKEN_S or number in side.waits_for for side, number in sides)
    if not all(number in side.waits_for for side, number in sides):
        return False
    # The link tells a process within seconds that another one has begun an exchange.
    early, late = sorted((one, other), key=lambda process: -process.figures_s)
    return early.is_waiting and late.waited_s >= early.figures_s + AWAITED_S


def _judged(run: Run, former: Mapping[Key, Process]) -> dict[Key, Process]:
    """Return the processes with the waits of others for them, and with marks."""
    waits: dict[int, dict[int, float]] = {}
    # Leave newcomers out: they wait for all members, hold up nobody, and have no typical speed.
    members = [one for one in run.processes.values() if run.counts(one)]
    for process in members:
        for number in process.figures.waits_for if process.is_waiting and process.figures else ():
            waits.setdefault(number, {})[process.key.number] = process.waited_s
    # The median speed is over replicas that are heard and have not ended.
    heard = [one for one in members if one.figures_s <= SILENT_S and not one.is_gone]
    speeds = [one.speed for one in heard if one.speed == one.speed]
    middle = median_high(speeds) if len(speeds) > 1 else math.nan
    return {
        key: _marked(process, waits.get(key.number, {}), middle, former)
        if not run.is_finished and run.counts(process)
        else replace(process, marks=_marks_outside(run, process))
        for key, process in run.processes.items()
    }


def _marks_outside(run: Run, process: Process) -> frozenset[str]:
    """Return the marks of a process that is no member; a lost replica stays marked as silent."""
    is_over = process.is_gone or run.is_finished or _has_left(process, run)
    is_silent = process.silent_s > SILENT_S and not is_over
    return frozenset((CUT,) * bool(process.cut_from) + (SILENT,) * is_silent)


def _marked(
    process: Process,
    waits: Mapping[int, float],
    middle: float,
    former: Mapping[Key, Process],
) -> Process:
    if process.is_gone:
        return process
    had = former[process.key].marks if process.key in former else frozenset()
    awaited_s = max(waits.values(), default=0.0)
    least = NOT_SLOW if SLOW_ONE in had else SLOW
    marks = {
        SILENT: process.silent_s > SILENT_S,
        CUT: bool(process.cut_from),
        AWAITED: bool(waits) and _holds_up(process, awaited_s),
        SLOW_ONE: process.speed < least * middle and process.silent_s <= SILENT_S,
    }
    return replace(
        process,
        awaited_by=tuple(sorted(waits)),
        awaited_s=awaited_s,
        median=middle,
        marks=frozenset(name for name, holds in marks.items() if holds),
    )


def _holds_up(process: Process, awaited_s: float) -> bool:
    """Whether a process holds others up: it is silent, or its newer figures say it does not wait.

    Args:
        awaited_s: Seconds for which others have waited for it.
    """
    if process.silent_s > SILENT_S or process.figures is None:
        return True
    # If all wait for each other, the link is slow, and no replica holds up the others.
    is_news = process.figures_s <= awaited_s - SPOKEN_S
    return is_news and process.figures.waits_s < SPOKEN_S and process.phase != EXCHANGE


def _continued(before: Run, run: Run, now: float) -> Run:
    """Return a run with the events and rounds of the state before, and the new ones."""
    members = [one for one in run.processes.values() if run.counts(one)]
    rounds = max([before.rounds, *[one.rounds for one in members]])
    points, step_s = before.points, before.step_s
    if not points or now - points[-1][0] >= step_s:
        points = (*points, (int(now), rounds))
    if len(points) > MAX_POINTS:
        points, step_s = points[::2], 2 * step_s
    run = replace(run, cause=_cause(before, run))
    texts = [*_view_events(before, run), *_process_events(before, run)]
    events = (*before.events, *[Event(now, text) for text in texts])[-MAX_EVENTS:]
    changes = before.changes
    if before.seen.view is not None and run.seen.view is not None:
        changes += max(run.seen.view.number - before.seen.view.number, 0)
    return replace(
        run,
        rounds=rounds,
        points=points,
        step_s=step_s,
        events=events,
        changes=changes,
        since=before.since or now,
    )


def _cause(before: Run, run: Run) -> str:
    """Return why the last view came, and how each replica went that is a member no more."""
    old, new = before.seen.view, run.seen.view
    if new is None or (old is not None and old.number == new.number):
        return before.cause
    if old is None:
        return cause_of(new)
    gone = sorted((before.seen.member_set - run.seen.member_set) & before.processes.keys())
    causes = [_end_of_member(before.processes[key], before, run) for key in gone[:MOST_NAMED]]
    causes += [f"{len(gone) - MOST_NAMED} more left"] * (len(gone) > MOST_NAMED)
    joined = _numbers_of(run.seen.member_set - before.seen.member_set)
    causes += [f"replicas [{numbers_of(joined)}] join"] * bool(joined)
    return ", ".join(causes) or cause_of(new)


def _end_of_member(old: Process, before: Run, run: Run) -> str:
    number, now = old.key.number, run.processes.get(old.key, old)
    if number in run.seen.asked or any(one.seen.is_evicted(old.key) for one in (before, run)):
        return f"replica {number} left when asked"
    if old.cut_from:
        return f"replica {number} is left out, cut off from {numbers_of(old.cut_from)}"
    if old.is_gone or now.is_gone or _has_left(old, run) or _has_left(now, run):
        return f"replica {number} left by itself"
    if now.silent_s <= SILENT_S:
        return f"replica {number} is left out, though its beats come"
    return f"replica {number} is left out after {now.silent_s:.0f} s of silence"


def _has_left(process: Process, run: Run) -> bool:
    """Whether a process goes because its program, or an operator, has asked for that."""
    is_leaving = process.beat is not None and process.beat.place.is_leaving
    is_asked = run.seen.is_evicted(process.key) or process.key.number in run.seen.asked
    return is_leaving or (is_asked and not process.is_member)


def _view_events(before: Run, run: Run) -> Iterable[str]:
    old, new = before.seen.view, run.seen.view
    if new is None or (old is not None and old.number == new.number):
        return
    yield f"view {new.number}: {run.cause}"
    if new.is_finished:
        yield "all steps of the run are taken"


def _process_events(before: Run, run: Run) -> Iterable[str]:
    for number, process in run.replicas.items():
        old = before.replicas.get(number)
        if old is None:
            if before.replicas:
                yield f"replica {number} is there"
            continue
        if old.key != process.key:
            yield f"replica {number} has started again"
        if process.is_gone and not (old.is_gone or run.is_finished):
            yield f"replica {number} has ended"
    members = {key.number for key in run.seen.members} or set(run.replicas)
    for key, process in run.processes.items():
        was = before.processes.get(key)
        had = frozenset() if was is None else was.marks
        for mark in BEGINS if before.processes else ():
            if mark in process.marks - had:
                yield BEGINS[mark].format(key.number, numbers_of(process.cut_from))
            elif mark in had - process.marks and was and _is_news(mark, was, process, run, members):
                yield ENDS[mark].format(key.number)
    for number in sorted(before.replicas.keys() - run.replicas.keys()):
        if not before.replicas[number].is_gone:
            yield f"replica {number} is there no more"


def _is_news(mark: str, old: Process, process: Process, run: Run, members: Container[int]) -> bool:
    """Whether the end of a mark is neither an end of the replica nor a mark of another one."""
    if process.key.number not in members or process.is_gone or run.is_finished:
        return False
    if mark not in (CUT, SLOW_ONE):
        return True
    if process.silent_s > SILENT_S:
        return False
    if mark == SLOW_ONE:
        return process.median == process.median
    others = [run.replicas[one] for one in old.cut_from if one in members and one in run.replicas]
    are_heard = all(one.silent_s <= SILENT_S and not one.is_gone for one in others)
    return bool(others) and are_heard and not process.cannot_reach


def numbers_of(numbers: Sequence[int]) -> str:
    """Return replicas in words; where they are many, the first of them."""
    shown, more = ", ".join(map(str, numbers[:MOST_NAMED])), len(numbers) - MOST_NAMED
    return f"{shown} and {more} more" if more > 0 else shown
