"""Storms: a schedule of faults against an elastic group of processes, and what the group achieves.

    python -m benchmarks.elastic.storms build/outages.jsonl --make outages --seconds 360
    python -m benchmarks.elastic.storms build/outages.jsonl --replicas 8 --json build/outages.json
    make soak-elastic                                # a drawn schedule of 15 minutes

Replicas with a tiny model train on this machine, at the pace of a sleep. The schedule is a file of
JSON lines (``schedules.py``), which ``--make`` writes. The main figure is the part of the inner
steps that living replicas could have taken, and that are in committed rounds; beside the figure
stands what a model expects (``storm_report.py``). A replica lives from its start to its death; the
time in which the schedule pauses it or cuts it off does not count. A replica that the others have
left behind is started again at once. As nobody keeps a checkpoint, a kill waits while no other
replica holds the state. The exit status is 1 if an invariant was violated, or if
something hung. Cuts need root, for network namespaces.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.elastic import checks, schedules
from benchmarks.elastic.checks import Life, Metrics, Resources
from benchmarks.elastic.ledger_replica import (
    INTERFACE,
    LEAST,
    LEAVE,
    RUN,
    Applied,
    LedgerSettings,
    Paused,
    Taking,
    train,
)
from benchmarks.elastic.schedules import Fault
from benchmarks.elastic.storm_report import print_results, results_of
from benchmarks.support import common
from benchmarks.support.hosted import Hosted
from benchmarks.support.namespaces import NETWORK, Namespaces, call, missing_tools
from diloco_comm_tools.common.ranks import WITH_OPTIMIZER
from diloco_comm_tools.common.workers import free_port
from diloco_comm_tools.demo.crew import (
    DONE,
    KILLED,
    LEFT,
    LEFT_BEHIND,
    Crew,
    Ended,
    Entered,
    Replica,
)

# Seconds without an outer step after which a storm is given up, beside its longest fault.
_PATIENCE_S = 90.0
_POLL_S = 0.05
_LOOK_S = 2.0
# Seconds after which a fault happens that would have lost the run.
_HEIRS_S = 1.0
_HUB = f"{NETWORK}.254"
# Drops what passes the bridge to or from a port of the set; the registry on the bridge is in reach.
_FILTER = """
table bridge storm {
    set cut {
        type ifname
    }
    chain cuts {
        type filter hook forward priority 0
        iifname @cut drop
        oifname @cut drop
    }
}
"""


class Hang(Exception):
    """Something did not happen in time."""


class Network(Namespaces):
    """Namespaces of replicas around a bridge on which the registry is; replicas can be cut off."""

    def __init__(self, num_replicas: int) -> None:
        super().__init__(num_replicas, "dls", INTERFACE, _HUB)

    def build(self) -> None:
        super().build()
        self._nft(_FILTER)

    def cut(self, replica: int, is_cut: bool) -> None:
        """Let nothing pass between a replica and the others, or let everything pass again."""
        what = "add" if is_cut else "delete"
        self._nft(f"{what} element bridge storm cut {{ port{replica} }}")

    def _nft(self, text: str) -> None:
        call("ip", "netns", "exec", self.hub, "nft", text)


class Storm:
    """One storm over a crew.

    Attributes:
        lives: The life of each process, by its number.
        records: All records of the registry, as its journal has them.
        begin, end: When the schedule began, and when all was over, as ``time.monotonic()``.
        samples: Resources of a replica that the schedule leaves alone, over time.
        metrics: None where a namespace of the registry hides its HTTP port.
        failures: Sentences about what went wrong.
    """

    def __init__(
        self,
        crew: Crew,
        registry: Hosted,
        network: Network | None,
        schedule: Sequence[Fault],
        num_replicas: int,
        settings: LedgerSettings,
        metrics: Metrics | None = None,
    ) -> None:
        self.crew, self.schedule, self.settings = crew, schedule, settings
        self.metrics = metrics
        self._registry, self._network = registry, network
        self.num_replicas = num_replicas
        self.lives: dict[int, Life] = {}
        self.records: list[bytes] = []
        self.samples: list[Resources] = []
        self.failures: list[str] = []
        self.begin = self.end = time.monotonic()
        self._view: Entered | None = None
        self._is_ending = False
        self._heard_at = self._look_at = time.monotonic()
        alone = set(range(num_replicas)) - {fault.replica for fault in schedule}
        self._steady = min(alone, default=None)
        self._cut_until: dict[int, float] = {}
        # Replicas that were killed or asked to leave, until they return.
        self._gone: set[int] = set()
        # Calls that are due, by time; the number keeps the order of the schedule.
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        longest_s = max((fault.seconds for fault in schedule), default=0.0)
        self._patience_s = _PATIENCE_S + longest_s

    def run(self, tail_s: float) -> None:
        """Let everything happen, train ``tail_s`` seconds more, and let all end together."""
        for number in range(self.num_replicas):
            self._start(number)
        # The registry loads its modules while the replicas load their own.
        self._registry.wait()
        self._until(self._are_all_in, "all replicas take part")
        self.begin = self.end = time.monotonic()
        for fault in self.schedule:
            self._at(self.begin + fault.time, partial(self._happen, fault))
        last = self.begin + max((fault.end for fault in self.schedule), default=0.0) + tail_s
        while self._due or time.monotonic() < last:
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
            self._pump()
        self._until(self._are_all_in, "all living replicas take part")
        self.end = time.monotonic()
        self._finish()

    def _finish(self) -> None:
        self._is_ending = True
        ending = [one for one in self.crew.replicas.values() if not one.has_ended]
        steps = [self.lives[one.place.process].inner_step for one in ending]
        for one in ending:
            self.crew.tell(one.number, max(steps) + 3 * self.settings.sync_every)
        self._until(lambda: all(one.has_ended for one in ending), "all replicas end together")

    def read_journal(self) -> None:
        """Read the records since the registry was started: a restart keeps the newest only.

        A registry that is killed before it has begun leaves the journal as it was.
        """
        found = list(checks.records_of(self.crew.journal / "journal", RUN))
        begin = self.records.index(found[0]) if found[:1] and found[0] in self.records else None
        known = [] if begin is None else self.records[begin:]
        self.records += found[len(known) :] if found[: len(known)] == known else found

    # --------------------------------------------------------------------------------- faults

    def _at(self, when: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._numbers), do))

    def _happen(self, fault: Fault) -> None:
        """Let a fault of the schedule begin, and note when it must end."""
        now, number = time.monotonic(), fault.replica
        end = now + fault.seconds
        if fault.fault == "registry":
            self._registry.end()
            self.read_journal()
            return self._at(end, self._registry.start)
        if fault.fault == "return":
            return self._return(number)
        replica = self.crew.replicas[number]
        life = self.lives[replica.place.process]
        if fault.fault in ("kill", "leave"):
            if self._num_heirs(number) < (LEAST if fault.fault == "leave" else 1):
                return self._at(now + _HEIRS_S, partial(self._happen, fault))
            self._gone.add(number)
        if fault.fault == "kill":
            life.ended = now
            self.crew.kill(number)
        elif fault.fault == "leave":
            self.crew.tell(number, LEAVE)
        elif fault.fault == "stop":
            life.pauses.append((now, end))
            self.crew.stop(number)
            self._at(end, lambda: None if replica.has_ended else self.crew.resume(number))
        elif fault.fault == "cut":
            assert self._network is not None
            life.pauses.append((now, end))
            self._cut_until[number] = end
            self._network.cut(number, True)
            self._at(end, partial(self._network.cut, number, False))
        else:
            self.crew.tell(number, fault)

    def _num_heirs(self, number: int) -> int:
        """Return how many other replicas are in the newest view, and hold the state of the run.

        Nobody keeps a checkpoint: the run is lost where the last holder dies.
        """
        if self._view is None:
            return self.num_replicas
        others = [one for n, one in self.crew.replicas.items() if n not in (number, *self._gone)]
        entered = [self.lives[one.place.process].entered for one in others if not one.has_ended]
        return sum(bool(own) and own[-1].view == self._view.view for own in entered)

    def _return(self, number: int) -> None:
        """Start a replica again, as soon as its process before has ended."""
        if self.crew.replicas[number].has_ended:
            self._gone.remove(number)
            self._start(number)
        else:
            self._at(time.monotonic() + _POLL_S, partial(self._return, number))

    def _start(self, number: int) -> None:
        replica = self.crew.start(number)
        process = replica.place.process
        # The network may be cut still.
        until = max(replica.started, self._cut_until.get(number, 0.0))
        life = Life(number, process, replica.started, pauses=[(replica.started, until)])
        self.lives[process] = life

    # ---------------------------------------------------------------------------- the replicas

    def _are_all_in(self) -> bool:
        """Whether all living replicas are in the newest view, and it has no other member."""
        view = self._view
        living = {n: one for n, one in self.crew.replicas.items() if not one.has_ended}
        if view is None or set(view.members) != set(living):
            return False
        entered = [self.lives[one.place.process].entered for one in living.values()]
        return all(own and own[-1].view == view.view for own in entered)

    def _until(self, is_so: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + self._patience_s
        while not is_so():
            if time.monotonic() > end:
                raise Hang(f"waited {self._patience_s:g} s in vain, until {what}; {self._seen()}")
            self._pump()

    def _seen(self) -> str:
        lives = [f"{one.number}: {one.how or len(one.steps)}" for one in self.lives.values()]
        return f"the newest view is {self._view}; ends or steps: {', '.join(lives)}"

    def _pump(self) -> None:
        """Hear what the replicas say, until the next fault is due."""
        now = time.monotonic()
        wait_s = self._due[0][0] - now if self._due else _POLL_S
        for replica, message in self.crew.messages(min(max(wait_s, 0.0), _POLL_S)):
            self._take(replica, message)
        if now > self._heard_at + self._patience_s:
            raise Hang(f"no outer step for {self._patience_s:g} s; {self._seen()}")
        if now > self._look_at:
            self._look_at = now + _LOOK_S
            self._look()

    def _take(self, replica: Replica, message: Any) -> None:
        life = self.lives[replica.place.process]
        if isinstance(message, Taking):
            life.steps.append(message.at)
            life.inner_step = message.inner_step
        elif isinstance(message, Paused):
            life.pauses.append((message.at, message.at + message.seconds))
        elif isinstance(message, Applied):
            life.applied.append(message)
            self._heard_at = time.monotonic()
        elif isinstance(message, Entered):
            life.entered.append(message)
            if self._view is None or message.view > self._view.view:
                self._view = message
        elif isinstance(message, Ended):
            self._ended(replica, life, message)

    def _ended(self, replica: Replica, life: Life, ended: Ended) -> None:
        is_gone = replica.number in self._gone
        life.how, life.outer_hash = ended.how, ended.outer_hash
        life.ended = min(life.ended, ended.at)
        is_foreseen = ended.how in (DONE, LEFT, LEFT_BEHIND) or (is_gone and ended.how == KILLED)
        if not is_foreseen:
            self.failures.append(f"process {life.process} {ended.how}: {ended.detail}")
        # A launcher does the same.
        if not (is_gone or self._is_ending or ended.how == DONE):
            self._start(replica.number)

    def _look(self) -> None:
        """Look at the metrics, and at a replica that the schedule leaves alone."""
        if self.metrics is not None:
            self.metrics.read()
        replica = None if self._steady is None else self.crew.replicas[self._steady]
        if replica is not None and not replica.has_ended and self._view is not None:
            with suppress(OSError):
                self.samples.append(checks.resources(replica.pid, len(self._view.members)))


def run(
    schedule: Sequence[Fault],
    num_replicas: int,
    settings: LedgerSettings,
    folder: Path,
    *,
    has_relay: bool = False,
    tail_s: float = 10.0,
) -> Storm:
    """Run a storm; a hang is one of its failures.

    Args:
        folder: For the registry's journal, and for logs.
        has_relay: Nobody can dial a replica: all meet at a relay.
        tail_s: Seconds of training after the schedule.
    """
    host, hub, network = "127.0.0.1", "", None
    with (folder / "services.log").open("w") as log, ExitStack() as stack:

        def serve(*words: str) -> Hosted:
            one = Hosted(words, log, hub)
            stack.callback(one.end)
            return one

        if any(fault.fault == "cut" for fault in schedule):
            network = stack.enter_context(Network(num_replicas))
            host, hub = _HUB, network.hub
            settings = replace(settings, namespaces=tuple(network.names))
        place, journal = f"{host}:{free_port()}", str(folder / "journal")
        words = ["registry", "--listen", place, "--journal", journal, "--insecure"]
        http = None if hub else f"127.0.0.1:{free_port()}"
        metrics = None if http is None else Metrics(f"http://{http}/metrics")
        registry = serve(*words, *(("--http", http) if http else ()))
        if has_relay:
            store, relay = f"{host}:{free_port()}", str(free_port())
            serve("store", "--listen", store, "--relay-port", relay).wait()
            meeting = f"tcp://{store}", f"tcp://{host}:{relay}"
            settings = replace(settings, meeting=meeting)
        crew = Crew(train, settings, folder, [__name__, *WITH_OPTIMIZER], f"tcp://{place}")
        stack.callback(crew.close)
        storm = Storm(crew, registry, network, schedule, num_replicas, settings, metrics)
        try:
            storm.run(tail_s)
        except Hang as hang:
            storm.end = time.monotonic()
            storm.failures.append(f"hang: {hang}")
        # The registry closes its journal.
        registry.end(signal.SIGTERM)
        storm.read_journal()
    return storm


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("schedule", type=Path, metavar="SCHEDULE.jsonl", help="faults, one JSON object a line")
    add("--replicas", type=common.parse_count, default=8, help="replicas that begin")
    add("--make", choices=schedules.NAMES, help="write a schedule into the file, and end")
    add("--seed", type=int, default=0, help="with --make: seed of all that is drawn")
    add("--seconds", type=float, default=360.0, help="with --make: time of the last fault")
    add("--every", type=float, default=10.0, help="with --make: seconds between two faults")
    add("--step", type=float, default=LedgerSettings.step_s, help="seconds of an inner step")
    add("--sync-every", type=int, default=LedgerSettings.sync_every, help="inner steps a round (H)")
    add("--suspect-after", type=float, default=LedgerSettings.suspect_after_s, help="see Elastic")
    add("--busy-after", type=float, default=LedgerSettings.busy_after_s, help="see Elastic")
    add("--tail", type=float, default=10.0, help="seconds of training after the last fault")
    add(
        "--link",
        choices=("tcp", "gloo", "relay"),
        default="tcp",
        help="transport of the rounds; relay: tcp between replicas that nobody can dial",
    )
    add("--logs", type=Path, help="empty folder for the logs of all processes, which stay there")
    common.add_output(parser)
    return parser


def read_schedule(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[Fault]:
    """Return the schedule of the arguments; end with 2 and one sentence if there is none."""
    try:
        schedule = schedules.parse(args.schedule.read_text(), args.replicas)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if any(fault.fault == "cut" for fault in schedule):
        if args.link == "relay":
            parser.error("a relay is in reach of replicas that are cut off: take another --link")
        if reason := missing_tools("ip", "nft"):
            parser.error(f"cuts need network namespaces: {reason}")
    return schedule


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    if args.make:
        made = schedules.make(args.make, args.replicas, args.seconds, args.every, args.seed)
        try:
            args.schedule.write_text(schedules.to_text(made))
        except OSError as error:
            parser.error(str(error))
        print(f"{len(made)} lines for {args.replicas} replicas in {args.schedule}")
        return 0
    schedule = read_schedule(parser, args)
    settings = LedgerSettings(
        sync_every=args.sync_every,
        step_s=args.step,
        suspect_after_s=args.suspect_after,
        busy_after_s=args.busy_after,
        backend="gloo" if args.link == "gloo" else "tcp",
    )
    report = common.Report(
        "elastic.storms", workers=args.replicas, link=f"{args.link}, on this machine"
    )
    with common.stoppable(), tempfile.TemporaryDirectory(prefix="diloco-storm-") as passing:
        options = {"has_relay": args.link == "relay", "tail_s": args.tail}
        folder = args.logs or Path(passing)
        folder.mkdir(parents=True, exist_ok=True)
        storm = run(schedule, args.replicas, settings, folder, **options)
        results = results_of(storm)
    print_results(report, results)
    common.save(report, args.json, results)
    return 1 if results["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
