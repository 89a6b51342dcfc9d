"""Soak of elastic membership: events without end, and its invariants checked from outside.

    make soak-elastic                                # 15 minutes
    python -m benchmarks.elastic.soak --seconds 180 --seed 7
    python -m benchmarks.elastic.soak --moments 200 --replicas 4 --link relay

Six replicas train. Every 20 seconds something happens, drawn from a seed: a replica is killed,
stopped for a while, leaves or joins, or the registry is killed and comes back with its journal. The
exit status is 1 if an invariant was violated or something hung.

With --moments, a replica joins again and again, and at a random moment of the join the newcomer or
a member is killed, or stopped for longer than the others wait.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.elastic import checks
from benchmarks.elastic.checks import Life, Resources
from benchmarks.elastic.ledger_replica import LEAVE, RUN, Applied, SoakSettings, Taking, train
from benchmarks.elastic.soak_report import print_results, results_of
from benchmarks.support import common
from diloco_comm.group.records import NO_RECORD
from diloco_comm.tools.common.ranks import WITH_OPTIMIZER
from diloco_comm.tools.common.workers import free_port
from diloco_comm.tools.demo.chaos.crew import Crew, Replica
from diloco_comm.tools.demo.chaos.messages import DONE, KILLED, LEFT, LEFT_BEHIND, Ended, Entered

KINDS = ("kill", "stop", "leave", "join", "registry")
# This replica is left alone: its descriptors, threads and memory must stay as they are.
STEADY = 2
# At least so many members train when one is taken away.
_LEAST = 3
# Seconds in which each event must have its effect, on any machine.
_PATIENCE_S = 90.0
_POLL_S = 0.05
_LOOK_S = 2.0
# Seconds for which a replica is stopped: some are shorter than the suspicion.
_STOPS_S = (1.0, 14.0)
_OUTAGES_S = (1.0, 6.0)
# Seconds after the start of a newcomer in which a moment is drawn: a join takes about one.
_JOIN_S = 1.5
# The two choices of a moment.
_VICTIMS, _FAULTS = ("newcomer", "member"), ("kill", "stop")


@dataclass
class Event:
    """What happened.

    Attributes:
        settled_s: Seconds until it had its effect, and a round of the newest view was applied.
    """

    at: float
    kind: str
    replica: int
    settled_s: float = 0.0
    note: str = ""


class Hang(Exception):
    """Something did not happen in time."""


class Soak:
    """One soak over a crew.

    Attributes:
        lives: Of all processes.
        records: All records of the registry so far.
        samples: What the steady replica held, over time.
        failures: What went wrong while it ran.
    """

    def __init__(
        self, crew: Crew, settings: SoakSettings, num_replicas: int, every_s: float, seed: int
    ) -> None:
        self.crew, self._settings, self._every_s = crew, settings, every_s
        self._numbers = range(num_replicas)
        self._rng = random.Random(seed)
        self.lives: dict[int, Life] = {}
        self.events: list[Event] = []
        self.records: list[bytes] = []
        self.samples: list[Resources] = []
        self.failures: list[str] = []
        self._view: Entered | None = None
        self._last_applied: Applied | None = None
        self._expected: set[int] = set()
        self._look_at = 0.0
        self.began = time.monotonic()

    def run(self, seconds: float) -> None:
        """Let things happen for so long, then let all replicas end together."""
        for number in self._numbers:
            self._start(number)
        self._until(lambda: self._members() == set(self._numbers), "all replicas begin")
        self.began = time.monotonic()
        end = self.began + seconds
        while time.monotonic() < end:
            began = time.monotonic()
            self._happen(self._draw())
            rest = min(began + self._every_s, end) - time.monotonic()
            self._wait(max(rest, 0.0))
        self._finish()

    def run_moments(self, num_moments: int) -> None:
        """Let so many joins be disturbed, one after another; then let all replicas end together."""
        for number in self._numbers[:-1]:
            self._start(number)
        self._until(lambda: self._members() == set(self._numbers[:-1]), "all replicas begin")
        self.began = time.monotonic()
        for _ in range(num_moments):
            if self._settled() == set(self._numbers):
                number = self._rng.choice([n for n in self._numbers if n != STEADY])
                self._kill(number, Event(0.0, "kill", number))
            (absent,) = set(self._numbers) - self._settled()
            self._moment(absent)
        self._finish()

    def _moment(self, newcomer: int) -> None:
        who, how = self._rng.choice(_VICTIMS), self._rng.choice(_FAULTS)
        delay = self._rng.uniform(0.0, _JOIN_S)
        member = self._rng.choice(sorted(self._members() - {STEADY}))
        victim = newcomer if who == "newcomer" else member
        at, all_of_them = time.monotonic(), set(self._numbers)
        event = Event(at - self.began, f"{how} {who}", victim, note=f"after {delay:.2f} s")
        self.events.append(event)
        self._start(newcomer)
        self._wait(delay)
        process = self.crew.replicas[victim].place.process
        if how == "kill":
            self._expected.add(process)
            self.crew.kill(victim)
            stay = all_of_them - {victim}
        else:
            seconds = self._settings.suspect_after_s + 3.0
            self.crew.stop(victim)
            self._wait(seconds)
            self.crew.resume(victim)
            self.lives[process].stopped_s += seconds
            stay = all_of_them
        self._until(lambda: self._members() == stay, f"replicas {stay} train after {event}")
        view = self._number_of_view()
        self._until(lambda: self._is_applied_in(view), f"a round after {event}")
        event.settled_s = time.monotonic() - at

    def _draw(self) -> str:
        members = self._settled()
        absent = [n for n in self._numbers if n not in members]
        kinds = [kind for kind in KINDS if kind != "join" or absent]
        if len(members) <= _LEAST:
            kinds = ["join", "registry"]
        # Who is absent shall come back more often than another goes.
        weights = [2.0 * len(absent) if kind == "join" else 1.0 for kind in kinds]
        return self._rng.choices(kinds, weights)[0]

    def _happen(self, kind: str) -> None:
        at = time.monotonic()
        if kind == "registry":
            self._outage(at)
            return
        members = self._members()
        pool = [n for n in self._numbers if (n not in members) == (kind == "join") and n != STEADY]
        number = self._rng.choice(pool)
        event = Event(at - self.began, kind, number)
        self.events.append(event)
        getattr(self, f"_{kind}")(number, event)
        view = self._number_of_view()
        self._until(lambda: self._is_applied_in(view), f"a round after the event {event}")
        event.settled_s = time.monotonic() - at

    def _is_applied_in(self, view: int) -> bool:
        return self._last_applied is not None and self._last_applied.view >= view

    def _kill(self, number: int, event: Event) -> None:
        self._expected.add(self.crew.replicas[number].place.process)
        self.crew.kill(number)
        self._until(lambda: self._is_out(number), f"replica {number} is left out")

    def _stop(self, number: int, event: Event) -> None:
        seconds = self._rng.uniform(*_STOPS_S)
        event.note = f"for {seconds:.1f} s"
        replica = self.crew.replicas[number]
        self.crew.stop(number)
        self._wait(seconds)
        self.crew.resume(number)
        self.lives[replica.place.process].stopped_s += seconds
        before = self.lives[replica.place.process].count

        def is_over() -> bool:
            life = self.lives[replica.place.process]
            if replica.has_ended:
                return self.crew.replicas[number] is not replica and number in self._members()
            return life.count > before + 3 * self._settings.sync_every

        self._until(is_over, f"replica {number} goes on, or is left behind and comes again")
        event.note += ", left behind" if replica.has_ended else ""

    def _leave(self, number: int, event: Event) -> None:
        replica = self.crew.replicas[number]
        self.crew.tell(number, LEAVE)
        self._until(lambda: replica.has_ended and self._is_out(number), f"replica {number} leaves")

    def _join(self, number: int, event: Event) -> None:
        self._start(number)
        self._until(lambda: number in self._members(), f"replica {number} joins")

    def _outage(self, at: float) -> None:
        seconds = self._rng.uniform(*_OUTAGES_S)
        event = Event(at - self.began, "registry", -1, note=f"away for {seconds:.1f} s")
        self.events.append(event)
        self.crew.kill_registry()
        self._read_journal()
        num_rounds = self.num_rounds
        self._wait(seconds)
        event.note += f", {self.num_rounds - num_rounds} rounds meanwhile"
        self.crew.start_registry()
        num_rounds = self.num_rounds
        self._until(lambda: self.num_rounds > num_rounds, "training goes on after an outage")
        event.settled_s = time.monotonic() - at

    def _finish(self) -> None:
        """Let all members end at one inner step."""
        members = self._settled()
        ending = [self.crew.replicas[number] for number in members]
        steps = [self.lives[one.place.process].inner_step for one in ending]
        for number in members:
            self.crew.tell(number, max(steps) + 10 * self._settings.sync_every)
        self._until(lambda: all(one.has_ended for one in ending), "all replicas end")
        self._read_journal()

    # ---------------------------------------------------------------------------- what is known

    def _members(self) -> set[int]:
        """The members of the newest view in which all of them take steps."""
        view = self._view
        if view is None:
            return set()
        own = {self.crew.replicas[n].place.process for n in view.members if n in self.crew.replicas}
        entered = {p for p in own if any(e.view == view.view for e in self.lives[p].entered)}
        return set(view.members) if len(entered) == len(view.members) else set()

    def _settled(self) -> set[int]:
        """Wait until all members of the newest view are in it, and return them."""
        self._until(lambda: bool(self._members()), "the members of a view enter it")
        return self._members()

    def _is_out(self, number: int) -> bool:
        members = self._members()
        return bool(members) and number not in members

    def _number_of_view(self) -> int:
        return NO_RECORD if self._view is None else self._view.view

    @property
    def num_rounds(self) -> int:
        """Rounds that count so far."""
        return max([one.applied[-1].round + 1 for one in self.lives.values() if one.applied] or [0])

    def _read_journal(self) -> None:
        """Read the records since the registry was started: a restart keeps the newest only."""
        found = list(checks.records_of(self.crew.journal / "journal", RUN))
        known = self.records[-1:] == found[:1]
        self.records += found[1:] if known else found

    # ---------------------------------------------------------------------------------- waiting

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._pump()

    def _until(self, is_so: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + _PATIENCE_S
        while not is_so():
            if time.monotonic() > end:
                raise Hang(f"waited {_PATIENCE_S:g} s in vain, until {what}; {self._seen()}")
            self._pump()

    def _seen(self) -> str:
        lives = [
            f"{one.number}: {one.how or 'lives'} at {one.count}" for one in self.lives.values()
        ]
        return f"the newest view is {self._view}; processes {', '.join(lives)}"

    def _pump(self) -> None:
        for replica, message in self.crew.messages(_POLL_S):
            self._take(replica, message)
        now = time.monotonic()
        if now > self._look_at and self.lives:
            self._look_at = now + _LOOK_S
            self._look()

    def _take(self, replica: Replica, message: Any) -> None:
        life = self.lives[replica.place.process]
        if isinstance(message, Taking):
            if life.last_taking:
                life.step_s.append(message.at - life.last_taking)
            life.last_taking = life.ended = message.at
            life.count, life.inner_step = message.count, message.inner_step
        elif isinstance(message, Applied):
            life.applied.append(message)
            self._last_applied = message
        elif isinstance(message, Entered):
            life.entered.append(message)
            if message.view > self._number_of_view():
                self._view = message
        elif isinstance(message, Ended):
            self._ended(replica, life, message)

    def _ended(self, replica: Replica, life: Life, ended: Ended) -> None:
        life.how, life.outer_hash = ended.how, ended.outer_hash
        if ended.how == LEFT_BEHIND:
            self._start(replica.number)
        elif ended.how == KILLED and life.process in self._expected:
            pass
        elif ended.how not in (DONE, LEFT):
            self.failures.append(f"process {life.process} {ended.how}: {ended.detail}")

    def _look(self) -> None:
        """Look at the processes that live as long as the soak."""
        num_members = len(self._members())
        if num_members and not self.crew.replicas[STEADY].has_ended:
            pid = self.crew.replicas[STEADY].pid
            self.samples.append(checks.resources(pid, num_members))

    def _start(self, number: int) -> None:
        replica = self.crew.start(number)
        process = replica.place.process
        self.lives[process] = Life(number, process)


def run(
    seconds: float,
    num_replicas: int,
    every_s: float,
    seed: int,
    folder: Path,
    *,
    num_moments: int = 0,
    link: str = "tcp",
) -> Soak:
    """Run a soak; what hangs is one of its failures."""
    settings = SoakSettings(link=link)
    with ExitStack() as processes:
        if link == "relay":
            meeting = processes.enter_context(_store_and_relay())
            settings = SoakSettings(link="tcp", meeting=meeting)
        preload = [train.__module__, *WITH_OPTIMIZER]
        crew = processes.enter_context(Crew(train, settings, folder, preload))
        soak = Soak(crew, settings, num_replicas, every_s, seed)
        try:
            if num_moments:
                soak.run_moments(num_moments)
            else:
                soak.run(seconds)
        except Hang as hang:
            soak.failures.append(f"hang: {hang}")
    return soak


@contextmanager
def _store_and_relay() -> Iterator[tuple[str, str]]:
    """Host a store and a relay; give their addresses."""
    port, relay_port = free_port(), free_port()
    words = ["store", "--listen", f"127.0.0.1:{port}", "--relay-port", str(relay_port)]
    command = [sys.executable, "-m", "diloco_comm.tools.cli", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            if not server.stdout.readline():
                raise RuntimeError("the store has not begun")
            yield f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{relay_port}"
        finally:
            server.kill()


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--seconds", type=float, default=900.0, help="of events")
    add("--replicas", type=int, default=6, help="at most at a time")
    add("--every", type=float, default=20.0, help="seconds between two events")
    add("--moments", type=int, default=0, help="disturbed joins, in place of --seconds of events")
    add(
        "--link",
        choices=("tcp", "gloo", "relay"),
        default="tcp",
        help="what the rounds go over; relay: tcp between replicas that nobody can dial",
    )
    add("--seed", type=int, default=0, help="of the events")
    common.add_output(parser, default=common.RESULTS / "elastic" / "soak.json")
    return parser


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    if args.moments:
        # The recorded figures come from events: moments are written where --json says so.
        parser.set_defaults(json=None)
        args = parser.parse_args()
    report = common.Report(
        "elastic.soak",
        workers=args.replicas,
        link=f"{args.link}, loopback",
        seed=args.seed,
        every_s=args.every,
    )
    with common.stoppable(), tempfile.TemporaryDirectory(prefix="diloco-soak-") as folder:
        soak = run(
            args.seconds,
            args.replicas,
            args.every,
            args.seed,
            Path(folder),
            num_moments=args.moments,
            link=args.link,
        )
        results = results_of(soak)
    print_results(report, results)
    common.save(report, args.json, results)
    return 1 if results["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
