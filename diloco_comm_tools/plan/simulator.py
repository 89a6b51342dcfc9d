"""Predict compute utilisation: a schedule of layers, exchanges and one link, on numpy arrays.

The graph of Streaming DiLoCo, section 3.1 (arXiv 2501.18512): a step of L layers is L forward, L-1
activation-backward and L parameter-backward nodes of equal cost. What that paper leaves open is
chosen so that its Table 4 comes out; ``docs/measurements/plan-results.md`` lists the choices.

Two granularities of what waits for what:

    layer   a layer's reduction leaves when its own backward ends, and only its own forward waits
            for it. This is the paper's simulator, and the best that any schedule can do.
    step    this library: a fragment leaves, and is waited for, after an optimizer step, and one
            exchange follows the other; with data parallel the optimizer step waits for all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

GRANULARITIES = ("layer", "step")
# The bandwidths of the paper's table, Gbit/s; neighbours differ by a factor of 1.207.
GRID_GBPS: Array = np.logspace(-1, 3, 50)
# Rounds are in steady state when one lasts as long as the one before, to within this fraction.
_STEADY = 1e-9
_MOST_WINDOWS = 32
# DistributedDataParallel's defaults.
_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 1 << 20, 25 << 20


@dataclass(frozen=True)
class Work:
    """What one replica computes and sends.

    Attributes:
        num_params: Parameters, spread evenly over the layers.
        num_layers: Layers of equal cost, at least 1.
        step_s: Seconds of an inner step without any communication.
        bits: Bits a parameter that the replica sends in an exchange of all of them.
        one_ways: Number of messages of an exchange that are sent one after the other.
        every_step: Data parallel: gradients are exchanged in every step.
    """

    num_params: float
    num_layers: int
    step_s: float
    bits: float
    one_ways: int = 3
    every_step: bool = False


@dataclass(frozen=True)
class Schedule:
    """Which layers are sent at which step of a round, and when they are needed.

    Attributes:
        sync_every: Steps of a round.
        sends: For each step of the round that sends, the layers of each fragment.
        delay: Steps between a send and the step that needs its result.
    """

    sync_every: int
    sends: dict[int, list[list[int]]]
    delay: int = 0


def strided(num_layers: int, fragment_layers: int) -> list[list[int]]:
    """Cut the layers into fragments of every P-th layer; the last fragments may be smaller."""
    count = -(-num_layers // fragment_layers)
    return [list(range(first, num_layers, count)) for first in range(count)]


def spread(fragments: list[list[int]], sync_every: int, granularity: str) -> dict[int, list]:
    """Spread the sends of the fragments over a round, one fragment after the other.

    The paper's interval leaves room for a fragment of embeddings, hence P + 1; the library's
    offsets are the default ones of ``DiLoCo``.
    """
    count = len(fragments)
    interval = sync_every // (count + 1)
    sends: dict[int, list[list[int]]] = {}
    for p, layers in enumerate(fragments):
        if granularity == "step":
            step = max(sync_every * (p + 1) // count, 1) - 1
        else:
            step = p * interval if interval else p * sync_every // (count + 1)
        sends.setdefault(step, []).append(layers)
    return sends


def utilisation(
    work: Work, schedule: Schedule, gbps: Array, *, rtt_s: float = 0.0, granularity: str = "layer"
) -> Array:
    """Return compute time over total time of a round in steady state.

    Args:
        gbps: Bandwidths of a replica's link in Gbit/s, any shape.
        rtt_s: Round trip of the link in seconds.
        granularity: One of ``GRANULARITIES``.

    Returns:
        The utilisation at each bandwidth, in (0, 1].
    """
    gbps = np.asarray(gbps, dtype=np.float64)
    clock = {"layer": _Layers, "step": _Steps}[granularity](work, schedule, gbps, rtt_s)
    # A result is needed up to this many rounds after its send, so that delays may repeat with this
    # period: time is measured over windows of so many rounds.
    window = -(-(1 + schedule.delay) // schedule.sync_every)
    before = clock.rounds(window)
    for _ in range(_MOST_WINDOWS):
        now = clock.rounds(window)
        if np.allclose(before, now, rtol=_STEADY, atol=0):
            break
        before = now
    # A link that is always busy sets the pace, but the simulated rounds may be too few to show it.
    round_s = np.maximum(now / window, clock.occupied_s)
    return np.minimum(schedule.sync_every * work.step_s / round_s, 1.0)


class _Clock:
    """Time of the processor and of the link, at each bandwidth."""

    def __init__(self, work: Work, schedule: Schedule, gbps: Array, rtt_s: float) -> None:
        self.work, self.schedule = work, schedule
        self.num_layers = work.num_layers
        self.node_s = work.step_s / (3 * work.num_layers - 1)
        self.layer_wire_s = work.num_params / work.num_layers * work.bits / (gbps * 1e9)
        self.latency_s = work.one_ways * rtt_s / 2
        self.time = np.zeros_like(gbps)
        self.link_free = np.zeros_like(gbps)
        self.step_idx = 0
        # For each coming step, by number: the results that it waits for.
        self.due: dict[int, list[Any]] = {}

    def rounds(self, count: int) -> Array:
        """Simulate some more rounds and return their seconds."""
        begin, idle = self.time, 0
        for step in range(count * self.schedule.sync_every):
            sends = self.schedule.sends.get(step % self.schedule.sync_every, [])
            if sends or self.step_idx in self.due:
                self.time = self.time + idle * self.work.step_s
                idle = 0
                self.step(sends)
            else:
                idle += 1
            self.step_idx += 1
        self.time = self.time + idle * self.work.step_s
        return self.time - begin

    @property
    def occupied_s(self) -> Array:
        """Seconds that the link needs for a round."""
        fragments = [layers for sends in self.schedule.sends.values() for layers in sends]
        return self.layer_wire_s * sum(map(len, fragments))

    def step(self, sends: list[list[int]]) -> None:
        raise NotImplementedError

    def backward_s(self, layer: int) -> float:
        """Seconds from the begin of the backward pass to a layer's parameter gradients."""
        # The first layer needs no gradient of its input.
        nodes = 2 * (self.num_layers - layer) - (1 if layer == 0 else 0)
        return nodes * self.node_s


