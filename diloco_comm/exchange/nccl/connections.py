"""The NCCL connections between the replicas' devices in one epoch, and how they are ended."""

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
# NCCL chooses a protocol by the size of a collective, and connects for it at its first use.
CONNECT_BYTES = 16 << 20
_POLL_S = 1e-3
# Seconds for which the host waits for NCCL to end a group, and for the device to pass a vote after
# an abort.
END_S = 5.0
# The share of the time for closing that is kept for ending the group.
_END_SHARE = 0.25

_log = logger_of(__name__)


class Watched(Protocol):
    """An exchange on these connections, as ``Connections`` sees it.

    Attributes:
        has_votes: The votes of all replicas had come before the group was aborted.
    """

    has_votes: bool

    @property
    def is_done(self) -> bool:
        """Whether the exchange has ended; queries the device."""
        ...

    def look(self) -> None:
        """Query how far the device is, and keep the answer."""
        ...


class Connections:
    """This replica's device, connected with those of the other replicas for one epoch.

    All collectives are enqueued on one side stream.

    Args:
        device: The device of this replica.
        group: The replicas' NCCL group; None if there is one replica.
        rank, size: Rank of this replica, and number of replicas.
        timeout: Seconds that an exchange may take.
        engine: The engine that exchanges headers and other small messages. When its epoch fails,
            exchanges here fail, too.

    Attributes:
        failure: Why no new exchange may start; "" while one may.
        side: The side stream.
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
        # A flag that the device reads before and after each vote. ``abort`` sets the flag first, so
        # the device never takes what an aborted collective has left in memory for a result.
        self._given_up = page_locked(1, torch.int64)

    def take_event(self) -> torch.Event:
        """Return an event with timing: a used one that was given back, or a new one."""
        if self._free_events:
            return self._free_events.pop()
        return torch.Event(self.device, enable_timing=True)

    def give_back(self, events: Iterable[torch.Event]) -> None:
        """Take back events that nobody queries any more; streams may still wait for them."""
        self._free_events.extend(events)

    def add(self, job: Watched) -> None:
        """Keep a weak reference to an enqueued exchange, for ``abort`` and ``seal``."""
        self._jobs.add(job)

    def connect(self, timeout: float) -> None:
        """Run each kind of collective once, so that NCCL makes its connections now.

        Else the first exchange would wait for them. A helper thread runs the collectives, as NCCL
        itself sets no limit to the time that connecting takes.

        Args:
            timeout: Most seconds to connect.

        Raises:
            SyncError: If the collectives do not end within the timeout, or fail.
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
            # NCCL may never return: abandon the group together with the helper thread.
            self.failure, self.group = why, None
        raise SyncError(why, stage="connect", seconds=time.monotonic() - begin) from call.error

    def _make_connections(self, group: dist.ProcessGroup) -> torch.Event:
        """Enqueue a collective of each kind; return an event after them."""
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
                    group.abort()  # ``connect`` has abandoned this thread meanwhile.
            done = torch.Event(self.device)
            done.record(self.side)
        return done

    def abort(self, reason: str) -> None:
        """End the exchanges under way: their streams go on, but no vote succeeds any more.

        NCCL ends its group when the device has done the work that was enqueued before. The host
        waits for that for ``END_S`` seconds at most, or for the rest of the time for closing. No
        vote depends on when the group ends.
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
        """Return the seconds for which the host may wait for NCCL or the device now."""
        return max(0.0, min(END_S, self._deadline - time.monotonic()))

    def seal(self, reason: str) -> None:
        """Allow no new exchange, and end the exchanges under way.

        If all of these have all votes, the connections stay until ``abort``, as this replica's
        messages may still be on their way to others.
        """
        for job in list(self._jobs):
            job.look()
        if not all(job.has_votes for job in self._jobs):
            self.abort(reason)
        elif self.group is not None:
            self.failure = self.failure or reason

    def close(self, patience: float = END_S) -> None:
        """End the exchanges and the connections.

        Args:
            patience: Seconds that the host may wait in all: most of them for exchanges under way,
                a share for ending the group, which is abandoned after that.
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
        # ``is_done`` also finds out whether a job has lost a peer; then the job aborts the group.
        return all(job.is_done or job.has_votes for job in list(self._jobs))

    def _send_chunk(self, group: dist.ProcessGroup, received: Tensor, own: Tensor) -> dist.Work:
        """Send each rank its run of the chunk ``own``.

        ``received`` gets, from all ranks, the run of the chunk that this rank averages.

        Returns:
            The work of the collective.
        """
        return group.alltoall_base(received, own, [], [])

    def _send_to_all(
        self, group: dist.ProcessGroup, received: list[Tensor], own: Tensor
    ) -> dist.Work:
        """Send the chunk ``own`` to every other rank; the others' chunks come into ``received``."""
        if self.size == 2:
            splits = [0 if rank == self.rank else own.numel() for rank in range(2)]
            return group.alltoall_base(received[0], own, splits, splits)
        # NCCL neither sends nor receives a tensor without elements.
        outs, given = list(received), [own] * self.size
        outs.insert(self.rank, own[:0])
        given[self.rank] = own[:0]
        return group.alltoall(outs, given)
