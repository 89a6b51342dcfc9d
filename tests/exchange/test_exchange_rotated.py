"""Rotated and sparse wires between real processes: the bytes of the reference, on every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from exchange_helpers import (
    check_pairs,
    decode,
    digest,
    exchange,
    reference_digest,
    split,
    sync,
    values,
)
from workers import Pool

from diloco_comm.exchange.round import Header
from diloco_comm.ops import reference
from diloco_comm.ops import reference as reference_of_digests
from diloco_comm.ops.wire import ROTATED_WIRES, Layout, WireFormat, mean_layout, num_phases

WIRES = [*ROTATED_WIRES, "topk64"]
Workers = Callable[[int], Pool]
SIZES = [1, 30_011]
WEIGHTS = [1.0, 3.0, 0.0, 0.5, 2.0, 1.0, 1.0, 0.25, 1.0, 1.5]


def digest_of_payloads(params: list[list[torch.Tensor]], layout: Layout, **kwargs: int) -> str:
    """The digest of all payloads that are added up, one after the other, zero weights included."""
    world = len(params)
    weights = [1.0] * world if num_phases(layout.wire, world) == 1 else WEIGHTS[:world]
    terms = reference.all_reduce(params, layout, weights, **kwargs)
    layout = mean_layout(layout, world)
    sums = torch.zeros(2, dtype=torch.int64)
    for source, (payload, _) in enumerate(terms):
        for run in range(layout.num_runs):
            begin, end = layout.run_range(run)
            used = layout.wire.code_offset(layout.run_elements)
            used += layout.wire.code_bytes(end - begin)
            place = run * layout.run_bytes
            first_word = (source * layout.payload_bytes + place) // 8
            if end > begin:
                reference_of_digests.digest(payload[place : place + used], sums, first_word)
    num_bytes = len(terms) * layout.payload_bytes
    product, total = sums.tolist()
    return str(reference_of_digests.finish_digest(product, total, num_bytes))


def _exchange_sizes(
    rank: int, world: int, wires: list[str], lanes: int, delay: float, chunk_bytes: int
) -> list[tuple[str, str]]:
    results = []
    with exchange(rank, world, lanes=lanes, window=3, chunk_bytes=chunk_bytes) as ex:
        if delay:
            ex.inject_fault(max_delay_us=delay, seed=17 * rank + world)
        for wire in wires:
            for round, n in enumerate(SIZES):
                buffers = ex.buffers(n, WireFormat(wire))
                params = [split(values(round, replica, n)) for replica in range(world)]
                weight = WEIGHTS[rank]
                outcome = sync(ex, buffers, params[rank], weight=weight, round=round, seed=5)
                buffers.commit()
                expected = reference_digest(
                    params, buffers.layout, WEIGHTS[:world], seed=5, round=round
                )
                results.append((digest(outcome), expected))
                if world > 1:  # a single replica has nobody to compare with
                    whole = digest_of_payloads(params, buffers.layout, seed=5, round=round)
                    results.append((str(outcome.digest), whole))
    return results


@pytest.mark.nightly("up to 5 s each; they differ in the number of replicas", but=["1", "2", "3"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_worlds_agree_with_the_reference(workers: Workers, world: int) -> None:
    check_pairs(workers(world).run(_exchange_sizes, WIRES, 1, 0.0, 4096))


@pytest.mark.nightly("4 s; the first tier has three replicas")
def test_ten_replicas_encode_a_sparse_mean_on_int2r(workers: Workers) -> None:
    check_pairs(workers(10).run(_exchange_sizes, ["topk256"], 1, 0.0, 4096))


@pytest.mark.nightly("7 s; they differ in the number of replicas", but=["2-3"])
@pytest.mark.parametrize(("world", "lanes"), [(2, 3), (4, 2)])
def test_random_delays_do_not_mix_messages(workers: Workers, world: int, lanes: int) -> None:
    check_pairs(workers(world).run(_exchange_sizes, ["int2r", "sub2"], lanes, 300.0, 512))


def _bytes_received(rank: int, world: int, wire: str) -> tuple[int, int]:
    n = 1 << 18
    with exchange(rank, world, chunk_bytes=1 << 20) as ex:
        buffers = ex.buffers(n, WireFormat(wire))
        outcome = sync(ex, buffers, [values(0, rank, n)])
        return outcome.received_bytes, outcome.sent_bytes


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("world", [2, 4])
def test_bytes_on_the_wire(workers: Workers, wire: str, world: int) -> None:
    form = WireFormat(wire)
    payload = (1 << 18) * form.bits_per_element / 8
    ideal = (world - 1) * payload
    if world > 2 and not form.is_gathered:
        ideal = 2 * (world - 1) / world * payload
    for received, sent in workers(world).run(_bytes_received, wire):
        # Headers and votes besides: a few hundred bytes for each peer.
        assert ideal <= received <= 1.015 * ideal + 600 * (world - 1)
        assert sent == pytest.approx(received, rel=0.02)


def test_bytes_of_a_mean_on_a_wire_of_its_own(workers: Workers) -> None:
    ideal = 4 / 5 * (1 << 18) * (0.515625 + 1.0625) / 8
    for received, sent in workers(5).run(_bytes_received, "sub2"):
        assert ideal <= received <= 1.015 * ideal + 600 * 4
        assert sent == pytest.approx(received, rel=0.03)  # the five runs differ by a block


def _mean_of_rounds(rank: int, world: int, wire: str) -> list[float]:
    """The relative error of the mean over 1 and over 100 rounds of one vector."""
    n = 2048
    with exchange(rank, world) as ex:
        buffers = ex.buffers(n, WireFormat(wire))
        inputs = [values(3, replica, n) for replica in range(world)]
        mean = torch.stack(inputs).double().mean(0)
        total, errors = torch.zeros(n, dtype=torch.float64), []
        for round in range(100):
            total += decode(sync(ex, buffers, [inputs[rank]], round=round, seed=1)).double()
            buffers.commit()
            errors.append(float((total / (round + 1) - mean).norm() / mean.norm()))
        return [errors[0], errors[-1]]


def _mean_of_sparse_rounds(rank: int, world: int) -> list[float]:
    """As above, against the mean of what the payloads hold."""
    n = 8192
    with exchange(rank, world) as ex:
        buffers = ex.buffers(n, WireFormat("topk256"))
        inputs = [values(3, replica, n) for replica in range(world)]
        decoded = []
        for x in inputs:
            layout = Layout.plan(n, 1, 1, buffers.wire)
            payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
            reference.encode(None, [x], payload, 0, n, layout.run_elements, "topk256", 4096)
            decoded.append(decode_own(payload, layout))
        mean = torch.stack(decoded).double().mean(0)
        total, errors = torch.zeros(n, dtype=torch.float64), []
        for round in range(64):
            total += decode(sync(ex, buffers, [inputs[rank]], round=round, seed=1)).double()
            buffers.commit()
            errors.append(float((total / (round + 1) - mean).norm() / mean.norm()))
        return [errors[0], errors[-1]]


@pytest.mark.nightly("5 s; the first tier has the rotated wires")
def test_the_error_of_owners_of_sparse_payloads_averages_away(workers: Workers) -> None:
    for first, last in workers(10).run(_mean_of_sparse_rounds):
        assert 0.25 < first < 0.5 and last < first / 6


@pytest.mark.nightly("3 s each; they differ in wire and replicas", but=["3-int2r"])
@pytest.mark.parametrize(("world", "wire"), [(3, "int2r"), (3, "int1r"), (3, "sub8"), (5, "sub2")])
def test_rounds_of_one_vector_average_the_error_away(
    workers: Workers, world: int, wire: str
) -> None:
    for first, last in workers(world).run(_mean_of_rounds, wire):
        # Independent errors without a bias fall as the square root of the rounds: by 10.
        assert first / 13 < last < first / 7.5


def _error_feedback(rank: int, world: int) -> list[float]:
    n, errors = 5_003, []
    with exchange(rank, world) as ex:
        buffers = ex.buffers(n, WireFormat("int2r"), error_feedback=True)
        inputs = [values(3, replica, n) for replica in range(world)]
        mean = torch.stack(inputs).double().mean(0)
        total = torch.zeros(n, dtype=torch.float64)
        for round in range(40):
            total += decode(sync(ex, buffers, [inputs[rank]], round=round)).double()
            buffers.commit()
            errors.append(float((total / (round + 1) - mean).norm() / mean.norm()))
    return errors


@pytest.mark.parametrize("world", [2, 3])
def test_error_feedback_of_int2r(workers: Workers, world: int) -> None:
    for errors in workers(world).run(_error_feedback):
        assert errors[-1] < errors[0] / 20


def _sparse_feedback(rank: int, world: int) -> tuple[bool, float]:
    n = 9_000
    with exchange(rank, world) as ex:
        buffers = ex.buffers(n, WireFormat("topk256"), error_feedback=True)
        x, residual = values(3, rank, n), torch.zeros(n)
        is_decayed, total = True, torch.zeros(n)
        for round in range(30):
            header = Header("sync", round=round)
            work = ex.start(buffers, outer=None, params=[x], header=header)
            own = decode_own(work.own.tensor, work.layout)
            residual = 0.95 * (x + residual - own)
            total += decode(work.wait(40))
            buffers.commit()
            is_decayed = is_decayed and torch.equal(buffers.residual, residual)
        mean = torch.stack([values(3, replica, n) for replica in range(world)]).mean(0)
        return is_decayed, float((total / 30 - mean).norm() / mean.norm())


def decode_own(payload: torch.Tensor, layout: Layout) -> torch.Tensor:
    out = torch.zeros(layout.num_elements)
    form = (layout.run_elements, layout.wire.name, layout.wire.block_size)
    reference.decode([payload], [1.0], [out], 0, layout.num_elements, *form)
    return out


@pytest.mark.parametrize("world", [2, 3])
def test_a_sparse_wire_adds_what_it_has_not_sent(workers: Workers, world: int) -> None:
    for is_decayed, error in workers(world).run(_sparse_feedback):
        assert is_decayed and error < 0.8


def _repeated_round(rank: int, world: int) -> tuple[bool, bool]:
    n = 3000
    with exchange(rank, world) as ex:
        buffers = ex.buffers(n, WireFormat("int2r"))
        payloads = []
        for round in (4, 4, 5):
            header = Header("sync", round=round)
            work = ex.start(buffers, outer=None, params=[values(0, rank, n)], header=header)
            payloads.append(work.own.tensor.clone())
            work.wait(40)
            buffers.commit()
        return torch.equal(payloads[0], payloads[1]), torch.equal(payloads[1], payloads[2])


def test_a_repeated_round_repeats_its_bytes(workers: Workers) -> None:
    assert workers(2).run(_repeated_round) == [(True, False)] * 2


@pytest.mark.parametrize("wire", ["int2r", "int1r", "sub8", "topk64"])
def test_a_wire_takes_a_fragment_on_a_device(wire: str) -> None:
    from diloco_comm.exchange.buffers import ExchangeBuffers

    buffers = ExchangeBuffers(10, WireFormat(wire), device=torch.device("cuda:0"))
    assert buffers.wire.name == wire
