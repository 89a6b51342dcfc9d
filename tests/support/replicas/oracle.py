"""The overlap methods in float64 numpy, one vector for each fragment and replica.

Written from the equations alone, without payloads: what a fragment's rounds do to plain vectors.
Every replica takes ``num_steps`` inner steps; ``inner(rank, x)`` takes one of them. Local values
of low precision lie on a ``Grid``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

Vector = np.ndarray


@dataclass
class OuterOptimizer:
    """The outer state of one fragment; ``clip`` bounds the stored momentum.

    Under Adam ``mu`` is the first beta.
    """

    kind: str
    lr: float
    mu: float = 0.0
    clip: float = np.inf
    momentum: Vector | float = 0.0
    beta2: float = 0.95
    eps: float = 0.1
    second: Vector | float = 0.0
    num_steps: int = 0

    def step(self, theta: Vector, g: Vector, scale: float = 1.0) -> Vector:
        if self.kind == "sgd":
            return theta - self.lr * scale * g
        if self.kind == "adam":
            return theta - self.lr * scale * self._adam(g)
        self.momentum = np.clip(self.mu * self.momentum + g, -self.clip, self.clip)
        ahead = g + self.mu * self.momentum if self.kind == "nesterov" else self.momentum
        return theta - self.lr * scale * ahead

    def _adam(self, g: Vector) -> Vector:
        self.num_steps += 1
        self.momentum = self.mu * self.momentum + (1 - self.mu) * g
        self.second = self.beta2 * self.second + (1 - self.beta2) * g**2
        first = self.momentum / (1 - self.mu**self.num_steps)
        second = self.second / (1 - self.beta2**self.num_steps)
        return first / (np.sqrt(second) + self.eps)


@dataclass(frozen=True)
class Grid:
    """The numbers of a floating-point format.

    Args:
        digits: Binary digits of a number, the leading one included.
        least: Exponent of the smallest number, whose multiples the other numbers are.
    """

    digits: int
    least: int

    def spacing(self, x: Vector) -> Vector:
        """Return the distance between the neighbours of each value."""
        return np.ldexp(1.0, np.maximum(np.frexp(x)[1] - self.digits, self.least))

    def nearest(self, x: Vector) -> Vector:
        """Round to the nearest number, from the middle to the even one."""
        return np.rint(x / self.spacing(x)) * self.spacing(x)

    def toward(self, x: Vector, target: Vector) -> Vector:
        """As ``nearest``, but never farther from the target, a number of the grid, than x is.

        The other neighbour of x, on the target's side, takes the place of such a number.
        """
        unit, number = self.spacing(x), self.nearest(x)
        inner = np.where(x >= target, np.floor(x / unit), np.ceil(x / unit)) * unit
        return np.where(np.abs(number - target) > np.abs(x - target), inner, number)


FLOAT64, BF16, FP16 = Grid(53, -1074), Grid(8, -133), Grid(11, -24)


@dataclass
class Method:
    """A policy and its numbers; see ``diloco_comm.methods.overlap`` for their meaning.

    ``sick`` has (inner step, replica): what that replica would send then is not finite, and it is
    reset. The local values lie on ``grid``, the outer ones do not.
    """

    name: str = "blocking"
    delays: Sequence[int] = (0, 0)
    alpha: float = 0.0
    rounds: int = 1
    first: str = "zero"
    gap: float | str = 1.0
    clip: float = np.inf
    inner_lr: Callable[[int], float] | None = None
    weights: Sequence[float] | None = None
    sick: frozenset[tuple[int, int]] = frozenset()
    grid: Grid = FLOAT64


@dataclass
class _Fragment:
    indices: list[int]
    offset: int
    theta: list[Vector]
    optimizers: list[OuterOptimizer]
    sent: list[list[Vector]] = field(default_factory=list)  # round -> replica -> pseudo-gradient
    weights: list[Vector] = field(default_factory=list)  # round -> replica -> weight
    held_from: dict[int, int] = field(default_factory=dict)  # replica -> first round in its local
    fresh: list[list[float]] = field(default_factory=list)  # round -> replica -> coefficient
    gaps: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    num_sent: int = 0
    num_synced: int = 0
    means: dict[int, Vector] = field(default_factory=dict)  # replica -> mean of the last round

    def step(self, rank: int, g: Vector, plain: Vector, scale: float = 1.0) -> None:
        """Take an outer step on g; ``plain`` is the round's mean pseudo-gradient itself."""
        before = self.theta[rank]
        self.means[rank] = before - plain
        self.theta[rank] = self.optimizers[rank].step(before, g, scale)


