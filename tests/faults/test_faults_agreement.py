"""Who is missing is decided once: the same for all survivors, and said to whoever was left out."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fault_replicas
import pytest
import torch.distributed as dist
from fault_replicas import Failure, Replica, Result, Setup, check_agreement, connect, wait_for
from test_faults_store import STORE
from workers import Pool
from zygote import Job, Zygote

from diloco_comm import _C, LeftBehind, NonFiniteError, SyncError
from diloco_comm.exchange.membership import connecting, regroup, sealing
from diloco_comm.exchange.membership.stores import decide_once
from diloco_comm.exchange.membership.termination import Ack, Progress

H = 4
Address = tuple[str, int]
Fresh = Callable[..., Pool]


@dataclass
class End:
    """What a replica saw, and where it ended."""

    missing: tuple[int, ...]
    survivors: tuple[int, ...]
    members: tuple[int, ...]
    epoch: int
    result: Result
    errors: list[str]


def end(replica: Replica, failure: Failure, errors: Sequence[str] = ()) -> End:
    diloco = replica.diloco
    ended = End(
        failure.missing,
        failure.details["survivors"],
        diloco.members,
        diloco.epoch,
        replica.result([failure]),
        list(errors),
    )
    diloco.close()
    return ended


# ------------------------------------------------------------------------- one and two deaths


def die_together(
    rank: int, world: int, address: Address, setup: Setup, deaths: dict[int, str]
) -> End:
    replica = Replica(address, rank, range(world), setup)
    replica.train_to(2 * H - 1)
    if rank in deaths:
        replica.fault("kill", deaths[rank], num_peers=1 if deaths[rank] == "vote" else 0)
    failure = replica.train_until_failure(2 * H)
    replica.diloco.change_group("survivors")
    replica.train_to(5 * H)
    return end(replica, failure)


@pytest.mark.parametrize(
    "deaths",
    [
        {2: "header"},
        {0: "vote"},
        {2: "header", 3: "header"},
        {0: "post_exchange", 3: "post_exchange"},
        {1: "reduce"},
        {1: "vote", 3: "vote"},
    ],
    ids=lambda deaths: "-".join(f"{r}{stage}" for r, stage in deaths.items()),
)
def test_survivors_agree_on_who_is_missing(fresh_workers: Fresh, deaths: dict[int, str]) -> None:
    pool = fresh_workers(4, init_group=False)
    # One chunk: then the second to die gets to its stage, whenever the first one dies.
    setup = Setup("int8", 1, H, chunk_bytes=1 << 20)
    results: list[Any] = pool.run(
        die_together, pool.store, setup, deaths, expect_exit=set(deaths), timeout=40
    )
    survivors = tuple(rank for rank in range(4) if rank not in deaths)
    ends = [results[rank] for rank in survivors]
    for one in ends:
        assert one.missing == tuple(sorted(deaths)), ends
        assert one.survivors == one.members == survivors, ends
        assert one.epoch == ends[0].epoch
    check_agreement(one.result for one in ends)


def die_before_the_new_group(rank: int, world: int, address: Address, setup: Setup) -> Any:
    """Replica 3 dies in the exchange; replica 2 when it has reported, and before it comes back."""
    replica = Replica(address, rank, range(world), setup, join_timeout=3.0, suspect_after=3.0)
    replica.train_to(2 * H - 1)
    if rank == 3:
        replica.fault("kill", "reduce")
    failure = replica.train_until_failure(1)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(SyncError) as caught:
        replica.diloco.change_group("survivors")
    replica.diloco.change_group("survivors")
    replica.train_to(4 * H)
    error = caught.value
    return end(replica, failure, [str(error)]), error.missing, error.survivors


def test_a_second_death_is_agreed_on_too(fresh_workers: Fresh) -> None:
    pool = fresh_workers(4, init_group=False)
    # Nobody waits for the timeout of an exchange.
    setup = Setup("int8", 1, H, timeout=1800.0)
    results: list[Any] = pool.run(
        die_before_the_new_group, pool.store, setup, expect_exit={2, 3}, timeout=50
    )
    for one, missing, survivors in results[:2]:
        assert one.missing == (3,) and one.survivors == (0, 1, 2)
        assert missing == (2,) and survivors == one.members == (0, 1)
        assert one.errors == results[0][0].errors and "[2] did not come" in one.errors[0]
    check_agreement(one.result for one, *_ in results[:2])


def come_late(rank: int, world: int, address: Address, setup: Setup) -> Any:
    """Replica 0 has applied the round and trains on; meanwhile replica 2 is lost in regrouping."""
    replica = Replica(address, rank, range(world), setup, join_timeout=2.0, suspect_after=2.0)
    replica.train_to(2 * H - 1)
    if rank == 3:
        replica.fault("kill", "vote", num_peers=1)
    if rank == 0:
        replica.step()
        replica.store.wait(["regrouped"])
    failure = replica.train_until_failure(H)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        with pytest.raises(SyncError) as caught:
            replica.diloco.change_group("survivors")
        assert caught.value.missing == (2,), str(caught.value)
        replica.store.set("regrouped", "")
    # Who comes late follows the newest decision, and not the one that his own exchange knows.
    replica.diloco.change_group("survivors")
    replica.train_to(4 * H)
    return end(replica, failure)


def test_who_comes_late_follows_the_newest_decision(fresh_workers: Fresh) -> None:
    pool = fresh_workers(4, init_group=False)
    setup = Setup("int8", 1, H, timeout=1800.0)
    results: list[Any] = pool.run(come_late, pool.store, setup, expect_exit={2, 3}, timeout=50)
    for one in results[:2]:
        assert one.missing == (3,) and one.survivors == (0, 1, 2)
        assert one.members == (0, 1)
    check_agreement(one.result for one in results[:2])


# --------------------------------------------------------------------------- stops and zombies


def wait_until_stopped(pid: int) -> None:
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        time.sleep(0.005)


def stop_for_a_while(rank: int, world: int, address: Address, setup: Setup) -> Any:
    replica = Replica(address, rank, range(world), setup)
    replica.train_to(2 * H - 1)
    if rank == 2:
        replica.fault("stop", "reduce")
    failure = None
    while failure is None and replica.diloco.inner_step < 3 * H:
        failure = replica.failing_step()
    if failure is None:
        return replica.result()
    try:
        replica.diloco.change_group("survivors")
    except LeftBehind as error:
        return end(replica, failure, [str(error)])
    replica.train_to(4 * H)
    return end(replica, failure)


@pytest.mark.parametrize("seconds", [1.9, 2.0, 2.1, 3.0])
def test_a_stop_near_the_timeout_is_one_decision(fresh_workers: Fresh, seconds: float) -> None:
    pool = fresh_workers(4, init_group=False)
    pool.submit(stop_for_a_while, pool.store, Setup("int8", 1, H, timeout=2.0))
    wait_until_stopped(pool.pid(2))
    time.sleep(seconds)
    pool.kill(2, signal.SIGCONT)
    results: list[Any] = pool.collect(timeout=40)
    if isinstance(results[0], Result):
        # It came back in time.
        check_agreement(results)
        return
    kinds = [one.result.failures[0].kind for one in results]
    assert all(one.missing == results[0].missing for one in results), results
    assert all(one.survivors == results[0].survivors for one in results), results
    if results[0].missing:
        # Decided without the one that stood still: it is told so, twice.
        assert results[0].missing == (2,) and kinds[2] == "LeftBehind", results
        assert "without replica 2" in results[2].errors[0]
    going_on = [one for rank, one in enumerate(results) if rank not in one.missing]
    assert all(one.members == one.survivors for one in going_on)
    check_agreement(one.result for one in going_on)


def sleep_through_it(rank: int, world: int, address: Address, setup: Setup) -> Any:
    replica = Replica(address, rank, range(world), setup, suspect_after=1.5)
    replica.train_to(2 * H - 1)
    if rank == 0:
        replica.fault("stop", "reduce")
    failure = replica.train_until_failure(1)
    errors = []
    if rank == 0:
        # What a handler may do with the error, in each of the forms that the documents show.
        others = set(replica.diloco.members) - set(failure.missing)
        for members in ("survivors", others):
            with pytest.raises(LeftBehind) as caught:
                replica.diloco.change_group(members)
            errors.append((str(caught.value), caught.value.went_on_in))
    else:
        replica.diloco.change_group(set(replica.diloco.members) - set(failure.missing))
        replica.train_to(3 * H)
        replica.store.set(f"went on/{rank}", "")
    return end(replica, failure), errors


def test_a_zombie_is_told_that_the_group_went_on(fresh_workers: Fresh) -> None:
    pool = fresh_workers(3, init_group=False)
    # The peers give it up by its silence, not by the timeout.
    pool.submit(sleep_through_it, pool.store, Setup("int8", 1, H, timeout=1800.0))
    wait_for(pool, ["went on/1", "went on/2"], timeout=40)
    pool.kill(0, signal.SIGCONT)
    results: list[Any] = pool.collect(timeout=30)
    (zombie, errors), (first, _), (second, _) = results
    failure = zombie.result.failures[0]
    assert failure.kind == "LeftBehind" and failure.is_state_kept, failure
    assert failure.missing == first.missing == second.missing == (0,)
    assert failure.details["went_on_in"] == first.epoch == second.epoch
    assert f"the group went on without replica 0 in epoch {first.epoch}" in failure.message
    assert 'init="join"' in failure.message
    for text, epoch in errors:
        assert epoch == first.epoch and "\n" not in text
        assert f"replicas [1, 2] went on in epoch {first.epoch} without replica 0" in text, text
    for one in (first, second):
        failure = one.result.failures[0]
        assert failure.kind == "SyncError" and failure.seconds < 60, failure
    # One notices it, and the other hears of that.
    told = [one.result.failures[0].message for one in (first, second)]
    assert any("nothing was heard of replica 0 for 1.5 s" in text for text in told), told
    check_agreement([first.result, second.result])


# ---------------------------------------------------------------------- left out without a failure


def check_left_out(error: SyncError, epoch: int, left_out: int) -> None:
    others = tuple(r for r in range(3) if r != left_out)
    assert isinstance(error, LeftBehind) and "\n" not in str(error), error
    assert error.missing == (left_out,) and error.survivors == others, error
    assert error.went_on_in == epoch, error
    assert f"in epoch {epoch}" in str(error), error


def leave_one_out(rank: int, world: int, address: Address, setup: Setup) -> Any:
    """Replicas 0 and 1 go on without 2, which trains all the while, and comes back at the end."""
    replica = Replica(address, rank, range(world), setup)
    replica.train_to(H)
    diloco = replica.diloco
    if rank < 2:
        diloco.change_group([0, 1])
        replica.store.set("new epoch", str(diloco.epoch))
        replica.train_to(3 * H)
        replica.store.set(f"went on/{rank}", "")
        replica.store.wait(["told"])
        diloco.change_group(range(world))
        replica.train_to(5 * H)
        return replica.result()
    replica.store.wait(["went on/0", "went on/1"])
    epoch = int(replica.store.get("new epoch"))
    with pytest.raises(SyncError) as caught:
        replica.train_to(3 * H)
    check_left_out(caught.value, epoch, 2)
    for members in ("survivors", set(diloco.members) - set(caught.value.missing)):
        with pytest.raises(LeftBehind) as again:
            diloco.change_group(members)
        check_left_out(again.value, epoch, 2)
    diloco.close()
    replica.store.set("told", "")
    newcomer = Replica(address, 2, range(world), setup, init="join")
    newcomer.train_to(5 * H)
    return newcomer.result()


def test_who_is_left_out_without_a_failure_is_told_so(fresh_workers: Fresh) -> None:
    pool = fresh_workers(3, init_group=False)
    setup = Setup("int8", 1, H, timeout=1800.0)
    results: list[Any] = pool.run(leave_one_out, pool.store, setup, timeout=40)
    check_agreement(results)


def leave_out_who_waits(rank: int, world: int, address: Address, setup: Setup) -> Any:
    """Replica 2 waits in an exchange when the others go on without it."""
    replica = Replica(address, rank, range(world), setup)
    replica.train_to(H)
    if rank < 2:
        replica.store.wait(["waits"])
        replica.diloco.change_group([0, 1])
        replica.train_to(3 * H)
        replica.store.wait(["told"])
        return replica.diloco.epoch
    replica.train_to(2 * H - 1)
    replica.before_exchange = lambda: replica.store.set("waits", "")
    failure = replica.train_until_failure(1)
    with pytest.raises(LeftBehind):
        # The others may not have begun yet when they leave it out.
        replica.diloco.change_group("survivors")
    replica.store.set("told", "")
    return failure


def test_who_is_left_out_in_an_exchange_does_not_go_on_alone(fresh_workers: Fresh) -> None:
    pool = fresh_workers(3, init_group=False)
    setup = Setup("int8", 1, H, timeout=1800.0)
    results: list[Any] = pool.run(leave_out_who_waits, pool.store, setup, timeout=40)
    assert results[0] == results[1]
    # Told as LeftBehind, unless it was heard before the others had agreed to leave it out.
    assert set(results[2].missing) <= {2}, results[2]


def leave_out_after_a_decision(rank: int, world: int, address: Address, setup: Setup) -> Any:
    """Replica 3 dies, and all others survive it; but 0 and 1 go on without 2 then."""
    limits = {"join_timeout": 1800.0, "suspect_after": 4.0}
    replica = Replica(address, rank, range(world), setup, **limits)
    replica.train_to(2 * H - 1)
    if rank == 3:
        replica.fault("kill", "header")
    if rank == 2:
        # In no exchange: its engine alone answers.
        replica.store.wait(["went on/0", "went on/1"])
        failure = replica.train_until_failure(1)
        with pytest.raises(LeftBehind) as caught:
            replica.diloco.change_group("survivors")
        replica.store.set("told", "")
        return failure, caught.value
    failure = replica.train_until_failure(1)
    replica.diloco.change_group([0, 1])
    replica.train_to(4 * H)
    replica.store.set(f"went on/{rank}", "")
    replica.store.wait(["told"])
    return failure, replica.diloco.epoch


def test_a_group_that_has_begun_says_more_than_the_decision_before(fresh_workers: Fresh) -> None:
    pool = fresh_workers(4, init_group=False)
    setup = Setup("int8", 1, H, timeout=1800.0)
    results: list[Any] = pool.run(
        leave_out_after_a_decision, pool.store, setup, expect_exit={3}, timeout=40
    )
    for failure, _ in results[:2]:
        assert failure.details["survivors"] == (0, 1, 2), failure
    failure, error = results[2]
    assert failure.kind == "LeftBehind" and failure.missing == (2, 3), failure
    assert "replicas 0, 1 left replicas 2, 3 out of the group" in failure.message, failure
    assert failure.details["went_on_in"] == error.went_on_in == results[0][1]
    assert error.survivors == (0, 1)


# ------------------------------------------------------- a group that could not begin, and the next


def take_time_before_the_next_try(rank: int, world: int, address: Address, setup: Setup) -> Any:
    """Connecting fails once. Replica 1 does other things then, for longer than ``join_timeout``."""
    replica = Replica(address, rank, range(world), setup, join_timeout=4.0, suspect_after=4.0)
    replica.train_to(2 * H - 1)
    if rank == 2:
        replica.fault("stop", "reduce")
    failure = replica.train_until_failure(1)
    if rank == 2:
        with pytest.raises(LeftBehind) as told:
            replica.diloco.change_group("survivors")
        return failure, told.value
    lose_one_connection(rank)
    with pytest.raises(SyncError, match="lost on purpose") as caught:
        replica.diloco.change_group("survivors")
    assert caught.value.survivors == (0, 1)
    if rank == 1:
        time.sleep(9.0)
    replica.diloco.change_group([0, 1])
    replica.train_to(4 * H)
    replica.store.set(f"went on/{rank}", "")
    return failure, replica.result()


def lose_one_connection(rank: int) -> None:
    """Let the next group fail while it connects, on replica 0; the others wait for it briefly."""
    limit, build = connecting.LIMIT_S, regroup.rendezvous.build_groups

    def build_once(*arguments: Any) -> Any:
        connecting.LIMIT_S, regroup.rendezvous.build_groups = limit, build
        if rank == 0:
            raise SyncError("lost on purpose", stage="connect")
        return build(*arguments)

    connecting.LIMIT_S, regroup.rendezvous.build_groups = 2.0, build_once


def test_a_try_that_failed_does_not_hide_who_lives(fresh_workers: Fresh) -> None:
    pool = fresh_workers(3, init_group=False)
    setup = Setup("int8", 1, H, timeout=1800.0)
    pool.submit(take_time_before_the_next_try, pool.store, setup)
    wait_for(pool, ["went on/0", "went on/1"], timeout=60)
    pool.kill(2, signal.SIGCONT)
    results: list[Any] = pool.collect(timeout=30)
    check_agreement(result for _, result in results[:2])
    # Who was left out finds where they are, though it knows of the first epoch alone.
    failure, error = results[2]
    epoch = results[0][1].epoch
    assert failure.kind == "LeftBehind" and failure.details["went_on_in"] == epoch, failure
    assert error.went_on_in == epoch and error.survivors == (0, 1)


def come_with_an_old_state(rank: int, world: int, address: Address, setup: Setup) -> Any:
    """Replica 3 dies; replica 2 has the state of long ago, as one that was restored."""
    replica = Replica(address, rank, range(world), setup)
    replica.train_to(6 * H - 1)
    if rank == 3:
        replica.fault("kill", "reduce")
    failure = replica.train_until_failure(1)
    assert failure.details["survivors"] == (0, 1, 2), failure
    if rank == 2:
        sealing.ack_of = lambda exchange, last: Ack(
            exchange.epoch, exchange.members, exchange.epoch, {0: Progress(0)}
        )
    with pytest.raises(SyncError, match="at most 1 missing can be repaired") as caught:
        replica.diloco.change_group("survivors")
    if rank == 2:
        with pytest.raises(LeftBehind):
            replica.diloco.change_group("survivors")
        replica.diloco.close()
        return caught.value, None
    replica.diloco.change_group("survivors")
    replica.train_to(8 * H)
    return caught.value, replica.result()


def test_who_cannot_go_on_with_the_others_is_no_survivor(fresh_workers: Fresh) -> None:
    pool = fresh_workers(4, init_group=False)
    setup = Setup("int8", 1, H, timeout=1800.0)
    results: list[Any] = pool.run(
        come_with_an_old_state, pool.store, setup, expect_exit={3}, timeout=40
    )
    for error, _ in results[:3]:
        assert error.missing == (2,) and error.survivors == (0, 1), error
    check_agreement(result for _, result in results[:2])


# --------------------------------------------------------------------------------- the store


@pytest.fixture
def host(zygote: Zygote) -> Any:
    """A process that hosts a store, to be killed, with its address."""
    job = Job(zygote, STORE)
    yield job, ("127.0.0.1", int(job.output.readline()))
    job.send_signal(signal.SIGKILL)
    job.finish()


def fail_without_a_store(
    rank: int, world: int, addresses: list[Address], setup: Setup, action: str
) -> Any:
    replica = Replica(addresses[0], rank, range(world), setup)
    other = connect(addresses[1])
    replica.train_to(2 * H - 1)
    other.set(f"ready/{rank}", "")
    other.wait(["store is gone"])
    if rank == 0:
        replica.fault(action, "reduce")
    failure = replica.train_until_failure(1)
    reason = "was not decided, because this replica's connection to the store has broken"
    with pytest.raises(SyncError, match=reason):
        replica.diloco.change_group("survivors")
    # Nobody's listener is closed before all have looked.
    other.set(f"looked/{rank}", "")
    other.wait([f"looked/{r}" for r in range(action == "kill", world)])
    replica.diloco.close()
    return failure


@pytest.mark.parametrize(("action", "missing"), [("kill", (0,)), ("fail", ())])
def test_without_the_store_nobody_is_missing_who_may_live(
    fresh_workers: Fresh, host: Any, action: str, missing: tuple[int, ...]
) -> None:
    job, address = host
    pool = fresh_workers(3, init_group=False)
    setup = Setup("int8", 1, H, timeout=20.0)
    pool.submit(fail_without_a_store, [address, pool.store], setup, action)
    wait_for(pool, [f"ready/{rank}" for rank in range(3)])
    job.send_signal(signal.SIGKILL)
    pool.crew.store.set("store is gone", "")
    results: list[Any] = pool.collect(timeout=40, expect_exit={0} if action == "kill" else set())
    for failure in results[1:]:
        assert failure.missing == missing, failure
        assert failure.details["survivors"] == (), failure
        assert "because the store does not answer" in failure.message, failure
        assert ("the connection to replica 0 is lost" in failure.message) == bool(missing)


class PlainStore(dist.Store):
    """One that can do no more than torch asks of every store."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:  # type: ignore[override]
        self.values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:  # type: ignore[override]
        return all(key in self.values for key in keys)


