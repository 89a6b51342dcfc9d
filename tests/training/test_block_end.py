"""The end of a ``with`` block is the end of training: all replicas share the rest, and close."""

from __future__ import annotations

import copy
import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from problems import attach, train_step

from diloco_comm import Nesterov, NonFiniteError, PeerLeft, ReplicaMismatch
from diloco_comm.exchange.membership import change

# Between two sends.
NUM_STEPS = 5


def ended(rank: int, world: int, flushed_by: list[int], is_final: bool) -> tuple[str, bool, int]:
    """Train in a block; return the hash after it, whether local is outer, and the sends."""
    model, optimizer, diloco = attach(sync_every=3, outer=Nesterov(0.7, 0.9), timeout=30)
    with diloco:
        for step in range(NUM_STEPS):
            train_step(model, optimizer, rank, step)
        if rank in flushed_by:
            diloco.flush(final=is_final)
    local = torch.cat([param.detach().flatten() for param in model.parameters()])
    outer = torch.cat([part.outer.flatten() for part in diloco.parts])
    return diloco.outer_hash(), torch.equal(local, outer), diloco.totals().num_syncs


def test_the_end_of_a_block_is_a_final_flush(workers) -> None:
    expected = [(hashed, True, 2) for hashed, _, _ in workers(2).run(ended, [0, 1], True)]
    assert expected[0] == expected[1]
    for flushed_by, is_final in (([], True), ([0, 1], True), ([0], True), ([0, 1], False)):
        assert workers(2).run(ended, flushed_by, is_final) == expected


def ended_otherwise(rank: int, world: int, ending: str) -> str:
    """Replica 0 leaves its block in another way than replica 1; return what replica 1 hears."""
    model, optimizer, diloco = attach(sync_every=3, timeout=30)
    try:
        with diloco:
            for step in range(12 if (ending, rank) == ("early", 1) else NUM_STEPS):
                train_step(model, optimizer, rank, step)
            if rank == 0 and ending == "error":
                raise KeyError(ending)
            if rank == 0 and ending == "closed":
                diloco.close()
    except (KeyError, PeerLeft, ReplicaMismatch) as error:
        return type(error).__name__
    assert diloco._is_closed
    return ""


@pytest.mark.parametrize(
    ("ending", "heard"),
    [
        ("error", ["KeyError", "PeerLeft"]),
        ("closed", ["", "PeerLeft"]),
        ("early", ["ReplicaMismatch", "ReplicaMismatch"]),
    ],
)
def test_no_replica_waits_for_one_that_ends_otherwise(
    ending: str, heard: list[str], workers
) -> None:
    assert workers(2).run(ended_otherwise, ending) == heard


def ended_after_bad_values(rank: int, world: int) -> tuple[int, int, bool]:
    """Replica 1 has a NaN in a round; return the sends before and after the end of the block."""
    model, optimizer, diloco = attach(sync_every=3, on_nonfinite="raise", timeout=30)
    with diloco:
        for step in range(NUM_STEPS):
            train_step(model, optimizer, rank, step)
        healthy = copy.deepcopy(model.state_dict())
        if rank == 1:
            next(model.parameters()).data.fill_(math.nan)
        with pytest.raises(NonFiniteError):
            train_step(model, optimizer, rank, NUM_STEPS)
        for parameter, value in zip(model.parameters(), healthy.values(), strict=True):
            parameter.data.copy_(value)
        num_sent = diloco.totals().num_syncs
    local = torch.cat([param.detach().flatten() for param in model.parameters()])
    outer = torch.cat([part.outer.flatten() for part in diloco.parts])
    return num_sent, diloco.totals().num_syncs, torch.equal(local, outer)


def test_a_caught_error_of_bad_values_does_not_keep_a_block_from_sharing(workers) -> None:
    (before, after, is_shared), other = workers(2).run(ended_after_bad_values)
    assert other == (before, after, is_shared)
    assert after == before + 1
    assert is_shared


def ended_with_bad_values(rank: int, world: int, is_caught: bool) -> str:
    """Replica 1 has a NaN when its block ends; return the error that leaves the block."""
    model, optimizer, diloco = attach(sync_every=3, on_nonfinite="raise", timeout=30)
    try:
        with diloco:
            for step in range(NUM_STEPS):
                train_step(model, optimizer, rank, step)
            if rank == 1:
                next(model.parameters()).data.fill_(math.nan)
            if is_caught:
                with pytest.raises(NonFiniteError):
                    train_step(model, optimizer, rank, NUM_STEPS)
    except NonFiniteError as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize(("is_caught", "left_by"), [(True, ""), (False, "NonFiniteError")])
def test_bad_values_leave_a_block_unless_the_program_knows_of_them(
    is_caught: bool, left_by: str, workers
) -> None:
    assert workers(2).run(ended_with_bad_values, is_caught) == [left_by, left_by]


def test_a_block_of_one_replica_applies_the_rest() -> None:
    model, optimizer, diloco = attach(sync_every=3, outer=Nesterov(0.7, 0.9))
    with diloco:
        train_step(model, optimizer, 0, 0)
        assert diloco.totals().num_syncs == 0
    assert diloco.totals().num_syncs == 1
    with pytest.raises(RuntimeError, match="closed"):
        diloco.__enter__()


def left_out(rank: int, world: int) -> str:
    """Replica 1 ends its block while the others, who have left its group, make the next one."""
    model, optimizer, diloco = attach(sync_every=3, timeout=30)
    store = dist.distributed_c10d._get_default_store()
    connect = change.connect

    def connect_late(*arguments: Any) -> Any:
        store.set("the old group is closed", "")
        store.wait(["replica 1 has ended"])
        return connect(*arguments)

    with diloco:
        for step in range(NUM_STEPS):
            train_step(model, optimizer, rank, step)
        diloco.flush()
        if rank == 1:
            store.wait(["the old group is closed"])
        else:
            with mock.patch.object(change, "connect", connect_late):
                diloco.change_group([0, 2])
            train_step(model, optimizer, rank, NUM_STEPS)
    if rank == 1:
        store.set("replica 1 has ended", "")
    return diloco.outer_hash()


def test_who_is_left_out_ends_while_the_others_make_their_group(workers) -> None:
    first, _, third = workers(3).run(left_out)
    assert first == third
