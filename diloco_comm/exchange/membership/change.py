"""A change of the group, as an exchange carries it out: connect, settle the old rounds, go on.

The agreement of the group (``diloco_comm.group``) leads the change. A replica seals its epoch, and
reports how far its rounds are (``positions_of``). The next record decides which rounds count, and
``missed_in`` returns the ones that this replica has yet to apply.
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

# Seconds between two probes of an idle connection, and after how many unanswered probes the kernel
# ends the connection; Linux allows no more. So that takes an hour: the probes only keep idle
# connections alive, and dead members are noticed by their missing beats.
_PROBE_S, _PROBES = 30, 127
# Longest seconds in which the members of an epoch must connect, over the link and over gloo. Hosts
# that reach each other take milliseconds. Connecting over gloo cannot be stopped early.
LIMIT_S, GLOO_LIMIT_S = 30.0, 10.0
# A replica reports on so many latest rounds of a fragment; all before have ended on all members.
_NAMED = 16
_HELD = ("voted", "agreed", "applied")


@dataclass(frozen=True)
class Agreed:
    """The next epoch, and the rounds of the last one that count.

    Attributes:
        decision: For each fragment of this worker, by rising index, the rounds that count; () for
            a replica that brings no outer state.
    """

    epoch: Epoch
    decision: Positions = ()


@dataclass
class Repair:
    """A round that counts and that this replica has yet to apply.

    A round counts only if all survivors have voted for it, and a replica that votes has the whole
    result. So the payloads are this replica's own, kept since the exchange ended.

    Attributes:
        fragment, round: Index of the fragment, and number of the round.
        terms: The mean, laid out as ``layout``.
        layout: The layout of a mean in the group of that round.
        headers: The headers of that group, in rank order; only the own header if an exchange
            on streams (NCCL) was given up before the other headers arrived.
        digest: Digest of the payloads.
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
        members: The numbers of all replicas of the next epoch, rising.
        token: The unique name of the attempt, equal on all members.
        store: The store at which gloo groups and NCCL connect, under a prefix of this attempt;
            None over the link. Reading this raises SyncError if the store does not answer.
        ways: In rank order, ``OwnLink.ways`` of each member's worker that is the peer of this one;
            () if the exchange does not travel over the link.
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
        """Take two functions, callable on any thread: one ends the epoch, one returns its number.

        The agreement calls ``seal`` when rounds under way are to fail.
        """
        ...

    def is_void(self) -> bool:
        """Whether another attempt has replaced this one, so that it fails; from any thread."""
        ...

    def entered(self, failure: SyncError | None) -> Agreed:
        """Report whether this worker is connected to all members; wait until the epoch may begin.

        All workers of a replica call this, also after a failure.

        Args:
            failure: Why this worker is not connected; None if it is.

        Raises:
            SyncError: If this attempt fails.
        """
        ...


def connect(member: Member, change: Change) -> Groups:
    """Return groups that connect the members of the next epoch; [] if this replica is alone.

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
    """End all exchanges of the epoch for good; idempotent.

    From now on no vote of this replica is sent, and no vote is received.

    Raises:
        SyncError: If the work of this replica's device or engine does not end.
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
    """Return how far the rounds of a sealed replica are: for each fragment, by rising index.

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
        # A round without a state is applied if it is not later than the last applied one.
        is_held = states[number] in _HELD if number in states else number <= last
        bits |= is_held << number - first
    return Rounds(first, end - first, bits)


def missed_in(member: Member, fragments: Sequence[int], decision: Positions) -> list[Round]:
    """Return the rounds that count and that this replica has yet to apply.

    Args:
        fragments: For each stream (``group.streams``) of the decision, the index of its fragment.
        decision: The rounds that count.
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
        store: The store with a prefix that only this group has.
        rank, size: Rank of this process in the group, and number of ranks.
        timeout: Most seconds to connect, and of each collective.
        name: How the error names the group.

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
            # One entry is the descriptor of the listing itself, which is closed by now.
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
