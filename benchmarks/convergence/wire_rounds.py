"""The rounds of all replicas in one process, on any wire and under any policy but CO2.

The operators, fragments, schedules and policies are those of the package. Where the package sends a
payload, all replicas are at the same inner step here, and their payloads are there at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from benchmarks.convergence.wire_means import BySparseLoCo, OnWire, Sent
from diloco_comm import ops
from diloco_comm.methods.outer import OuterOptimizer, Update
from diloco_comm.methods.overlap import Blocking, Eager, Overlap, Own, Streaming, Terms
from diloco_comm.ops.wire import Layout, WireFormat
from diloco_comm.replica.fragments import Fragment, Schedule, make_fragments, trainable_parameters

Replica = tuple[nn.Module, torch.optim.Optimizer]


class Rounds(Protocol):
    """What follows the inner steps of all replicas."""

    def after_step(self, inner_step: int) -> None:
        """Send and apply what is due after this inner step, which counts from 1."""

    def flush(self, inner_step: int) -> None:
        """Share what was trained since the last send: then all replicas have one model."""

    def bits(self) -> float:
        """Bits an element of one payload, with scales and without padding."""


class SparseLoCoRounds:
    """Every ``sync_every`` steps a step of SGD on SparseLoCo's mean, the same at all replicas."""

    def __init__(self, replicas: Sequence[Replica], sync_every: int, lr: float) -> None:
        self._params = [[p.detach() for p in model.parameters()] for model, _ in replicas]
        self.outer = torch.cat([p.flatten() for p in self._params[0]])
        self._mean = BySparseLoCo(self._params[0], len(replicas))
        self._sync_every, self._lr = sync_every, lr

    def after_step(self, inner_step: int) -> None:
        if inner_step % self._sync_every:
            return
        self.outer -= self._lr * self._mean.mean(self.outer, self._params)
        for params in self._params:
            values = self.outer.split([p.numel() for p in params])
            for p, value in zip(params, values, strict=True):
                p.copy_(value.view_as(p))

    def flush(self, inner_step: int) -> None:
        assert inner_step % self._sync_every == 0, "a run ends with a round"

    def bits(self) -> float:
        return self._mean.bits()


class Part:
    """One fragment of all replicas; each replica has outer parameters of its own."""

    def __init__(self, copies: Sequence[Fragment], wire: OnWire, outer: OuterOptimizer) -> None:
        self.wire, self._copies = wire, copies
        flat = [torch.cat([t.flatten() for t in copy.tensors()]).float() for copy in copies]
        self.states = [outer.make_state(values) for values in flat]
        self.lr = outer.lr_at(0, self.states[0])
        self.in_flight: deque[Sent] = deque()
        self.num_sent = self.last_sent = 0

    @property
    def outers(self) -> list[Tensor]:
        return [state.outer for state in self.states]

    def params(self, replica: int) -> list[Tensor]:
        return self._copies[replica].tensors()

    def encode(self, inner_step: int) -> Sent:
        """Encode what all replicas would send now."""
        tensors = [copy.tensors() for copy in self._copies]
        return self.wire.send(self.outers, tensors, self.num_sent, inner_step)

    def send(self, inner_step: int) -> Sent:
        sent = self.encode(inner_step)
        self.num_sent, self.last_sent = self.num_sent + 1, inner_step
        return sent

    def step(self, replica: int, terms: Terms, layout: Layout, alpha: float = 0.0) -> None:
        """Take an outer step, and merge the result into the local parameters."""
        update = Update(terms, self.params(replica), layout, self.lr, alpha)
        self.states[replica].step(update)

    def mean(self) -> Tensor:
        """Return the mean of the outer parameters, as the fp32 wire brings it."""
        wire = OnWire(WireFormat("fp32"), [self.outers[0]], len(self.outers), False, 0)
        return wire.send([None] * len(self.outers), [[each] for each in self.outers], 0).mean()

    def spoil(self) -> None:
        """Let the loss be no number: the replicas of the package would end with an error."""
        for outer in self.outers:
            outer.fill_(float("nan"))

    def write(self) -> None:
        """Set the local parameters to the outer ones."""
        for outer, copy in zip(self.outers, self._copies, strict=True):
            ops.merge(outer, copy.tensors())


