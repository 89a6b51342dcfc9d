"""Replicas whose outer state differs find out before a payload counts, on every replica."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_training import METHODS, Replica
from exchange_helpers import decode, exchange, sync, values, wire_of
from problems import attach, equal, everything, train_step
from test_gpu_streams import cases, on_streams, use_streams

from diloco_comm import (
    CO2,
    Blocking,
    Delayed,
    DiLoCo,
    Eager,
    HeavyBall,
    Nesterov,
    ReplicaMismatch,
    Streaming,
)
from diloco_comm.ops import finish_digest
from diloco_comm.ops.reference import digest as reference_digest

POLICIES: dict[str, dict[str, Any]] = {
    "blocking": {"outer": Nesterov()},
    "streaming": {"overlap": Streaming(1, 0.5), "fragments": 2},
    "delayed": {"overlap": Delayed()},
    "eager": {"overlap": Eager()},
    "eager_2": {"overlap": Eager(2)},
    "co2": {"overlap": CO2(), "outer": HeavyBall(0.3, 0.9)},
}


def histories(diloco: DiLoCo) -> list[int]:
    return [part.history for part in diloco.parts]


def run_of(rank: int, seed: int, num_steps: int, **arguments: Any) -> io.BytesIO:
    """Train from weights of ``seed`` and save."""
    model, optimizer, diloco = attach(model_seed=seed, **arguments)
    with diloco:
        for step in range(num_steps):
            train_step(model, optimizer, rank, step)
        file = io.BytesIO()
        torch.save({"diloco": diloco.state_dict(), "model": model.state_dict()}, file)
    return file


def resume(file: io.BytesIO, **arguments: Any) -> tuple[Any, Any, DiLoCo]:
    model, optimizer, diloco = attach(**arguments)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    model.load_state_dict(state["model"])
    diloco.load_state_dict(state["diloco"])
    return model, optimizer, diloco


def two_checkpoints(rank: int, world: int, name: str, call: str) -> tuple[str, bool, int]:
    """Replica 1 resumes step 16 of another run than the others do."""
    arguments = {"sync_every": 4, "timeout": 60, **POLICIES[name]}
    files = [run_of(rank, seed, 16, **arguments) for seed in (5, 6)]
    model, optimizer, diloco = resume(files[rank == 1], **arguments)
    with diloco:
        before = everything(model, diloco)[-1:]
        with pytest.raises(ReplicaMismatch) as info:
            for step in range(16, 40):
                train_step(model, optimizer, rank, step)
                if call == "flush":
                    diloco.flush()
        return str(info.value), equal(before, everything(model, diloco)[-1:]), diloco.inner_step


@pytest.mark.nightly("1 s each; they differ in the policy", but=["blocking", "eager"])
@pytest.mark.parametrize("name", POLICIES)
def test_another_runs_checkpoint_is_refused_at_the_first_send(name: str, workers) -> None:
    # A policy that takes a result later hears of the difference later.
    sent_at = 19 if name == "streaming" else 20
    rounds = POLICIES[name].get("overlap", Blocking()).rounds
    for message, is_unchanged, inner_step in workers(3).run(two_checkpoints, name, "step"):
        assert "outer state differs between replicas" in message
        assert "on replicas 0, 2" in message and "on replica 1" in message
        assert "Load the same checkpoint on every replica" in message
        assert is_unchanged or name != "blocking"
        assert inner_step <= sent_at + 4 * rounds


@pytest.mark.parametrize("name", ["blocking", "eager"])
def test_another_runs_checkpoint_is_refused_by_flush(name: str, workers) -> None:
    for message, is_unchanged, inner_step in workers(2).run(two_checkpoints, name, "flush"):
        assert "outer state of fragment 0 differs" in message
        assert is_unchanged and inner_step == 17


def other_momentum(rank: int, world: int) -> str:
    """All numbers and outer parameters are equal; one element of a momentum is not."""
    model, optimizer, diloco = resume(run_of(rank, 0, 4, outer=Nesterov()), outer=Nesterov())
    with diloco:
        state = diloco.state_dict()
        if rank == 1:
            next(iter(state["buffers"]["momentum"].values())).view(-1)[0] += 1e-7
        diloco.load_state_dict(state)
        with pytest.raises(ReplicaMismatch) as info:
            for step in range(2):
                train_step(model, optimizer, rank, step)
        return str(info.value)


def test_one_bit_of_a_momentum_is_seen(workers) -> None:
    for message in workers(2).run(other_momentum):
        assert "outer state differs between replicas" in message


def changed_by_hand(rank: int, world: int, name: str) -> str:
    """Something writes into replica 1's outer parameters; the group is formed anew."""
    model, optimizer, diloco = attach(timeout=60, **POLICIES[name])
    with diloco:
        for step in range(4):
            train_step(model, optimizer, rank, step)
        if rank == 1:
            diloco.parts[0].state.outer[0] += 1.0
        with pytest.raises(ReplicaMismatch) as info:
            diloco.change_group([0, 1])
        # The group is there, and its replicas still have nothing to share.
        with pytest.raises(ReplicaMismatch, match="differs between replicas"):
            for step in range(4, 8):
                train_step(model, optimizer, rank, step)
        return str(info.value)


