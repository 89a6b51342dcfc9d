"""A plan that is asked for, and the predictions of a simulator for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...ops.phases import held_bits, num_phases, received_bits
from ...ops.wire import ELEMENT_WIRES, WIRES, WireFormat
from ..common.sizes import at_least, positive
from .settings import Setting
from .simulator import GRID_GBPS, Array, Schedule, Work, spread, strided, utilisation

METHODS = ("dp", "diloco", "streaming", "delayed", "eager", "co2")
# The methods that ``DiLoCo`` can be given as arguments from here.
CHOOSABLE = ("diloco", "streaming")
TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
DAY_S = 86400.0
# The methods that apply a result when its fragment is sent again.
ROUND_LATE = ("delayed", "eager", "co2")
AUTO = "auto"
MOST_SYNC_EVERY = 1_000_000  # each inner step of a round is simulated
# Gbit/s of a link, and the share of them that an all-reduce of fp32 among four replicas got: gloo's
# ring over TCP, without any codec (benchmarks/results/exchange/shaped-links.json).
EFFICIENCY = ((0.05, 0.87), (0.1, 0.91), (0.2, 0.91), (1.0, 0.94))


@dataclass(frozen=True)
class Request:
    """What is planned.

    Attributes:
        params: Parameters of the model.
        layers: Its layers.
        step_time: Seconds of an inner step without communication.
        workers: Replicas.
        method: One of ``METHODS``.
        sync_every: Inner steps between two sends of a fragment; data parallel ignores it.
        fragment_layers: Layers of a fragment; 0: the whole model is one. Ignored by dp and diloco.
        delay: Inner steps from send to apply; of streaming alone.
        rounds: Sends until a result is due; of delayed, eager and co2.
        wire: Wire format; "auto" is replaced by ``make_plan``.
        block_size: Elements that share a scale, on a wire that leaves the choice.
        bits: Bits that a replica sends for each parameter, instead of the wire's.
        rtt_ms: Round trip of the link.
        efficiency: Share of the link's rate that payloads get, at "step" granularity; None: as
            measured at that rate.
    """

    params: float
    layers: int
    step_time: float
    workers: int = 2
    method: str = "diloco"
    sync_every: int = 100
    fragment_layers: int = 0
    delay: int = 1
    rounds: int = 1
    wire: str = "int8"
    block_size: int = 256
    bits: float | None = None
    rtt_ms: float = 0.0
    efficiency: float | None = 1.0

    def __post_init__(self) -> None:
        _check_choice("method", self.method, METHODS)
        _check_choice("wire", self.wire, (*WIRES, AUTO))
        at_least(1, layers=self.layers, sync_every=self.sync_every, rounds=self.rounds)
        at_least(2, replicas=self.workers)
        if self.sync_every > MOST_SYNC_EVERY:
            raise ValueError(
                f"--sync-every must be at most {MOST_SYNC_EVERY}, got {self.sync_every}"
            )
        positive(params=self.params, step_time=self.step_time, bits=self.bits)
        if not 0 <= self.rtt_ms < float("inf"):
            raise ValueError(f"--rtt-ms must not be negative, got {self.rtt_ms:g}")
        if self.efficiency is not None and not 0 < self.efficiency <= 1:
            raise ValueError(f"--efficiency must be above 0 and at most 1, got {self.efficiency:g}")
        if not 0 <= self.fragment_layers <= self.layers:
            raise ValueError(
                f"--fragment-layers must be between 0 and --layers {self.layers}, "
                f"got {self.fragment_layers}"
            )
        if self.method == "streaming" and not 0 <= self.delay < self.sync_every:
            raise ValueError(
                f"--delay must be at least 0 and below --sync-every {self.sync_every}, "
                f"got {self.delay}"
            )
        if self.wire == AUTO and self.method not in CHOOSABLE:
            raise ValueError(
                f"--wire auto is for --method {' and '.join(CHOOSABLE)}, got {self.method}"
            )
        if self.wire == AUTO and self.bits is not None:
            raise ValueError("--wire auto and --bits exclude each other: both choose the bits")
        if self.wire != AUTO:
            _ = self.wire_format

    @property
    def wire_format(self) -> WireFormat:
        # 256 is the default here, and the other wires have no choice.
        is_given = self.wire in ELEMENT_WIRES or self.block_size != 256
        return WireFormat(self.wire, self.block_size) if is_given else WireFormat(self.wire)

    @property
    def steps_a_round(self) -> int:
        return 1 if self.method == "dp" else self.sync_every

    @property
    def bits_per_param(self) -> float:
        """Bits that a replica sends for each parameter in one exchange of all of them."""
        if self.bits is not None:
            return self.bits
        return received_bits(self.wire_format, self.workers, must_gather=self._must_gather)

    @property
    def _must_gather(self) -> bool:
        # Eager adds the own payload to the mean.
        return self.method == "eager"

    @property
    def has_owners(self) -> bool:
        """Whether owners encode the mean on a wire of its own, because the replicas are many."""
        wire = self.wire_format
        phases = num_phases(wire, self.workers, must_gather=self._must_gather)
        return wire.is_gathered and phases == 2

    @property
    def work(self) -> Work:
        # Header, payload and vote; with more than two replicas the owner's result goes back too.
        one_ways = 3 if self.workers == 2 else 4
        is_dp = self.method == "dp"
        return Work(self.params, self.layers, self.step_time, self.bits_per_param, one_ways, is_dp)

    def schedule(self, granularity: str) -> Schedule:
        """Return when the fragments are sent and needed."""
        if self.method in ("dp", "diloco"):
            last = self.steps_a_round - 1
            return Schedule(self.steps_a_round, {last: [list(range(self.layers))]})
        fragments = strided(self.layers, self.fragment_layers or self.layers)
        sends = spread(fragments, self.sync_every, granularity)
        delay = self.delay if self.method == "streaming" else self.rounds * self.sync_every
        return Schedule(self.sync_every, sends, delay)

    def utilisation(self, gbps: Array, granularity: str = "layer") -> Array:
        """Return the compute utilisation at each bandwidth in Gbit/s."""
        schedule, rtt_s = self.schedule(granularity), self.rtt_ms / 1e3
        if granularity == "step":
            gbps = gbps * self.efficiency_at(gbps)
        return utilisation(self.work, schedule, gbps, rtt_s=rtt_s, granularity=granularity)

    def efficiency_at(self, gbps: Array) -> Array:
        """Return the share of each bandwidth that payloads get."""
        if self.efficiency is not None:
            return np.full_like(gbps, self.efficiency)
        rates, shares = np.array(EFFICIENCY).T
        return np.interp(np.log(gbps), np.log(rates), shares)

    def bandwidth_gbps(self, granularity: str = "layer") -> dict[str, float | None]:
        """Return the least bandwidth of the grid for each target; None: none is enough."""
        return needed_gbps(self.utilisation(GRID_GBPS, granularity))

    def setting(self, share: float) -> Setting:
        """Return this request, with its utilisation on a link, as a setting."""
        layers = self.fragment_layers or self.layers
        delay = self.delay if self.method == "streaming" else 0
        return Setting(self.method, delay, self.wire, self.sync_every, layers, share)

    @property
    def bytes_per_round(self) -> float:
        """Bytes that a replica sends in a round."""
        return self.params * self.bits_per_param / 8

    def bytes_per_day(self, share: float) -> float:
        """Bytes that a replica sends in a day at a given compute utilisation."""
        return self.bytes_per_round * DAY_S * share / (self.step_time * self.steps_a_round)

    @property
    def extra_memory_bytes(self) -> float:
        """Bytes beside model, gradients and inner optimizer: outer state, momentum, payloads."""
        if self.method == "dp":
            return 0.0
        rounds = self.rounds if self.method in ROUND_LATE else 0
        bits = held_bits(self.wire_format, self.workers, must_gather=self._must_gather)
        return self.params * (4 + 4 + (rounds + 1) * bits / 8)


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"--{name} must be one of {', '.join(choices)}, got {value!r}")


def needed_gbps(shares: Array) -> dict[str, float | None]:
    """Return the least bandwidth of the grid that reaches each target, in Gbit/s.

    Rounded to two decimals, as a grid of 50 values from 0.1 to 1000 deserves.
    """
    needed: dict[str, float | None] = {}
    for target in TARGETS:
        reached = np.flatnonzero(shares >= target)
        needed[f"{target:g}"] = round(float(GRID_GBPS[reached[0]]), 2) if len(reached) else None
    return needed
