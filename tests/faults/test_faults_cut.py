"""Two replicas live and reach the store, but not each other: it is named, soon, and by all."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cut_links
import pytest
from fault_replicas import Replica, Result, Setup, check_agreement, check_sentence
from workers import Pool
from zygote import Job, Zygote

from diloco_comm import LeftBehind, SyncError

H = 4
Address = tuple[str, int]
# Nobody waits for it.
SETUP = Setup("int8", 1, H, timeout=1800.0)
CUT = "replicas 1 and 2 live but cannot reach each other"

HOST = """
import sys
import cut_links
cut_links.enter(sys.argv[1])
import torch.distributed as dist
store = dist.TCPStore(cut_links.HUB, 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def reason() -> str:
    return cut_links.missing()


@pytest.fixture
def site(reason: str) -> Iterator[cut_links.Site]:
    if reason:
        pytest.skip(reason)
    with cut_links.Site(4) as made:
        yield made


@pytest.fixture
def host(zygote: Zygote, site: cut_links.Site) -> Iterator[Address]:
    """The address of a store on the bridge."""
    job = Job(zygote, HOST, site.hub)
    # torch warns on the same stream of addresses without names.
    lines = iter(job.output.readline, "")
    yield cut_links.HUB, int(next(line for line in lines if line.strip().isdigit()))
    job.send_signal(9)
    job.finish()


def start(
    rank: int, world: int, site: cut_links.Site, address: Address, backend: str = "gloo"
) -> Replica:
    cut_links.enter(site.names[rank])
    options = {"suspect_after": 2.0, "join_timeout": 10.0, "backend": backend}
    return Replica(address, rank, range(world), SETUP, **options)


def cut_once(replica: Replica, world: int, make_cuts: Callable[[], object]) -> None:
    """Let the lowest replica make cuts when all of them have come here."""
    key = f"cut/{replica.diloco.epoch}"
    replica.store.set(f"{key}/{replica.number}", "")
    replica.store.wait([f"{key}/{rank}" for rank in range(world)])
    if replica.number == 0:
        make_cuts()
        replica.store.set(f"{key}/made", "")
    replica.store.wait([f"{key}/made"])


# ------------------------------------------------------------------------------- in a round


def lose_a_link(
    rank: int, world: int, site: cut_links.Site, address: Address, how: str, backend: str
) -> Any:
    replica = start(rank, world, site, address, backend)
    replica.train_to(H)
    cut_once(replica, world, lambda: site.cut(1, 2, how))
    failure = replica.train_until_failure(H)
    if rank in failure.missing:
        with pytest.raises(LeftBehind) as caught:
            replica.diloco.change_group("survivors")
        replica.diloco.close()
        return failure, str(caught.value)
    replica.diloco.change_group("survivors")
    replica.train_to(3 * H)
    result = replica.result()
    replica.diloco.close()
    return failure, result


@pytest.mark.nightly(
    "5 s each; a cut of one direction is the most difficult case", but=["gloo-one way"]
)
@pytest.mark.parametrize("how", ["both ways", "one way", "isolated"])
@pytest.mark.parametrize("backend", ["gloo", "tcp"])
def test_a_cut_ends_a_round_and_names_the_pair(
    fresh_workers: Callable[..., Pool], site: cut_links.Site, host: Address, how: str, backend: str
) -> None:
    pool = fresh_workers(3, init_group=False)
    results: list[Any] = pool.run(lose_a_link, site, host, how, backend, timeout=60)
    for rank, (failure, _) in enumerate(results):
        assert failure.missing == (2,) and failure.details["survivors"] == (0, 1), failure
        assert failure.details["cuts"] == ((1, 2),), failure
        assert failure.kind == ("LeftBehind" if rank == 2 else "SyncError")
        assert failure.is_state_kept and CUT in failure.message, failure
        check_sentence(failure, [2])
    assert "replicas [0, 1]" in results[2][1] and "without replica 2" in results[2][1]
    check_agreement(result for _, result in results[:2])


# Replica 0 loses everybody, and 1 and 2 each other: 1 and 3 are as many as 2 and 3.
FOUR_CUTS = ((0, 1), (0, 2), (0, 3), (1, 2))


def lose_four_links(rank: int, world: int, site: cut_links.Site, address: Address) -> Any:
    replica = start(rank, world, site, address)
    replica.train_to(H)
    cut_once(replica, world, lambda: [site.cut(a, b) for a, b in FOUR_CUTS])
    failure = replica.train_until_failure(H)
    result: Result | None = None
    if rank not in failure.missing:
        replica.diloco.change_group("survivors")
        replica.train_to(3 * H)
        result = replica.result()
    replica.diloco.close()
    return failure, result


@pytest.mark.nightly("6 s; test_reach.py has every set of cuts between few members")
def test_the_largest_set_goes_on_and_of_two_the_lower(
    fresh_workers: Callable[..., Pool], site: cut_links.Site, host: Address
) -> None:
    pool = fresh_workers(4, init_group=False)
    results: list[Any] = pool.run(lose_four_links, site, host, timeout=60)
    for failure, _ in results:
        assert failure.missing == (0, 2) and failure.details["survivors"] == (1, 3), failure
        assert failure.details["cuts"] == FOUR_CUTS, failure
    check_agreement(result for _, result in results if result)


# ------------------------------------------------------------------------- in change_group


def change_over_cuts(
    rank: int,
    world: int,
    site: cut_links.Site,
    address: Address,
    cuts: Sequence[tuple[int, int]],
    how: str,
) -> Any:
    replica = start(rank, world, site, address, "gloo")
    replica.train_to(H)
    cut_once(replica, world, lambda: [site.cut(a, b, how) for a, b in cuts])
    with pytest.raises(SyncError) as caught:
        replica.diloco.change_group(range(world))
    error = caught.value
    seen = type(error), str(error), error.missing, error.survivors, error.cuts, error.stage
    if rank in error.survivors:
        replica.diloco.change_group(error.survivors)
        replica.train_to(3 * H)
    result = replica.result()
    replica.diloco.close()
    return seen, result


@pytest.mark.nightly("2 s each; a cut of one direction is the most difficult case", but=["one way"])
@pytest.mark.parametrize("how", ["both ways", "one way", "isolated"])
def test_a_group_over_a_cut_is_one_error_for_all(
    fresh_workers: Callable[..., Pool], site: cut_links.Site, host: Address, how: str
) -> None:
    pool = fresh_workers(3, init_group=False)
    # Well below the time of the exchange, and of joining and connecting one after the other.
    results: list[Any] = pool.run(change_over_cuts, site, host, [(1, 2)], how, timeout=60)
    seen = [seen for seen, _ in results]
    # The words are each replica's own: gloo may say no more than that time is over.
    told = [(kind, missing, survivors) for kind, _, missing, survivors, _, _ in seen]
    assert told == [(SyncError, (2,), (0, 1))] * 3, seen
    check_agreement(result for _, result in results[:2])


def meet_over_a_cut(rank: int, world: int, site: cut_links.Site, address: Address) -> Any:
    with pytest.raises(SyncError) as caught:
        start(rank, world, site, address)
    return str(caught.value), caught.value.missing, caught.value.cuts


def test_a_first_meeting_over_a_cut_names_it(
    fresh_workers: Callable[..., Pool], site: cut_links.Site, host: Address
) -> None:
    pool = fresh_workers(2, init_group=False)
    site.cut(0, 1)
    results: list[Any] = pool.run(meet_over_a_cut, site, host, timeout=60)
    text = (
        "replicas [0, 1] cannot form a group: replicas 0 and 1 live but cannot reach each other; "
        "replicas [0] can"
    )
    assert results == [(text, (1,), ((0, 1),))] * 2


# ------------------------------------------------------------------------------- through a relay

RELAY = """
import sys
import cut_links
cut_links.enter(sys.argv[1])
from diloco_comm.base.service.relay import Relay
relay = Relay(cut_links.HUB, 0)
print(relay.address, flush=True)
relay.serve()
"""


@pytest.fixture
def relay(zygote: Zygote, site: cut_links.Site) -> Iterator[str]:
    """The address of a relay on the bridge."""
    job = Job(zygote, RELAY, site.hub)
    lines = iter(job.output.readline, "")
    yield next(line.strip() for line in lines if line.startswith(f"tcp://{cut_links.HUB}"))
    job.send_signal(9)
    job.finish()


def meet_at_a_relay(
    rank: int, world: int, site: cut_links.Site, address: Address, relay: str
) -> Any:
    """No replica reaches another one; replica 2 is killed after its first round."""
    cut_links.enter(site.names[rank])
    options = {"suspect_after": 4.0, "join_timeout": 10.0, "backend": "tcp", "relay": relay}
    replica = Replica(address, rank, range(world), SETUP, **options)
    replica.train_to(H)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    failure = replica.train_until_failure(H)
    replica.diloco.change_group("survivors")
    replica.train_to(3 * H)
    result = replica.result()
    replica.diloco.close()
    return failure, result


def test_replicas_without_a_way_to_each_other_meet_at_a_relay(
    fresh_workers: Callable[..., Pool], site: cut_links.Site, host: Address, relay: str
) -> None:
    for a, b in ((0, 1), (0, 2), (1, 2)):
        site.cut(a, b)
    pool = fresh_workers(3, init_group=False)
    results: list[Any] = pool.run(meet_at_a_relay, site, host, relay, expect_exit={2}, timeout=60)
    for failure, _ in results[:2]:
        assert failure.missing == (2,) and failure.is_state_kept, failure
        assert not failure.details["cuts"], failure
    check_agreement(result for _, result in results[:2])
