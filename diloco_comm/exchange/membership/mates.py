"""How worker 0 of a replica breaks off the rounds of the replica's other workers."""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable, Sequence

from ... import _C
from ...group.beats import Way

_LISTEN_S, _REACH_AGAIN_S = 0.5, 3.0
_EPOCH = struct.Struct("<q")
# In the place of an epoch: the attempt that is under way.
_ATTEMPT = -1


class Mates:
    """The workers of one replica, over their links; worker 0 speaks, and the others listen.

    A round of another worker may wait for a replica that has stopped. The agreement of the group,
    at worker 0, finds that out.

    Args:
        link: The link of this worker.
        ways: To the links of all workers.
        rank: Of this worker.
        service: Names the messages, equal on all workers of this replica, and on no other.

    Attributes:
        is_void: Worker 0 has given up the attempt under way.
    """

    def __init__(self, link: _C.Link, ways: Sequence[Way], rank: int, service: str) -> None:
        self._link, self._service = link, service
        self._others = [way for way in ways[1:] if way != ways[0]] if rank == 0 else [ways[0]]
        self._seal: Callable[[], None] = lambda: None
        self._epoch: Callable[[], int] = lambda: 0
        self._is_closed = False
        self.is_void = False
        link.told(service, 0.0)
        run = self._reach if rank == 0 else self._listen
        self._thread = threading.Thread(target=run, daemon=True, name="diloco_comm mates")
        self._thread.start()

    def guard(self, seal: Callable[[], None], epoch: Callable[[], int]) -> None:
        """Call ``seal`` when worker 0 breaks the rounds of ``epoch`` off."""
        self._seal, self._epoch = seal, epoch

    def break_off(self, epoch: int) -> None:
        """Break off the rounds of the other workers in an epoch; at worker 0."""
        for way in self._others:
            self._link.tell(way.nonce, self._service, _EPOCH.pack(epoch))

    def give_up(self) -> None:
        """Let the other workers give up the attempt under way; at worker 0."""
        self.break_off(_ATTEMPT)

    def close(self) -> None:
        """End the thread soon; idempotent."""
        self._is_closed = True

    def _reach(self) -> None:
        wait = threading.Event()
        with contextlib.suppress(RuntimeError):  # The link was closed.
            while not self._is_closed:
                self._link.reach(self._service, [way.words for way in self._others])
                wait.wait(_REACH_AGAIN_S)
            self._link.reach(self._service, [])

    def _listen(self) -> None:
        with contextlib.suppress(RuntimeError):  # The link was closed.
            self._link.reach(self._service, [way.words for way in self._others])
            while not self._is_closed:
                for nonce, message in self._link.told(self._service, _LISTEN_S):
                    if nonce != self._others[0].nonce or len(message) != _EPOCH.size:
                        continue
                    (epoch,) = _EPOCH.unpack(message)
                    if epoch == _ATTEMPT:
                        self.is_void = True
                    elif epoch == self._epoch():
                        self._seal()
            self._link.reach(self._service, [])
