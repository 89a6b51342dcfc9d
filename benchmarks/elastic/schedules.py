"""Schedules of faults for ``storms``: JSON lines, read with all their checks, and made from a seed.

{"time": 10.0, "fault": "kill", "replica": 3}
{"time": 18.5, "fault": "return", "replica": 3}
{"time": 20.0, "fault": "stop", "replica": 5, "seconds": 12.0}
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

# The replica of a fault that concerns the registry.
REGISTRY = -1
# All faults, and whether a fault lasts for some seconds.
KINDS = {
    "kill": False,  # SIGKILL
    "leave": False,  # the replica leaves after the next round
    "return": False,  # a replica that was killed, or has left, is started again
    "stop": True,  # SIGSTOP, then SIGCONT
    "hold": True,  # the replica's Python code is held up: a call keeps the interpreter's lock
    "evaluation": True,  # the replica sleeps in ``DiLoCo.doing("evaluation")``
    "cut": True,  # nothing passes between the replica and the others; the registry is in reach
    "slow": True,  # the replica sends at ``mbps``
    "registry": True,  # the registry is killed, and comes back with its journal
}
# Replicas do nothing of their own meanwhile.
PAUSES = ("stop", "hold", "evaluation")


@dataclass(frozen=True)
class Fault:
    """One line of a schedule.

    Attributes:
        time: Seconds since the beginning.
        fault: One of ``KINDS``.
        replica: Its number; ``REGISTRY`` for the registry.
        seconds: How long the fault lasts; 0 for a fault of a moment.
        mbps: Rate of a slow link, in 1e6 bits a second.
    """

    time: float
    fault: str
    replica: int = REGISTRY
    seconds: float = 0.0
    mbps: float = 0.0

    @property
    def end(self) -> float:
        return self.time + self.seconds


# ------------------------------------------------------------------------------------ reading


def parse(text: str, num_replicas: int) -> list[Fault]:
    """Read a schedule for replicas 0 to ``num_replicas`` - 1.

    Raises:
        ValueError: If a line is none, or cannot happen after the lines before; one sentence.
    """
    found: list[Fault] = []
    absent: set[int] = set()
    last: dict[int, tuple[int, Fault]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            fault = _read(line, num_replicas)
            if found and fault.time < found[-1].time:
                raise ValueError(f"time {fault.time:g} is before {found[-1].time:g}, the last one")
            _check_order(fault, absent, last.get(fault.replica))
        except ValueError as error:
            raise ValueError(f"line {number} of the schedule: {error}") from None
        if fault.fault in ("kill", "leave"):
            absent.add(fault.replica)
        absent -= {fault.replica} if fault.fault == "return" else set()
        last[fault.replica] = number, fault
        found.append(fault)
    return found


def _read(line: str, num_replicas: int) -> Fault:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError:
        row = None
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {line.strip()!r}")
    names = {field.name for field in fields(Fault)}
    if unknown := sorted(row.keys() - names):
        raise ValueError(f"expected the keys {', '.join(sorted(names))}, got {unknown[0]!r}")
    kind = row.get("fault")
    if kind not in KINDS:
        raise ValueError(f"fault must be one of {', '.join(KINDS)}, got {kind!r}")
    wanted = {"time": True, "seconds": KINDS[kind], "mbps": kind == "slow"}
    for name, is_wanted in wanted.items():
        value: Any = row.get(name)
        if not is_wanted and name in row:
            raise ValueError(f"a {kind} has no {name}, got {value!r}")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        least = "at least" if name == "time" else "above"
        if is_wanted and not (is_number and 0 <= value < math.inf and (value or name == "time")):
            raise ValueError(f"{name} of a {kind} must be a number {least} 0, got {value!r}")
    replica: Any = row.get("replica")
    if kind == "registry" and replica not in (None, REGISTRY):
        raise ValueError(f"a fault of the registry has no replica, got {replica!r}")
    if kind != "registry" and (type(replica) is not int or not 0 <= replica < num_replicas):
        raise ValueError(f"replica must be from 0 to {num_replicas - 1}, got {replica!r}")
    return Fault(**{**row, "replica": REGISTRY if kind == "registry" else replica})


def _check_order(fault: Fault, absent: set[int], last: tuple[int, Fault] | None) -> None:
    who = "the registry" if fault.replica == REGISTRY else f"replica {fault.replica}"
    if (fault.fault == "return") != (fault.replica in absent):
        state = "has not gone" if fault.fault == "return" else "has gone"
        raise ValueError(f"{who} {state} at {fault.time:g} s, got {fault.fault!r}")
    if last is not None and fault.time < last[1].end and fault.fault != "kill":
        raise ValueError(f"{who} is in the {last[1].fault} of line {last[0]} until {last[1].end:g}")


def to_text(schedule: Sequence[Fault]) -> str:
    """Return the JSON lines of a schedule."""
    rows = [
        {
            name: round(value, 2) if isinstance(value, float) else value
            for name, value in vars(fault).items()
            if (value != REGISTRY if name == "replica" else value or name == "time")
        }
        for fault in schedule
    ]
    return "".join(f"{json.dumps(row)}\n" for row in rows)


# ------------------------------------------------------------------------------------- making

# Seconds that a fault of a made schedule lasts.
_LASTS_S = {
    "stop": (1.0, 14.0),
    "cut": (5.0, 20.0),
    "slow": (5.0, 20.0),
    "registry": (1.0, 6.0),
}
_PAUSES_S = (5.0, 60.0)
# Seconds after which a replica that has gone returns.
_AWAY_S = (4.0, 14.0)
# A replica, and the registry, is left alone for so many seconds after its fault.
_REST_S = 6.0
# The soak looks at this replica's memory and descriptors: it is left alone.
_STEADY = 2
# Seconds that a fault of chaos lasts: shorter and longer than a replica is waited for.
_CHAOS_S = {
    "stop": (0.5, 12.0),
    "hold": (0.5, 8.0),
    "evaluation": (0.5, 8.0),
    "slow": (2.0, 10.0),
    "cut": (1.0, 15.0),
    "registry": (1.0, 6.0),
}


@dataclass
class _Maker:
    """Make a schedule: ``every_s`` seconds from one fault to the next, for ``seconds``."""

    num_replicas: int
    seconds: float
    every_s: float
    rng: random.Random

    def times(self) -> Iterator[float]:
        yield from (self.every_s * i for i in range(1, int(self.seconds / self.every_s) + 1))

    def faults(
        self,
        kinds: Callable[[int], str],
        lasts_s: Mapping[str, tuple[float, float]] = _LASTS_S,
        spared: int | None = None,
        least: int = 2,
    ) -> list[Fault]:
        """Let faults of the given kinds happen to replicas that are well.

        Half of all stay well, and ``least`` of them at least.
        """
        made: list[Fault] = []
        ill = dict.fromkeys(range(self.num_replicas), 0.0)
        registry_back = 0.0
        for i, at in enumerate(self.times()):
            kind = kinds(i)
            well = [n for n, until in ill.items() if until <= at]
            if kind == "registry":
                if registry_back <= at:
                    made.append(Fault(at, kind, seconds=self.rng.uniform(*lasts_s[kind])))
                    registry_back = made[-1].end + _REST_S
                continue
            if len(well) <= max(least, self.num_replicas // 2):
                continue
            replica = self.rng.choice([n for n in well if n != spared])
            if kind in ("kill", "leave"):
                back = at + self.rng.uniform(*_AWAY_S)
                made += [Fault(at, kind, replica), Fault(back, "return", replica)]
            else:
                seconds = self.rng.uniform(*lasts_s.get(kind, _PAUSES_S))
                mbps = self.rng.uniform(1.0, 10.0) if kind == "slow" else 0.0
                made.append(Fault(at, kind, replica, seconds, mbps))
                back = at + seconds
            ill[replica] = back + _REST_S
        return made

    def outages(self) -> list[Fault]:
        """A replica is killed, and comes back after some seconds, again and again."""
        return self.faults(lambda i: "kill")

    def pauses(self) -> list[Fault]:
        """Outages; each tenth fault is a pause in their place, of each kind in turn."""
        return self.faults(lambda i: PAUSES[i // 10 % 3] if i % 10 == 9 else "kill", lasts_s={})

    def links(self) -> list[Fault]:
        """Links are cut and slow in turns."""
        return self.faults(lambda i: "slow" if i % 2 else "cut")

    def soak(self) -> list[Fault]:
        """Replicas die, stop and leave, and the registry goes, as it is drawn."""
        kinds = ("kill", "stop", "leave", "registry")
        return self.faults(lambda i: self.rng.choice(kinds), spared=_STEADY)

    def chaos(self) -> list[Fault]:
        """All faults but cuts, as they are drawn."""
        kinds = ["kill", "kill", "stop", "hold", "evaluation", "slow", "registry", *self._leaves()]
        return self.faults(lambda i: self.rng.choice(kinds), _CHAOS_S, least=1)

    def _leaves(self) -> list[str]:
        """One of two replicas cannot leave where fewer than two do not train."""
        return ["leave"] if self.num_replicas > 2 else []

    def cuts(self) -> list[Fault]:
        """As chaos; each second fault is a cut."""
        kinds = ["kill", "stop", "slow", "registry", *self._leaves()]
        draw = partial(self.rng.choice, kinds)
        return self.faults(lambda i: draw() if i % 2 else "cut", _CHAOS_S, least=1)

    def half(self) -> list[Fault]:
        """Half of the replicas are killed at once, and come back together."""
        made = []
        for at in list(self.times())[::4]:
            chosen = self.rng.sample(range(self.num_replicas), self.num_replicas // 2)
            back = at + self.rng.uniform(*_AWAY_S)
            made += [Fault(at, "kill", n) for n in chosen]
            made += [Fault(back, "return", n) for n in chosen]
        return made

    def rolling(self) -> list[Fault]:
        """Each replica leaves in its turn, and comes back soon."""
        turns = list(zip(self.times(), range(self.num_replicas), strict=False))
        left = [Fault(at, "leave", n) for at, n in turns]
        return left + [Fault(at + 0.3 * self.every_s, "return", n) for at, n in turns]

    def flapping(self) -> list[Fault]:
        """One replica is killed and comes back, again and again."""
        replica = self.rng.randrange(self.num_replicas)
        made = [Fault(at, "kill", replica) for at in self.times()]
        return made + [Fault(at + 0.4 * self.every_s, "return", replica) for at in self.times()]

    def moments(self) -> list[Fault]:
        """A replica comes; within 1.5 s it or a member is killed, or stopped for eight seconds."""
        absent = self.num_replicas - 1
        others = [n for n in range(self.num_replicas) if n != _STEADY]
        made = [Fault(0.0, "kill", absent)]
        for at in self.times():
            made.append(Fault(at, "return", absent))
            member = self.rng.choice([n for n in others if n != absent])
            victim = self.rng.choice((absent, member))
            then = at + self.rng.uniform(0.0, 1.5)
            if self.rng.random() < 0.5:
                made.append(Fault(then, "kill", victim))
                absent = victim
            else:
                made.append(Fault(then, "stop", victim, 8.0))
                absent = self.rng.choice(others)
                made.append(Fault(at + 0.8 * self.every_s, "kill", absent))
        return made


NAMES = (
    "outages", "pauses", "links", "chaos", "cuts", "half", "rolling", "flapping", "soak", "moments",
)  # fmt: skip


def make(name: str, num_replicas: int, seconds: float, every_s: float, seed: int) -> list[Fault]:
    """Return the schedule that has one of ``NAMES``; the same arguments give the same schedule."""
    maker = _Maker(num_replicas, seconds, every_s, random.Random(f"{name} {seed}"))
    made: list[Fault] = getattr(maker, name)()
    return sorted(made, key=lambda fault: fault.time)
