"""The programs of the demos' replicas: ordinary training loops in the processes of a ``Crew``."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from diloco_comm import SGD, Blocking, DiLoCo, Eager, Link, Nesterov, Overlap, Streaming
from diloco_comm.base.store_host import dial_store
from diloco_comm.elastic.events import Happening, JoinProgress, ViewChanged
from diloco_comm.elastic.options import Elastic
from diloco_comm.exchange.buffers import ExchangeBuffers
from diloco_comm.exchange.exchange import Exchange
from diloco_comm.exchange.round import Header, Round
from diloco_comm.ops.wire import WireFormat

from .crew import DONE, LEFT, Ended, Entered, Place, Stepped
from .data import Batches, Corpus, load_corpus, validation_windows
from .model import ByteTransformer, byte_loss
from .settings import Chaos, Comparison, Decoupled, Row, Training

Future = torch.futures.Future


class BucketExchange:
    """State of the hook, which averages each bucket over the replicas during the backward pass.

    DDP finishes its buckets in the same order on all ranks, and the hook exchanges them in this
    order.
    """

    def __init__(self, wire: str, link_gbps: float, link_rtt_ms: float) -> None:
        self.sent_bytes = 0
        self.received_bytes = 0
        self.exposed_s = 0.0
        self._wire = WireFormat(wire)
        self._exchange = Exchange.from_group(dist.group.WORLD, name="ddp")
        self._exchange.emulate_link(link_gbps, link_rtt_ms)
        # DDP rebuilds its buckets after the first step: keys are a bucket's index and size.
        self._all_buffers: dict[tuple[int, int], ExchangeBuffers] = {}
        self._round = 0
        # One thread finishes the buckets in order, and sleeps while the engine works.
        self._finisher = ThreadPoolExecutor(1, "diloco_comm-ddp")
        self._last_bucket_at = 0.0

    def hook(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Start averaging one bucket; DDP waits for the future at the end of backward."""
        gradients = bucket.buffer()
        buffers = self._buffers(bucket.index(), gradients.numel())
        self._round += 1
        header = Header(
            kind="all_reduce",
            layout_hash=gradients.numel(),
            fragment=bucket.index(),
            round=self._round,
            sync_every=1,
            num_fragments=0,
            weight=1.0,
            outer_lr=1.0,
            inner_step=self._round,
        )
        work = self._exchange.start(buffers, outer=None, params=[gradients], header=header)
        future: Future[Tensor] = Future()
        self._finisher.submit(self._finish, buffers, work, gradients, future)
        if bucket.is_last():
            self._last_bucket_at = time.perf_counter()
        return future

    @contextlib.contextmanager
    def timed_backward(self) -> Iterator[None]:
        """Count the time of the backward pass after the last gradient as exposed time."""
        yield
        self.exposed_s += time.perf_counter() - self._last_bucket_at

    def close(self) -> None:
        """Finish the buckets in flight and leave the exchange."""
        self._finisher.shutdown()
        self._exchange.close()

    def _buffers(self, index: int, num_elements: int) -> ExchangeBuffers:
        key = (index, num_elements)
        if key not in self._all_buffers:
            self._all_buffers[key] = self._exchange.buffers(num_elements, self._wire)
        return self._all_buffers[key]

    def _finish(
        self,
        buffers: ExchangeBuffers,
        work: Round,
        gradients: Tensor,
        future: Future[Tensor],
    ) -> None:
        """Wait for a bucket's average, write it over the gradients, and set DDP's future."""
        try:
            outcome = work.collect(gradients)
            buffers.commit()
            self.sent_bytes += outcome.sent_bytes
            self.received_bytes += outcome.received_bytes
            future.set_result(gradients)
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------ replica


_TIMEOUT = timedelta(minutes=2)
_NUM_WINDOWS = 128
# Streaming sends two fragments in turn, and applies a result this many steps after the send.
_FRAGMENTS = {"Streaming": 2}
_STREAMING_DELAY = 5
# FedAvg averages without momentum. Eager's mean comes a round late, and needs a smaller momentum.
_OUTERS = {"FedAvg": SGD(lr=1.0), "Eager": Nesterov(lr=0.5, momentum=0.3)}


