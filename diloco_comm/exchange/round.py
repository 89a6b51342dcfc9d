"""One round of a fragment: its header, its state, and the mean that its exchange brings.

    started -> agreed    all votes have come, and all are yes
            -> voted     failed after the own vote: peers that have all votes may apply the round
            -> rejected  failed by a vote no: nobody applies the round
            -> failed    failed before the own vote: nobody applies the round
    agreed, voted -> applied

A round holds its payloads while it is started, voted or agreed. The next change of the group
decides whether a voted round is applied or forgotten (``group.streams.decide``).
"""

from __future__ import annotations

import re
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from math import inf, isnan, nan
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from .. import _C, ops
from ..base.errors import ERRORS, NonFiniteError, ReplicaMismatch, SyncError, named
from ..base.memory import Payload
from ..ops.offload import Offloaded, chunks_of
from ..ops.residuals import Residuals
from ..ops.wire import Layout
from . import waits

Kind = Literal["sync", "flush", "all_reduce"]
# Pairs of a payload, uint8, and its coefficient. The weighted mean is the sum of the decoded
# payloads, each times its coefficient.
Terms = list[tuple[Tensor, float]]
RoundState = Literal["started", "agreed", "voted", "rejected", "failed", "applied"]
# The states of a round that replicas tell each other when the group changes.
State = Literal["voted", "agreed", "rejected", "applied"]

_NEXT: Mapping[RoundState, Sequence[RoundState]] = {
    "started": ("agreed", "voted", "rejected", "failed"),
    "agreed": ("applied",),
    "voted": ("applied",),
}
_POLL_S = 2e-5
_LONG_S = 3600.0  # C++ clocks cannot take an infinite time
# Seconds until the first look at the replicas for which a job waits. The next look follows after a
# tenth of the wait so far, but at most a second.
_LOOK_S = 0.01
# ``Job.waiting`` says this while the engine waits for a replica's header.
TO_BEGIN = re.compile(r"replica (\d+) to begin ")
# For error messages: the user's call behind a kind of exchange.
_CALLS = {
    "exchange_objects": "start of flush",
    "an agreement among all replicas": "start of flush",
    "all_reduce": "consensus",
}
# ``Header.gap`` of small messages that only a replica in ``flush`` sends.
END = -1.0
# Advice for errors, by the field of the header that differs.
_ADVICE = {
    "round": "load the same checkpoint on every replica",
    "outer_lr": "assign the same outer.lr on every replica",
    "protocol version": "install the same version of diloco_comm on every replica",
}
STATE_ADVICE = (
    "outer parameters, momentum or the rounds applied so far are not the same. Load the same "
    'checkpoint on every replica, or let the odd ones join anew (init="join")'
)


@dataclass
class Header:
    """The numbers that a replica sends to the others before an exchange.

    ``weight``, ``inner_step``, ``gap``, ``is_reset``, ``is_change_due`` and ``digest`` may differ
    between replicas; everything else, and the fragment's wire, block size and number of elements,
    must be equal on all of them.

    Attributes:
        gap: Divisor of the mean under ``CO2``, see ``CO2.gap_for``; the lowest replica's value
            counts. ``END`` in the small messages of a ``flush``.
        history: Number for all rounds applied to the fragment, see ``rounds.history``; 0 where no
            outer state is involved.
        is_reset: The replica's values cannot be encoded, as some are not finite or too large. Its
            payload is zeros of weight 0.
        is_change_due: The replica asks for a boundary after this round, for a change of the group.
        digest: A digest of the local parameters, below 2^32; 0 where none is needed.
    """

    kind: Kind = "sync"
    layout_hash: int = 0
    fragment: int = 0
    round: int = 0
    sync_every: int = 0
    num_fragments: int = 1
    weight: float = 1.0
    outer_lr: float = 0.0
    inner_step: int = 0
    gap: float = 1.0
    history: int = 0
    is_reset: bool = False
    is_change_due: bool = False
    digest: int = 0

    @classmethod
    def of(cls, native: _C.Header) -> Header:
        """Return a replica's header, as the engine has received it."""
        numbers = {name: getattr(native, name) for name in _NUMBERS}
        return cls(
            kind=cast(Kind, native.kind),
            is_reset=native.is_reset,
            is_change_due=native.is_change_due,
            digest=native.blob_bytes,
            **numbers,
        )

    def native(self, layout: Layout, num_chunks: int, stochastic: bool) -> _C.Header:
        """Return the header as the engine takes it, with the layout of the payload."""
        native = _C.Header(self.kind)
        for name in _NUMBERS:
            setattr(native, name, getattr(self, name))
        native.wire, native.block_size = layout.wire.name, layout.wire.block_size
        native.num_elements, native.num_chunks = layout.num_elements, num_chunks
        native.flags = int(stochastic) | (_C.RESET if self.is_reset else 0)
        native.flags |= _C.CHANGE if self.is_change_due else 0
        # A round has no blob, so the field for the blob's length carries the digest.
        native.blob_bytes = self.digest
        return native


