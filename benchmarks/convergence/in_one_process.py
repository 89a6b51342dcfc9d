"""Replicas in one process: the policies and operators of the package, without an exchange.

Every replica has a model, an inner optimizer, outer parameters and an outer momentum of its own. At
a send all replicas encode, and each takes the outer step that its policy prescribes, on the very
payloads that an exchange on the fp32 wire would have brought.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from diloco_comm.asynchronous.local import LocalModel
from diloco_comm.methods.outer import OuterOptimizer, Update
from diloco_comm.methods.overlap import Blocking, Eager, Overlap, Own, Terms
from diloco_comm.ops.wire import WireFormat


class Replica:
    """One replica: its model, its outer parameters, and its payloads of the rounds under way."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, outer: OuterOptimizer
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.local = LocalModel(model, [optimizer], wire=WireFormat("fp32"))
        self.local.read()
        self.layout = self.local.layouts[0]
        self.state = outer.make_state(self.local.outer[0])
        self.lr = outer.lr_at(0, self.state)

    def encode(self, seq: int) -> Tensor:
        """Return the payload of outer - local."""
        self.local.encode(seq)
        return self.local.payloads[0].clone()

    def step(self, terms: Terms) -> None:
        """Take an outer step on these terms, and set the local parameters to the outer ones."""
        params = self.local.fragments[0].tensors()
        self.state.step(Update(terms, params, self.layout, self.lr))


@dataclass
class _Round:
    mean: Terms
    own: list[Own]


class Replicas:
    """All replicas of a run under ``Blocking``, ``Delayed`` or ``Eager``."""

    def __init__(self, replicas: list[Replica], policy: Overlap) -> None:
        assert policy.first in ("zero", "sync")
        self.replicas, self.policy = replicas, policy
        self._in_flight: deque[_Round] = deque()
        self._num_sent = 0

    def exchange(self) -> None:
        """Send the next round, and take the outer step that follows the send."""
        number, self._num_sent = self._num_sent, self._num_sent + 1
        world = len(self.replicas)
        payloads = [replica.encode(number) for replica in self.replicas]
        coefficient = self.policy.own_coefficient(1.0, float(world))
        own = [
            Own(payload, coefficient, replica.layout)
            for payload, replica in zip(payloads, self.replicas, strict=True)
        ]
        sent = _Round([(payload, 1.0 / world) for payload in payloads], own)
        is_synced = number < self.policy.rounds and self.policy.first == "sync"
        if isinstance(self.policy, Blocking) or is_synced:
            for replica in self.replicas:
                replica.step(sent.mean)
            return
        is_due = len(self._in_flight) >= self.policy.rounds
        self._advance(self._in_flight.popleft() if is_due else None, sent)
        self._in_flight.append(sent)

    def flush(self) -> None:
        """Apply the rounds under way, and set all outer parameters to their mean."""
        while self._in_flight:
            self._advance(self._in_flight.popleft(), None)
        mean = self._mean()
        for replica in self.replicas:
            replica.state.outer.copy_(mean)
            replica.local.write()

    @contextmanager
    def outer_parameters(self) -> Iterator[nn.Module]:
        """Have the mean of the outer parameters in the first replica's model, and put it back."""
        first = self.replicas[0]
        kept = [tensor.clone() for tensor in first.local.fragments[0].tensors()]
        outer = first.state.outer.clone()
        first.state.outer.copy_(self._mean())
        first.local.write()
        try:
            yield first.model
        finally:
            first.state.outer.copy_(outer)
            for tensor, value in zip(first.local.fragments[0].tensors(), kept, strict=True):
                tensor.copy_(value)

    def _mean(self) -> Tensor:
        return torch.stack([replica.state.outer for replica in self.replicas]).mean(0)

    def _advance(self, due: _Round | None, sent: _Round | None) -> None:
        mean = [] if due is None else due.mean
        for index, replica in enumerate(self.replicas):
            fresh = None if sent is None else sent.own[index]
            stale = [] if due is None else [due.own[index]]
            if due is None and not isinstance(self.policy, Eager):
                replica.local.write()
                continue
            replica.step(self.policy.gradient(mean, fresh, stale))