@dataclass
class Run:
    """Values after each inner step: ``local[t][rank]`` and ``outer[t][rank]``, t from 0.

    After the flush that may follow: ``flushed[rank]``, and ``ended[rank]`` with ``final=True``.
    """

    local: list[list[Vector]] = field(default_factory=list)
    outer: list[list[Vector]] = field(default_factory=list)
    flushed: list[Vector] = field(default_factory=list)
    ended: list[Vector] = field(default_factory=list)


def simulate(
    start: Vector,
    num_steps: int,
    sync_every: int,
    method: Method,
    optimizer: Callable[[], OuterOptimizer],
    inner: Callable[[int, int, Vector], Vector],
    *,
    fragments: Sequence[Sequence[int]] | None = None,
    offsets: Sequence[int] | None = None,
    num_replicas: int = 2,
    flushes: bool = False,
) -> Run:
    """Train all replicas; ``inner(rank, t, x)`` is inner step t (from 1) of one of them.

    Args:
        flushes: Flush after the last step; for ``first="zero"``, and no sick replica.
    """
    cuts = [list(range(len(start)))] if fragments is None else [list(f) for f in fragments]
    sends = [sync_every] * len(cuts) if offsets is None else list(offsets)
    weights = np.ones(num_replicas) if method.weights is None else np.array(method.weights)
    x = [start.astype(float).copy() for _ in range(num_replicas)]
    parts = []
    for cut, offset in zip(cuts, sends, strict=True):
        theta = [start[cut].astype(float) for _ in range(num_replicas)]
        parts.append(_Fragment(cut, offset, theta, [optimizer() for _ in range(num_replicas)]))
        for own in parts[-1].optimizers:
            own.clip = method.clip
    run = Run([[v.copy() for v in x]], [_gather(parts, start, num_replicas)])
    for t in range(1, num_steps + 1):
        x = [inner(rank, t, value) for rank, value in enumerate(x)]
        sick = {rank for step, rank in method.sick if step == t}
        for part in parts:
            for rank in sick:
                x[rank][part.indices] = method.grid.nearest(part.theta[rank])
        for part in parts:
            is_due = t >= part.offset and (t - part.offset) % sync_every == 0
            for rank in sick:
                part.held_from[rank] = part.num_sent + is_due
            if is_due:
                healthy = [rank not in sick for rank in range(num_replicas)]
                part.weights.append(weights * np.array(healthy))
            if method.name in ("blocking", "streaming"):
                _stream(part, x, t, sync_every, method, is_due)
            elif is_due:
                _turn(part, x, t, method)
        run.local.append([v.copy() for v in x])
        run.outer.append(_gather(parts, start, num_replicas))
    if flushes:
        for part in parts:
            part.weights.append(weights)
            _flush(part, x, num_steps, sync_every, method)
        run.flushed = _gather(parts, start, num_replicas)
        for part in parts:
            part.theta = [part.means[rank] for rank in range(num_replicas)]
            if method.name == "eager":
                part.theta = [sum(part.theta) / num_replicas] * num_replicas
        run.ended = _gather(parts, start, num_replicas)
    return run


def _flush(part: _Fragment, x: list[Vector], t: int, sync_every: int, method: Method) -> None:
    """Apply what is under way, and what was trained since the last send."""
    sends = [part.offset + number * sync_every for number in range(len(part.sent))]
    has_rest = t not in sends
    if method.name in ("blocking", "streaming"):
        for rank, delay in enumerate(method.delays):
            for number, sent_at in enumerate(sends):
                if sent_at + delay > t:
                    _apply(part, x, rank, number, method, method.alpha)
        if has_rest:
            starts = [method.grid.nearest(theta) for theta in part.theta]
            part.sent.append([starts[r] - x[r][part.indices] for r in range(len(x))])
            for rank in range(len(x)):
                _apply(part, x, rank, -1, method, 0.0)
        return
    if has_rest:
        _turn(part, x, t, method)
    gamma = 1.0 if method.inner_lr is None else method.inner_lr(t)
    for number in range(max(part.num_sent - method.rounds, 0), part.num_sent):
        for rank in range(len(x)):
            mean, own = _mean(part, number), 0.0
            if method.name == "eager":
                own = part.fresh[number][rank] * part.sent[number][rank]
            penalty = part.gaps[number] * gamma
            part.step(rank, mean / penalty - own, mean - own, gamma)
    if method.name == "eager":
        part.theta = [sum(part.theta) / len(x)] * len(x)