# The fields that the engine's header has under the same names.
_NUMBERS = tuple(
    field.name
    for field in fields(Header)
    if field.name not in ("kind", "is_reset", "is_change_due", "digest")
)


@dataclass
class Mean:
    """The weighted mean that an exchange has brought.

    Attributes:
        terms: The mean as ``Terms``, with payloads laid out as ``layout``. These payloads are the
            fragment's buffers: a ``start`` after ``commit`` overwrites them.
        headers: The headers of all ranks.
        weights: The normalised weights of all ranks.
        verdict: None; or, with ``leaves_verdict``, int64 [1] on the device, which becomes 0 once
            all votes have come and are yes: then the round counts.
        seconds: Seconds of each stage: encode, header, exchange (waiting for messages), reduce,
            vote, wait (in ``wait()``) and total (on the engine thread). An exchange on streams has
            encode (always 0), wait, total and exposed: the time for which the caller's stream
            stood still.
        sent_bytes, received_bytes: All bytes that this rank has sent to and received from peers;
            of an exchange on streams, bytes of payloads only.
        counters: Minor page faults of the calling thread and of the engine's thread.
        digest: Digest of the payloads, the same on all replicas; 0 where none is needed.
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
    """Set elements [begin, end) of ``outs``, taken as one vector, to the weighted mean.

    Args:
        terms: The payloads and their coefficients; the mean is the sum of their products.
        layout: The layout of each payload.
        outs: fp32, bf16 or fp16 tensors, ``layout.num_elements`` in all.
    """
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


@dataclass(frozen=True)
class Standing:
    """How far a replica is with one round, and the epoch in which the round was sent."""

    state: State
    epoch: int


class Job(Protocol):
    """A started exchange: a job of the engine (``_C.Job``), or one on streams (``nccl.streams``).

    Attributes:
        waiting: Words for the log: the replicas and their messages that the job waits for.
        failure: Why the exchange failed; None before its end, and after success.
        standing: How far the vote of a failed exchange was: "none", "voted" or "rejected".
        headers: The headers in rank order; empty until they have been exchanged.
        weights: The normalised weights, in rank order.
        digest: Digest of the payloads, the same on all replicas.
        num_bad_encoded: How many own elements cannot be encoded, as they are not finite or too
            large; None until this is known.
    """

    @property
    def waiting(self) -> str: ...
    @property
    def is_done(self) -> bool: ...
    @property
    def failure(self) -> _C.Failure | None: ...
    @property
    def standing(self) -> str: ...
    @property
    def headers(self) -> list[_C.Header]: ...
    @property
    def weights(self) -> list[float]: ...
    @property
    def digest(self) -> int: ...
    @property
    def num_bad_encoded(self) -> int | None: ...
    @property
    def seconds(self) -> dict[str, float]: ...
    @property
    def encode_seconds(self) -> float: ...
    @property
    def counters(self) -> dict[str, int]: ...

    def wait(self, seconds: float) -> bool:
        """Wait until the job is done; return whether it is."""
        ...

    def wait_landed(self, runs: int, seconds: float) -> int:
        """Wait until more than ``runs`` runs of the result have come; return how many have."""
        ...

    def block_caller(self) -> None:
        """Make the caller's stream wait for the exchange's work on the device."""
        ...


@dataclass
class Sending:
    """The arguments of a round whose exchange stays on the device, on streams.

    Attributes:
        outer, params, stochastic, loader: See ``Exchange.start``.
        offered: The weights of all ranks, as their headers name them.
        encode_key, reduce_key: The keys of random rounding, in the encoding and in the reduction.
    """

    outer: Tensor | None
    params: list[Tensor]
    offered: list[float]
    stochastic: bool
    encode_key: int
    reduce_key: int
    loader: _C.ChunkLoader | None = None

    @property
    def weights(self) -> list[float]:
        """The normalised weights, in rank order."""
        return shares(self.offered)

    def pieces(self, layout: Layout, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the pieces in which elements [begin, end) of a chunk are encoded.

        One piece, or several if the outer parameters come from host memory piece by piece.
        """
        if self.loader is None:
            return [(begin, end)] if begin < end else []
        return chunks_of(layout, begin=begin, end=end)

    @contextmanager
    def outer_of(self, begin: int, end: int) -> Iterator[tuple[Tensor | None, int]]:
        """Run a block with the outer parameters of elements [begin, end) on the device.

        Yields:
            These outer parameters or all of them (None without any), and their first element's
            index.
        """
        if self.loader is None or self.outer is None:
            yield self.outer, 0
            return
        with Offloaded([self.outer], self.loader).chunk(begin, end, is_written=False) as (outer,):
            yield outer, begin


