"""A link loses no message beside a broken connection, and returns credit and news of sizes.

The links of one process meet in groups of a token. A forwarder between the links cuts one of their
connections.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
from commanded_network import Network, Route

from diloco_comm import _C

ANY_PORT = "127.0.0.1:0"
# No message takes this long on a loaded machine.
LIMIT = timedelta(seconds=60)
SMALL, LARGE = 24, 70_000
# Small messages that nobody expects yet: so many are sent at most.
MOST_EARLY = 1024


def filled(num_bytes: int, value: int = 0) -> torch.Tensor:
    return torch.full((num_bytes,), value, dtype=torch.uint8)


@dataclass
class Links:
    """Links that reach each other through a network."""

    links: list[_C.Link]
    network: Network = field(default_factory=Network)
    routes: dict[tuple[int, int], Route] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for i in range(len(self.links)):
            for j, other in enumerate(self.links):
                if i != j:
                    self.routes[i, j] = self.network.route(other.address)

    def peers(self, rank: int) -> list[tuple[str, str]]:
        return [
            (link.nonce, link.address if i == rank else self.routes[rank, i].address)
            for i, link in enumerate(self.links)
        ]

    def meet(self, token: str, lanes: int, ranks: tuple[int, ...] | None = None) -> Meeting:
        """Let links begin to form groups, each in a thread of its own."""
        meeting = Meeting(self, token, lanes)
        for rank in range(len(self.links)) if ranks is None else ranks:
            meeting.begin(rank)
        return meeting

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.network.close()


@dataclass
class Meeting:
    """The groups of a token, by rank: two for each lane."""

    links: Links
    token: str
    lanes: int
    groups: dict[int, list[Any]] = field(default_factory=dict)
    threads: dict[int, threading.Thread] = field(default_factory=dict)

    def begin(self, rank: int) -> None:
        def form() -> None:
            link, peers = self.links.links[rank], self.links.peers(rank)
            self.groups[rank] = link.groups(
                self.token, rank, peers, self.lanes, LIMIT.total_seconds()
            )

        self.threads[rank] = threading.Thread(target=form)
        self.threads[rank].start()

    def of(self, rank: int) -> list[Any]:
        """Return the groups of a rank once these are formed."""
        self.threads[rank].join()
        return self.groups[rank]


@pytest.fixture
def pair() -> Iterator[Links]:
    links = Links([_C.Link(ANY_PORT, ANY_PORT) for _ in range(2)])
    yield links
    links.close()


@pytest.fixture
def trio() -> Iterator[Links]:
    links = Links([_C.Link(ANY_PORT, ANY_PORT) for _ in range(3)])
    yield links
    links.close()


def arrives(sender: Any, receiver: Any, ranks: tuple[int, int], tag: int) -> bool:
    """Send a small message, receive it, and return whether it arrived."""
    memory = filled(SMALL)
    work = receiver.recv([memory], ranks[0], tag)
    sent = sender.send([filled(SMALL, 7)], ranks[1], tag)
    return sent.wait(LIMIT) and work.wait(LIMIT) and bool((memory == 7).all())


def end_of_lane_1(pair: Links) -> None:
    """Form groups of two lanes, and end the connection of the second lane from 0 to 1."""
    former = pair.meet("former", 2)
    assert arrives(former.of(0)[0], former.of(1)[0], (0, 1), 1)
    route = pair.routes[0, 1]
    # Lanes are dialled in their order.
    assert len(route.flows) == 2
    former.groups.clear()
    assert pair.network.cut(route, is_single=True, is_reset=False, at=1) == 1


@pytest.mark.parametrize("lanes", [1, 2])
def test_groups_that_form_after_an_end_do_not_fail_for_it(pair: Links, lanes: int) -> None:
    end_of_lane_1(pair)
    later = pair.meet("later", lanes)
    # The link waits a second for what the other connections of the peer may still bring.
    work = later.of(1)[0].recv([filled(SMALL)], 0, 9)
    with pytest.raises(RuntimeError, match="timed out"):
        work.wait(timedelta(seconds=2.5))
    for group in range(2 * lanes):
        assert arrives(later.of(0)[group], later.of(1)[group], (0, 1), 1)
        assert arrives(later.of(1)[group], later.of(0)[group], (1, 0), 1)


def test_a_message_that_comes_while_a_group_forms_is_kept(trio: Links) -> None:
    """Rank 1 has its group and sends; rank 0 still waits for rank 2, as a lane ends."""
    end_of_lane_1(trio)
    trio.network.set(trio.routes[2, 0], is_held=True)
    trio.network.set(trio.routes[0, 2], is_held=True)
    later = trio.meet("later", 1)
    sent = later.of(1)[0].send([filled(SMALL, 7)], 0, 1)
    assert sent.wait(LIMIT)
    later.threads[0].join(timeout=2.5)
    assert later.threads[0].is_alive()
    for way in ((2, 0), (0, 2)):
        trio.network.set(trio.routes[way], is_held=False)
    memory = filled(SMALL)
    assert later.of(0)[0].recv([memory], 1, 1).wait(LIMIT)
    assert bool((memory == 7).all())


@pytest.mark.parametrize("waits_before", [False, True], ids=["alone", "behind another send"])
def test_a_large_send_hears_of_a_small_receive(pair: Links, waits_before: bool) -> None:
    meeting = pair.meet("sizes", 1)
    sender, receiver = meeting.of(0)[0], meeting.of(1)[0]
    waiting = sender.send([filled(LARGE)], 1, 1) if waits_before else None
    sent, received = sender.send([filled(LARGE)], 1, 2), receiver.recv([filled(SMALL)], 0, 2)
    for work, text in ((sent, "expects 24 bytes"), (received, "sends 70000 bytes")):
        with pytest.raises(RuntimeError, match=text):
            work.wait(LIMIT)
    if waiting is not None:
        assert receiver.recv([filled(LARGE)], 0, 1).wait(LIMIT) and waiting.wait(LIMIT)


def test_early_messages_take_no_credit_of_others_for_good(pair: Links) -> None:
    meeting = pair.meet("credit", 1)
    sender, receiver = meeting.of(0)[0], meeting.of(1)[0]
    early = [sender.send([filled(SMALL)], 1, 1) for _ in range(MOST_EARLY - 24)]
    others = [sender.send([filled(SMALL)], 1, 2) for _ in range(300)]
    received = [receiver.recv([filled(SMALL)], 0, 2) for _ in range(300)]
    assert all(work.wait(LIMIT) for work in [*received, *others, *early])


@pytest.mark.parametrize("num_taken", [1, 255])
def test_a_store_that_fills_up_gives_credit_for_what_was_taken(pair: Links, num_taken: int) -> None:
    meeting = pair.meet("taken", 1)
    sender, receiver = meeting.of(0)[0], meeting.of(1)[0]
    assert all(arrives(sender, receiver, (0, 1), 2) for _ in range(num_taken))
    early = [sender.send([filled(SMALL)], 1, 1) for _ in range(MOST_EARLY - num_taken)]
    assert arrives(sender, receiver, (0, 1), 3)
    assert all(work.wait(LIMIT) for work in early)


def test_a_closed_group_gives_its_credit_back(pair: Links) -> None:
    meeting = pair.meet("closed", 1)
    early = [meeting.of(0)[0].send([filled(SMALL)], 1, 1) for _ in range(MOST_EARLY)]
    assert all(work.wait(LIMIT) for work in early)
    meeting.of(1)[0] = None
    others = [meeting.of(0)[1].send([filled(SMALL)], 1, 2) for _ in range(300)]
    received = [meeting.of(1)[1].recv([filled(SMALL)], 0, 2) for _ in range(300)]
    assert all(work.wait(LIMIT) for work in [*received, *others])