def _gather(parts: list[_Fragment], start: Vector, num_replicas: int) -> list[Vector]:
    whole = [np.zeros(len(start)) for _ in range(num_replicas)]
    for part in parts:
        for rank in range(num_replicas):
            whole[rank][part.indices] = part.theta[rank]
    return whole


def _stream(
    part: _Fragment,
    x: list[Vector],
    t: int,
    sync_every: int,
    method: Method,
    is_due: bool,
) -> None:
    """Alg. 2 of arXiv 2501.18512."""
    if is_due:
        starts = [method.grid.nearest(theta) for theta in part.theta]
        part.sent.append([starts[r] - x[r][part.indices] for r in range(len(x))])
    for rank, delay in enumerate(method.delays):
        number = (t - delay - part.offset) // sync_every
        if t - delay < part.offset or (t - delay - part.offset) % sync_every:
            continue
        _apply(part, x, rank, number, method, method.alpha)


def _apply(
    part: _Fragment, x: list[Vector], rank: int, number: int, method: Method, alpha: float
) -> None:
    mean = _mean(part, number)
    part.step(rank, mean, mean)
    target = method.grid.nearest(part.theta[rank])
    merged = alpha * x[rank][part.indices] + (1 - alpha) * part.theta[rank]
    x[rank][part.indices] = method.grid.toward(merged, target) if alpha else target


def _mean(part: _Fragment, number: int) -> Vector:
    share = part.weights[number] / part.weights[number].sum()
    return sum(w * d for w, d in zip(share, part.sent[number], strict=True))


def _turn(part: _Fragment, x: list[Vector], t: int, method: Method) -> None:
    """Delayed, eager (arXiv 2502.12996) and CO2 (arXiv 2401.16265) at a send of the part."""
    n, num = part.num_sent, len(x)
    part.num_sent += 1
    # Pseudo-gradients count once: under "skip" the local values still hold the earlier ones.
    kept = n if method.first == "skip" and n <= method.rounds else 0
    zero = np.zeros(len(part.indices))
    held_from = [part.held_from.get(r, 0) for r in range(num)]
    earlier = [sum((s[r] for s in part.sent[held_from[r] : kept]), zero) for r in range(num)]
    starts = [method.grid.nearest(theta) for theta in part.theta]
    part.sent.append([starts[r] - x[r][part.indices] - earlier[r] for r in range(num)])
    weights = part.weights[n]
    gap = method.gap
    if gap == "gap-aware":
        gap = 1 + part.norms[-1] / max(part.norms) if part.norms else 1.0
    part.gaps.append(float(gap))
    is_first = n < method.rounds
    due = n - method.rounds
    is_synced = is_first and method.first == "sync"
    if is_synced:
        due, part.num_synced = n, n + 1
    elif due < part.num_synced:
        due = -1
    part.fresh.append([0.0] * num)
    if is_first and method.first == "skip":
        return
    gamma = 1.0 if method.inner_lr is None else method.inner_lr(t)
    mean = plain = zero
    if due >= 0:
        plain = _mean(part, due)
        mean = plain / (part.gaps[due] * gamma)
    moved = 0.0
    for rank in range(num):
        g = mean
        if method.name == "eager" and not is_synced:
            # The sum of weights of the last round that was applied; 1/M at first.
            last = due if due >= 0 else part.num_synced - 1
            c = weights[rank] / part.weights[last].sum() if last >= 0 else (weights[rank] > 0) / num
            part.fresh[n][rank] = c
            g = mean + c * part.sent[n][rank]
            if due >= 0:
                g = g - part.fresh[due][rank] * part.sent[due][rank]
        elif due < 0:
            x[rank][part.indices] = starts[rank]
            continue
        before = part.theta[rank]
        part.step(rank, g, plain + (g - mean), gamma)
        moved = float(np.linalg.norm(part.theta[rank] - before))
        x[rank][part.indices] = method.grid.nearest(part.theta[rank])
    if due >= 0:
        part.norms.append(moved)
