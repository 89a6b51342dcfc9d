"""Exchanges on a device's streams give the same bits as those of the engine, without host waits.

On a GPU these need as many NCCL ranks as replicas; ``DILOCO_TEST_NCCL_RANKS`` says how many there
may be (1 by default: two ranks on one GPU are refused unless NCCL is told otherwise).
"""

from __future__ import annotations

import gc
import os
import time
import weakref
from types import SimpleNamespace
from typing import Any

import devices
import pytest
import torch
import torch.distributed as dist
from device_training import METHODS, NAMES, Replica, train
from problems import equal

from diloco_comm import Nesterov
from diloco_comm.base.errors import NonFiniteError, ReplicaMismatch, SyncError
from diloco_comm.base.memory import GIVEN_UP, Ballot, vote_token
from diloco_comm.exchange.nccl import connections
from diloco_comm.exchange.nccl import group as nccl_group
from diloco_comm.exchange.nccl.streams import StreamDriver

NCCL_RANKS = int(os.environ.get("DILOCO_TEST_NCCL_RANKS", "1"))


def cases(*worlds: int) -> list[Any]:
    stand_in = [pytest.param("lagging", world) for world in worlds]
    return stand_in + [
        pytest.param("cuda", world, marks=pytest.mark.gpu)
        for world in worlds
        if world <= NCCL_RANKS
    ]


def use_streams(rank: int, device: str, library: str) -> torch.device:
    """Make a device ready, and let its groups be the stand-in's where it is one."""
    # NCCL takes ranks on one GPU only if they seem to be on different hosts.
    os.environ["NCCL_HOSTID"] = f"diloco-{rank}"
    here = devices.use(device, library)
    if device == "lagging":
        from lagging_group import LaggingGroup

        nccl_group.make_group = LaggingGroup  # type: ignore[assignment]
        connections.CONNECT_BYTES = 1 << 10
    return here


def on_streams(arguments: dict[str, Any]) -> dict[str, Any]:
    return {**arguments, "backend": "nccl", "lanes": 1}


def against_engine(rank: int, world: int, device: str, library: str, names: list[str]) -> list[str]:
    here = use_streams(rank, device, library)
    wrong = []
    for name in names:
        expected = train(rank, torch.device("cpu"), 13, **{**METHODS[name], "lanes": 1})
        # Averaged buffers, and gaps computed from norms, are looked at by the host.
        checks = name not in ("co2", "streaming", "delayed")
        given = train(rank, here, 13, checks=checks, **on_streams(METHODS[name]))
        wrong += [] if equal(expected, given) else [name]
        if name in ("diloco", "adam"):
            given = train(rank, here, 13, offload="cpu", **on_streams(METHODS[name]))
            wrong += [] if equal(expected, given) else ["offload"]
    return wrong


@pytest.mark.nightly("up to 4 s each; they differ in the number of replicas", but=["lagging-1"])
@pytest.mark.parametrize(("device", "world"), cases(1, 2, 3, 4, 5))
def test_streams_equal_the_engine(device: str, world: int, replicas, stand_in) -> None:
    result = replicas(world).run(against_engine, device, stand_in, NAMES[world], timeout=100)
    assert result == [[]] * world


def changing_weights(rank: int, world: int, device: str, library: str) -> list[bool]:
    """Weights that every send asks for: tensors, and the sums that an own share goes by."""
    here = use_streams(rank, device, library)
    same = []
    for name in ("diloco", "eager"):
        given = []
        for there in (torch.device("cpu"), here):
            sends: list[float] = []

            def weight(sends: list[float] = sends) -> float:
                sends.append(1.0 + (rank + len(sends)) % 3)
                return sends[-1]

            arguments = METHODS[name] if there.type == "cpu" else on_streams(METHODS[name])
            replica = Replica(rank, there, weight=weight, **{**arguments, "lanes": 1})
            replica.steps(0, 13)
            replica.diloco.flush()
            sums = [part.weight_sum for part in replica.diloco.parts]
            given.append((replica.all(), sums, sends))
            replica.diloco.close()
        (tensors, *numbers), (on_device, *numbers_on_device) = given
        same += [equal(tensors, on_device), numbers == numbers_on_device, len(set(sends)) > 1]
    return same


@pytest.mark.nightly("3 s; they differ in the number of replicas", but=["lagging-2"])
@pytest.mark.parametrize(("device", "world"), cases(2, 3))
def test_weights_that_change(device: str, world: int, replicas, stand_in) -> None:
    result = replicas(world).run(changing_weights, device, stand_in)
    assert result == [[True] * 6] * world