@pytest.mark.parametrize("name", ["blocking", "delayed"])
def test_change_group_compares_the_state(name: str, workers) -> None:
    for message in workers(2).run(changed_by_hand, name):
        assert "outer state of fragment 0 differs between replicas" in message
        assert "on replica 0; " in message and "on replica 1: " in message


def changed_in_training(rank: int, world: int, name: str) -> list[str]:
    """A program writes into the outer parameters of one replica, as through ``state_dict``."""
    model, optimizer, diloco = attach(timeout=60, **POLICIES[name])
    said = []
    with diloco:
        for step in range(5):
            train_step(model, optimizer, rank, step)
        if rank == 1:
            diloco.parts[0].outer.add_(2.0**-10)
        for _ in range(2):
            try:
                for step in range(4):
                    train_step(model, optimizer, rank, step)
                diloco.flush()
            except ReplicaMismatch as error:
                said.append(str(error))
        return [*said, diloco.outer_hash()]


@pytest.mark.parametrize("name", POLICIES)
def test_flush_sees_what_was_written_into_the_state(name: str, workers) -> None:
    results = workers(2).run(changed_in_training, name)
    if "eager" in name:
        # What differs between replicas is shared by a flush, whatever made the difference.
        assert results[0] == results[1] and len(results[0]) == 1
        return
    for *said, _ in results:
        assert len(said) == 2, said
        assert "outer state of fragment 0 differs between replicas" in said[0]
        assert "differs between replicas" in said[1]
    assert results[0][:2] == results[1][:2]
    assert results[0][2] != results[1][2]


def train_on(rank: int, world: int, name: str) -> list[list[int]]:
    """Histories along a run: trained, resumed, after a change of the group, after a flush."""
    seen = []
    arguments = {"average_buffers": True, "timeout": 60, **POLICIES[name]}
    file = run_of(rank, 0, 7, **arguments)
    model, optimizer, diloco = resume(file, **arguments)
    with diloco:
        for step in range(7, 20):
            train_step(model, optimizer, rank, step)
            if step % 2:
                seen.append(histories(diloco))
        diloco.flush()
        seen.append(histories(diloco))
        diloco.change_group(range(world))
        for step in range(20, 24):
            train_step(model, optimizer, rank, step)
        seen.append(histories(diloco))
    return seen


@pytest.mark.each_value("18 combinations of policies and numbers of replicas")
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", POLICIES)
def test_replicas_that_train_have_one_history(name: str, world: int, workers) -> None:
    first, *others = workers(world).run(train_on, name)
    assert all(other == first for other in others)
    # Every round that was applied is in the history.
    assert len({tuple(histories) for histories in first}) > 6


def joiner(rank: int, world: int, address: tuple[str, int], name: str) -> list[int]:
    store = dist.TCPStore(*address, is_master=False)
    arguments = {"store": store, "replica": rank, "timeout": 60, **POLICIES[name]}
    if rank == 2:
        arguments |= {"members": [0, 1, 2], "init": "join", "model_seed": 5}
    else:
        arguments |= {"num_replicas": 2}
    model, optimizer, diloco = attach(**arguments)
    with diloco:
        for step in range(diloco.inner_step, 5):
            train_step(model, optimizer, rank, step)
        if rank != 2:
            diloco.change_group([0, 1, 2])
        for step in range(5, 12):
            train_step(model, optimizer, rank, step)
        return histories(diloco)


