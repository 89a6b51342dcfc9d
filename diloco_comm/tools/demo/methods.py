"""The training methods that the demo compares, behind one small interface."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ... import SGD, Blocking, DiLoCo, Eager, Nesterov, Overlap, Streaming
from .ddp import BucketExchange
from .model import byte_loss
from .settings import Row, Settings


@dataclass(frozen=True)
class Traffic:
    """Bytes and waiting time of one replica since the row began."""

    sent_bytes: int
    received_bytes: int
    exposed_s: float


class Method(Protocol):
    """A way to train the same model on several replicas."""

    def step(self, tokens: Tensor, targets: Tensor, lr: float) -> Tensor:
        """Do one inner step and return its loss, detached."""

    def finish(self) -> None:
        """After the last step, exchange and apply everything that is not applied yet."""

    def shared_model(self) -> contextlib.AbstractContextManager[object]:
        """Put the shared parameters into the model; a collective call."""

    def traffic(self) -> Traffic: ...

    def outer_hash(self) -> str: ...

    def close(self) -> None: ...


def open_method(row: Row, model: nn.Module, settings: Settings) -> Method:
    """Attach the row's method to a fresh model; a collective call."""
    if row.method == "DDP":
        return DataParallel(row, model, settings)
    return LowCommunication(row, model, settings)


# Streaming sends two fragments in turn, and applies a result this many steps after the send.
FRAGMENTS = {"Streaming": 2}
STREAMING_DELAY = 5
# FedAvg averages without momentum. Eager's mean comes a round late, and needs a smaller momentum.
OUTERS = {"FedAvg": SGD(lr=1.0), "Eager": Nesterov(lr=0.5, momentum=0.3)}


def overlap_of(row: Row, settings: Settings) -> Overlap:
    """Return the row's overlap policy."""
    if row.method == "Streaming":
        # The delay is shorter than a round: a result arrives before the fragment's next send.
        return Streaming(delay=min(STREAMING_DELAY, settings.sync_every - 1), alpha=0.5)
    return Eager() if row.method == "Eager" else Blocking()


class LowCommunication:
    """DiLoCo and its overlapped forms; or FedAvg: plain averaging as the outer step."""

    def __init__(self, row: Row, model: nn.Module, settings: Settings) -> None:
        outer = Nesterov(lr=settings.outer_lr, momentum=settings.outer_momentum)
        self._row, self._model = row, model
        self._optimizer = inner_optimizer(model, settings)
        # init="check": all replicas make the same weights from the seed, so none are sent.
        self._diloco = DiLoCo(
            model,
            self._optimizer,
            sync_every=settings.sync_every,
            outer=OUTERS.get(row.method, outer),
            wire=row.wire,
            overlap=overlap_of(row, settings),
            fragments=FRAGMENTS.get(row.method, 1),
            init="check",
        )
        self._diloco.emulate_link(settings.link_gbps, settings.link_rtt_ms)

    def step(self, tokens: Tensor, targets: Tensor, lr: float) -> Tensor:
        set_lr(self._optimizer, lr)
        loss = byte_loss(self._model, tokens, targets)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def finish(self) -> None:
        self._diloco.flush()

    def shared_model(self) -> contextlib.AbstractContextManager[object]:
        return self._diloco.outer_parameters(consensus=self._row.method == "Eager")

    def traffic(self) -> Traffic:
        syncs = self._diloco.metrics()
        return Traffic(
            sent_bytes=sum(sync.sent_bytes for sync in syncs),
            received_bytes=sum(sync.received_bytes for sync in syncs),
            exposed_s=sum(sync.exposed_s for sync in syncs),
        )

    def outer_hash(self) -> str:
        return self._diloco.outer_hash()

    def close(self) -> None:
        self._diloco.close()


class DataParallel:
    """DistributedDataParallel whose gradients travel through this library's engine.

    The link emulator throttles only the engine, so DDP must use the engine for a fair comparison.
    DDP alone would send fp32 too, and as many bytes by a ring all-reduce.
    """

    def __init__(self, row: Row, model: nn.Module, settings: Settings) -> None:
        self._optimizer = inner_optimizer(model, settings)
        self._model = model
        self._exchange = BucketExchange(row.wire, settings.link_gbps, settings.link_rtt_ms)
        self._ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)
        self._ddp.register_comm_hook(self._exchange, BucketExchange.hook)

    def step(self, tokens: Tensor, targets: Tensor, lr: float) -> Tensor:
        set_lr(self._optimizer, lr)
        loss = byte_loss(self._ddp, tokens, targets)
        with self._exchange.timed_backward():
            loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def finish(self) -> None:
        pass

    def shared_model(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def traffic(self) -> Traffic:
        exchange = self._exchange
        return Traffic(exchange.sent_bytes, exchange.received_bytes, exchange.exposed_s)

    def outer_hash(self) -> str:
        digest = hashlib.sha256()
        for parameter in self._model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()

    def close(self) -> None:
        self._exchange.close()


def inner_optimizer(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """Return the optimizer that every method uses on each replica."""
    return torch.optim.AdamW(
        model.parameters(), settings.inner_lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