def left_of_rounds(rank: int, world: int, device: str, library: str) -> list[Any]:
    """Without collections of garbage: exchanges still watched, and payloads of the old group."""
    here = use_streams(rank, device, library)
    gc.disable()
    try:
        replica = Replica(rank, here, **on_streams(METHODS["diloco"]))
        diloco = replica.diloco
        replica.steps(0, 16)
        driver = diloco.exchange._driver
        assert driver is not None
        num_watched = len(driver._jobs)
        payloads = [
            weakref.ref(one.tensor) for p in diloco.parts if p.buffers for one in p.buffers._owns
        ]
        diloco.change_group(range(world))
        replica.steps(16, 20)
        num_kept = sum(payload() is not None for payload in payloads)
        diloco.close()
    finally:
        gc.enable()
    return [num_watched <= len(diloco.parts), len(payloads) > 0, num_kept]


def test_a_round_that_is_applied_leaves_nothing_on_the_device(replicas, stand_in) -> None:
    result = replicas(2).run(left_of_rounds, "lagging", stand_in)
    assert result == [[True, True, 0]] * 2


def voted_down(rank: int, world: int, device: str, library: str, name: str) -> list[Any]:
    """A round with values that are not finite, left to the device: nothing changes."""
    here = use_streams(rank, device, library)
    pair = []
    for there in (here, torch.device("cpu")):
        arguments = METHODS[name] if there.type == "cpu" else on_streams(METHODS[name])
        arguments = {**arguments, "average_buffers": False}
        replica = Replica(rank, there, on_nonfinite="skip", num_steps=24, **arguments)
        replica.steps(0, 5)
        spoil = replica.model.tensors[3]
        kept = spoil.detach().clone()
        if rank == 0:
            with torch.no_grad():
                spoil.view(-1)[77].fill_(float("nan"))
        replica.steps(5, 8)
        with torch.no_grad():
            spoil.copy_(kept)
        replica.steps(8, 20)
        replica.diloco.flush()
        pair.append((replica.all(), sorted(m.is_applied for m in replica.diloco.metrics())))
        replica.diloco.close()
    assert not all(pair[0][1])
    return [equal(pair[0][0], pair[1][0]), pair[0][1] == pair[1][1]]


@pytest.mark.parametrize("name", ["diloco", "adam", "eager", "eager_2"])
@pytest.mark.parametrize(("device", "world"), cases(2))
def test_a_round_voted_down(device: str, world: int, name: str, replicas, stand_in) -> None:
    assert replicas(world).run(voted_down, device, stand_in, name) == [[True, True]] * world


def bad_mean(rank: int, world: int, device: str, library: str) -> list[tuple[str, Any]]:
    """What is within the range on every replica, and in the mean is not."""
    here = use_streams(rank, device, library)
    seen = []
    for there in (here, torch.device("cpu")):
        arguments = {**METHODS["diloco"], "wire": "int4"}
        arguments = arguments if there.type == "cpu" else on_streams(arguments)
        replica = Replica(rank, there, **arguments)
        replica.steps(0, 7)
        with torch.no_grad():
            replica.model.tensors[0].view(-1)[3].fill_(-(2.0**126))
        try:
            replica.diloco.step()
            replica.diloco.state_dict()
        except NonFiniteError as error:
            seen.append((str(error), error.replicas))
        replica.diloco.close()
    return seen


@pytest.mark.parametrize(("device", "world"), cases(3))
def test_a_mean_out_of_range(device: str, world: int, replicas, stand_in) -> None:
    for on_device, on_host in replicas(world).run(bad_mean, device, stand_in):
        assert on_device == on_host
        assert "elements whose mean is out" in on_host[0] and on_host[1] == (0, 1, 2)


def raised_later(rank: int, world: int, device: str, library: str) -> list[Any]:
    """With ``on_nonfinite="raise"`` a later call raises, and outer parameters are as before."""
    here = use_streams(rank, device, library)
    replica = Replica(rank, here, **on_streams(METHODS["diloco"]))
    replica.steps(0, 7)
    before = replica.diloco.outer_hash()
    with torch.no_grad():
        replica.model.tensors[0].view(-1)[3].fill_(float("inf"))
    raised = 0
    try:
        replica.steps(7, 8)
        replica.diloco.state_dict()
    except NonFiniteError as error:
        raised = len(error.replicas)
    after = replica.diloco.outer_hash()
    replica.diloco.close()
    return [raised, before == after]