# DDP compares the annotations of a hook as objects, not as text.
BucketExchange.hook.__annotations__ = {"bucket": dist.GradBucket, "return": Future[Tensor]}


class Trainee:
    """The model of a replica, its inner optimizer and its data."""

    def __init__(self, settings: Training, shard: bytes, seed: int, weight_decay: float) -> None:
        self._settings = settings
        self.model = ByteTransformer(settings.model, settings.seed)
        self.batches = Batches(shard, settings.batch_size, settings.model.context, seed)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=(0.9, 0.95), weight_decay=weight_decay, fused=True
        )
        self.num_taken = 0

    def step(
        self,
        lr: float | None = None,
        model: nn.Module | None = None,
        backward: contextlib.AbstractContextManager[object] | None = None,
    ) -> Tensor:
        """Do one inner step and return its loss, detached.

        Args:
            lr: The learning rate; None: as the warm-up says.
            model: The wrapped model, if anything wraps it.
            backward: Entered around the backward pass.
        """
        self.num_taken += 1
        if lr is None:
            lr = self._settings.inner_lr * min(1.0, self.num_taken / self._settings.warmup_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = byte_loss(model or self.model, *self.batches.next())
        with backward or contextlib.nullcontext():
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def loss_of(model: nn.Module, windows: Tensor) -> float:
    """Return the mean loss on some windows, int64 of shape [number, context + 1]."""
    with torch.no_grad():
        losses = [byte_loss(model, w[:, :-1], w[:, 1:]) * len(w) for w in windows.split(32)]
    return float(torch.stack(losses).sum()) / len(windows)


# -------------------------------------------------------------------------------- the comparison


@dataclass(frozen=True)
class Progress:
    """The training loss of one replica after ``step`` inner steps of the current row.

    ``seconds`` counts training only, not validation.
    """

    step: int
    loss: float
    seconds: float
    weight: float = 1.0


@dataclass(frozen=True)
class Validation:
    """Loss of the shared model on this replica's ``weight`` windows of the validation text."""

    step: int
    loss: float
    seconds: float
    weight: float


@dataclass(frozen=True)
class Finished:
    """One replica has finished the row; ``outer_hash`` identifies its shared model.

    ``exposed_s`` is the part of ``seconds`` for which the training loop waited for communication.
    """

    outer_hash: str
    num_parameters: int
    sent_bytes: int
    received_bytes: int
    exposed_s: float
    seconds: float


Event = Progress | Validation | Finished


def compare(pipe: Connection, place: Place, given: tuple[Comparison, int]) -> None:
    """Train the rows that come through the pipe, until the parent process ends this one."""
    settings, port = given
    rank, world = place.number, settings.num_replicas
    store = dial_store("127.0.0.1", port, _TIMEOUT.total_seconds())
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=_TIMEOUT)
    corpus = load_corpus(settings.data, world)
    windows = validation_windows(
        corpus.validation, settings.num_validation_windows, settings.model.context
    )[rank::world]
    # Let torch set up its threads and kernels before the first row's clock starts.
    warm = _trainee(settings, corpus, rank)
    for _ in range(2):
        byte_loss(warm.model, *warm.batches.next()).backward()
    while True:
        _train_row(pipe, pipe.recv(), settings, _trainee(settings, corpus, rank), windows)


def _trainee(settings: Comparison, corpus: Corpus, rank: int) -> Trainee:
    seed = settings.seed * settings.num_replicas + rank
    return Trainee(settings, corpus.shards[rank], seed, weight_decay=0.1)


