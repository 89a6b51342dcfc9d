"""What every registry does: compare-and-set by many clients at a time, beats, timeouts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from registries import (
    KINDS,
    STORE,
    EtcdHost,
    Host,
    hosting,
    in_threads,
    increment,
    open_registry,
    stopped,
)

from diloco_comm.elastic.registry import RegistryMismatch, RegistryUnavailable
from diloco_comm.elastic.registry.protocol import MAX_BEAT_BYTES, MAX_RECORD_BYTES


@pytest.fixture(scope="module", params=KINDS)
def host(request: pytest.FixtureRequest) -> Iterator[Host | EtcdHost]:
    with hosting(request.param) as host:
        yield host


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return request.node.originalname


def test_many_clients_increment_a_counter(host: Host, run: str) -> None:
    def work(client: int) -> list[tuple[bytes, bytes]]:
        registry = open_registry(host, run)
        done = [increment(registry, f"{client}-{i}") for i in range(50)]
        registry.close()
        return done

    swaps = [swap for done in in_threads(work, 8) for swap in done]
    # The successful swaps are one chain: each record was replaced once.
    following = dict(swaps)
    assert len(following) == len(swaps) == 400
    record = b""
    for _ in range(400):
        record = following[record]
    assert int(record.split()[0]) == 400
    assert open_registry(host, run).read() == record


def test_of_equal_swaps_one_succeeds(host: Host, run: str) -> None:
    meeting = threading.Barrier(4)

    def work(client: int) -> list[bool]:
        registry, done = open_registry(host, run), []
        for i in range(30):
            old = b"%d" % i if i else b""
            assert registry.read() == old
            meeting.wait(20)
            done.append(registry.swap(old, b"%d" % (i + 1)))
            meeting.wait(20)
        registry.close()
        return done

    assert [sum(round) for round in zip(*in_threads(work, 4), strict=True)] == [1] * 30


def test_threads_may_share_a_registry(host: Host, run: str) -> None:
    registry = open_registry(host, run)

    def work(thread: int) -> None:
        for i in range(10):
            increment(registry, f"{thread}-{i}")
            registry.beat(f"m{thread}", b"%d" % i)

    in_threads(work, 4)
    assert registry.read().split()[0] == b"40"
    assert registry.beat("", b"") == {f"m{thread}": b"9" for thread in range(4)}
    registry.close()
    registry.close()


def test_swap_compares_every_byte(host: Host, run: str) -> None:
    registry, other = open_registry(host, run), open_registry(host, run + "-2")
    # An absent record equals b"" only; on a TCPStore this is the case that lies.
    assert not registry.swap(b"something", b"x") and registry.read() == b""
    long, longer = bytes(range(256)) * 239, bytes(range(256)) * 240
    assert registry.swap(b"", long) and registry.read() == long
    assert not registry.swap(b"", b"x") and not registry.swap(long[:-1], b"x")
    assert not registry.swap(longer, b"x") and registry.read() == long
    # The same bytes again are a swap like any other.
    assert registry.swap(long, long) and registry.swap(long, longer)
    assert other.read() == b"" and other.swap(b"", b"other")
    assert registry.swap(longer, b"") and registry.read() == b""
    assert not registry.swap(longer, b"x") and registry.swap(b"", b"again")
    assert (registry.read(), other.read()) == (b"again", b"other")


def test_beats_are_of_one_run(host: Host, run: str) -> None:
    one, two, other = (open_registry(host, name) for name in (run, run, run + "-2"))
    full = bytes(range(256)) * (MAX_BEAT_BYTES // 256)
    assert one.beat("0", b"a") == {"0": b"a"}
    assert two.beat("paris/é-7", full) == {"0": b"a", "paris/é-7": full}
    assert one.beat("0", b"b") == {"0": b"b", "paris/é-7": full}
    assert other.beat("0", b"c") == {"0": b"c"}
    # No name publishes nothing, no text takes a beat back.
    assert one.beat("", b"") == {"0": b"b", "paris/é-7": full}
    assert two.beat("paris/é-7", b"") == {"0": b"b"}
    assert one.read() == b""


def test_limits_are_said_before_anything_is_sent(host: Host, run: str) -> None:
    registry = open_registry(host, run)
    with pytest.raises(ValueError, match="a record has at most 61440 bytes, got 61441 bytes"):
        registry.swap(b"", bytes(MAX_RECORD_BYTES + 1))
    with pytest.raises(ValueError, match="a beat has at most 16384 bytes, got 16385 bytes"):
        registry.beat("0", bytes(MAX_BEAT_BYTES + 1))
    for name in ("a b", "n" * 101, "a\n"):
        with pytest.raises(ValueError, match="member must have 1 to 100 printable characters"):
            registry.beat(name, b"x")
    for name in ("", "a b", "a/b", "n" * 101):
        with pytest.raises(ValueError, match="run must have 1 to 100 printable characters"):
            open_registry(host, name)


def test_the_id_of_the_registry_is_compared(host: Host, run: str) -> None:
    registry = open_registry(host, run)
    registry.swap(b"", b"x")
    assert len(registry.registry_id) == 32
    assert registry.is_durable == (not host.address.startswith(STORE))
    again = open_registry(host, run, registry_id=registry.registry_id)
    assert again.read() == b"x"
    stranger = open_registry(host, run, registry_id="ab" * 16)
    for call in (stranger.read, lambda: stranger.swap(b"x", b"y"), lambda: stranger.beat("", b"")):
        with pytest.raises(RegistryMismatch, match=f"{registry.registry_id}.*{'ab' * 16}"):
            call()
    assert registry.read() == b"x"


def test_a_registry_that_stands_still_is_unavailable(host: Host, run: str) -> None:
    if host.address.startswith(STORE):
        pytest.skip("a call of a TCPStore lasts until the store's host goes on")
    hasty, patient = open_registry(host, run, 0.3), open_registry(host, run)
    assert patient.read() == b""
    while not hasty.registry_id:
        with suppress(RegistryUnavailable):
            hasty.read()
    with stopped(host):
        with pytest.raises(RegistryUnavailable, match="not answer"):
            hasty.read()
        with pytest.raises(RegistryUnavailable, match="not answer"):
            hasty.beat("0", b"x")
        with pytest.raises(RegistryUnavailable, match="not answer"):
            hasty.swap(b"", b"late")
    # The outcome of that swap is unknown until the record has changed.
    found = patient.read()
    assert found in (b"", b"late")
    while not patient.swap(found, b"next"):
        found = patient.read()
        assert found == b"late"
    assert patient.beat("1", b"y")["1"] == b"y"
    hasty.close()
    assert open_registry(host, run).read() == b"next"
