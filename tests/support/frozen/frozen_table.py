"""The settings whose every bit is kept: a table of policies, wires, numbers of replicas, events.

The table covers each sensible pair of values, and as many triples as its size allows. The rows are
kept in the file of frozen bits, under their names.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from diloco_comm import (
    CO2,
    SGD,
    Adam,
    Blocking,
    Delayed,
    Eager,
    HeavyBall,
    Nesterov,
    Streaming,
)

NUM_SETTINGS = 200

# Each policy with an outer optimizer of its own; a preset is named by the key "preset".
POLICIES: dict[str, dict[str, Any]] = {
    "blocking": {"overlap": Blocking(), "outer": Nesterov(0.75, 0.5), "fragments": 2},
    "streaming": {"overlap": Streaming(2, 0.25), "outer": HeavyBall(0.5, 0.75), "fragments": 2},
    "delayed": {"overlap": Delayed(), "outer": Adam(0.25), "fragments": 2},
    "eager-1": {"overlap": Eager(1), "outer": Nesterov(0.25, 0.875)},
    "eager-2": {"overlap": Eager(2, "skip"), "outer": Nesterov(0.125, 0.75), "fragments": 2},
    "CO2": {"overlap": CO2(0.125, "gap-aware", rounds=2), "outer": HeavyBall(0.5, 0.5)},
    "FedAvg": {"outer": SGD(1.0), "weight": "measured"},
    "fedavg()": {"preset": "fedavg", "weight": "given"},
    "local_sgd()": {"preset": "local_sgd"},
    "streaming_diloco()": {"preset": "streaming_diloco"},
    "eager_diloco()": {"preset": "eager_diloco"},
    "co2()": {"preset": "co2"},
}
WIRES: dict[str, dict[str, Any]] = {
    "fp32": {"wire": "fp32"},
    "int8": {"wire": "int8", "block_size": 64},
    "int4": {"wire": "int4", "error_feedback": True},
    "e3m0": {"wire": "e3m0", "block_size": 128, "rounding": "stochastic", "seed": 7},
    "int2r": {"wire": {"bias": "int8", "rest": "int2r"}, "align_tensors": True},
    "sub8": {"wire": "sub8", "seed": 3},
    "topk64": {"wire": "topk64", "error_feedback": True, "feedback_decay": 0.75},
}
WORLDS = (1, 2, 3)
EVENTS = ("plain", "kill", "join", "resume", "reset")
# The dtypes that the parameters of a row have in turn, by the first word of the event.
DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "bf16": (torch.bfloat16,),
    "fp16": (torch.float16,),
    "mixed": (torch.bfloat16, torch.float16, torch.float32),
}
# Where a replica dies: before its header, and when one peer has its header
# or its vote. The round of a death "after" has been agreed on.
DEATHS = {"header": 2, "told": 3, "vote": 3, "after": 2}
# Both workers of a replica die. The others go on, or wait for a process that takes its place in an
# elastic group.
WORKER_DEATHS = ("death-workers", "death-elastic")


class Setting(NamedTuple):
    """One row of the table.

    Attributes:
        world: Replicas, a killed and a joining one among them.
        event: After a key of ``DTYPES`` and a hyphen, or that key alone: the parameters have
            these dtypes.
    """

    policy: str
    wire: str
    world: int
    event: str

    @property
    def name(self) -> str:
        return f"{self.policy} {self.wire} W{self.world} {self.event}"

    @classmethod
    def parse(cls, name: str) -> Setting:
        policy, wire, world, event = name.split(" ")
        return cls(policy, wire, int(world[1:]), event)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return DTYPES.get(self.event.partition("-")[0], (torch.float32,))

    @property
    def happening(self) -> str:
        """The event without the dtypes."""
        dtypes, _, event = self.event.partition("-")
        return event or "plain" if dtypes in DTYPES else self.event

    @property
    def has_workers(self) -> bool:
        """Whether two workers share each replica."""
        return self.event in ("workers", *WORKER_DEATHS)

    @property
    def killed(self) -> range:
        """The processes that are killed: all of the last replica."""
        if self.event in WORKER_DEATHS:
            return range(2 * self.world - 2, 2 * self.world)
        return range(self.world - 1, self.world)

    @property
    def num_processes(self) -> int:
        """The processes of a row with a death."""
        return 6 if self.event in WORKER_DEATHS else self.world

    @property
    def is_sensible(self) -> bool:
        """Whether the event can happen: a group of one has no member to lose and none to take in.

        A single replica that is reset has nothing to share the round with.
        """
        return self.world > 1 or self.happening not in ("kill", "join", "reset")


def sensible() -> list[Setting]:
    every = itertools.starmap(Setting, itertools.product(POLICIES, WIRES, WORLDS, EVENTS))
    return [setting for setting in every if setting.is_sensible]


def combinations(setting: Setting, size: int) -> Iterator[tuple[Any, ...]]:
    """Yield each ``size`` of the four values with their columns."""
    return itertools.combinations(enumerate(setting), size)


def make_table(kept: Iterable[Setting] = ()) -> list[Setting]:
    """Add rows to those that are kept: greedily, to cover all pairs, then triples.

    The first one of equally good rows counts, so the same call makes the same table.
    """
    candidates, table = sensible(), list(kept)
    missing = {size: set(covered(candidates, size)) - set(covered(table, size)) for size in (2, 3)}
    while missing[2] or len(table) < NUM_SETTINGS:
        size = 2 if missing[2] else 3
        gains = [len(missing[size].intersection(combinations(row, size))) for row in candidates]
        row = candidates.pop(gains.index(max(gains)))
        table.append(row)
        for size in missing:
            missing[size].difference_update(combinations(row, size))
    return sorted(table)


def covered(rows: Iterable[Setting], size: int) -> Iterator[tuple[Any, ...]]:
    return itertools.chain.from_iterable(combinations(row, size) for row in rows)


def finals() -> list[Setting]:
    """Rows that end between two rounds, with ``flush()``."""
    wires = itertools.cycle(WIRES)
    return [Setting(policy, next(wires), world, "final") for policy in POLICIES for world in (2, 3)]


def ends() -> list[Setting]:
    """Rows whose training ends between two rounds, with ``flush(final=True)``."""
    wires, policies = itertools.cycle(WIRES), ("blocking", "delayed", "streaming", "eager-1")
    rows = [Setting(policy, next(wires), world, "ended") for policy in policies for world in WORLDS]
    return [*rows, Setting("CO2", "int4", 2, "ended"), Setting("FedAvg", "fp32", 3, "ended")]


def low_precision() -> list[Setting]:
    """Rows with parameters in bf16 and fp16: policies and wires, then the events."""
    worlds = itertools.cycle(WORLDS)
    policies = ("blocking", "delayed", "eager-1", "CO2", "streaming", "streaming_diloco()")
    chosen = itertools.product(policies, ("fp32", "int4"), ("bf16", "fp16"))
    return [
        *(Setting(policy, wire, next(worlds), dtype) for policy, wire, dtype in chosen),
        Setting("blocking", "int8", 3, "mixed"),
        Setting("delayed", "sub8", 3, "mixed"),
        Setting("eager-2", "int2r", 2, "mixed"),
        Setting("streaming", "topk64", 2, "mixed"),
        Setting("blocking", "fp32", 3, "bf16-final"),
        Setting("CO2", "int4", 2, "bf16-ended"),
        Setting("delayed", "int4", 3, "bf16-kill"),
        Setting("eager-1", "int4", 2, "bf16-join"),
        Setting("streaming", "int8", 2, "fp16-resume"),
        Setting("blocking", "int4", 3, "mixed-offload"),
        Setting("streaming", "int8", 2, "mixed-offload"),
    ]


def same_as_plain() -> list[Setting]:
    """Rows that end with the bits of the event "plain": with a keyed link, or offloaded."""
    return [
        Setting("blocking", "sub8", 3, "keys"),
        Setting("streaming", "int8", 2, "keys"),
        Setting("eager-1", "int8", 2, "keys"),
        Setting("blocking", "e3m0", 2, "offload"),
        Setting("delayed", "int2r", 3, "offload"),
        Setting("streaming", "e3m0", 3, "offload"),
    ]


def deaths() -> list[Setting]:
    """Rows in which a process is killed, each policy at two of the places."""
    wires, places = itertools.cycle(WIRES), list(DEATHS)
    chosen = [
        (policy, places[(index + k) % len(places)])
        for index, policy in enumerate(POLICIES)
        for k in range(2)
    ]
    return [
        *(
            Setting(policy, next(wires), DEATHS[place], f"death-{place}")
            for policy, place in chosen
        ),
        Setting("streaming", "int8", 3, "death-workers"),
        Setting("blocking", "int4", 2, "death-elastic"),
    ]


def others() -> list[Setting]:
    """Rows of what is no value of the table, such as workers that share a replica."""
    return [
        Setting("blocking", "int4", 2, "workers"),
        Setting("streaming", "int8", 2, "workers"),
        Setting("eager-1", "sub8", 2, "workers"),
        Setting("blocking", "int8", 3, "buffers"),
        Setting("delayed", "fp32", 2, "buffers"),
        *ends(),
        *low_precision(),
        *same_as_plain(),
    ]