def _train_row(
    pipe: Connection, row: Row, settings: Comparison, trainee: Trainee, windows: Tensor
) -> None:
    """Train one row from the first step to the last, and send its events."""
    kind = DataParallel if row.method == "DDP" else LowCommunication

    def validate(step: int, seconds: float) -> None:
        pipe.send(Validation(step, loss_of(trainee.model, windows), seconds, len(windows)))

    with contextlib.closing(kind(row, trainee, settings)) as method:
        seconds, loss_sum = 0.0, torch.zeros(())
        validate(0, seconds)
        for step in range(1, settings.num_steps + 1):
            if (step - 1) % settings.sync_every == 0:
                dist.barrier()
                clock = time.perf_counter() - seconds
            loss_sum += method.step(settings.inner_lr_at(step - 1))
            seconds = time.perf_counter() - clock
            if step % settings.report_every == 0:
                pipe.send(Progress(step, float(loss_sum) / settings.report_every, seconds))
                loss_sum.zero_()
            if step == settings.num_steps:
                method.finish()
                seconds = time.perf_counter() - clock
            if step % settings.sync_every == 0:
                with method.shared_model():
                    validate(step, seconds)
        num_parameters = sum(p.numel() for p in trainee.model.parameters())
        pipe.send(Finished(method.outer_hash(), num_parameters, *method.traffic(), seconds))


def overlap_of(row: Row, settings: Comparison) -> Overlap:
    """Return the row's overlap policy."""
    if row.method == "Streaming":
        # The delay is shorter than a round: a result arrives before the fragment's next send.
        return Streaming(delay=min(_STREAMING_DELAY, settings.sync_every - 1), alpha=0.5)
    return Eager() if row.method == "Eager" else Blocking()


class LowCommunication:
    """DiLoCo and its overlapped forms; or FedAvg: plain averaging as the outer step."""

    def __init__(self, row: Row, trainee: Trainee, settings: Comparison) -> None:
        outer = Nesterov(lr=settings.outer_lr, momentum=settings.outer_momentum)
        self._row = row
        self.step = trainee.step
        # init="check": all replicas make the same weights from the seed, so none are sent.
        self._diloco = DiLoCo(
            trainee.model,
            trainee.optimizer,
            sync_every=settings.sync_every,
            outer=_OUTERS.get(row.method, outer),
            wire=row.wire,
            overlap=overlap_of(row, settings),
            fragments=_FRAGMENTS.get(row.method, 1),
            init="check",
        )
        self._diloco.emulate_link(settings.link_gbps, settings.link_rtt_ms)
        self.finish, self.outer_hash = self._diloco.flush, self._diloco.outer_hash
        self.close = self._diloco.close

    def shared_model(self) -> contextlib.AbstractContextManager[object]:
        """Put the shared parameters into the model; a collective call."""
        return self._diloco.outer_parameters(consensus=self._row.method == "Eager")

    def traffic(self) -> tuple[int, int, float]:
        """Return bytes sent and received, and seconds waited, since the row began."""
        totals = self._diloco.totals()
        return totals.sent_bytes, totals.received_bytes, totals.exposed_s