@dataclass(eq=False)
class Round:
    """One exchange of a fragment, from its start until it is applied or dropped.

    ``wait`` or ``collect`` give the mean to the caller, who started the exchange.

    Attributes:
        layout, mean_layout: Layout of the own payload, and of the mean's; see ``ExchangeBuffers``.
        num_phases: See ``ExchangeBuffers``; 0 in a saved round.
        own: The own encoded values, uint8, laid out as ``layout``; complete as soon as
            ``Exchange.start`` has returned, on a device for work that is enqueued from then on.
        result: The other payloads in the order of ranks, or the mean; None with one rank, and in a
            saved round.
        residuals: The fragment's residuals, which get the rounding errors of this round.
        epoch: The epoch in which the round was sent.
        rank: This replica's rank in the group of that epoch.
        terms: The mean, laid out as ``mean_layout``, once the round is agreed or voted.
        digest: Digest of the payloads, once the round is agreed or voted.
        job: The exchange; None in a saved round, and in a round on streams that is held.
        sending: The arguments of an exchange on streams; None for any other.
        encoded: Event at the end of the encoding, in a held round on streams; else None.
        error: Why there is no result; set in a round that is voted, rejected or failed.
        blame: Returns an error with the replicas that are missing; None if nothing does.
        waits_since: Monotonic time since when the caller waits for the job; 0 while it does not.
        awaited_s: By replica number, the seconds that the caller has waited until that replica
            began the round.
    """

    header: Header
    layout: Layout
    mean_layout: Layout
    num_phases: int
    own: Payload
    result: Payload | None
    residuals: Residuals
    state: RoundState = "started"
    terms: Terms = field(default_factory=list)
    epoch: int = 0
    digest: int = 0
    rank: int = 0
    job: Job | None = None
    sending: Sending | None = None
    encoded: torch.Event | None = None
    error: SyncError | None = None
    blame: Callable[[SyncError], SyncError] | None = None
    waits_since: float = field(default=0.0, init=False)
    awaited_s: defaultdict[int, float] = field(
        default_factory=partial(defaultdict, float), init=False
    )
    _headers: list[Header] = field(default_factory=list, init=False)
    _num_collected: int = field(default=0, init=False)  # runs of the result
    _wait_s: float = field(default=0.0, init=False)
    _mean: Mean | None = field(default=None, init=False)

    @property
    def key(self) -> tuple[int, int]:
        """The index of the fragment, and the number of the round."""
        return self.header.fragment, self.header.round

    @property
    def headers(self) -> list[Header]:
        """Headers of all ranks, in rank order; empty until they have been exchanged."""
        # An agreed or voted round has copied them.
        if self.terms or self.job is None:
            return self._headers
        return [Header.of(header) for header in self.job.headers]

    @headers.setter
    def headers(self, headers: list[Header]) -> None:
        self._headers = headers

    @property
    def received(self) -> list[Tensor]:
        """The payloads of the other ranks, in rank order."""
        assert self.result is not None
        return list(self.result.tensor.split(self.mean_layout.payload_bytes))

    def combine(self, weights: Sequence[float]) -> Terms:
        """Return the terms of the mean; their payloads need not have come completely yet."""
        own = self.own.tensor
        if self.result is None:
            return [(own, 1.0)]
        if self.num_phases == 2:
            return [(self.result.tensor, 1.0)]
        payloads = [self.result.tensor] if len(weights) == 2 else self.received
        payloads.insert(self.rank, own)
        return list(zip(payloads, weights, strict=True))

    # --------------------------------------------------------------------------- before it is sent

    def has_bad_values(self) -> bool:
        """Whether some own values cannot be encoded, as they are not finite or too large.

        If the values are on a device, the host waits until they are encoded.
        """
        while (count := self._num_bad_encoded()) is None:
            time.sleep(_POLL_S)
        return count > 0

    def _num_bad_encoded(self) -> int | None:
        if self.job is not None:
            return self.job.num_bad_encoded
        assert self.own.ballot is not None
        # Without an event the encoding has ended, and sending the round has failed after that.
        is_known = self.encoded is None or self.encoded.query()
        return int(self.own.ballot.host_bad) if is_known else None

    def forgo(self) -> None:
        """Replace a payload with bad values by zeros of weight 0, before it is sent."""
        own = self.own
        own.tensor.zero_()
        if own.host is not own.tensor:
            own.host.zero_()
        if own.ballot is not None:
            own.ballot.bad.zero_()
        self.residuals.forgo(self.layout.wire)
        # A weight of NaN stays: the function of the weight has failed, and this fails the round.
        weight = nan if isnan(self.header.weight) else 0.0
        self.header = replace(self.header, weight=weight, is_reset=True)

    def fail(self, error: SyncError) -> None:
        """End a round that was held, and cannot be sent."""
        self.error = error
        self.advance("failed")

    # ------------------------------------------------------------------------- how the round ends

    def done(self) -> bool:
        """Whether the exchange has ended, so that ``wait()`` would return, or raise, at once."""
        return self.state != "started" or (self.job is not None and self.job.is_done)

    def advance(self, state: RoundState) -> None:
        assert state in _NEXT.get(self.state, ()), f"a round that is {self.state} cannot be {state}"
        self.state = state

    def resolve(self) -> None:
        """Set the state of this round from its exchange, which is done; idempotent.

        Then an agreed or voted round has its terms; a voted, rejected or failed one its error.
        """
        if self.state != "started":
            return
        job = self.job
        assert job is not None, "the exchange is held, and was not sent"
        job.block_caller()
        state: RoundState = "agreed"
        if job.failure is not None:
            self.error = error_from(job.failure, self.header, job.headers)
            state = "rejected" if job.standing == "rejected" else "failed"
            state = "voted" if job.standing == "voted" else state
        if state == "agreed" or state == "voted":
            self.terms = self.combine(job.weights)
            self._headers = [Header.of(header) for header in job.headers]
            self.digest = job.digest
        self.advance(state)
        if state == "agreed" and self.residuals.is_kept:
            self.residuals.turn(self.header.round)

    def wait(self, timeout: float | None = None, *, leaves_verdict: bool = False) -> Mean:
        """Wait for the vote and return the mean.

        The host does not wait until the mean is complete on a device: the caller's stream does.

        Args:
            timeout: The most seconds to wait; None: no limit.
            leaves_verdict: For an exchange on streams: return as soon as the headers have come,
                with the votes still under way. The caller passes ``Mean.verdict`` to the operator
                that applies the mean, and calls ``wait`` again later.

        Raises:
            ReplicaMismatch, NonFiniteError, SyncError: No replica has a result. Only after a
                SyncError at the vote may some replicas have one; ``change_group`` settles that.
            TimeoutError: After ``timeout`` seconds; the exchange goes on.
            RuntimeError: In a forked child.
        """
        job = self.job
        if self.state == "started":
            assert job is not None, "the exchange is held, and was not sent"
            self.waits_since = time.monotonic()
            try:
                if leaves_verdict and self.sending is not None:
                    mean = self._open_mean(job)
                    if mean is not None:
                        return mean
                begin = time.perf_counter()
                if not wait_for_job(job, inf if timeout is None else timeout, self.awaited_s):
                    raise TimeoutError(f"the exchange was not done after {timeout} s")
                wait_s = time.perf_counter() - begin
            finally:
                self.waits_since = 0.0
            self.resolve()
            self._wait_s = wait_s
        if self.error is not None:
            if self.blame is not None:
                self.error, self.blame = self.blame(self.error), None
            raise self.error
        assert job is not None
        job.block_caller()
        if self._mean is None:
            counters = dict(job.counters)
            self._mean = Mean(
                terms=self.terms,
                layout=self.mean_layout,
                headers=self._headers,
                weights=list(job.weights),
                seconds={**job.seconds, "encode": job.encode_seconds, "wait": self._wait_s},
                sent_bytes=counters.pop("sent_bytes"),
                received_bytes=counters.pop("received_bytes"),
                counters=counters,
                digest=self.digest,
            )
        return self._mean

    def _open_mean(self, job: Any) -> Mean | None:
        """Return a mean whose votes are still under way; None if the exchange has ended.

        Args:
            job: A job on streams (``nccl.streams``).
        """
        assert self.own.ballot is not None
        job.wait_for_headers()
        if job.is_done:
            return None
        job.block_caller()
        return Mean(
            terms=self.combine(job.weights),
            layout=self.mean_layout,
            headers=[Header.of(header) for header in job.headers],
            weights=list(job.weights),
            seconds={},
            sent_bytes=0,
            received_bytes=0,
            verdict=self.own.ballot.verdict,
        )

    def collect(self, out: Tensor, timeout: float | None = None, *, impl: str = "") -> Mean:
        """Write the mean into ``out``, part by part as it arrives, and wait for the vote.

        So if the link is slow, only the last part is decoded after the last message. On a device
        all of it is decoded at the end. After an error the values of ``out`` are undefined.

        Args:
            out: Dense, as many elements as the payload; fp32, bf16 or fp16. It may be the tensor
                that was encoded.
            timeout: The most seconds to wait; None: no limit.

        Raises:
            ReplicaMismatch, NonFiniteError, SyncError, TimeoutError: As ``wait``; the
                next call goes on after a timeout, with the same ``out``.
        """
        deadline = inf if timeout is None else time.perf_counter() + timeout
        job = self.job
        assert job is not None, "the exchange is held, and was not sent"
        while not job.is_done:
            left = min(deadline - time.perf_counter(), _LONG_S)
            landed = job.wait_landed(self._num_collected, left)
            if landed == self._num_collected:
                break
            self._collect(landed, self.combine(job.weights), out, impl)
            if time.perf_counter() >= deadline:
                break
        try:
            mean = self.wait(max(0.0, deadline - time.perf_counter()))
        except TimeoutError:
            raise TimeoutError(f"the exchange was not done after {timeout} s") from None
        # The last part is left; on a device, or with one rank, all of them are.
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


