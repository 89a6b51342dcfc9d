"""Links of one process against a model of their promises, over a network that misbehaves.

A history of operations is generated: groups are formed and closed, messages are posted on both
sides and cancelled, links are closed and opened anew. A forwarder between the links cuts, holds
and splits the bytes. The model knows of each message whether the message must arrive, may fail, or
may still wait.

Messages of one stream (a group, a direction and a tag) have one size, except where a test is about
sizes that differ. After a cancel the model no longer knows which send meets which receive; then the
received messages are sent messages in the order of the sends, each at most once.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import permutations
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from commanded_network import Network
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from diloco_comm import _C

ANY_PORT = "127.0.0.1:0"
# No operation takes this long on a loaded machine: the operation hangs.
LIMIT_S = 60.0
EAGER_BYTES, FRAGMENT_BYTES, MOST_EARLY = 1024, 256 * 1024, 1024
# The size of a message by its tag: without a grant, with a grant, and in several fragments.
SIZES = (0, 1, 24, EAGER_BYTES, EAGER_BYTES + 1, 70000, FRAGMENT_BYTES + 1, 600000)
# The tag of sizes that differ is new each time.
FIRST_OTHER_TAG = 1000
GUARD, CANARY = 64, 0xA5
MOST_MEETINGS = 3
# Every sentence about a message that fails begins so, or is about sizes.
REASONS = ("connection closed by peer: rank ", "the group was closed", "the link was closed")
Pair = frozenset[int]


# ------------------------------------------------------------------------------------ the model


@dataclass(frozen=True)
class Key:
    """A stream: the messages of one direction in a group, with a tag."""

    meeting: int
    number: int
    sender: int
    receiver: int
    tag: int

    def payload(self, index: int, size: int) -> bytes:
        """Return the bytes of one message, which no other message has."""
        return random.Random(f"{self}/{index}").randbytes(size)


@dataclass(eq=False)
class Post:
    """A send or a receive, and its memory with a guard on both sides."""

    key: Key
    index: int
    is_send: bool
    size: int
    memory: torch.Tensor
    work: Any = None
    state: str = "posted"  # then "done", "failed" or "cancelled"
    found: list[int] = field(default_factory=list)  # the sends that have the received bytes

    @property
    def middle(self) -> torch.Tensor:
        return self.memory[GUARD : GUARD + self.size]

    @property
    def owner(self) -> int:
        return self.key.sender if self.is_send else self.key.receiver

    @property
    def is_eager(self) -> bool:
        return self.size <= EAGER_BYTES

    def __str__(self) -> str:
        kind = "send" if self.is_send else "receive"
        return f"{kind} {self.index} of {self.size} bytes in {self.key}"


@dataclass(eq=False)
class Stream:
    sends: list[Post] = field(default_factory=list)
    recvs: list[Post] = field(default_factory=list)
    is_loose: bool = False  # a message was cancelled
    payloads: dict[bytes, list[int]] = field(default_factory=dict)  # the sends by their bytes

    def side(self, is_send: bool) -> list[Post]:
        return self.sends if is_send else self.recvs


@dataclass(eq=False)
class Meeting:
    """The groups of one token, by rank."""

    groups: list[list[Any]]
    closed: set[tuple[int, int]] = field(default_factory=set)  # rank and number
    broken: set[Pair] = field(default_factory=set)  # every message between the two must end
    shaky: set[Pair] = field(default_factory=set)  # a message between the two may fail


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def eventually(holds: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
    deadline = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


class World:
    """Links with all that was posted; every method is an operation of a history."""

    def __init__(
        self, size: int, lanes: int, is_keyed: bool = False, has_network: bool = False
    ) -> None:
        self.size, self.lanes, self.is_keyed = size, lanes, is_keyed
        self.history = [f"World({size}, {lanes}, {is_keyed}, {has_network})"]
        self.limit_s = LIMIT_S
        self.most_early = MOST_EARLY
        self.descriptors = num_descriptors()
        self.network = Network() if has_network else None
        self.seeds = [os.urandom(32) if is_keyed else b"" for _ in range(size)]
        self.links = [_C.Link(ANY_PORT, ANY_PORT, seed) for seed in self.seeds]
        self.routes = {}
        if self.network is not None:
            for here, there in permutations(range(size), 2):
                self.routes[here, there] = self.network.route(self.links[there].address)
        self.meetings: list[Meeting] = []
        self.streams: dict[Key, Stream] = {}
        self.live: list[Post] = []
        self.ended: list[Post] = []
        self.num_others = 0
        self.num_breaks = 0
        self.is_quiet = True  # no frame may be dropped
        self.is_whole = False  # every lane has two connections
        self.is_failed = False
        self.armed: dict[tuple[int, int], int] = {}  # ways with a later cut, and their cuts before
        self._allow()

    def _allow(self) -> None:
        if self.is_keyed:
            for link in self.links:
                link.allow([other.public_key for other in self.links])

    def note(self, *parts: Any) -> None:
        self.history.append(" ".join(map(str, parts)))

    def fail(self, text: str) -> NoReturn:
        self.is_failed = True
        raise AssertionError("\n  ".join([text + "; the history is", *self.history]))

    # ------------------------------------------------------------------------------- groups

    def peers_of(self, rank: int) -> list[tuple[str, ...]]:
        """Return the places as one rank sees them."""
        places = []
        for other, link in enumerate(self.links):
            route = self.routes.get((rank, other))
            address = link.address if route is None else route.address
            places.append((link.nonce, address, link.public_key.hex()))
        return places

    def form(self, meanwhile: Callable[[], None] | None = None) -> Meeting | None:
        """Make groups of all links; with ``meanwhile`` they may fail, else they must not."""
        self.calm()
        number = len(self.meetings)
        self.note("form", number, "" if meanwhile is None else "with a cut")
        groups: list[list[Any]] = [[] for _ in self.links]
        errors: list[str] = []

        def call(rank: int) -> None:
            try:
                peers = self.peers_of(rank)
                token = f"meeting {number}"
                limit_s = self.limit_s if meanwhile is None else 5.0
                groups[rank] = self.links[rank].groups(token, rank, peers, self.lanes, limit_s)
            except RuntimeError as error:
                errors.append(f"rank {rank}: {error}")

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(self.size)]
        meeting = Meeting(groups)
        self.meetings.append(meeting)
        for thread in threads:
            thread.start()
        if meanwhile is not None:
            meanwhile()
        for thread in threads:
            thread.join(self.limit_s + 10.0)
            if thread.is_alive():
                self.fail("groups() does not return")
        if errors and meanwhile is None:
            self.fail(f"no groups: {errors}")
        if any("\n" in error or "rank" not in error.partition(": ")[2] for error in errors):
            self.fail(f"a sentence names no rank: {errors}")
        self.is_whole = all(
            link.counters()["open"] == 2 * self.lanes * (self.size - 1) for link in self.links
        )
        if errors:
            meeting.groups = [[None] * 2 * self.lanes for _ in self.links]
            meeting.closed = {
                (rank, one) for rank in range(self.size) for one in range(2 * self.lanes)
            }
            return None
        return meeting

    def close_group(self, at: int, rank: int, number: int) -> None:
        self.note("close group", at, rank, number)
        self.is_quiet = False
        meeting = self.meetings[at]
        meeting.groups[rank][number] = None
        meeting.closed.add((rank, number))

    def close_meeting(self, at: int) -> None:
        for rank in range(self.size):
            for number in range(2 * self.lanes):
                self.close_group(at, rank, number)

    def reopen(self, rank: int) -> None:
        """Close a link; another process takes its place."""
        self.note("reopen", rank)
        self.is_quiet = False
        self.num_breaks += 1
        self.links[rank].close()
        for meeting in self.meetings:
            meeting.broken |= {frozenset((rank, peer)) for peer in range(self.size) if peer != rank}
        self.links[rank] = _C.Link(ANY_PORT, ANY_PORT, self.seeds[rank])
        self._allow()
        for (_, there), route in self.routes.items():
            if there == rank:
                assert self.network is not None
                self.network.set(route, target=self.links[rank].address)

    def open_meetings(self) -> list[int]:
        every = self.size * 2 * self.lanes
        return [at for at, one in enumerate(self.meetings) if len(one.closed) < every]

    # ----------------------------------------------------------------------------- messages

    def post(self, key: Key, is_send: bool, size: int | None = None) -> Post | None:
        """Post the next message of a stream; None where the own group is closed."""
        meeting = self.meetings[key.meeting]
        owner, peer = (key.sender, key.receiver) if is_send else (key.receiver, key.sender)
        group = meeting.groups[owner][key.number]
        if group is None:
            return None
        stream = self.streams.setdefault(key, Stream())
        index = len(stream.side(is_send))
        size = SIZES[key.tag] if size is None else size
        memory = torch.full((size + 2 * GUARD,), CANARY, dtype=torch.uint8)
        post = Post(key, index, is_send, size, memory)
        self.note(post)
        if is_send:
            payload = key.payload(index, size)
            stream.payloads.setdefault(payload, []).append(index)
            post.middle.numpy()[:] = np.frombuffer(payload, dtype=np.uint8)
        stream.side(is_send).append(post)
        self.live.append(post)
        call = group.send if is_send else group.recv
        post.work = call([post.middle], peer, key.tag)
        return post

    def post_other_size(self, key: Key, sizes: tuple[int, int], sends_first: bool) -> None:
        """Post a send and a receive of other sizes, with a tag that nobody else has."""
        self.num_others += 1
        self.is_quiet = False
        key = Key(
            key.meeting, key.number, key.sender, key.receiver, FIRST_OTHER_TAG + self.num_others
        )
        for is_send in (sends_first, not sends_first):
            self.post(key, is_send, sizes[0 if is_send else 1])

    def flood(self, key: Key, count: int) -> None:
        """Send more small messages than the receiver keeps; then receive them."""
        for is_send in (True, False):
            for _ in range(count):
                self.post(key, is_send)
            # One line for all of them.
            self.history[-count:] = [f"{count} times: {self.history[-1]}"]
            time.sleep(0.02)
            self.check_credit(key)

    def check_credit(self, key: Key) -> None:
        """Check that the receiver keeps no more small messages than its credit allows."""

        def count(is_send: bool) -> int:
            ends = (key.meeting, key.sender, key.receiver)
            alike = [
                post
                for other, stream in self.streams.items()
                if (other.meeting, other.sender, other.receiver) == ends
                for post in stream.side(is_send)
                if post.is_eager
            ]
            # A message that was taken back may have travelled before.
            states = ("done",) if is_send else ("done", "cancelled", "failed")
            return sum(
                post.state in states or (post.work is not None and post.work.is_completed())
                for post in alike
            )

        num_sent = count(True)
        num_early = num_sent - count(False)
        if num_early > self.most_early and not self.may_fail(self.streams[key].sends[-1]):
            self.fail(f"{num_early} small messages have left, and nobody has taken them")

    def cancel(self, post: Post, by_timeout: bool) -> None:
        self.note("cancel", "by a timeout" if by_timeout else "by dropping", post)
        self.is_quiet = False
        if by_timeout:
            if self.wait(post, 0.001) != "cancelled":
                return
        else:
            self.take_back(post, "cancelled")
        self.streams[post.key].is_loose = True

    def take_back(self, post: Post, state: str) -> None:
        """The poster has the memory again, and fills it with other bytes."""
        post.state = state
        post.work = None
        self.check_guards(post)
        post.memory.fill_(CANARY)
        self.live.remove(post)
        self.ended.append(post)

    def check_guards(self, post: Post) -> None:
        memory = post.memory.numpy()
        if (memory[:GUARD] != CANARY).any() or (memory[GUARD + post.size :] != CANARY).any():
            self.fail(f"bytes were written beside the memory of {post}")

    # ------------------------------------------------------------------ what must come about

    def pair(self, post: Post) -> Pair:
        return frozenset((post.key.sender, post.key.receiver))

    def is_over(self, post: Post) -> bool:
        """Return whether a message must end because its group or its connections have ended."""
        meeting = self.meetings[post.key.meeting]
        ranks = (post.key.sender, post.key.receiver)
        is_closed = any((rank, post.key.number) in meeting.closed for rank in ranks)
        return is_closed or self.pair(post) in meeting.broken

    def may_fail(self, post: Post) -> bool:
        is_shaky = self.pair(post) in self.meetings[post.key.meeting].shaky
        return is_shaky or self.is_over(post)

    def partner(self, post: Post) -> Post | None:
        """Return the other side of a message, where the model knows the other side."""
        stream = self.streams[post.key]
        others = stream.side(not post.is_send)
        if stream.is_loose or post.index >= len(others):
            return None
        return others[post.index]

    def must_end(self, post: Post) -> bool:
        return self.is_over(post) or self.partner(post) is not None

    def wait(self, post: Post, limit_s: float) -> str:
        """Wait for a message, judge the outcome, and return it."""
        try:
            is_success = post.work.wait(timedelta(seconds=limit_s))
        except RuntimeError as failure:
            error = str(failure)
            if error.startswith("timed out after"):
                self.take_back(post, "cancelled")
            else:
                self.judge_failure(post, error)
                self.take_back(post, "failed")
        else:
            if not is_success:
                self.fail(f"nobody has cancelled {post}, and the outcome is no success")
            self.judge_success(post)
            self.take_back(post, "done")
        return post.state

    def judge_failure(self, post: Post, error: str) -> None:
        if "\n" in error or "broken the protocol" in error:
            self.fail(f"{post} failed with {error!r}")
        if self.may_fail(post) and any(error.startswith(reason) for reason in REASONS):
            return
        does, other = ("sends", "expects") if post.is_send else ("expects", "sends")
        own = f"this process {does} {post.size} bytes with tag {post.key.tag}, and rank "
        for partner in self.streams[post.key].side(not post.is_send):
            is_named = error.endswith(f" {other} {partner.size} bytes")
            if partner.size != post.size and is_named and error.startswith(own):
                return
        self.fail(f"{post} failed with {error!r}, and nothing has happened to its group")

    def judge_success(self, post: Post) -> None:
        stream = self.streams[post.key]
        partner = self.partner(post)
        if post.is_send:
            if not post.is_eager and not stream.is_loose and not post.index < len(stream.recvs):
                self.fail(f"{post} is complete, and nobody has posted its receive")
            if partner is not None and partner.size != post.size and not post.is_eager:
                self.fail(f"{post} is a success, and the receive has {partner.size} bytes")
            return
        got = post.middle.numpy().tobytes()
        found = stream.payloads.get(got, [])
        post.found = found if stream.is_loose else [one for one in found if one == post.index]
        if not post.found:
            self.fail(f"{post} has other bytes than its send; sends {found} have these bytes")

    def settle(self) -> None:
        """Wait for all that must end, and compare both sides of every message."""
        self.calm()
        for post in list(self.live):
            if self.must_end(post) or post.work.is_completed():
                if self.wait(post, self.limit_s) == "cancelled":
                    self.fail(f"{post} does not end")
        for key, stream in self.streams.items():
            if stream.is_loose:
                self.check_order(key, stream)
                continue
            for send, recv in zip(stream.sends, stream.recvs, strict=False):
                if (send.state, recv.state) == ("done", "failed"):
                    self.check_loss(send, recv)
        self.check_ended()
        self.check_counters()

    def check_ended(self) -> None:
        """Check that nobody has written to memory that its poster has again."""
        for post in self.ended:
            if (post.memory.numpy() != CANARY).any():
                self.fail(f"bytes were written after the end of {post}")

    def check_order(self, key: Key, stream: Stream) -> None:
        """Check that received messages are sent messages in their order, each at most once."""
        last = -1
        for recv in stream.recvs:
            if recv.state == "done":
                later = [index for index in recv.found if index > last]
                if not later:
                    self.fail(f"{recv} has the bytes of sends {recv.found} after send {last}")
                last = later[0]

    def check_loss(self, send: Post, recv: Post) -> None:
        meeting = self.meetings[send.key.meeting]
        has_gone = (recv.key.receiver, recv.key.number) in meeting.closed
        is_cut = self.pair(send) in meeting.broken | meeting.shaky
        if not has_gone and not is_cut and send.size == recv.size:
            self.fail(f"{send} was a success, and {recv} has failed")

    def check_counters(self) -> None:
        most = 2 * self.lanes * (self.size - 1)
        for rank, link in enumerate(self.links):
            if not eventually(lambda link=link: link.counters()["open"] <= most):  # type: ignore[misc]
                self.fail(f"the link of rank {rank} keeps connections: {link.counters()}")
            counters = link.counters()
            if counters["connects"] > most * (1 + self.num_breaks):
                self.fail(f"the link of rank {rank} connects without need: {counters}")
            if self.is_quiet and counters["dropped"] > 0:
                self.fail(f"the link of rank {rank} drops frames without need: {counters}")

    # --------------------------------------------------------------------------- the network

    def command(self, here: int, there: int, **values: Any) -> None:
        self.note("network", here, there, values)
        if values.get("left") is not None:
            # The cut may come from now on.
            self.is_quiet = False
            self.num_breaks += 1
            self.armed[here, there] = self.routes[here, there].num_cuts
            self.mark("shaky", here, there)
        assert self.network is not None
        self.network.set(self.routes[here, there], **values)

    def calm(self) -> None:
        """End all that the network does; then every message that must end can end."""
        for (here, there), route in self.routes.items():
            assert self.network is not None
            self.network.set(route, is_held=False, left=None, num_single=0)
            before = self.armed.pop((here, there), route.num_cuts)
            if route.num_cuts > before and self.is_whole:
                self.mark("broken", here, there)

    def mark(self, kind: str, here: int, there: int) -> None:
        for meeting in self.meetings:
            getattr(meeting, kind).add(frozenset((here, there)))

    def cut(self, here: int, there: int, is_single: bool, is_reset: bool) -> None:
        """End connections that one link has dialled to another link."""
        self.note("cut", here, there, "one" if is_single else "all", "by a reset" * is_reset)
        self.is_quiet = False
        self.num_breaks += 1
        assert self.network is not None
        # A lane with one connection alone may be a lane whose other connection nobody uses.
        self.mark("broken" if self.is_whole else "shaky", here, there)
        if self.network.cut(self.routes[here, there], is_single, is_reset) == 0:
            self.fail("the network has no connection to cut")

    def form_and_cut(self, here: int, there: int, delay_s: float, is_reset: bool) -> None:
        """Cut all connections of a way while groups are formed."""

        def cut() -> None:
            time.sleep(delay_s)
            assert self.network is not None
            self.network.cut(self.routes[here, there], False, is_reset)
            self.mark("shaky", here, there)

        self.is_quiet = False
        self.num_breaks += 1
        self.form(cut)

    # ------------------------------------------------------------------------------- the end

    def finish(self) -> None:
        """End the history, and check that nothing is kept."""
        self.note("finish")
        self.settle()
        for meeting in self.meetings:
            meeting.groups.clear()
        for post in list(self.live):
            self.take_back(post, "cancelled")
        self.close()
        self.check_ended()
        if not eventually(lambda: num_descriptors() <= self.descriptors, self.limit_s):
            self.fail(f"{num_descriptors() - self.descriptors} descriptors are kept")

    def close(self) -> None:
        for link in self.links:
            link.close()
        if self.network is not None:
            self.network.close()
            self.network = None
        for post in self.live:
            post.work = None
        for meeting in self.meetings:
            meeting.groups.clear()
        self.live.clear()
        self.links.clear()


# ----------------------------------------------------------------------------------- histories


class Histories(RuleBasedStateMachine):
    """Whatever may happen, in any order.

    Which rule comes next depends on no outcome: an outcome may be another one in the next run.
    """

    is_keyed = False

    @initialize(
        size=st.sampled_from([2, 2, 3]),
        lanes=st.integers(1, 2),
        has_network=st.sampled_from([True, True, False]),
    )
    def begin(self, size: int, lanes: int, has_network: bool) -> None:
        self.world = World(size, lanes, self.is_keyed, has_network)
        self.world.form()
        self.has_flooded = False

    def chosen_key(self, choice: int, tag: int) -> Key | None:
        """Return a stream of an open meeting."""
        world = self.world
        opened = world.open_meetings()
        if not opened:
            return None
        ways = list(permutations(range(world.size), 2))
        choice, at = divmod(choice, len(opened))
        choice, number = divmod(choice, 2 * world.lanes)
        sender, receiver = ways[choice % len(ways)]
        return Key(opened[-1 - at], number, sender, receiver, tag)

    def chosen_way(self, choice: int) -> tuple[int, int]:
        ways = list(permutations(range(self.world.size), 2))
        return ways[choice % len(ways)]

    def has_network(self) -> bool:
        return self.world.network is not None

    # ------------------------------------------------------------------------------- groups

    @rule()
    def form(self) -> None:
        self.make_room()
        self.world.form()

    def make_room(self) -> None:
        opened = self.world.open_meetings()
        if len(opened) == MOST_MEETINGS:
            self.world.close_meeting(opened[0])

    @rule(choice=st.integers(0, 99), rank=st.integers(0, 2), is_whole=st.booleans())
    def close_groups(self, choice: int, rank: int, is_whole: bool) -> None:
        opened = self.world.open_meetings()
        if not opened:
            return
        at = opened[choice % len(opened)]
        if is_whole:
            self.world.close_meeting(at)
        else:
            self.world.close_group(at, rank % self.world.size, choice % (2 * self.world.lanes))

    @rule(rank=st.integers(0, 2))
    def reopen(self, rank: int) -> None:
        self.world.reopen(rank % self.world.size)
        self.form()

    # ----------------------------------------------------------------------------- messages

    @rule(
        choice=st.integers(0, 99),
        tag=st.integers(0, len(SIZES) - 1),
        sides=st.sampled_from([(True, False), (False, True), (True,), (False,)]),
        count=st.integers(1, 3),
    )
    def post(self, choice: int, tag: int, sides: tuple[bool, ...], count: int) -> None:
        key = self.chosen_key(choice, tag)
        for _ in range(count if key else 0):
            for is_send in sides:
                self.world.post(key, is_send)

    @rule(
        choice=st.integers(0, 99),
        sizes=st.permutations([0, 100, 5000, 300000]),
        sends_first=st.booleans(),
    )
    def post_other_size(self, choice: int, sizes: list[int], sends_first: bool) -> None:
        if key := self.chosen_key(choice, 0):
            self.world.post_other_size(key, (sizes[0], sizes[1]), sends_first)

    @precondition(lambda self: not self.has_flooded)
    @rule(choice=st.integers(0, 99), count=st.integers(1000, 1500))
    def flood(self, choice: int, count: int) -> None:
        self.has_flooded = True
        if key := self.chosen_key(choice, 2):
            self.world.flood(key, count)

    @rule(choice=st.integers(0, 99), by_timeout=st.booleans(), count=st.integers(0, 2))
    def cancel(self, choice: int, by_timeout: bool, count: int) -> None:
        """Cancel a message; the next messages of the stream follow."""
        live = self.world.live
        if not live:
            return
        post = live[-1 - choice % len(live)]
        self.world.cancel(post, by_timeout)
        for is_send in (True, False) * (count if post.key.tag < FIRST_OTHER_TAG else 0):
            self.world.post(post.key, is_send)

    @rule()
    def settle(self) -> None:
        self.world.settle()

    # --------------------------------------------------------------------------- the network

    @precondition(has_network)
    @rule(choice=st.integers(0, 5), is_single=st.booleans(), is_reset=st.booleans())
    def cut(self, choice: int, is_single: bool, is_reset: bool) -> None:
        way = self.chosen_way(choice)
        if self.world.routes[way].flows:
            self.world.cut(*way, is_single, is_reset)

    @precondition(has_network)
    @rule(choice=st.integers(0, 5), left=st.integers(1, 300000), is_reset=st.booleans())
    def cut_later(self, choice: int, left: int, is_reset: bool) -> None:
        self.world.command(*self.chosen_way(choice), left=left, is_reset=is_reset)

    @precondition(has_network)
    @rule(choice=st.integers(0, 5), is_held=st.booleans())
    def hold(self, choice: int, is_held: bool) -> None:
        self.world.command(*self.chosen_way(choice), is_held=is_held)

    @precondition(has_network)
    @rule(choice=st.integers(0, 5), num_single=st.integers(1, 500))
    def split(self, choice: int, num_single: int) -> None:
        self.world.command(*self.chosen_way(choice), num_single=num_single)

    @precondition(has_network)
    @rule(choice=st.integers(0, 5), delay_s=st.floats(0, 0.02), is_reset=st.booleans())
    def form_and_cut(self, choice: int, delay_s: float, is_reset: bool) -> None:
        self.make_room()
        self.world.form_and_cut(*self.chosen_way(choice), delay_s, is_reset)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            if self.world.is_failed:
                self.world.close()
            else:
                self.world.finish()


class KeyedHistories(Histories):
    is_keyed = True


FIRST = settings(
    max_examples=3,
    stateful_step_count=15,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
DEEP = settings(FIRST, max_examples=30, stateful_step_count=40)


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Open whatever a process opens once, before descriptors are counted."""
    for is_keyed in (False, True):
        world = World(2, 1, is_keyed, True)
        world.form()
        world.close()


