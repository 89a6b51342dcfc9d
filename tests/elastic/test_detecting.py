"""What the hosts of silent processes say, with real listeners."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest

from diloco_comm.base.store_host import address, open_store
from diloco_comm.elastic.detecting import Refusals

PATIENCE_S = 60.0


@pytest.fixture
def refusals() -> Iterator[Refusals]:
    one = Refusals()
    yield one
    one.close()


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end, f"not so within {PATIENCE_S:g} s"
        time.sleep(0.01)


def closed_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def test_a_process_that_does_not_listen_has_ended(refusals: Refusals) -> None:
    store = open_store("127.0.0.1", 0)
    silent = {"lives": address(store), "ended": closed_address()}
    until(lambda: refusals.look(silent) == ("ended",))
    assert refusals.look({"lives": address(store)}) == ()


def test_a_process_that_takes_no_connections_may_live(refusals: Refusals) -> None:
    """The kernel keeps the connections of a process that is stopped, until its queue is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        place = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        for _ in range(20):
            assert refusals.look({"stopped": place, "again": place}) == ()


@pytest.mark.parametrize("place", ["", "tcp://a.name.that.nobody.looks.up:1", "tcp://10.0.0.1"])
def test_an_address_that_cannot_be_tried_says_nothing(refusals: Refusals, place: str) -> None:
    assert refusals.look({"unknown": place}) == ()


def test_who_is_not_silent_any_more_is_forgotten(refusals: Refusals) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        place = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        refusals.look({str(number): place for number in range(8)})
        assert refusals.look({}) == ()
        assert not refusals._attempts
