"""One exchange of a slot: how far it is, and what it gave."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from math import inf, isnan, nan
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from .. import _C, ops
from ..base.errors import SyncError
from ..base.memory import Payload
from ..ops.wire import Layout
from .headers import Header, error_from, from_native
from .waiting import wait_for_job

if TYPE_CHECKING:
    from .buffers import ExchangeBuffers
    from .nccl.jobs import StreamJob

Terms = list[tuple[Tensor, float]]
_POLL_S = 2e-5
_LONG_S = 3600.0


@dataclass
class Mean:
    """What an exchange gave.

    Attributes:
        terms: (payload uint8 laid out as ``layout``, coefficient): their sum is the weighted mean.
            They are the slot's buffers: a ``start`` after ``commit`` writes into them.
        headers: One a rank.
        weights: Normalised, one a rank, as used.
        verdict: None; or, from ``ExchangeWork.offer``, int64 [1] on the device: the round counts if
            the verdict is 0, and until it is known nobody knows.
        seconds: encode, header, exchange (waiting for messages), reduce, vote, wait (of ``wait()``)
            and total (on the engine thread).
        sent_bytes, received_bytes: Everything this rank sent to and got from its peers.
        counters: Minor page faults of the calling and the engine thread.
        digest: Of the payloads, the same on all replicas; 0 where nobody needs one.
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


@dataclass(eq=False)
class Round:
    """One exchange of a slot that is not applied yet: buffers, and how far it is.

    "voted": it failed after this rank's vote, so the terms are complete, and peers that got all
    votes may have applied them. "agreed": all votes are here.
    """

    header: Header
    layout: Layout
    own: Payload
    result: Payload | None
    state: Literal["started", "agreed", "voted"] = "started"
    terms: Terms = field(default_factory=list)
    epoch: int = 0
    headers: list[Header] = field(default_factory=list)
    digest: int = 0

    def complete(self, terms: Terms, headers: list[Header], digest: int) -> None:
        """Keep what is needed to apply the round, now that all of it is here."""
        self.terms, self.headers, self.digest = terms, headers, digest