@pytest.mark.nightly("1 s each; they differ in the policy", but=["blocking", "eager"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_newcomer_takes_the_history_over(name: str, fresh_workers) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, *others = fresh_workers(3).run(joiner, ("127.0.0.1", store.port), name)
    assert all(other == first for other in others)


# ------------------------------------------------------------------------- digests of the rounds


def digests(rank: int, world: int, wire: str, num_elements: int) -> list[tuple[int, int]]:
    """Three rounds: the engine's digest, and one of the payloads' bytes as they lie here."""
    found = []
    with exchange(rank, world) as ex:
        buffers = ex.buffers(num_elements, wire_of(wire))
        for round in range(3):
            params = [values(min(round, 1), rank, num_elements)]
            outcome = sync(ex, buffers, params, round=round)
            decode(outcome)
            sums = torch.zeros(2, dtype=torch.int64)
            total = sum(payload.numel() for payload, _ in outcome.terms)
            for place, (payload, _) in enumerate(outcome.terms):
                for begin, end in outcome.layout.filled():
                    first_word = (place * payload.numel() + begin) // 8
                    reference_digest(payload[begin:end], sums, first_word)
            found.append((outcome.digest, finish_digest(*sums.tolist(), total)))
            buffers.commit()
    return found


@pytest.mark.each_pair("48 combinations")
@pytest.mark.parametrize("wire", ["fp32", "int8", "int4", "bf16"])
@pytest.mark.parametrize("num_elements", [1, 257, 4096, 30_011])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_digest_is_that_of_the_payloads(
    world: int, num_elements: int, wire: str, workers
) -> None:
    first, *others = workers(world).run(digests, wire, num_elements)
    assert all(
        [engine for engine, _ in other] == [engine for engine, _ in first] for other in others
    )
    assert len({engine for engine, _ in first}) == 2
    assert all(engine == reference for engine, reference in first)


# ----------------------------------------------------------------------------------- on streams


def differing(rank: int, world: int, device: str, library: str, what: str) -> list[Any]:
    """One replica differs in something that every replica must share; both ways to exchange."""
    here = use_streams(rank, device, library)
    seen = []
    for there in (here, torch.device("cpu")):
        arguments = {**METHODS["diloco"], "outer": Nesterov(0.7, 0.9)}
        arguments = arguments if there.type == "cpu" else on_streams(arguments)
        replica = Replica(rank, there, **arguments)
        replica.steps(0, 5)
        if rank == 1 and what == "outer lr":
            replica.diloco.outer.lr = 0.5
        if rank == 1 and what == "history":
            replica.diloco.parts[0].history ^= 1
        before = replica.diloco.outer_hash()
        with pytest.raises(ReplicaMismatch) as info:
            replica.steps(5, 12)
            replica.diloco.state_dict()
        seen += [str(info.value), replica.diloco.outer_hash() == before]
        replica.diloco.close()
    return seen


@pytest.mark.parametrize("what", ["outer lr", "history"])
@pytest.mark.parametrize(("device", "world"), cases(2))
def test_streams_compare_what_the_engine_compares(
    device: str, world: int, what: str, replicas, stand_in
) -> None:
    for on_device, kept, on_host, also_kept in replicas(world).run(
        differing, device, stand_in, what
    ):
        assert kept and also_kept
        for message in (on_device, on_host):
            assert ("outer_lr differs" if what == "outer lr" else "outer state differs") in message


def same_on_streams(rank: int, world: int, device: str, library: str) -> list[list[int]]:
    here = use_streams(rank, device, library)
    seen = []
    for there in (here, torch.device("cpu")):
        arguments = {**METHODS["diloco"], "outer": Nesterov(0.7, 0.9)}
        arguments = arguments if there.type == "cpu" else on_streams(arguments)
        replica = Replica(rank, there, **arguments)
        replica.steps(0, 9)
        replica.diloco.flush()
        seen.append(histories(replica.diloco))
        replica.diloco.close()
    return seen


@pytest.mark.parametrize(("device", "world"), cases(2, 3))
def test_the_history_is_the_same_on_a_device(device: str, world: int, replicas, stand_in) -> None:
    results = replicas(world).run(same_on_streams, device, stand_in)
    assert all(history == results[0][0] for result in results for history in result)
