"""Replicas that disagree and values that no wire carries: errors after which the group goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exchange_helpers import N, connect_replica, decode, gives_reference_bytes, sync
from workers import Pool

from diloco_comm import __version__
from diloco_comm.base import extension
from diloco_comm.base.errors import NonFiniteError, ReplicaMismatch, SyncError
from diloco_comm.exchange.round import Header
from diloco_comm.ops.wire import ELEMENT_WIRES, WireFormat

Fresh = Callable[..., Pool]
Address = tuple[str, int]


def _mismatch(rank: int, world: int, address: Address, field: str) -> Any:
    ex = connect_replica(address, rank, list(range(world)))
    odd = rank == 1
    n = N + 64 if odd and field == "num_elements" else N
    wire = WireFormat("int4" if odd and field == "wire" else "int8",
                      128 if odd and field == "block_size" else 256)  # fmt: skip
    buffers = ex.buffers(n, wire)
    header = Header(num_fragments=4)
    if odd and hasattr(header, field) and field != "kind":
        setattr(header, field, 3)
    if odd and field == "kind":
        header.kind = "flush"
    stochastic = odd and field == "rounding"
    work = ex.start(
        buffers, outer=None, params=[torch.randn(n)], header=header, stochastic=stochastic
    )
    with pytest.raises(ReplicaMismatch) as caught:
        work.wait(20)
    # The groups are as good as before: nothing had been posted.
    fine = gives_reference_bytes(ex, ex.buffers(N, WireFormat("int8")), 5, list(range(world)))
    ex.close()
    return str(caught.value), fine


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("kind", "kind differs between replicas: sync on replicas 0, 2; flush on replica 1"),
        ("wire", "wire differs between replicas: int8 on replicas 0, 2; int4 on replica 1"),
        ("block_size", "block_size differs between replicas: 256 on replicas 0, 2; 128 on"),
        ("num_fragments", "number of fragments differs between replicas: 4 on replicas 0, 2; 3"),
        ("sync_every", "sync_every differs between replicas: 0 on replicas 0, 2; 3 on replica 1"),
        ("fragment", "fragment differs between replicas: 0 on replicas 0, 2; 3 on replica 1"),
        ("round", "round differs between replicas: 0 on replicas 0, 2; 3 on replica 1"),
        ("num_elements", "num_elements differs between replicas: 60000 on replicas 0, 2; 60064"),
        ("layout_hash", "layout_hash differs between replicas: 0x0000000000000000 on replicas"),
        ("outer_lr", "outer_lr differs between replicas: 0 on replicas 0, 2; 3 on replica 1"),
        ("rounding", "rounding differs between replicas: nearest on replicas 0, 2; stochastic"),
    ],
)
def test_mismatch_names_values_and_replicas(fresh_workers: Fresh, field: str, text: str) -> None:
    pool = fresh_workers(3, init_group=False)
    for message, fine in pool.run(_mismatch, pool.store, field):
        assert text in message
        assert fine


def _bad_means(rank: int, world: int, address: Address) -> list[str]:
    """Every rank has the largest value that is encoded, in one element; then half of it."""
    ex = connect_replica(address, rank, list(range(world)))
    messages = []
    for name in ELEMENT_WIRES:
        buffers = ex.buffers(N, WireFormat(name))
        largest = 2.0**15 if name == "fp16" else 2.0**126
        for round, value in enumerate((largest, largest / 2)):
            params = torch.ones(N)
            params[12345] = value
            try:
                mean = decode(sync(ex, buffers, [params], round=round))[12345].item()
                buffers.commit()
                assert abs(mean / value - 1) < 1 / 64, (name, mean)
            except NonFiniteError as error:
                assert round == 0 and error.replicas == tuple(range(world)), name
                messages.append(f"{name} {error}")
    ex.close()
    return messages


def test_a_mean_that_no_wire_carries(fresh_workers: Fresh) -> None:
    """A scale is rounded up, and so may be what the largest value decodes to."""
    pool = fresh_workers(3, init_group=False)
    for messages in pool.run(_bad_means, pool.store):
        assert [message.split()[0] for message in messages] == ["fp8_e4m3", "fp8_e5m2", "int4"]
        for message in messages:
            assert "whose mean is out of the range of its wire (2^126 = 8.5e37;" in message
            assert "added up: 1 on replica " in message


def _zero_weights(rank: int, world: int, address: Address) -> Any:
    ex = connect_replica(address, rank, list(range(world)))
    buffers = ex.buffers(N, WireFormat("fp32"))
    with pytest.raises(SyncError, match="not all zero"):
        sync(ex, buffers, [torch.ones(N)], weight=0.0)
    with pytest.raises(SyncError, match="weights must be finite"):
        sync(ex, buffers, [torch.ones(N)], weight=-1.0 if rank else 1.0)
    outcome = sync(ex, buffers, [torch.full((N,), float(rank))], weight=float(rank == 1))
    ex.close()
    return decode(outcome).unique().tolist()


def test_weights_that_are_all_zero(fresh_workers: Fresh) -> None:
    pool = fresh_workers(2, init_group=False)
    assert pool.run(_zero_weights, pool.store) == [[1.0], [1.0]]


def _members_differ(rank: int, world: int, address: Address) -> str:
    with pytest.raises(ReplicaMismatch) as caught:
        connect_replica(address, rank, [0, 1] if rank == 0 else [0, 1, 2])
    return str(caught.value)


@pytest.mark.nightly("4 s; the first tier names each value that differs")
def test_members_that_differ(fresh_workers: Fresh) -> None:
    pool = fresh_workers(2, init_group=False)
    for message in pool.run(_members_differ, pool.store):
        assert "was told to go on with replicas [0, 1" in message


def _meets(rank: int, world: int, address: Address, odd: str) -> str:
    if rank == 0 and odd == "newer":
        extension.HANDSHAKE += 1
        extension.package_version = lambda: "0.9.0"
    with pytest.raises(ReplicaMismatch) as caught:
        connect_replica(address, rank, list(range(world)))
    return str(caught.value)


@pytest.mark.parametrize("odd", ["newer"])
def test_replicas_of_two_versions_name_both(fresh_workers: Fresh, odd: str) -> None:
    pool = fresh_workers(2, init_group=False)
    at_odd, at_own = pool.run(_meets, pool.store, odd)
    own = f"{__version__} (handshake {extension.HANDSHAKE}) on replica 1"
    remedy = "install the same version on all replicas"
    first = f"0.9.0 (handshake {extension.HANDSHAKE + 1}) on replica 0"
    assert at_odd == at_own
    assert at_own == f"diloco_comm differs between replicas: {first}; {own}: {remedy}"


# -------------------------------------------------------- an attempt to change the group that fails


def _retry(rank: int, world: int, address: Address) -> bool:
    """The first attempt to regroup fails, because a member is dead; the second one succeeds."""
    ex = connect_replica(address, rank, [0, 1, 2], join_timeout=4.0)
    buffers = ex.buffers(N, WireFormat("int8"))
    assert gives_reference_bytes(ex, buffers, 0, [0, 1, 2])
    if rank == 2:
        ex.inject_fault(action="kill", stage="header")
    with pytest.raises(SyncError):
        gives_reference_bytes(ex, buffers, 1, [0, 1, 2])
    ex.timeout = 2.0 + rank
    with pytest.raises(SyncError, match=r"\[2\] did not come|differs"):
        ex.change_group([0, 1, 2], last_rounds={0: 0})
    ex.timeout = 20.0
    ex.change_group([0, 1], last_rounds={0: 0})
    fine = gives_reference_bytes(ex, buffers, 1, [0, 1])
    ex.close()
    return fine


def test_change_group_survives_a_failed_attempt(fresh_workers: Fresh) -> None:
    pool = fresh_workers(3, init_group=False)
    assert pool.run(_retry, pool.store, expect_exit={2})[:2] == [True, True]