@pytest.mark.parametrize("kind", ["tcp", "tcp without libuv", "hash", "file", "plain"])
def test_every_store_decides(kind: str, tmp_path: Path) -> None:
    stores: dict[str, Callable[[], dist.Store]] = {
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
        "tcp without libuv": lambda: dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False
        ),
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 1),
        "plain": PlainStore,
    }
    store = stores[kind]()
    ways = [store]
    if kind != "plain":
        ways += [dist.PrefixStore("p", store), _C.bounded_store(dist.PrefixStore("q", store), 10.0)]
    for way in ways:
        assert decide_once(way, "fate", "first") == "first"
        assert decide_once(way, "fate", "second") == "first"
        assert way.get("fate") == b"first"


class Forgetful(dist.Store):
    """A way to a store on which one notice is lost, once ``forget`` names a part of its key."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.way, self.forget = store, ""

    def _is_lost(self, key: str) -> bool:
        is_lost = bool(self.forget) and re.search(self.forget, key) is not None
        self.forget = "" if is_lost else self.forget
        return is_lost

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        if self._is_lost(key):
            # As a call that was not answered in time: what we wait for next gets its answers.
            raise dist.DistStoreError("the store did not answer, on purpose")
        self.way.set(key, value)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:  # type: ignore[override]
        if self._is_lost(key):
            raise dist.DistStoreError("the store did not answer, on purpose")
        texts = (text if isinstance(text, str) else text.decode() for text in (expected, desired))
        return self.way.compare_set(key, *texts)

    def get(self, key: str) -> bytes:
        return self.way.get(key)

    def add(self, key: str, value: int) -> int:
        return self.way.add(key, value)

    def check(self, keys: list[str]) -> bool:  # type: ignore[override]
        return self.way.check(keys)

    def wait(self, keys: list[str], timeout: Any = None) -> None:  # type: ignore[override]
        self.way.wait(keys) if timeout is None else self.way.wait(keys, timeout)


def lose_a_notice(rank: int, world: int, address: Address, setup: Setup, notice: str) -> Any:
    """Replica 1 dies, and what replica 0 says of it is lost at first. Replica 2 is in training."""
    way = Forgetful(connect(address))
    if rank == 0:
        fault_replicas.connect = lambda address: way
    replica = Replica(address, rank, range(world), setup)
    replica.train_to(2 * H - 1)
    if rank == 1:
        replica.fault("kill", "header")
    if rank == 2:
        replica.store.wait(["decided"])
    way.forget = notice
    failure = replica.train_until_failure(1)
    assert rank != 0 or way.forget == ""
    way.forget = ""
    replica.store.set("decided", "")
    replica.diloco.change_group("survivors")
    replica.train_to(4 * H)
    return end(replica, failure)


@pytest.mark.parametrize("notice", ["any_failed", r"board/(failed|report)/0"])
def test_a_notice_that_is_lost_is_sent_again(fresh_workers: Fresh, notice: str) -> None:
    pool = fresh_workers(3, init_group=False)
    setup = Setup("int8", 1, H, timeout=1800.0)
    results: list[Any] = pool.run(
        lose_a_notice, pool.store, setup, notice, expect_exit={1}, timeout=40
    )
    for one in (results[0], results[2]):
        assert one.missing == (1,) and one.survivors == one.members == (0, 2), one
    check_agreement([results[0].result, results[2].result])


def die_on_a_file(rank: int, world: int, path: str) -> Any:
    """The replicas share a file, and nothing else."""
    fault_replicas.connect = lambda address: dist.FileStore(path, world)
    replica = Replica(("", 0), rank, range(world), Setup("int8", 1, H), suspect_after=4.0)
    replica.train_to(2 * H - 1)
    if rank == 0:
        replica.fault("kill", "reduce")
    failure = replica.train_until_failure(1)
    replica.diloco.change_group("survivors")
    replica.train_to(4 * H)
    return end(replica, failure)


def test_survivors_agree_through_a_file(fresh_workers: Fresh, tmp_path: Path) -> None:
    pool = fresh_workers(3, init_group=False)
    results: list[Any] = pool.run(
        die_on_a_file, str(tmp_path / "store"), expect_exit={0}, timeout=40
    )
    for one in results[1:]:
        assert one.missing == (0,) and one.survivors == one.members == (1, 2)
    check_agreement(one.result for one in results[1:])


# ------------------------------------------------------------------------- what a handler sees


def leave_and_die(rank: int, world: int, address: Address, setup: Setup) -> Any:
    replica = Replica(address, rank, range(world), setup)
    replica.train_to(2 * H - 1)
    if rank == 1:
        replica.diloco.close()
        return None
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    failure = replica.train_until_failure(1)
    replica.diloco.change_group("survivors")
    replica.train_to(4 * H)
    return end(replica, failure)


def test_one_leaves_and_another_dies(fresh_workers: Fresh) -> None:
    pool = fresh_workers(4, init_group=False)
    results: list[Any] = pool.run(
        leave_and_die, pool.store, Setup("int8", 1, H), expect_exit={3}, timeout=40
    )
    for one in (results[0], results[2]):
        failure = one.result.failures[0]
        assert failure.kind == "PeerLeft", failure
        assert failure.details["replicas"] == (1,), failure
        assert failure.details["inner_steps"] == (2 * H - 1,), failure
        assert one.missing == (1, 3) and one.survivors == one.members == (0, 2), failure
        assert "replica 1 closed its DiLoCo and left" in failure.message
        assert "replica 3 did not report" in failure.message
    check_agreement([results[0].result, results[2].result])


def handle_bad_values(rank: int, world: int, address: Address, setup: Setup) -> Any:
    """A handler that leaves out whom the error names goes on without the sick replica."""
    replica = Replica(address, rank, range(world), setup)
    replica.train_to(H - 1)
    if rank == 1:
        next(replica.model.parameters()).data[0, 0] = float("nan")
    with pytest.raises(NonFiniteError) as caught:
        replica.step()
    error = caught.value
    diloco = replica.diloco
    with pytest.raises(
        ValueError, match='"survivors"\\) follows the loss of a replica, but none is known'
    ):
        diloco.change_group("survivors")
    if rank == 1:
        with pytest.raises(ValueError, match=r"replica 1 is not one of the members \[0, 2\]"):
            diloco.change_group(set(diloco.members) - set(error.missing))
    else:
        diloco.change_group(set(diloco.members) - set(error.missing))
        replica.train_to(3 * H)
    return error.missing, error.replicas, error.survivors, diloco.members, replica.result()


def test_bad_values_name_their_replicas_where_a_handler_looks(fresh_workers: Fresh) -> None:
    pool = fresh_workers(3, init_group=False)
    results: list[Any] = pool.run(handle_bad_values, pool.store, Setup("fp32", 1, H), timeout=40)
    assert all(result[:3] == ((1,), (1,), ()) for result in results), results
    assert [result[3] for result in results] == [(0, 2), (0, 1, 2), (0, 2)]
    check_agreement([results[0][4], results[2][4]])


def test_a_name_for_members_that_means_nothing(fresh_workers: Fresh) -> None:
    pool = fresh_workers(1, init_group=False)
    assert pool.run(ask_for_nonsense, pool.store) == [1]


def ask_for_nonsense(rank: int, world: int, address: Address) -> int:
    diloco = Replica(address, rank, [0], Setup()).diloco
    assert diloco.members == (0,) and diloco.epoch > 0
    with pytest.raises(ValueError, match="members must be replicas or \"survivors\", got 'all'"):
        diloco.change_group("all")
    with pytest.raises(ValueError, match=f"none is known in epoch {diloco.epoch} of replicas"):
        diloco.change_group("survivors")
    diloco.close()
    return 1


def propose_at_once(rank: int, world: int, address: Address) -> list[str]:
    """All decide about the same keys at the same time; one of them wins each."""
    store = dist.PrefixStore("decisions", _C.bounded_store(connect(address), 10.0))
    return [decide_once(store, f"key {n}", f"{rank}") for n in range(50)]


def test_a_decision_is_made_once(workers: Callable[[int], Pool]) -> None:
    pool = workers(4)
    results = pool.run(propose_at_once, pool.store)
    assert all(result == results[0] for result in results)
    assert decide_once(pool.crew.store, "decisions/key 0", "x") == results[0][0]