@pytest.mark.nightly(
    "1 min each; the first histories are of the same kinds", but=["plain-first", "keys-first"]
)
@pytest.mark.timeout(400)
@pytest.mark.parametrize("depth", [FIRST, DEEP], ids=["first", "deep"])
@pytest.mark.parametrize("machine", [Histories, KeyedHistories], ids=["plain", "keys"])
def test_the_link_keeps_its_promises(machine: type[Histories], depth: settings) -> None:
    run_state_machine_as_test(machine, settings=depth)


# --------------------------------------------------------------------- the model notices faults


def flip(chunk: bytes) -> bytes:
    """Change a byte of a large message, and no byte of a short frame."""
    return chunk if len(chunk) < 1000 else chunk[:-1] + bytes([chunk[-1] ^ 1])


def swap() -> Callable[[bytes], bytes]:
    """Return what puts the second small message before the first one."""
    kept: list[bytes] = []

    def spoil(chunk: bytes) -> bytes:
        if not kept:
            kept.append(chunk)
            return b""
        return chunk + kept.pop()

    return spoil


SMALL, LARGE = Key(0, 0, 0, 1, 2), Key(0, 0, 0, 1, 5)


def exchange(world: World, key: Key, spoil: Callable[[bytes], bytes]) -> None:
    """Send two messages through a network that changes bytes, then receive the messages."""
    chunks: list[bytes] = []

    def look_and_spoil(chunk: bytes) -> bytes:
        chunks.append(chunk)
        return spoil(chunk)

    world.command(0, 1, spoil=look_and_spoil)
    for is_send in (True, False):
        for _ in range(2):
            post = world.post(key, is_send)
            assert post is not None
            # No chunk of the network is of two messages; a large one leaves when it is received.
            if is_send and post.is_eager:
                assert eventually(lambda: len(chunks) >= len(world.streams[key].sends))
            elif not is_send and not post.is_eager:
                assert eventually(post.work.is_completed)
    world.settle()