class DataParallel:
    """DistributedDataParallel whose gradients travel through this library's engine.

    The link emulator throttles only the engine, so DDP must use the engine for a fair comparison.
    DDP alone would send fp32 too, and as many bytes by a ring all-reduce.
    """

    def __init__(self, row: Row, trainee: Trainee, settings: Comparison) -> None:
        self._trainee = trainee
        self._exchange = BucketExchange(row.wire, settings.link_gbps, settings.link_rtt_ms)
        self._ddp = DistributedDataParallel(
            trainee.model, gradient_as_bucket_view=True, init_sync=False
        )
        self._ddp.register_comm_hook(self._exchange, BucketExchange.hook)
        self.close = self._exchange.close

    def step(self, lr: float) -> Tensor:
        return self._trainee.step(lr, self._ddp, self._exchange.timed_backward())

    def finish(self) -> None:
        """Nothing is under way after a step."""

    def shared_model(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def traffic(self) -> tuple[int, int, float]:
        return self._exchange.sent_bytes, self._exchange.received_bytes, self._exchange.exposed_s

    def outer_hash(self) -> str:
        parameters = self._trainee.model.parameters()
        shared = b"".join(parameter.detach().numpy().tobytes() for parameter in parameters)
        return hashlib.sha256(shared).hexdigest()


# ------------------------------------------------------------------- replicas that come and go


def come_and_go(pipe: Connection, place: Place, settings: Chaos) -> None:
    """Train until the parent process names the last inner step, and all replicas have taken it."""
    shard = load_corpus(settings.data, settings.num_replicas).shards[place.number]
    trainee = Trainee(settings, shard, place.process, weight_decay=0.01)

    def tell(happening: Happening) -> None:
        now = time.monotonic()
        if isinstance(happening, ViewChanged):
            who = happening.number, happening.members, happening.joined, happening.left
            pipe.send(Entered(now, *who, happening.seconds, happening.copied_bytes))
        elif isinstance(happening, JoinProgress):
            pipe.send(happening)

    diloco = DiLoCo(
        trainee.model,
        trainee.optimizer,
        sync_every=settings.sync_every,
        wire=settings.wire,
        outer=Nesterov(settings.outer_lr, settings.outer_momentum),
        peers=Elastic(
            place.registry,
            run="chaos",
            replica=place.number,
            min_replicas=2,
            suspect_after=settings.suspect_after_s,
            founding_wait=settings.founding_wait_s,
            quorum_wait=settings.timeout_s,
            on_event=tell,
        ),
    )
    last_step: int | None = None
    while not diloco.is_done:
        while pipe.poll():
            last_step = pipe.recv()
        if last_step is not None and diloco.inner_step >= last_step:
            break
        began = time.monotonic()
        loss = float(trainee.step())
        pipe.send(Stepped(time.monotonic(), diloco.inner_step, loss))
        time.sleep(max(0.0, settings.step_s - (time.monotonic() - began)))
    if not diloco.is_done:
        diloco.flush()
    how = LEFT if diloco.is_done else DONE
    num_parameters = sum(parameter.numel() for parameter in trainee.model.parameters())
    ended = Ended(time.monotonic(), how, "", diloco.inner_step, diloco.outer_hash(), num_parameters)
    diloco.close()
    pipe.send(ended)


# ------------------------------------------------------------------- learners that never wait


@dataclass(frozen=True)
class Ready:
    """The learner has received the shared model; ``loss`` is its held-out loss."""

    loss: float


@dataclass(frozen=True)
class Learned:
    """The figures of a learner that was not killed.

    Attributes:
        loss: Held-out loss of the shared model.
        merged, refused: How many of the learner's reports the syncer took, and refused.
        hook_s: Seconds that ``DecoupledDiLoCo`` took of the training loop, in all.
        sent_bytes, received_bytes: Traffic of all messages.
    """

    loss: float
    merged: int
    refused: int
    hook_s: float
    sent_bytes: int
    received_bytes: int


def learn(pipe: Connection, place: Place, given: tuple[Decoupled, str]) -> None:
    """Train from the first message on the pipe to the second."""
    from diloco_comm.asynchronous import DecoupledDiLoCo

    settings, server = given
    index, context = place.number, settings.model.context
    corpus = load_corpus(settings.data, settings.num_replicas)
    windows = validation_windows(corpus.validation, _NUM_WINDOWS, context)
    trainee = Trainee(settings, corpus.shards[index], index, weight_decay=0.01)
    options: dict[str, Any] = {
        "name": f"learner-{index}",
        "tokens": settings.tokens_per_step,
        "link": Link(timeout=settings.timeout_s),
    }
    with DecoupledDiLoCo(trainee.model, trainee.optimizer, server=server, **options) as diloco:

        def held_out() -> float:
            with diloco.outer_parameters():
                return loss_of(trainee.model, windows)

        pipe.send(Ready(held_out()))
        pipe.recv()
        while not pipe.poll():
            began = time.monotonic()
            loss = float(trainee.step())
            time.sleep(max(0.0, settings.step_s_of(index) - (time.monotonic() - began)))
            pipe.send(Stepped(time.monotonic(), sum(diloco.metrics.versions), loss))
        seen, loss = diloco.metrics, held_out()
    # Sent after the block, so that the syncer has this learner's goodbye before the parent process
    # ends this process.
    figures = (seen.merged, seen.refused, seen.hook_s, seen.sent_bytes, seen.received_bytes)
    pipe.send(Learned(loss, *figures))
    pipe.send(Ended(time.monotonic(), DONE))
