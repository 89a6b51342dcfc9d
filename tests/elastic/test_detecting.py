"""What the hosts of silent processes say, with real listeners."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from elastic_replicas import registry as registry
from registries import Host

from diloco_comm import DiLoCo, Elastic
from diloco_comm.base.store_host import open_store
from diloco_comm.elastic.detecting import Refusals
from diloco_comm.tools.common.workers import free_port

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


def look(refusals: Refusals, silent: Mapping[str, str], times: int) -> set[tuple[str, ...]]:
    """Look so often, with time for an answer in between; return what was said."""
    said = set()
    for _ in range(times):
        said.add(refusals.look({}, silent))
        time.sleep(0.05)
    return said


def meet(refusals: Refusals, living: Mapping[str, str]) -> None:
    """Look until the hosts of all these processes have taken a connection."""

    def have_met() -> bool:
        assert refusals.look(living, {}) == ()
        return all(refusals._asked[nonce].has_accepted for nonce in living)

    until(have_met)


def place_of(listener: socket.socket) -> str:
    return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def test_a_process_that_does_not_listen_any_more_has_ended(refusals: Refusals) -> None:
    store = open_store("127.0.0.1", 0)
    listener = socket.create_server(("127.0.0.1", 0))
    both = {"lives": store.address, "ended": place_of(listener)}
    meet(refusals, both)
    listener.close()
    # One refusal is no sign.
    assert refusals.look({}, both) == ()
    until(lambda: refusals.look({}, both) == ("ended",))
    assert refusals.look({}, both) == ("ended",) and not refusals.is_in_doubt
    assert refusals.look({}, {"lives": both["lives"]}) == ()


def test_who_takes_a_connection_again_lives(refusals: Refusals) -> None:
    listener = socket.create_server(("127.0.0.1", free_port()))
    silent = {"one": place_of(listener)}
    place = listener.getsockname()
    meet(refusals, silent)
    listener.close()
    until(lambda: refusals.look({}, silent) == ("one",))
    with socket.create_server(place):
        until(lambda: refusals.look({}, silent) == ())
    until(lambda: refusals.look({}, silent) == ("one",))
    # A beat takes the sign back, too.
    assert refusals.look(silent, {}) == ()
    assert refusals.look({}, silent) == ()


def test_a_host_that_has_always_refused_says_nothing(refusals: Refusals) -> None:
    """Behind a proxy the address of a process may be one at which nobody ever listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = {"filtered": place_of(listener)}
    for _ in range(3):
        assert refusals.look(silent, {}) == ()
    assert look(refusals, silent, times=20) == {()}


def test_a_process_that_takes_no_connections_may_live(refusals: Refusals) -> None:
    """The kernel keeps the connections of a process that is stopped, until its queue is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        silent = {"stopped": place_of(listener), "again": place_of(listener)}
        meet(refusals, {"stopped": silent["stopped"]})
        assert look(refusals, silent, times=20) == {()}


@pytest.mark.parametrize("place", ["", "tcp://a.name.that.nobody.looks.up:1", "tcp://10.0.0.1"])
def test_an_address_that_cannot_be_tried_says_nothing(refusals: Refusals, place: str) -> None:
    assert refusals.look({"unknown": place}, {}) == ()
    assert refusals.look({}, {"unknown": place}) == ()


def test_who_is_a_member_no_more_is_forgotten(refusals: Refusals) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        refusals.look({str(number): place_of(listener) for number in range(8)}, {})
        assert refusals.look({}, {}) == ()
        assert not refusals._asked


def test_a_forked_child_does_not_listen_for_its_parent(refusals: Refusals) -> None:
    """A worker of a DataLoader has the descriptors of its process, and may outlive the process."""
    store = open_store("127.0.0.1", 0)
    place = store.address
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    try:
        meet(refusals, {"parent": place})
        # As when the parent dies, its own descriptor is closed.
        del store
        until(lambda: refusals.look({}, {"parent": place}) == ("parent",))
        assert child.is_alive()
    finally:
        child.kill()
        child.join()


class Failing:
    """A detector of a user, all of whose methods fail."""

    def __init__(self) -> None:
        self.called: set[str] = set()

    def begin(self, nonce: str) -> None:
        self.called.add("begin")
        raise RuntimeError("begin fails")

    def look(self, silent: Mapping[str, str]) -> tuple[str, ...]:
        self.called.add("look")
        raise RuntimeError("look fails")

    def close(self) -> None:
        self.called.add("close")
        raise RuntimeError("close fails")


def test_the_errors_of_a_detector_are_logged_once(
    registry: Host, caplog: pytest.LogCaptureFixture
) -> None:
    detector = Failing()
    membership = Elastic(registry.address, founding_wait=0.0, detector=detector)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, optimizer, sync_every=1, peers=membership) as diloco:
        until(lambda: "look" in detector.called)
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        assert diloco.view == 1 and diloco.inner_step == 1
    assert detector.called == {"begin", "look", "close"}
    logged = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
    assert logged == ["begin of the detector Failing failed, which is no sign"]