@pytest.mark.parametrize(("device", "world"), cases(2))
def test_the_error_of_a_round_comes_later(device: str, world: int, replicas, stand_in) -> None:
    assert replicas(world).run(raised_later, device, stand_in) == [[2, True]] * 2


def other_rate(rank: int, world: int, device: str, library: str) -> list[Any]:
    """The last replica has another outer learning rate, which only headers tell."""
    here = use_streams(rank, device, library)
    # An optimizer of its own: the one in METHODS is other tests', too.
    replica = Replica(rank, here, outer=Nesterov(0.7, 0.9), **on_streams({"wire": "int8"}))
    replica.steps(0, 7)
    before = replica.diloco.outer_hash()
    if rank == world - 1:
        replica.diloco.outer.lr = 0.25
    message = ""
    try:
        replica.steps(7, 8)
    except ReplicaMismatch as error:
        message = str(error)
    kept = replica.diloco.outer_hash() == before
    replica.diloco.close()
    return [message, kept]


@pytest.mark.parametrize(("device", "world"), cases(2, 3))
def test_a_header_that_differs(device: str, world: int, replicas, stand_in) -> None:
    """Every field is compared, as over gloo, and before anything is applied."""
    for message, kept in replicas(world).run(other_rate, device, stand_in):
        assert "outer_lr differs between replicas" in message
        assert f"0.25 on replica {world - 1}" in message and kept


def abandoned(rank: int, world: int, device: str, library: str, name: str) -> list[Any]:
    """A replica stops answering: the others abort, have the state as before, and go on."""
    here = use_streams(rank, device, library)
    store = dist.PrefixStore(f"abandoned/{name}", dist.group.WORLD.get_group_store())
    members = {"store": store, "replica": rank, "num_replicas": world, "timeout": 3.0}
    replica = Replica(rank, here, **members, **on_streams(METHODS[name]))
    replica.steps(0, 7)
    if rank == world - 1:
        time.sleep(7)
        replica.diloco.close()
        return [True] * 3
    before = replica.diloco.outer_hash()
    failed = ""
    # What failed is found out, and given up, without a wait for all that the device has to do.
    with devices.no_host_wait(here):
        try:
            replica.steps(7, 12)
            replica.diloco._rounds.settle_verdicts(12)
        except SyncError as error:
            failed = str(error)
    kept = replica.diloco.outer_hash() == before
    replica.diloco.change_group(range(world - 1))
    replica.steps(12, 20)
    replica.diloco.flush()
    hashes = replica.diloco.exchange.exchange_objects(replica.diloco.outer_hash().encode())
    replica.diloco.close()
    return [bool(failed), kept, len(set(hashes)) == 1]


@pytest.mark.nightly("7 s each; the first tier has rounds that are voted down")
@pytest.mark.parametrize("name", ["diloco"])
@pytest.mark.parametrize(("device", "world"), cases(2, 3))
def test_an_abort_leaves_the_state_as_before(
    device: str, world: int, name: str, replicas, stand_in
) -> None:
    assert replicas(world).run(abandoned, device, stand_in, name) == [[True] * 3] * world


def cut_off(rank: int, world: int, library: str) -> list[Any]:
    """The last rank gives up while it waits for data; the votes of all come after that."""
    here = use_streams(rank, "lagging", library)
    replica = Replica(rank, here, timeout=60.0, **on_streams(METHODS["diloco"]))
    replica.steps(0, 7)
    before, failed = replica.diloco.outer_hash(), ""
    driver: Any = replica.diloco.exchange._driver
    if rank == world - 1:
        driver.group.is_cut, driver.timeout = True, 2.0
    try:
        replica.steps(7, 8)
        replica.diloco._rounds.settle_verdicts(8)
    except SyncError as error:
        failed = str(error)
    kept = replica.diloco.outer_hash() == before
    replica.diloco.change_group(range(world))
    replica.steps(8, 20)
    replica.diloco.flush()
    hashes = replica.diloco.exchange.exchange_objects(replica.diloco.outer_hash().encode())
    replica.diloco.close()
    return [failed, kept, len(set(hashes)) == 1]


