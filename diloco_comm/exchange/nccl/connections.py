"""The connections of the replicas' devices in one epoch: made, given up, and ended."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ... import _C
from ...base.checks import logger_of
from ...base.errors import SyncError
from ...base.memory import GIVEN_UP, current, page_locked
from .group import HelperThread

# Bytes of the collectives that make the connections: a chunk of the default size (``buffers``).
# NCCL chooses the way of a collective by its size, and connects each way at its first use.
CONNECT_BYTES = 16 << 20
_POLL_S = 1e-3
# How long the host waits for NCCL to end a group, and for the device to be past an aborted vote.
END_S = 5.0
# The share of the time for closing that stays for ending the group.
_END_SHARE = 0.25

_log = logger_of(__name__)


class Watched(Protocol):
    """An exchange on these connections.

    Attributes:
        has_votes: The votes of all replicas were here before the group was given up.
    """

    has_votes: bool

    @property
    def is_done(self) -> bool:
        """Whether the exchange is decided, after another look at the device."""
        ...

    def look(self) -> None:
        """Note how far the device is."""
        ...


class Connections:
    """This replica's device, connected with those of the other replicas for one epoch.

    All collectives are enqueued on one side stream.

    Args:
        group: The replicas' NCCL group, which runs its collectives on streams of NCCL; None if
            there is one replica.
        timeout: Seconds that an exchange may take.
        engine: Exchanges small messages while collectives run. Exchanges fail with its epoch.

    Attributes:
        failure: Why no new exchange may start; "" while one may. ``abort`` gives up the exchanges
            under way.
    """

    def __init__(
        self,
        device: torch.device,
        group: dist.ProcessGroup | None,
        rank: int,
        size: int,
        timeout: float,
        engine: _C.Engine,
    ) -> None:
        self.engine = engine
        self.device, self.group = device, group
        self.rank, self.size, self.timeout = rank, size, timeout
        self.failure = ""
        self._is_aborted = False
        self._deadline = math.inf  # of closing
        self._helper = None if group is None else HelperThread(device)
        self._own_stream = _C.OwnStream(device)
        self.side = self._own_stream.stream
        self._jobs: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._free_events: list[torch.Event] = []
        # A flag that the device reads before and after each vote. An aborted collective ends after
        # the flag is set, so whatever that collective leaves behind is never taken for a result.
        self._given_up = page_locked(1, torch.int64)

    def take_event(self) -> torch.Event:
        """Return an event that tells the time, one that was given back if there is one."""
        if self._free_events:
            return self._free_events.pop()
        return torch.Event(self.device, enable_timing=True)

    def give_back(self, events: Iterable[torch.Event]) -> None:
        """Take events that nobody asks any more; what waits for them on a stream waits on."""
        self._free_events.extend(events)

    def add(self, job: Watched) -> None:
        """Watch over an exchange that is enqueued, for as long as its caller holds it."""
        self._jobs.add(job)

    def connect(self, timeout: float) -> None:
        """Make each kind of collective once: the first of a kind makes its connections.

        The host waits for the connections here, so that the first exchange does not. The helper
        thread makes them: nothing else bounds the time in which NCCL meets the other replicas.

        Args:
            timeout: Seconds that the connecting may take.

        Raises:
            SyncError: If the collectives do not come about within the timeout, or fail.
        """
        if self.group is None:
            return
        assert self._helper is not None
        begin, group = time.monotonic(), self.group
        call = self._helper.begin(lambda: self._make_connections(group))
        has_ended = call.join(timeout)
        if has_ended and call.error is None:
            while not call.result.query() and time.monotonic() - begin < timeout:
                time.sleep(_POLL_S)
            if call.result.query():
                return
        why = f"the replicas' devices did not connect within {timeout:g} s"
        if call.error is not None:
            why = f"the replicas' devices did not connect: {' '.join(str(call.error).split())}"
        if has_ended:
            self.abort(why)
        else:
            # NCCL may never return: the group is left to its thread.
            self.failure, self.group = why, None
        raise SyncError(why, stage="connect", seconds=time.monotonic() - begin) from call.error

    def _make_connections(self, group: dist.ProcessGroup) -> torch.Event:
        """Enqueue a collective of each kind; returns when all of them are done on the device."""
        with current(self.side):
            run_bytes = max(1, CONNECT_BYTES // self.size)
            own, received = torch.zeros(
                2, self.size * run_bytes, dtype=torch.uint8, device=self.device
            ).unbind()
            votes = torch.zeros(2 * self.size + 2, dtype=torch.int64, device=self.device)
            try:
                if self.size == 2:
                    self._send_to_all(group, [received], own).synchronize()
                else:
                    self._send_chunk(group, received, own).synchronize()
                    group._allgather_base(received, own[:run_bytes]).synchronize()
                group._allgather_base(votes[2:], votes[:2]).synchronize()
            finally:
                if self.group is None:
                    group.abort()  # This thread was left behind.
            done = torch.Event(self.device)
            done.record(self.side)
        return done

    def abort(self, reason: str) -> None:
        """End what is under way: the streams go on, and no vote on the streams is unanimous.

        NCCL ends its group when the device has done everything that was enqueued before. The host
        waits ``END_S`` seconds for that at most, or what is left of the time for closing: no vote
        depends on when the group ends.
        """
        if self._is_aborted or self.group is None:
            return
        for job in list(self._jobs):
            job.look()
        self.failure, self._is_aborted = self.failure or reason, True
        self._given_up.fill_(GIVEN_UP)
        self._end(self.group.abort)

    def _end(self, function: Callable[[], None]) -> None:
        assert self._helper is not None
        begin, call = time.monotonic(), self._helper.begin(function)
        if not call.join(self.seconds_to_end()):
            seconds = time.monotonic() - begin
            _log.warning(
                "the replicas' NCCL group has not ended after %.3g s: left behind", seconds
            )
        elif call.error is not None:
            _log.warning("the replicas' NCCL group did not end well: %s", call.error)

    def seconds_to_end(self) -> float:
        """Return how long the host may wait for something to end."""
        return max(0.0, min(END_S, self._deadline - time.monotonic()))

    def seal(self, reason: str) -> None:
        """Let nothing more be enqueued, and end what is under way.

        Where all votes are here the connections stay as they are until ``abort``: what this replica
        has sent may still be on its way to others.
        """
        for job in list(self._jobs):
            job.look()
        if not all(job.has_votes for job in self._jobs):
            self.abort(reason)
        elif self.group is not None:
            self.failure = self.failure or reason

    def close(self, patience: float = END_S) -> None:
        """Give the connections up.

        Args:
            patience: Seconds that the host may wait in all. What is under way has most of them;
                a share stays for ending the group, which is left behind after that.
        """
        begin = time.monotonic()
        self._deadline = begin + patience
        settled_by = begin + (1 - _END_SHARE) * patience
        while not self._is_settled() and time.monotonic() < settled_by:
            time.sleep(_POLL_S)
        if self._is_settled() and self.group is not None and not self.failure:
            self.failure, self._is_aborted = "this DiLoCo is closed", True
            self._end(self.group.shutdown)
        self.abort("this DiLoCo is closed")
        self.group = None

    def _is_settled(self) -> bool:
        """Whether no exchange still needs the connections: all have ended, or the group has."""
        if self.failure or self.group is None:
            return True
        # A job whose peer is lost finds that out when it is asked, and aborts.
        return all(job.is_done or job.has_votes for job in list(self._jobs))

    def _send_chunk(self, group: dist.ProcessGroup, received: Tensor, own: Tensor) -> dist.Work:
        """Send every rank its run of a chunk."""
        return group.alltoall_base(received, own, [], [])

    def _send_to_all(
        self, group: dist.ProcessGroup, received: list[Tensor], own: Tensor
    ) -> dist.Work:
        """Send the whole of a chunk to every other rank, whose chunks come into ``received``."""
        if self.size == 2:
            splits = [0 if rank == self.rank else own.numel() for rank in range(2)]
            return group.alltoall_base(received[0], own, splits, splits)
        # NCCL neither sends nor receives a tensor without elements.
        outs, given = list(received), [own] * self.size
        outs.insert(self.rank, own[:0])
        given[self.rank] = own[:0]
        return group.alltoall(outs, given)
