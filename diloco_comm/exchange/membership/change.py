"""A change of the group as an exchange sees it: connect, hear what was agreed on, settle, go on.

The agreement of the group (``diloco_comm.group``) leads the change. A replica seals its epoch, and
says how far it is (``positions_of``); the next record says which rounds count (``missed_in``).
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from ... import _C
from ...base.background import batch_threads
from ...base.errors import SyncError
from ...group.streams import Positions, Rounds
from ...ops.wire import Layout
from ..round import Header, Round, Terms
from .member import Epoch, Member
from .own_link import Dial

Groups = list[dist.ProcessGroupGloo] | list[_C.LinkGroup]

# Seconds between two probes of an idle connection, and the most probes without an answer that Linux
# takes. The kernel then ends a connection after an hour; a dead member is noticed long before.
_PROBE_S, _PROBES = 30, 127
# Seconds in which the members of an epoch connect: hosts that reach each other take milliseconds.
# Groups of gloo cannot be given up before.
LIMIT_S, GLOO_LIMIT_S = 30.0, 10.0
# Rounds of a fragment that a replica names; all before have ended on all members.
_NAMED = 16
_HELD = ("voted", "agreed", "applied")


@dataclass(frozen=True)
class Agreed:
    """The next epoch, and the rounds of the last one that count.

    Attributes:
        decision: One stream for each fragment of this worker, by rising index; () for a replica
            without state.
    """

    epoch: Epoch
    decision: Positions = ()


@dataclass
class Repair:
    """A round that counts and that this replica has not applied.

    ``terms`` are laid out as ``layout``, the layout of a mean in the group at the time. A round
    counts only when all survivors have voted, and a replica that votes has the whole result: the
    terms are this replica's own, kept since its exchange ended. ``headers`` are the headers of that
    group, in rank order; the own header alone where streams were given up before the others came.
    """

    fragment: int
    round: int
    terms: Terms
    layout: Layout
    headers: list[Header]
    digest: int

    @classmethod
    def of(cls, round: Round) -> Repair:
        headers = round.headers or [round.header]
        return cls(*round.key, round.terms, round.mean_layout, headers, round.digest)


class Change(Protocol):
    """One attempt to begin an epoch.

    Attributes:
        members: All replicas of the next epoch, rising.
        token: Names the attempt, equal on all members and unlike any other one.
        store: Where groups of gloo and devices meet, under a prefix of this attempt; None over the
            link. Reading this raises SyncError where the store does not answer.
        ways: ``OwnLink.ways`` of each member's worker that is the peer of this one, in rank order;
            () where the exchange does not travel over the link.
    """

    @property
    def members(self) -> tuple[int, ...]: ...
    @property
    def token(self) -> str: ...
    @property
    def store(self) -> dist.Store | None: ...
    @property
    def ways(self) -> Sequence[Mapping[str, str]]: ...

    def guard(self, seal: Callable[[], None], epoch: Callable[[], int]) -> None:
        """Take functions for any thread: one ends the present epoch, one returns its number."""
        ...

    def is_void(self) -> bool:
        """Whether this attempt comes to nothing, as another one has begun; from any thread."""
        ...

    def entered(self, failure: SyncError | None) -> Agreed:
        """Say that all members are connected here, or why not; wait until the epoch may begin.

        All workers of a replica call this, whatever became of their connections.

        Raises:
            SyncError: If this attempt comes to nothing.
        """
        ...


def connect(member: Member, change: Change) -> Groups:
    """Connect groups with the members of the next epoch; none where this replica is alone.

    Raises:
        SyncError: If a member did not connect in time, or is not let in.
    """
    members, name = change.members, "the groups of the members"
    rank, size = members.index(member.replica), len(members)
    limit = min(member.timeout, member.suspect_after, LIMIT_S)
    if size == 1:
        return []
    if member.tcp is not None:
        dial = Dial(member.tcp, f"{member.name}/{change.token}", members, change.ways)
        return dial.groups(rank, member.lanes, limit, name, change.is_void)
    deadline, store = time.monotonic() + min(limit, GLOO_LIMIT_S), change.store
    assert store is not None
    return [
        connect_gloo(
            dist.PrefixStore(f"{member.name}/{number}", store),
            rank,
            size,
            max(deadline - time.monotonic(), 0.1),
            name,
        )
        for number in range(2 * member.lanes)
    ]


def seal(member: Member) -> None:
    """End what is under way for good: no vote leaves this replica or is heard any more. Idempotent.

    Raises:
        SyncError: If this replica's own device or engine does not come to an end.
    """
    try:
        member.seal()
    except RuntimeError as error:
        raise SyncError(str(error), stage="seal") from error


def fragments_of(member: Member, last_rounds: Mapping[int, int]) -> list[int]:
    """Return the index of each fragment that ``positions_of`` names, rising."""
    held = [key[0] for buffers in member.all_buffers for key in buffers.standings()]
    return sorted({*last_rounds, *held})


def positions_of(member: Member, last_rounds: Mapping[int, int]) -> Positions:
    """Say how far a replica is that has sealed: one stream for each fragment, by rising index.

    Args:
        last_rounds: The last applied round of every fragment.
    """
    states: dict[int, dict[int, str]] = {fragment: {} for fragment in last_rounds}
    for buffers in member.all_buffers:
        for (fragment, number), standing in buffers.standings().items():
            states.setdefault(fragment, {})[number] = standing.state
    return tuple(
        [_rounds_of(last_rounds.get(fragment, -1), states[fragment]) for fragment in sorted(states)]
    )


def _rounds_of(last: int, states: Mapping[int, str]) -> Rounds:
    end = max([last, *states]) + 1
    first = max(0, end - _NAMED)
    bits = 0
    for number in range(first, end):
        # Rounds up to the last applied one that are not named are applied.
        is_held = states[number] in _HELD if number in states else number <= last
        bits |= is_held << number - first
    return Rounds(first, end - first, bits)


def missed_in(member: Member, fragments: Sequence[int], decision: Positions) -> list[Round]:
    """Return the rounds that count and that this replica has not applied.

    Args:
        fragments: The index of each fragment in the decision.
    """
    missed: list[Round] = []
    if len(fragments) != len(decision):
        # A replica without state, or without fragments, has no rounds.
        return missed
    for fragment, rounds in zip(fragments, decision, strict=True):
        for number in range(rounds.first, rounds.end):
            if rounds.holds(number):
                held = [buffers.held(fragment, number) for buffers in member.all_buffers]
                missed += [round for round in held if round is not None][:1]
    return missed


# ----------------------------------------------------------------------------- groups of gloo


def connect_gloo(
    store: dist.Store, rank: int, size: int, timeout: float, name: str
) -> dist.ProcessGroupGloo:
    """Connect a gloo group.

    gloo binds to GLOO_SOCKET_IFNAME, else to the host's address, else to loopback.

    Args:
        store: Under a prefix of this group.
        timeout: Seconds, to connect and of each collective.
        name: For the error.

    Raises:
        SyncError: If a peer did not connect in time.
    """
    started = time.monotonic()
    try:
        with batch_threads(), _kept_alive():
            return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))
    except RuntimeError as error:
        raise SyncError(
            f"{name} could not be connected: {error}",
            stage="connect",
            seconds=time.monotonic() - started,
        ) from error


@contextlib.contextmanager
def _kept_alive() -> Iterator[None]:
    """Let the kernel probe the TCP connections that gloo opens in this block (Linux).

    Between rounds nothing travels on a connection of gloo. A NAT or a firewall forgets an idle
    connection, and both of its ends would then wait for the whole timeout.

    gloo hands no socket out, so the sockets that are new in this process are probed. A connection
    that another thread opens meanwhile may be among them; probes do it no harm. Under
    TORCH_GLOO_LAZY_INIT gloo connects after this block, and its connections are not probed.
    """
    before = _socket_descriptors()
    yield
    for descriptor, _ in _socket_descriptors() - before:
        # Another thread may have closed the descriptor.
        with contextlib.suppress(OSError):
            _probe(descriptor)


def _socket_descriptors() -> set[tuple[int, str]]:
    """Return the sockets of this process, each with its inode; none on a system without /proc."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            # The descriptor of the listing itself is closed by now.
            with contextlib.suppress(OSError):
                link = os.readlink(f"/proc/self/fd/{name}")
                if link.startswith("socket:"):
                    found.add((int(name), link))
    return found


def _probe(descriptor: int) -> None:
    """Set the keepalive options of a connected TCP socket, and leave other sockets alone.

    Raises:
        OSError: If the descriptor is closed, or its socket is not connected.
    """
    # fromfd duplicates the descriptor. SOCK_NONBLOCK keeps a default timeout of Python's sockets
    # from changing the flags that both descriptors share.
    stream = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
    with socket.fromfd(descriptor, socket.AF_INET, stream) as connection:
        connection.getpeername()
        family = connection.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN)
        kind = connection.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
        if family in (socket.AF_INET, socket.AF_INET6) and kind == socket.SOCK_STREAM:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