def change_after_posting(world: World) -> None:
    send = world.post(LARGE, True)
    assert send is not None
    send.middle.fill_(7)
    world.post(LARGE, False)
    world.settle()


def cancel_in_the_model_alone(world: World) -> None:
    recv = world.post(LARGE, False)
    assert recv is not None
    work = recv.work
    world.cancel(recv, False)
    world.post(LARGE, True)
    assert eventually(work.is_completed)
    world.settle()


def cut_unseen(world: World) -> None:
    world.post(LARGE, False)
    assert world.network is not None
    for way in ((0, 1), (1, 0)):
        world.network.cut(world.routes[way], False, False)
    world.post(LARGE, True)
    world.settle()


def expect_less_credit(world: World) -> None:
    world.most_early = 1000
    world.flood(SMALL, 1200)


def keep_descriptors(world: World) -> None:
    world.limit_s = 0.2
    with open(os.devnull):
        world.finish()


def lose(world: World) -> None:
    world.limit_s = 0.5
    exchange(world, SMALL, lambda chunk: b"")


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (lambda world: exchange(world, LARGE, flip), "has other bytes than its send"),
        (lambda world: exchange(world, SMALL, lambda chunk: 2 * chunk), "has other bytes than"),
        (lambda world: exchange(world, SMALL, swap()), "has other bytes than its send"),
        (lose, "does not end"),
        (change_after_posting, "has other bytes than its send"),
        (cancel_in_the_model_alone, "bytes were written after the end of receive"),
        (cut_unseen, "nothing has happened to its group"),
        (expect_less_credit, "small messages have left"),
        (keep_descriptors, "1 descriptors are kept"),
    ],
    ids=["flip", "twice", "swap", "lose", "change", "cancel", "cut", "credit", "descriptors"],
)
def test_the_model_notices(fault: Callable[[World], None], text: str) -> None:
    world = World(2, 1, has_network=True)
    world.form()
    with pytest.raises(AssertionError, match=text):
        fault(world)
    world.close()


def test_with_keys_a_changed_byte_is_a_failure() -> None:
    world = World(2, 1, is_keyed=True, has_network=True)
    world.form()
    world.mark("shaky", 0, 1)
    exchange(world, LARGE, flip)
    received = world.streams[LARGE].recvs
    assert [post.state for post in received] == ["failed", "failed"]
    world.finish()
