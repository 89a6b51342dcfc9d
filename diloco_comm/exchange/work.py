"""One exchange of a fragment as its caller holds it: waits, and gives the mean."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from math import inf, isnan, nan

from torch import Tensor

from .. import ops
from ..base.errors import SyncError
from ..ops.wire import Layout
from .buffers import ExchangeBuffers
from .headers import Header, from_native
from .round import Job, Round, Terms
from .waiting import wait_for_job

_POLL_S = 2e-5
_LONG_S = 3600.0


@dataclass
class Mean:
    """The weighted mean that an exchange has brought.

    Attributes:
        terms: (payload uint8 laid out as ``layout``, coefficient): their sum is the weighted mean.
            These payloads are the fragment's buffers: a ``start`` after ``commit`` overwrites them.
        headers: One a rank.
        weights: Normalised, one a rank, as used.
        verdict: None; or, from ``ExchangeWork.offer``, int64 [1] on the device: 0 once all votes
            are here and good, which is when the round counts.
        seconds: encode, header, exchange (waiting for messages), reduce, vote, wait (of ``wait()``)
            and total (on the engine thread).
        sent_bytes, received_bytes: All bytes that this rank sent to and got from its peers.
        counters: Minor page faults of the calling and the engine thread.
        digest: Of the payloads, the same on all replicas; 0 where none is needed.
    """

    terms: Terms
    layout: Layout
    headers: list[Header]
    weights: list[float]
    seconds: dict[str, float]
    sent_bytes: int
    received_bytes: int
    counters: dict[str, int] = field(default_factory=dict)
    verdict: Tensor | None = None
    digest: int = 0

    def decode(self, outs: list[Tensor], *, impl: str = "") -> None:
        """Write the weighted mean into tensors: dense, as many elements, fp32, bf16 or fp16."""
        decode_terms(self.terms, self.layout, outs, impl=impl)


def decode_terms(
    terms: Terms,
    layout: Layout,
    outs: list[Tensor],
    begin: int = 0,
    end: int | None = None,
    *,
    impl: str = "",
) -> None:
    """Set elements [begin, end) of ``outs`` to the sum of the payloads times their coefficients."""
    ops.decode(
        [payload for payload, _ in terms],
        [coefficient for _, coefficient in terms],
        outs,
        begin,
        layout.num_elements if end is None else end,
        layout.run_elements,
        layout.wire.name,
        layout.wire.block_size,
        impl=impl,
    )


class ExchangeWork:
    """An exchange under way.

    Attributes:
        payload: The own encoded values; complete as soon as ``start`` has returned.
        layout, mean_layout: Of the payload, and of those of the mean.
        buffers, round: The fragment's, whose states decide how far this exchange is.
    """

    def __init__(self, buffers: ExchangeBuffers, round: Round) -> None:
        self.payload = round.own.tensor
        self.layout, self.mean_layout = round.layout, round.mean_layout
        self.buffers = buffers
        self.round = round
        self._num_collected = 0  # runs of the result
        self._wait_s = 0.0
        self._mean: Mean | None = None

    @property
    def headers(self) -> list[Header]:
        """Headers of all ranks, in rank order; empty until they have been exchanged."""
        job = self.round.job
        if job is None:
            return self.round.headers
        return [from_native(header) for header in job.headers]

    def has_bad_values(self) -> bool:
        """Whether some of the own values are such that no wire carries them.

        On a device, the host polls until these values are encoded.
        """
        while (count := self._num_bad_encoded()) is None:
            time.sleep(_POLL_S)
        return count > 0

    def _num_bad_encoded(self) -> int | None:
        return self._job.num_bad_encoded

    @property
    def _job(self) -> Job:
        job = self.round.job
        assert job is not None, "the exchange is held, and was not sent"
        return job

    def forgo(self) -> None:
        """Make the payload, which is held, zeros of weight 0; ``has_bad_values`` said why."""
        own, header = self.round.own, self.round.header
        own.tensor.zero_()
        if own.host is not own.tensor:
            own.host.zero_()
        if own.ballot is not None:
            own.ballot.bad.zero_()
        self.buffers.residuals.forgo(self.buffers.wire)
        # NaN says that this replica has no weight to offer, which ends the round.
        weight = nan if isnan(header.weight) else 0.0
        self.round.header = replace(header, weight=weight, is_reset=True)

    def fail(self, error: SyncError) -> None:
        """End an exchange that was held, and cannot be sent."""
        self.buffers.fail(self.round, error)

    def done(self) -> bool:
        """Whether ``wait()`` would return, or raise, at once."""
        return self.round.is_done

    def wait(self, timeout: float | None = None) -> Mean:
        """Wait for the vote and return the mean.

        On a device, the caller's stream is made to wait for the mean; the host is not.

        Raises:
            ReplicaMismatch, PeerLeft, NonFiniteError, SyncError: There is no result, on no replica
                (after a SyncError at the vote some may have one; ``change_group`` settles it).
            TimeoutError: After ``timeout`` seconds; the exchange goes on.
            RuntimeError: In a forked child.
        """
        return self._wait_until(_deadline(timeout), timeout)

    def _wait_until(self, deadline: float, timeout: float | None) -> Mean:
        round = self.round
        if round.state == "started":
            begin = time.perf_counter()
            while not wait_for_job(self._job, _until(deadline)):
                if time.perf_counter() >= deadline:
                    raise TimeoutError(f"the exchange was not done after {timeout} s")
            wait_s = time.perf_counter() - begin
            self.buffers.resolve(round)
            self._wait_s = wait_s
        if round.error is not None:
            raise round.error
        self._job.block_caller()
        if self._mean is None:
            self._mean = self._make_mean()
        return self._mean

    def collect(self, out: Tensor, timeout: float | None = None, *, impl: str = "") -> Mean:
        """Write the mean into ``out``, part by part as it arrives, and wait for the vote.

        Where the link is the limit, the last part alone is decoded after it. After an error, what
        ``out`` holds is undefined. On a device all of it is decoded at the end.

        Args:
            out: Dense, as many elements as the payload; fp32, bf16 or fp16. It may be what was
                encoded.

        Raises:
            ReplicaMismatch, PeerLeft, NonFiniteError, SyncError, TimeoutError: As ``wait``; the
                next call goes on after a timeout, with the same ``out``.
        """
        deadline, job = _deadline(timeout), self._job
        while not job.is_done:
            landed = job.wait_landed(self._num_collected, _until(deadline))
            if landed == self._num_collected:
                break
            self._collect(landed, self.round.combine(job.weights), out, impl)
            if time.perf_counter() >= deadline:
                break
        mean = self._wait_until(deadline, timeout)
        # The last part; all of them on a device, and of one rank alone.
        self._collect(self.layout.num_runs, mean.terms, out, impl)
        return mean

    def _collect(self, num_runs: int, terms: Terms, out: Tensor, impl: str) -> None:
        layout = self.mean_layout
        begin, end = (
            min(runs * layout.run_elements, layout.num_elements)
            for runs in (self._num_collected, num_runs)
        )
        if begin < end:
            decode_terms(terms, layout, [out], begin, end, impl=impl)
        self._num_collected = num_runs

    def offer(self) -> Mean:
        """Return the mean, with its verdict still open where the device finds the verdict.

        A caller who applies such a mean passes the verdict on to the operator, and calls ``wait``
        later.

        Raises:
            SyncError: As ``wait``, if the exchange is known to have failed.
        """
        return self.wait()

    def _make_mean(self) -> Mean:
        job, round = self._job, self.round
        counters = dict(job.counters)
        return Mean(
            terms=round.terms,
            layout=round.mean_layout,
            headers=round.headers,
            weights=list(job.weights),
            seconds={**job.seconds, "encode": job.encode_seconds, "wait": self._wait_s},
            sent_bytes=counters.pop("sent_bytes"),
            received_bytes=counters.pop("received_bytes"),
            counters=counters,
            digest=round.digest,
        )


def _deadline(timeout: float | None) -> float:
    return inf if timeout is None else time.perf_counter() + timeout


def _until(deadline: float) -> float:
    """Seconds, as many as a C++ clock takes."""
    return min(deadline - time.perf_counter(), _LONG_S)