class ExchangeWork:
    """An exchange under way.

    Attributes:
        payload: Our own encoded values; complete as soon as ``start`` has returned.
        layout: Of the payload.
    """

    def __init__(self, buffers: ExchangeBuffers, round: Round, job: _C.Job | StreamJob) -> None:
        self.payload = round.own.tensor
        self.layout = round.layout
        self._buffers = buffers
        self._round = round
        self._job = job
        self._num_collected = 0  # runs of the result
        self._outcome: Mean | None = None
        self._error: SyncError | None = None

    @property
    def headers(self) -> list[Header]:
        """Headers of all ranks, in rank order; empty until they have been exchanged."""
        return [from_native(header) for header in self._job.headers]

    def has_bad_values(self) -> bool:
        """Whether our own values were such that no wire carries them.

        On a device, the host asks until it has encoded them.
        """
        while (count := self._job.num_bad_encoded) is None:
            time.sleep(_POLL_S)
        return count > 0

    def forgo(self) -> None:
        """Make the payload, which is held, zeros of weight 0; ``has_bad_values`` said why."""
        own, header = self._round.own, self._round.header
        own.tensor.zero_()
        if own.host is not own.tensor:
            own.host.zero_()
        if own.ballot is not None:
            own.ballot.bad.zero_()
        self._buffers.residuals.forgo(self._buffers.wire)
        # NaN says that this replica has no weight to offer, which ends the round.
        weight = nan if isnan(header.weight) else 0.0
        self._round.header = replace(header, weight=weight, is_reset=True)

    def fail(self, error: SyncError) -> None:
        """End an exchange that was held, and cannot be sent."""
        self._error = error
        self._buffers.drop(self._round)

    def done(self) -> bool:
        """Whether ``wait()`` would return, or raise, at once."""
        return self._error is not None or self._job.is_done

    def wait(self, timeout: float | None = None) -> Mean:
        """Wait for the vote and return what the exchange gave.

        On a device, the caller's stream is made to wait until it is there; the host does not.

        Raises:
            ReplicaMismatch, PeerLeft, NonFiniteError, SyncError: There is no result, on no replica
                (after a SyncError at the vote some may have one; ``change_group`` settles it).
            TimeoutError: After ``timeout`` seconds; the exchange goes on.
            RuntimeError: In a forked child.
        """
        return self._wait_until(_deadline(timeout), timeout)

    def _wait_until(self, deadline: float, timeout: float | None) -> Mean:
        if self._error is not None:
            raise self._error
        if self._outcome is None:
            begin = time.perf_counter()
            while not wait_for_job(self._job, _until(deadline)):
                if time.perf_counter() >= deadline:
                    raise TimeoutError(f"the exchange was not done after {timeout} s")
            self._resolve(time.perf_counter() - begin)
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        self._job.block_caller()
        return self._outcome

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
        while isinstance(job, _C.Job) and not job.is_done:
            landed = job.wait_landed(self._num_collected, _until(deadline))
            if landed == self._num_collected:
                break
            self._collect(landed, self._buffers.terms_of(self._round, job.weights), out, impl)
            if time.perf_counter() >= deadline:
                break
        outcome = self._wait_until(deadline, timeout)
        # The last part; all of them on a device, and of one rank alone.
        self._collect(self.layout.num_runs, outcome.terms, out, impl)
        return outcome

    def _collect(self, num_runs: int, terms: Terms, out: Tensor, impl: str) -> None:
        layout = self.layout
        begin, end = (
            min(runs * layout.run_elements, layout.num_elements)
            for runs in (self._num_collected, num_runs)
        )
        if begin < end:
            decode_terms(terms, layout, [out], begin, end, impl=impl)
        self._num_collected = num_runs

    def offer(self) -> Mean:
        """Return the outcome, with the verdict still open where it is found on the device.

        Who applies it passes the verdict on to the operator, and asks ``wait`` later.

        Raises:
            SyncError: As ``wait``, if it is known by now.
        """
        job = self._job
        if isinstance(job, _C.Job) or self._outcome is not None or self._error is not None:
            return self.wait()
        job.wait_for_headers()
        if job.is_done:
            return self.wait()
        job.block_caller()
        assert self._round.own.ballot is not None
        return Mean(
            terms=self._buffers.terms_of(self._round, job.weights),
            layout=self._round.layout,
            headers=[from_native(header) for header in job.headers],
            weights=list(job.weights),
            seconds={},
            sent_bytes=0,
            received_bytes=0,
            verdict=self._round.own.ballot.verdict,
        )

    def _resolve(self, wait_s: float) -> None:
        job, round = self._job, self._round
        job.block_caller()
        if job.failure is not None:
            self._error = error_from(job.failure, round.header, job.headers)
            standing = _standing(job, round)
            if standing == "voted":
                round.state = "voted"
                self._complete()
            else:
                self._buffers.drop(round, is_rejected=standing == "rejected")
            return
        round.state = "agreed"
        self._complete()
        self._buffers.residuals.turn(round.header.round)
        counters = dict(job.counters)
        self._outcome = Mean(
            terms=round.terms,
            layout=round.layout,
            headers=round.headers,
            weights=list(job.weights),
            seconds={**job.seconds, "encode": job.encode_seconds, "wait": wait_s},
            sent_bytes=counters.pop("sent_bytes"),
            received_bytes=counters.pop("received_bytes"),
            counters=counters,
            digest=round.digest,
        )

    def _complete(self) -> None:
        terms = self._buffers.terms_of(self._round, self._job.weights)
        self._round.complete(terms, self.headers, self._job.digest)


def _deadline(timeout: float | None) -> float:
    return inf if timeout is None else time.perf_counter() + timeout


def _until(deadline: float) -> float:
    """Seconds, as many as a C++ clock takes."""
    return min(deadline - time.perf_counter(), _LONG_S)


def _standing(job: _C.Job | StreamJob, round: Round) -> str:
    """Say how far a failed exchange was with the vote: "none", "voted" or "rejected".

    Only who has voted can hold a round that others have applied; nobody applies one of which
    anybody has seen a bad vote, its own among them.
    """
    if isinstance(job, _C.Job):
        return job.standing
    failure = job.failure
    assert failure is not None
    if failure.kind == "NonFiniteError":
        return "rejected"
    if failure.stage != "vote" or not job.weights:
        return "none"
    assert round.own.ballot is not None
    return "rejected" if bool(round.own.ballot.host_bad) else "voted"
