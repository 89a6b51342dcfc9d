"""Exchanges on streams that are under way: whether they are done, and how they have ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from ... import _C
from ...ops import finish_digest
from ..round import Round, shares
from ..waiting import WaitLog
from .connections import Connections

_POLL_S = 2e-5
# What a failure says of the other replicas, as ``_C.Failure`` does.
_NO_BLAME: dict[str, Any] = {"missing": [], "replicas": [], "cause": ""}


class StreamJob:
    """An exchange on streams; fulfils ``round.Job`` as the engine's jobs do.

    Args:
        control: The engine's job that exchanges and compares the headers.
        events: Everything is encoded; the first chunk may leave; all chunks are here; the verdict
            is. They tell the time, and the driver gets them back.
        presumed: Headers of all ranks as far as this one knows them: its own, with each weight.
        members: Replicas in rank order.
    """

    encode_seconds = 0.0

    def __init__(
        self,
        driver: Connections,
        control: _C.Job,
        round: Round,
        events: tuple[torch.Event, ...],
        presumed: list[_C.Header],
        members: Sequence[int],
        sent_bytes: int,
    ) -> None:
        assert round.own.ballot is not None
        self.driver, self.control = driver, control
        # Not the round itself: it holds this job, and such a circle lives until the next collection
        # of garbage, with the round's payloads on the device.
        self._header, self._ballot = round.header, round.own.ballot
        num_payloads = len(members) if round.num_phases == 1 else 1
        self._digest_bytes = num_payloads * round.mean_layout.payload_bytes
        self.encoded, self.leaving, self.data, self.done = events
        # Recorded on the caller's stream before and after that waits.
        self._stops: list[torch.Event] = []
        self._presumed, self.members = presumed, members
        self.weights = shares([header.weight for header in presumed])
        self.failure: Any = None
        self.counters = {"sent_bytes": sent_bytes, "received_bytes": sent_bytes}
        self._headers: list[_C.Header] = []
        self.has_data = self.has_votes = False
        self._begin = time.monotonic()
        self.is_decided = False
        driver.add(self)

    @property
    def headers(self) -> list[_C.Header]:
        """Every rank's, in rank order; what is presumed of them if the vote came without them."""
        return self._headers or self.control.headers

    @property
    def digest(self) -> int:
        """Of the payloads, once the vote is on the host."""
        product, total = self._ballot.host_digest.tolist()
        return finish_digest(product, total, self._digest_bytes)

    @property
    def seconds(self) -> dict[str, float]:
        """By the device's clock: of the exchange, and of the caller's stream without work."""
        return {"total": self.leaving.elapsed_time(self.done) / 1e3, "exposed": self._exposed_s()}

    @property
    def standing(self) -> str:
        """How far the vote of a failed exchange was: "none", "voted" or "rejected".

        Only a rank that has voted can hold a round that others have applied. Nobody applies a round
        of which any rank has seen a bad vote, the own vote among them.
        """
        assert self.failure is not None
        if self.failure.kind == "NonFiniteError":
            return "rejected"
        if self.failure.stage != "vote" or not self.weights:
            return "none"
        return "rejected" if bool(self._ballot.host_bad) else "voted"

    @property
    def waiting(self) -> str:
        """The replica whose header is waited for, in words; empty once all headers are here."""
        return self.control.waiting

    @property
    def num_bad_encoded(self) -> int | None:
        """Own elements that no wire carries; None: not on the host yet."""
        return int(self._ballot.host_bad) if self.encoded.query() else None

    @property
    def is_done(self) -> bool:
        if not self.is_decided:
            self._decide()
        return self.is_decided

    def wait(self, seconds: float) -> bool:
        """Poll until the exchange is decided; the host sleeps in between, never in the driver."""
        self._expect_wait()
        deadline = time.monotonic() + seconds
        while not self.is_done:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def wait_landed(self, runs: int, seconds: float) -> int:
        """Return ``runs`` at once: the host sees no part of a result before all of it."""
        return runs

    def wait_for_headers(self) -> None:
        """Wait until the headers are compared, or the exchange is decided."""
        self._expect_wait()
        log = WaitLog()
        while not self.control.is_done and not self.is_done:
            self.control.wait(0.05)
            log.tick(lambda: self.waiting)

    def __del__(self) -> None:
        self.driver.give_back((self.encoded, self.leaving, self.data, self.done, *self._stops))

    def _expect_wait(self) -> None:
        """Note on the caller's stream that the result is needed from here on."""
        if not self._stops:
            self._stop(torch.accelerator.current_stream(self.driver.device))

    def block_caller(self) -> None:
        stream = torch.accelerator.current_stream(self.driver.device)
        stream.wait_event(self.done)
        if len(self._stops) == 1:
            self._stop(stream)

    def _stop(self, stream: torch.Stream) -> None:
        self._stops.append(self.driver.take_event())
        self._stops[-1].record(stream)

    def _exposed_s(self) -> float:
        """Return for how long the caller's stream stood still; the exchange is over."""
        if len(self._stops) < 2 or not self._stops[0].query():
            return 0.0  # The stream gets there after the exchange.
        first, last = self._stops
        while not last.query():
            pass  # Between the two the stream does nothing but wait for the exchange.
        return first.elapsed_time(last) / 1e3

    def look(self) -> None:
        """Note how far the device is. After an abort every event is reached, whatever came."""
        if not self.driver.failure:
            self.has_data = self.has_data or self.data.query()
            self.has_votes = self.has_votes or self.done.query()

    def _decide(self) -> None:
        self.look()
        if self.driver.failure and not self.has_votes:
            why = f"its group was given up: {self.driver.failure}"
            self._fail("SyncError", self._ended(why))
        elif self.control.is_done and self.control.failure is not None:
            self._fail_with_control(self.control.failure)
        elif self.control.is_done and self.has_votes:
            self._count_votes()
        elif time.monotonic() - self._begin > self.driver.timeout:
            self._fail("SyncError", f"not done after {self.driver.timeout:g} s")
        elif not self.has_votes and (failure := self.driver.engine.dead_failure) is not None:
            # A change of the group has begun, or another exchange has lost a replica.
            self._fail("SyncError", self._ended(failure.message), missing=failure.missing)

    def _count_votes(self) -> None:
        ballot = self._ballot
        if quitters := ballot.quitters():
            names = ", ".join(str(self.members[rank]) for rank in quitters)
            self._fail("SyncError", f"replica {names} gave the round up before its vote")
            return
        self.is_decided = True
        message, replicas = _C.find_bad_elements(ballot.numbers(), list(self.members))
        if message:
            is_of_some = len(replicas) < len(self.members)
            self._set_failure(
                "NonFiniteError",
                self._named(message),
                "vote",
                replicas=replicas,
                missing=replicas if is_of_some else [],
            )

    def _fail_with_control(self, failure: _C.Failure) -> None:
        # A vote of all ranks counts, also if one of them left afterwards; a vote on rounds that are
        # not the same never does.
        if self.has_votes and failure.kind != "ReplicaMismatch" and not self._ballot.quitters():
            self._headers = self._presumed
            self._count_votes()
            return
        names = tuple(_NO_BLAME)
        more = {name: getattr(failure, name) for name in names}
        self._fail(failure.kind, failure.message, stage=failure.stage, **more)

    def _fail(self, kind: str, why: str, stage: str = "", **more: Any) -> None:
        message = self._named(why)
        self.driver.abort(message)
        is_mismatch = kind == "ReplicaMismatch"
        # Headers are compared before the outer step is enqueued: no round that differs is applied.
        is_over = not is_mismatch and self._is_over()
        if is_over and not bool(self._ballot.host_verdict):
            # The device found the vote unanimous before the abort, and has taken the outer step.
            self._headers = self._presumed
            self._count_votes()
            return
        # Where the data came before the abort the own vote may have left, with or without the
        # headers.
        has_data = self.has_data or (is_over and not bool(self._ballot.host_given_up))
        stage = "vote" if has_data and not is_mismatch else stage or "exchange"
        if stage == "vote":
            self._headers = self.control.headers or self._presumed
        self.is_decided = True
        self._set_failure(kind, message, stage, **more)

    def _named(self, why: str) -> str:
        header = self._header
        name = f"sync of fragment {header.fragment}, round {header.round}"
        return why if why.startswith(name) else f"{name}: {why}"

    def _ended(self, why: str) -> str:
        """Name the exchange, the place and the time of a failure, as the engine does."""
        where = f"round {self._header.round} failed at exchange"
        seconds = time.monotonic() - self._begin
        return f"sync of fragment {self._header.fragment}, {where} after {seconds:.1f} s: {why}"

    def _is_over(self) -> bool:
        """Wait until the device is past the vote, as it is after an abort; return whether it is."""
        # An abort ends the collectives; what was enqueued after them takes no time.
        deadline = time.monotonic() + self.driver.seconds_to_end()
        while not self.done.query() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return self.done.query()

    def _set_failure(self, kind: str, message: str, stage: str, **more: Any) -> None:
        seconds = time.monotonic() - self._begin
        self.failure = SimpleNamespace(
            kind=kind, message=message, stage=stage, seconds=seconds, **{**_NO_BLAME, **more}
        )