class _Layers(_Clock):
    """The clock of granularity "layer": a due result is a layer, and when its mean has arrived."""

    def step(self, sends: list[list[int]]) -> None:
        done = 0
        for layer, ready in sorted(self.due.pop(self.step_idx, []), key=lambda item: item[0]):
            self.time = np.maximum(self.time + self.node_s * (layer - done), ready)
            done = layer
        backward = self.time + self.node_s * (self.num_layers - done)
        due = self.step_idx + 1 + self.schedule.delay
        for layer in sorted((layer for layers in sends for layer in layers), reverse=True):
            begin = np.maximum(self.link_free, backward + self.backward_s(layer))
            self.link_free = begin + self.layer_wire_s
            self.due.setdefault(due, []).append((layer, self.link_free + self.latency_s))
        self.time = backward + self.node_s * (2 * self.num_layers - 1)


class _Steps(_Clock):
    """The clock of granularity "step": a due result is the time at which a fragment has arrived."""

    def step(self, sends: list[list[int]]) -> None:
        backward = self.time + self.node_s * self.num_layers
        self.time = self.time + self.work.step_s
        for ready in self.due.pop(self.step_idx, []):
            self.time = np.maximum(self.time, ready)
        for layers in sends:
            if self.work.every_step:
                ready = self._send_gradients(layers, backward)
            else:
                begin = np.maximum(self.link_free, self.time)
                self.link_free = begin + self.latency_s + self.layer_wire_s * len(layers)
                ready = self.link_free
            if self.schedule.delay:
                self.due.setdefault(self.step_idx + self.schedule.delay, []).append(ready)
            else:
                self.time = np.maximum(self.time, ready)

    def _send_gradients(self, layers: list[int], backward: Array) -> Array:
        """Send buckets of gradients as soon as their last layer is there."""
        for bucket in self._buckets(layers):
            begin = np.maximum(self.link_free, backward + self.backward_s(bucket[-1]))
            self.link_free = begin + self.latency_s + self.layer_wire_s * len(bucket)
        return self.link_free

    def _buckets(self, layers: list[int]) -> list[list[int]]:
        """Fill buckets as DistributedDataParallel does: a small one, then larger ones."""
        layer_bytes = 4 * self.work.num_params / self.num_layers
        buckets: list[list[int]] = [[]]
        for layer in sorted(layers, reverse=True):
            limit = _FIRST_BUCKET_BYTES if len(buckets) == 1 else _BUCKET_BYTES
            if len(buckets[-1]) * layer_bytes >= limit:
                buckets.append([])
            buckets[-1].append(layer)
        return buckets

    @property
    def occupied_s(self) -> Array:
        # One exchange follows the other, so that the latency of each counts.
        exchanges = [layers for sends in self.schedule.sends.values() for layers in sends]
        if self.work.every_step:
            exchanges = [bucket for layers in exchanges for bucket in self._buckets(layers)]
        return super().occupied_s + self.latency_s * len(exchanges)