class PolicyRounds(ABC):
    """Rounds under a policy of overlap.

    Args:
        policy: Says when a round is due, and from which payloads its outer gradient is made.
        num_fragments: Into so many the parameters are cut.
        sync_every: Inner steps between two sends of a fragment.
        wire, outer, error_feedback, seed: As in ``DiLoCo``.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        policy: Overlap,
        wire: WireFormat,
        *,
        sync_every: int,
        outer: OuterOptimizer,
        num_fragments: int = 1,
        error_feedback: bool = False,
        seed: int = 0,
    ) -> None:
        self.policy, self._wire, self._world = policy, wire, len(replicas)
        self._schedule = Schedule.plan(sync_every, num_fragments)
        cut = [
            make_fragments(model, trainable_parameters(model, [optimizer]), num_fragments)
            for model, optimizer in replicas
        ]
        self.parts = [
            Part(
                copies,
                OnWire(
                    wire,
                    copies[0].tensors(),
                    self._world,
                    error_feedback,
                    seed,
                    fragment=copies[0].index,
                    carries=policy.rounds > 0,
                    must_gather=not policy.is_shared,
                ),
                outer,
            )
            for copies in zip(*cut, strict=True)
        ]

    def bits(self) -> float:
        return self._wire.bits_per_element

    def _due(self, inner_step: int) -> list[Part]:
        return [self.parts[index] for index in self._schedule.due(inner_step)]

    def _stale(self, inner_step: int) -> list[Part]:
        return [part for part in self.parts if part.last_sent < inner_step]

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Have the mean of the outer parameters in the first replica's model for the block."""
        kept = [[tensor.clone() for tensor in part.params(0)] for part in self.parts]
        for part in self.parts:
            ops.merge(part.mean(), part.params(0))
        try:
            yield
        finally:
            for part, values in zip(self.parts, kept, strict=True):
                torch._foreach_copy_(part.params(0), values)

    @abstractmethod
    def after_step(self, inner_step: int) -> None: ...

    @abstractmethod
    def flush(self, inner_step: int) -> None: ...


class StreamingRounds(PolicyRounds):
    """Under ``Streaming``: a round is applied some inner steps after its send."""

    policy: Streaming

    def after_step(self, inner_step: int) -> None:
        for part in self._due(inner_step):
            part.in_flight.append(part.send(inner_step))
        for part in self.parts:
            if part.in_flight and part.in_flight[0].step + self.policy.delay <= inner_step:
                self._apply(part, part.in_flight.popleft(), self.policy.alpha)

    def flush(self, inner_step: int) -> None:
        for part in self.parts:
            while part.in_flight:
                self._apply(part, part.in_flight.popleft(), self.policy.alpha)
        for part in self._stale(inner_step):
            self._apply(part, part.send(inner_step), 0.0)
        for part in self.parts:
            part.write()

    def _apply(self, part: Part, sent: Sent, alpha: float) -> None:
        for replica in range(self._world):
            part.step(replica, sent.terms, sent.mean_layout, alpha)
        if sent.is_bad:
            part.spoil()


class SendingRounds(PolicyRounds):
    """Under ``Blocking``, ``Delayed`` or ``Eager``: an outer step follows each send."""

    def after_step(self, inner_step: int) -> None:
        for part in self._due(inner_step):
            self._exchange(part, inner_step)

    def flush(self, inner_step: int) -> None:
        for part in self._stale(inner_step):
            self._exchange(part, inner_step)
        for part in self.parts:
            while part.in_flight:
                self._advance(part, part.in_flight.popleft(), None)
            mean = part.outers[0] if self.policy.is_shared else part.mean()
            for outer in part.outers:
                outer.copy_(mean)
            part.write()

    def _exchange(self, part: Part, inner_step: int) -> None:
        is_first = part.num_sent < self.policy.rounds
        sent = part.send(inner_step)
        if isinstance(self.policy, Blocking) or (is_first and self.policy.first == "sync"):
            self._step(part, [sent.terms] * self._world, sent.mean_layout, sent)
            return
        is_due = len(part.in_flight) >= self.policy.rounds
        self._advance(part, part.in_flight.popleft() if is_due else None, sent)
        part.in_flight.append(sent)

    def _advance(self, part: Part, due: Sent | None, fresh: Sent | None) -> None:
        if due is None and not isinstance(self.policy, Eager):
            part.write()
            return
        terms = [
            self.policy.gradient(
                [] if due is None else due.terms,
                None if fresh is None else self._own(fresh, replica),
                [] if due is None else [self._own(due, replica)],
            )
            for replica in range(self._world)
        ]
        self._step(part, terms, part.wire.layout, due, fresh)

    def _step(
        self, part: Part, terms: Sequence[Terms], layout: Layout, *rounds: Sent | None
    ) -> None:
        for replica, own in enumerate(terms):
            part.step(replica, own, layout)
        if any(sent is not None and sent.is_bad for sent in rounds):
            part.spoil()

    def _own(self, sent: Sent, replica: int) -> Own:
        coefficient = self.policy.own_coefficient(1.0, float(self._world))
        return Own(sent.payloads[replica], coefficient, sent.layout)


def make_streaming(replicas: Sequence[Replica], wire: WireFormat, **options: Any) -> Rounds:
    """Return the rounds of two fragments, which travel for half of the steps between two sends."""
    policy = Streaming(delay=options["sync_every"] // 2, alpha=0.5)
    return StreamingRounds(replicas, policy, wire, num_fragments=2, **options)


def make_eager(replicas: Sequence[Replica], wire: WireFormat, **options: Any) -> Rounds:
    """Return the rounds of one fragment, which travel until the next send."""
    return SendingRounds(replicas, Eager(), wire, **options)


def make_blocking(replicas: Sequence[Replica], wire: WireFormat, **options: Any) -> Rounds:
    return SendingRounds(replicas, Blocking(), wire, **options)


METHODS = {"blocking": make_blocking, "streaming": make_streaming, "eager": make_eager}