def wait_for_job(
    job: Job, seconds: float, awaited_s: defaultdict[int, float] | None = None
) -> bool:
    """Wait as ``job.wait`` does, and log for which replicas if that takes long.

    Args:
        awaited_s: For each replica, by number, the seconds until it began the round are added
            here. The last interval between two looks is missing: at most a tenth of the wait and
            at most a second, or 0.01 s.
    """
    begin = last = time.monotonic()
    deadline, log = begin + seconds, None
    while not job.wait(min(deadline - last, max(_LOOK_S, min((last - begin) / 10, 1.0)))):
        before, last, what_for = last, time.monotonic(), job.waiting
        if awaited_s is not None and (found := TO_BEGIN.match(what_for)):
            awaited_s[int(found[1])] += last - before
        if last >= deadline:
            return False
        if log is None and last - begin >= waits.FIRST_S:
            log = waits.WaitLog(last - begin)
        if log is not None:
            log.tick(lambda what_for=what_for: what_for)  # type: ignore[misc]
    return True


def shares(weights: Sequence[float]) -> list[float]:
    """Return each weight divided by their sum, rounded to fp32 as the C++ engine rounds it.

    So a coefficient that is computed here equals the engine's to the bit.
    """
    total = sum(weights)
    return array("f", (weight / total for weight in weights)).tolist()


