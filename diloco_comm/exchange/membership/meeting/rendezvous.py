"""Agree through a store on the members of the next epoch, and build its groups."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .... import _C
from ....base import extension
from ....base.background import batch_threads
from ....base.errors import ReplicaMismatch, SyncError
from ...waiting import WaitLog, store_advice
from ..own_link import Dial
from ..plans import Plan, current_group, own_place
from .attendance import Attendance, Limits, Pulses
from .founding import refuse_second_founding
from .meetings import BEAT_S, Meeting, Say, arrive, leave, make_room, open_meeting

if TYPE_CHECKING:
    Groups = list[dist.ProcessGroupGloo] | list[_C.LinkGroup]

# A participant that retries with other members first removes its old hello; a difference that
# outlasts this is a real one.
_MISMATCH_PATIENCE_S = 3.0
_POLL_S = (0.002, 0.05)
# Seconds between two probes of an idle connection, and the most probes without an answer that Linux
# takes. The kernel then ends a connection after an hour; a dead member is noticed long before.
_PROBE_S, _PROBES = 30, 127


def agree(
    store: dist.Store,
    replica: int,
    members: Sequence[int],
    *,
    former: Sequence[int],
    epoch: int,
    newest: int,
    settings: dict[str, Any],
    say: Say,
    limits: Limits,
    place: str = "a store",
    newest_members: Sequence[int] = (),
    is_given_up: Callable[[], bool] = lambda: False,
) -> Plan:
    """Meet all ``members`` and return the same plan to each of them.

    Args:
        store: Under a prefix of this exchange.
        replica: Id of this replica, one of ``members``.
        members: Sorted ids of the replicas of the next epoch.
        former: Members of the current epoch; none for a replica that is new.
        epoch: The current epoch, in which this replica's engine beats.
        newest: The newest epoch that this replica has agreed to enter, whether it began or not; the
            next epoch is above that of every participant.
        settings: Must be equal on all participants.
        say: Returns what the others are handed; called again and again while it returns None.
            "join" and "address" are read here too.
        limits: How long to wait for them.
        place: Where the store is, for the log.
        newest_members: Of that epoch, in which their engines may beat.
        is_given_up: This replica shall not wait any more.

    Raises:
        ReplicaMismatch: If a participant expects other members or has other settings.
        LeftBehind: If the others went on without this replica.
        SyncError: If a member did not come in time, or two cannot reach each other, or the store
            does not answer.
    """
    hello = {
        "nonce": uuid.uuid4().hex,
        "beat": 0,
        "members": list(members),
        "settings": {extension.HANDSHAKE_NAME: extension.HANDSHAKE, **settings},
        "version": extension.package_version(),
        "epoch": epoch,
        "is_member": bool(former),
        "place": own_place(),
        "newest": newest,
        "info": say(False),
    }
    key = f"hello/{replica}"
    started = time.monotonic()
    try:
        make_room(store, members)
        hello["meeting"] = open_meeting(store, members)
        found = arrive(store, key, hello)
        try:
            return _wait_for_plan(
                store,
                replica,
                members,
                hello,
                say,
                former,
                newest_members,
                limits,
                place,
                found,
                is_given_up,
            )
        finally:
            with contextlib.suppress(Exception):
                leave(store, key, hello)
    except SyncError as error:
        error.seconds = time.monotonic() - started
        raise
    except dist.DistError as error:
        raise SyncError(
            f"the store did not answer while replicas {list(members)} were to form a group: "
            f"{error}; {store_advice(error)}",
            stage="rendezvous",
            seconds=time.monotonic() - started,
        ) from error


def _wait_for_plan(
    store: dist.Store,
    replica: int,
    members: Sequence[int],
    hello: dict[str, Any],
    say: Say,
    former: Sequence[int],
    newest_members: Sequence[int],
    limits: Limits,
    place: str,
    found: str,
    is_given_up: Callable[[], bool],
) -> Plan:
    is_newcomer = not former
    joins = bool((hello["info"] or {}).get("join"))

    def training() -> tuple[int, Sequence[int]]:
        return current_group(store) if is_newcomer else (hello["epoch"], former)

    pulses = Pulses(store, training, limits.silence, (hello["newest"], newest_members))
    here = Attendance(replica, members, limits, pulses, is_newcomer)
    meeting = Meeting(store, members, hello, say, here, found)
    after = f" after epoch {hello['epoch']}" if former else ""
    where = f"the rendezvous of replicas {list(members)}{after} on {place}"
    log, pause = WaitLog(), _POLL_S[0]
    while True:
        plan = meeting.begun_plan()
        if plan is not None:
            return plan
        has_news = meeting.look()
        if is_newcomer:
            refuse_second_founding(store, meeting, pulses, joins=joins)
        now = time.monotonic()
        if meeting.differs_since is not None and now - meeting.differs_since > _MISMATCH_PATIENCE_S:
            # The own hello stays until the others have seen the difference for as long.
            time.sleep(BEAT_S + 4 * _POLL_S[1])
            raise ReplicaMismatch(meeting.difference, stage="rendezvous")
        meeting.give_up_if_time()
        if is_given_up():
            raise SyncError(f"{where} was given up", stage="rendezvous")
        log.tick(lambda: meeting.waiting_for(where))
        pause = _POLL_S[0] if has_news else min(2 * pause, _POLL_S[1])
        time.sleep(pause)


def build_groups(
    store: dist.Store,
    dial: Dial | None,
    epoch: int,
    rank: int,
    size: int,
    lanes: int,
    timeout: float,
) -> Groups:
    """Connect the groups of an epoch, two for each lane, named by number, within the timeout.

    Args:
        store: Where gloo's groups meet.
        dial: None for groups of gloo.

    Raises:
        SyncError: If a peer did not connect in time.
    """
    name, deadline = f"the groups of epoch {epoch}", time.monotonic() + timeout
    if dial is not None:
        return dial.groups(rank, lanes, timeout, name)
    prefixes = [dist.PrefixStore(f"{epoch}/{number}", store) for number in range(2 * lanes)]
    return [
        connect(prefix, rank, size, max(deadline - time.monotonic(), 0.1), name)
        for prefix in prefixes
    ]


def connect(
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
