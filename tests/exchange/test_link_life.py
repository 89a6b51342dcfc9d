"""Signs of life and messages of a link between real processes, and behind a relay."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from commands import serving_command
from proxies import Forwarder

from diloco_comm import _C
from diloco_comm.base.service.keys import LinkKeys, allow, make_pairs
from diloco_comm.base.service.relay import Relay
from diloco_comm.exchange.membership.own_link import OwnLink

PATIENCE_S = 60.0
ANY_PORT = "127.0.0.1:0"
NAME = "control"
# A process that answers messages until it is killed; "hold" keeps the interpreter's lock.
OTHER = f"""
import ctypes, sys
from diloco_comm import _C
link = _C.Link({ANY_PORT!r}, {ANY_PORT!r})
link.told({NAME!r}, 0.0)
link.set_progress(5, "checkpoint")
print(link.nonce, link.address, flush=True)
link.reach({NAME!r}, [tuple(sys.stdin.readline().split())])
while True:
    for nonce, message in link.told({NAME!r}, 1.0):
        if message == b"hold":
            ctypes.PyDLL(None).usleep(4_000_000)
        link.tell(nonce, {NAME!r}, message)
"""


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end, f"not so within {PATIENCE_S:g} s"
        time.sleep(0.02)


def life(link: _C.Link, nonce: str) -> _C.PeerLife:
    (found,) = [one for one in link.life() if one.nonce == nonce]
    return found


@contextmanager
def other_process() -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A process that answers messages, and its nonce and address."""
    command = [sys.executable, "-c", OTHER]
    with serving_command(command, stdin=subprocess.PIPE) as (process, line):
        yield process, line.split()


def introduce(process: subprocess.Popen[str], link: _C.Link) -> None:
    """Tell a process of a link that it is to reach."""
    assert process.stdin is not None
    process.stdin.write(f"{link.nonce} {link.address}\n")
    process.stdin.flush()


@pytest.fixture
def other() -> Iterator[tuple[subprocess.Popen[str], _C.Link, str]]:
    """A process, and the link of this one that is connected with it."""
    with other_process() as (process, (nonce, address)):
        link = _C.Link(ANY_PORT, ANY_PORT)
        link.told(NAME, 0.0)
        until(lambda: link.reach(NAME, [(nonce, address)]) == [""])
        introduce(process, link)
        until(lambda: life(link, nonce).inner_step == 5)
        yield process, link, nonce
        link.close()


def test_a_process_stops_goes_on_holds_its_lock_and_dies(
    other: tuple[subprocess.Popen[str], _C.Link, str],
) -> None:
    process, link, nonce = other
    assert life(link, nonce).phase == "checkpoint"
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: life(link, nonce).silent_s > 1.5)
    # Its kernel takes what is sent, and its connections stay.
    assert link.tell(nonce, NAME, b"later")
    assert life(link, nonce).is_connected and not life(link, nonce).is_refused
    os.kill(process.pid, signal.SIGCONT)
    assert link.told(NAME, PATIENCE_S) == [(nonce, b"later")]
    until(lambda: life(link, nonce).silent_s < 1)
    # Without the interpreter's lock its link lives on, and its program makes no progress.
    before = life(link, nonce).still_s
    assert link.tell(nonce, NAME, b"hold")
    most = 0.0
    while not link.told(NAME, 0.05):
        most = max(most, life(link, nonce).silent_s)
    assert most < 3 < life(link, nonce).still_s - before
    process.kill()
    until(lambda: life(link, nonce).is_refused)
    assert not link.tell(nonce, NAME, b"")


def test_a_reader_that_stood_still_suspects_nobody(
    other: tuple[subprocess.Popen[str], _C.Link, str],
) -> None:
    _, link, nonce = other
    # A child of this process stops it, and lets it go on.
    script = "import os, signal, sys, time; p = int(sys.argv[1]); os.kill(p, signal.SIGSTOP)"
    script += "; time.sleep(4); os.kill(p, signal.SIGCONT)"
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", script, str(os.getpid())], check=True)
    assert time.monotonic() - begin > 4
    assert life(link, nonce).silent_s < 3