def error_from(
    failure: _C.Failure, header: Header | None = None, headers: Sequence[_C.Header] = ()
) -> SyncError:
    """Return the exception for the failure of a job.

    Args:
        header: The own header, if the job was a round.
        headers: The headers of all ranks, if they have come.
    """
    message = _explained(failure.message, headers)
    error = ERRORS[failure.kind](
        message,
        fragment=-1 if header is None or header.kind == "all_reduce" else header.fragment,
        round=-1 if header is None or header.kind == "all_reduce" else header.round,
        stage=failure.stage,
        seconds=failure.seconds,
        missing=failure.missing,
    )
    if failure.cause:
        error.__cause__ = RuntimeError(failure.cause)
    if isinstance(error, NonFiniteError):
        error.replicas = tuple(failure.replicas)
    if isinstance(error, ReplicaMismatch):
        training, ended = _kinds(headers)
        is_end = bool(ended) and all(header.gap == END for header in ended)
        if is_end and _are_near(training, ended):
            error.ended = tuple(header.replica for header in ended)
            error.fragment = training[0].fragment
    return error


def _explained(message: str, headers: Sequence[_C.Header]) -> str:
    """Return the engine's message, with advice or with the user's calls if headers differ."""
    if "outer state differs" in message:
        return f"{message}: {STATE_ADVICE}"
    for name, advice in _ADVICE.items():
        if f"{name} differs" in message:
            return f"{message}: {advice}"
    if "kind differs" not in message:
        return message
    training, ended = _kinds(headers)
    if ended:
        message = message[: message.index("kind differs")] + _uneven_steps(training, ended)
    for kind, call in _CALLS.items():
        message = message.replace(kind, call)
    return message


