"""Exchanges on streams that are under way: whether they are done, and what became of them."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from . import _C
from .headers import Header
from .pending import Round

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .streams import StreamDriver

_POLL_S = 2e-5
# An abort ends the collectives; what was enqueued after them takes no time.
_ABORT_S = 5.0
# Differences in these are a mistake of the caller; the others are each replica's own.
_SHARED = ("kind", "layout_hash", "fragment", "round", "sync_every", "num_fragments")


class StreamJob:
    """An exchange on streams, with what ``slot.Pending`` asks of an engine's job.

    Args:
        control: The job that carries every rank's header.
        events: Everything is encoded; all chunks are here; the verdict is.
        members: Replicas in rank order.
    """

    encode_seconds = 0.0

    def __init__(
        self,
        driver: StreamDriver,
        control: _C.Job,
        round: Round,
        events: tuple[torch.Event, ...],
        weights: list[float],
        members: Sequence[int],
        sent_bytes: int,
    ) -> None:
        self.driver, self.control, self.round = driver, control, round
        self.encoded, self.data, self.done = events
        self.weights, self.members = weights, members
        self.failure: Any = None
        self.counters = {"sent_bytes": sent_bytes, "received_bytes": sent_bytes}
        self.seconds: dict[str, float] = {}
        self._headers: list[Header] = []
        self.has_data = self.has_votes = False
        driver._jobs.add(self)
        self._begin = time.monotonic()
        self._is_decided = False

    @property
    def headers(self) -> list[Any]:
        """Every rank's, in rank order; our own for all when theirs did not come."""
        if not self._headers and self.control.is_done and self.control.failure is None:
            texts = [bytes(blob.numpy().tobytes()) for blob in self.control.blobs]
            own = header_bytes(self.round.header)
            self._headers = [Header(**json.loads(text)) for text in texts or [own]]
        return self._headers

    @property
    def num_bad_encoded(self) -> int | None:
        """Own elements that no wire carries; None: not on the host yet."""
        assert self.round.own.ballot is not None
        return int(self.round.own.ballot.host_bad) if self.encoded.query() else None

    @property
    def is_done(self) -> bool:
        if not self._is_decided:
            self._decide()
        return self._is_decided

    def wait(self, seconds: float) -> bool:
        """Ask until it is decided; the host sleeps in between and never waits in the driver."""
        deadline = time.monotonic() + seconds
        while not self.is_done:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def wait_for_headers(self) -> None:
        """Wait until it is known that all replicas mean the same exchange."""
        while not self.control.is_done and not self.is_done:
            self.control.wait(0.05)

    def block_caller(self) -> None:
        torch.accelerator.current_stream(self.driver.device).wait_event(self.done)

    def look(self) -> None:
        """Note how far the device is. After an abort every event is reached, whatever came."""
        if not self.driver.failure:
            self.has_data = self.has_data or self.data.query()
            self.has_votes = self.has_votes or self.done.query()

    def _decide(self) -> None:
        self.look()
        if self.driver.failure and not self.has_votes:
            self._fail("SyncError", f"its group was given up: {self.driver.failure}")
        elif self.control.is_done and (self.control.failure is not None or self._mismatch()):
            self._fail_with_control()
        elif self.control.is_done and self.has_votes:
            self._count_votes()
        elif time.monotonic() - self._begin > self.driver.timeout:
            self._fail("SyncError", f"not done after {self.driver.timeout:g} s")

    def _count_votes(self) -> None:
        assert self.round.own.ballot is not None
        self._is_decided = True
        self.seconds["total"] = time.monotonic() - self._begin
        numbers = self.round.own.ballot.numbers()
        message, replicas = _C.find_bad_elements(numbers, list(self.members))
        if message:
            self._set_failure("NonFiniteError", self._named(message), "vote", replicas=replicas)

    def _mismatch(self) -> str:
        headers = self.headers
        for name in _SHARED:
            for replica, header in zip(self.members, headers, strict=False):
                values = getattr(headers[0], name), getattr(header, name)
                if values[0] != values[1]:
                    return (
                        f"{name} differs between replicas: {values[0]!r} on replica "
                        f"{self.members[0]}, {values[1]!r} on replica {replica}"
                    )
        return ""

    def _fail_with_control(self) -> None:
        failure = self.control.failure
        # A vote that everybody took part in counts, whoever left after it.
        if failure is not None and self.has_votes:
            self._headers = [self.round.header] * len(self.members)
            self._count_votes()
            return
        if failure is None:
            self._fail("ReplicaMismatch", self._mismatch(), stage="header")
            return
        names = ("missing", "replicas", "inner_steps", "cause")
        more = {name: getattr(failure, name) for name in names}
        self._fail(failure.kind, failure.message, stage=failure.stage, **more)

    def _fail(self, kind: str, why: str, stage: str = "", **more: Any) -> None:
        # Known from before the abort, which lets every event be reached.
        stage = "vote" if self.has_data and kind == "SyncError" else stage or "exchange"
        message = self._named(why)
        self.driver.abort(message)
        if self._was_unanimous():
            self._headers = [self.round.header] * len(self.members)
            self._count_votes()
            return
        self._is_decided = True
        self._set_failure(kind, message, stage, **more)

    def _named(self, why: str) -> str:
        header = self.round.header
        return f"sync of fragment {header.fragment}, round {header.round}: {why}"

    def _was_unanimous(self) -> bool:
        """Whether the vote was complete when the abort came: the outer step has then been taken."""
        assert self.round.own.ballot is not None
        deadline = time.monotonic() + _ABORT_S
        while not self.done.query() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return self.done.query() and not bool(self.round.own.ballot.host_counts.any())

    def _set_failure(self, kind: str, message: str, stage: str, **more: Any) -> None:
        empty: dict[str, Any] = {"missing": [], "replicas": [], "inner_steps": [], "cause": ""}
        seconds = time.monotonic() - self._begin
        self.failure = SimpleNamespace(
            kind=kind, message=message, stage=stage, seconds=seconds, **{**empty, **more}
        )


def header_bytes(header: Header) -> bytes:
    """What a replica tells the others of an exchange."""
    return json.dumps(asdict(header)).encode()