@pytest.mark.parametrize("with_keys", [False, True], ids=["plain", "keys"])
def test_messages_and_life_behind_a_relay(tmp_path: Path, with_keys: bool) -> None:
    keys: list[LinkKeys | None] = [None, None]
    if with_keys:
        make_pairs(tmp_path, ["a", "b"])
        allow(tmp_path, [tmp_path / "a.key", tmp_path / "b.key"])
        keys = [LinkKeys.read(tmp_path / f"{name}.key_secret") for name in "ab"]
    with ExitStack() as stack:
        relay = Relay("127.0.0.1", 0)
        thread = threading.Thread(target=relay.serve)
        thread.start()
        stack.callback(thread.join)
        stack.callback(relay.stop_soon)
        owns = [
            stack.enter_context(closing(OwnLink(None, None, each, relay.address))) for each in keys
        ]
        names = ("link", "address", "link key", "relay")
        ways = [tuple(own.ways()[name] for name in names) for own in owns]
        for own, way in zip(owns, reversed(ways), strict=True):
            until(lambda own=own, way=way: own.link.reach(NAME, [way]) == [""])  # type: ignore[misc]
            own.link.told(NAME, 0.0)
        first, second = (own.link for own in owns)
        second.set_progress(9, "copying")
        until(lambda: life(first, second.nonce).inner_step == 9)
        large = os.urandom(64 * 1024)
        for one, another in ((first, second), (second, first)):
            assert one.tell(another.nonce, NAME, large)
            assert another.told(NAME, PATIENCE_S) == [(one.nonce, large)]
        owns[1].close()
        until(lambda: life(first, second.nonce).silent_s > 2)
        # The relay would refuse, not the process.
        assert not life(first, second.nonce).is_refused


def test_the_host_of_a_process_that_dialled_first_refuses() -> None:
    """Each end learns an address of the other, whichever end has dialled first."""
    with closing(_C.Link(ANY_PORT, ANY_PORT)) as link:
        with other_process() as (process, (nonce, address)):
            introduce(process, link)
            until(lambda: link.counters()["connects"] == 1)
            assert link.reach(NAME, [(nonce, address)]) == [""]
            until(lambda: life(link, nonce).inner_step == 5 and link.counters()["connects"] == 2)
        until(lambda: life(link, nonce).is_refused)


def test_another_address_takes_the_place_of_one_that_refuses() -> None:
    """A forwarder ends, and its address refuses; the process lives at another address."""
    with ExitStack() as stack:
        far = stack.enter_context(closing(_C.Link(ANY_PORT, ANY_PORT)))
        near = stack.enter_context(closing(_C.Link("", "")))
        way = Forwarder(int(far.address.split(":")[1]))
        far.reach(NAME, [(near.nonce, "")])
        until(lambda: near.reach(NAME, [(far.nonce, way.address)]) == [""])
        way.close()
        until(lambda: life(near, far.nonce).is_refused)
        until(lambda: near.reach(NAME, [(far.nonce, far.address)]) == [""])
        until(lambda: not life(near, far.nonce).is_refused)


@contextlib.contextmanager
def deaf(address: str) -> Iterator[None]:
    """Let the kernel drop all that comes to the connections of this process at its own address."""
    attach, detach, place = 26, 27, address.rpartition(":")
    # One instruction of a packet filter: keep no byte.
    code = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    filters = struct.pack("HxxxxxxQ", 1, ctypes.addressof(code))
    with ExitStack() as stack:
        found = []
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                one = stack.enter_context(socket.socket(fileno=os.dup(fd)))
                if one.getpeername() and one.getsockname()[:2] == (place[0], int(place[2])):
                    one.setsockopt(socket.SOL_SOCKET, attach, filters)
                    found.append(one)
        assert found
        yield
        for one in found:
            one.setsockopt(socket.SOL_SOCKET, detach, 0)


def test_the_segments_that_tcp_sends_again_stay_counted() -> None:
    with closing(_C.Link(ANY_PORT, ANY_PORT)) as link, closing(_C.Link(ANY_PORT, ANY_PORT)) as far:
        far.told(NAME, 0.0)
        link.reach(NAME, [(far.nonce, far.address, "", "")])
        until(lambda: link.tell(far.nonce, NAME, b"one"))
        assert far.told(NAME, PATIENCE_S) == [(link.nonce, b"one")]
        assert link.counters()["retransmits"] == 0 and link.counters()["rtt_us"] > 0
        with deaf(far.address):
            assert link.tell(far.nonce, NAME, b"two")
            until(lambda: link.counters()["retransmits"] > 0)
        assert far.told(NAME, PATIENCE_S) == [(link.nonce, b"two")]
        counted = link.counters()["retransmits"]
        far.close()
        until(lambda: link.counters()["open"] == 0)
        assert link.counters()["retransmits"] >= counted and link.counters()["rtt_us"] == 0