@pytest.mark.nightly("3 s each; they differ in the number of replicas", but=["2"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_replica_that_gave_up_never_votes_yes(world: int, replicas, stand_in) -> None:
    """Kernels that are enqueued after the aborted ones may still exchange real votes."""
    *others, last = replicas(world).run(cut_off, stand_in)
    assert last[1:] == [True] * 2 and "not done after 2 s" in last[0], last
    for other in others:
        assert other[1:] == [True] * 2, other
        assert f"replica {world - 1} gave the round up before its vote" in other[0], other


def test_tokens_differ_in_both_halves() -> None:
    """What an aborted gather leaves, zeros or an earlier vote, reads as no vote for this round."""
    tokens = [0, *(vote_token(number) for number in range(1, 1000))]
    assert all(0 < token < 1 << 62 for token in tokens[1:])
    assert len({token >> 32 for token in tokens}) == len(tokens)
    assert len({token & (1 << 32) - 1 for token in tokens}) == len(tokens)


@pytest.mark.parametrize("bad", [(0, 0), (10**9, 10**9), (7 * 10**9, 7 * 10**9 // 3), (1 << 32, 0)])
def test_a_vote_tells_any_number_of_bad_elements(bad: tuple[int, int]) -> None:
    numbers = (torch.zeros(size, dtype=torch.int64) for size in (2, 2, 1, 1, 2, 1, 2, 1, 1, 2))
    ballot = Ballot(torch.zeros(2, dtype=torch.bool), *numbers)
    ballot.bad.fill_(bad[0])
    ballot.bad_mean.fill_(bad[1])
    alone = SimpleNamespace(group=None, _num_votes=0, _given_up=torch.zeros(1, dtype=torch.int64))
    StreamDriver._vote(alone, ballot)  # type: ignore[arg-type]
    assert ballot.numbers() == [bad] and ballot.quitters() == []
    assert bool(ballot.host_verdict) == any(bad)
    alone._given_up.fill_(GIVEN_UP)
    ballot.own.zero_()
    StreamDriver._vote(alone, ballot)  # type: ignore[arg-type]
    assert ballot.quitters() == [0] and bool(ballot.host_verdict)


def changed(rank: int, world: int, device: str, library: str, names: list[str]) -> list[str]:
    """The group changes with rounds under way, all of whose replicas go on: all of them count."""
    here = use_streams(rank, device, library)
    wrong = []
    for name in names:
        pair = []
        for there in (here, torch.device("cpu")):
            arguments = METHODS[name] if there.type == "cpu" else on_streams(METHODS[name])
            replica = Replica(rank, there, num_steps=24, **{**arguments, "lanes": 1})
            replica.steps(0, 8)
            parts = replica.diloco.parts
            sent = [p.in_flight[-1].number + 1 if p.in_flight else p.round for p in parts]
            replica.diloco.change_group(range(world))
            rounds = [part.round for part in replica.diloco.parts]
            replica.steps(8, 20)
            replica.diloco.flush()
            pair.append((rounds, sent, replica.all()))
            replica.diloco.close()
        (rounds, _, given), (expected_rounds, sent, expected) = pair
        # On streams the host does not know yet that the last round of "diloco" is applied.
        if not (rounds == expected_rounds == sent and equal(given, expected)):
            wrong.append(f"{name}: {rounds}, {expected_rounds}, {sent}")
    return wrong


@pytest.mark.nightly("up to 7 s each; they differ in the number of rounds", but=["lagging-1"])
@pytest.mark.parametrize(("device", "world"), cases(1, 2, 3))
def test_rounds_under_way_count_when_the_group_changes(
    device: str, world: int, replicas, stand_in
) -> None:
    names = ["diloco", "streaming", "eager_2"]
    assert replicas(world).run(changed, device, stand_in, names, timeout=100) == [[]] * world


def order_of_collectives(rank: int, world: int, library: str) -> list[str]:
    """Replicas with other delays enqueue alike: what is first decides, not what is ready first."""
    here = use_streams(rank, "lagging", library)
    torch.ops.lagging.set_lag(100 + 700 * rank)
    replica = Replica(rank, here, **on_streams(METHODS["eager"]))
    replica.steps(0, 13)
    group = replica.diloco.exchange._driver.group
    calls = list(group.calls)
    replica.diloco.close()
    torch.ops.lagging.set_lag(devices.LAG_US)
    return calls


def test_the_order_is_the_same_on_all_ranks(replicas, stand_in) -> None:
    first, *others = replicas(3).run(order_of_collectives, stand_in)
    assert len(first) > 20
    assert all(calls == first for calls in others)