def _kinds(headers: Sequence[_C.Header]) -> tuple[list[_C.Header], list[_C.Header]]:
    """Return the headers of rounds, and of ``flush`` or other calls for all replicas.

    Both are [] if there is no header of a round, or one of any other kind.
    """
    training = [header for header in headers if header.kind == "sync"]
    ended = [header for header in headers if header.kind == "exchange_objects"]
    is_all = training and len(training) + len(ended) == len(headers)
    return (training, ended) if is_all else ([], [])


def _are_near(training: Sequence[_C.Header], ended: Sequence[_C.Header]) -> bool:
    """Whether all replicas that train are less than ``sync_every`` steps ahead of the ended ones.

    Then a flush of all replicas can share the training that was not sent.
    """
    latest = max(header.inner_step for header in training)
    return latest - min(header.inner_step for header in ended) < training[0].sync_every


def _uneven_steps(training: Sequence[_C.Header], ended: Sequence[_C.Header]) -> str:
    """Return the sentence for a group in which some replicas have ended, and others train."""
    steps = ", ".join(map(str, sorted({header.inner_step for header in ended})))
    has = "has" if len(ended) == 1 else "have"
    train = "trains" if len(training) == 1 else "train"
    return (
        f"{named([header.replica for header in ended])} {has} ended at inner step {steps} (flush, "
        "or another call for all replicas), while "
        f"{named([header.replica for header in training])} still {train}, at inner step "
        f"{training[0].inner_step}: "
        "give all replicas the same number of steps, see DiLoCo.agree_on_steps; one that a "
        "GradScaler skips counts if the optimizer is fused, or with attach=False and diloco.step() "
        "after each batch"
    )
