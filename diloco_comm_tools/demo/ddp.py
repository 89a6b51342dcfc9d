"""A DistributedDataParallel communication hook that sends gradients through the engine."""

# Without `from __future__ import annotations`: DDP compares the hook's annotations as objects.

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor

from diloco_comm.exchange.buffers import ExchangeBuffers
from diloco_comm.exchange.exchange import Exchange
from diloco_comm.exchange.round import Header, Round
from diloco_comm.ops.wire import WireFormat

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
