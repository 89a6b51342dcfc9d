"""The state of a round: what follows from how its exchange has ended, and what may follow then."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diloco_comm.base.errors import SyncError
from diloco_comm.base.memory import CPU, Payload
from diloco_comm.exchange.buffers import ExchangeBuffers
from diloco_comm.exchange.nccl.member import StreamMember
from diloco_comm.exchange.round import Header, Round, Standing
from diloco_comm.ops.wire import WireFormat


def job(standing: str = "none", kind: str = "") -> Any:
    """An exchange that is done; with a ``kind`` of failure, how far its vote was."""
    failure = SimpleNamespace(
        kind=kind,
        message="as a test wants it",
        stage="vote",
        seconds=1.0,
        cause="",
        missing=[],
        replicas=[1],
    )
    return SimpleNamespace(
        is_done=True,
        failure=failure if kind else None,
        standing=standing,
        headers=[],
        weights=[0.25, 0.75],
        digest=7,
        block_caller=lambda: None,
    )


def started(buffers: ExchangeBuffers, ended: Any, rank: int = 0) -> Round:
    own, other = (Payload.make(8, CPU) for _ in range(2))
    layout: Any = None
    header, residuals = Header(round=3), buffers.residuals
    round = Round(header, layout, layout, 1, own, other, residuals, epoch=2, rank=rank, job=ended)
    buffers.add_round(round)
    return round


def new_buffers(carries: bool = False) -> ExchangeBuffers:
    return ExchangeBuffers(1, WireFormat("fp32"), carries=carries)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exchange_that_ends_well_makes_its_round_agreed(rank: int) -> None:
    buffers = new_buffers()
    round = started(buffers, job("agreed"), rank)
    assert round.done() and round.state == "started"
    assert buffers.standings() == {(0, 3): Standing("agreed", 2)}
    assert (round.state, round.error, round.digest) == ("agreed", None, 7)
    assert round.result is not None
    payloads = [round.own.tensor, round.result.tensor]
    # In rank order, on every rank.
    expected = payloads if rank == 0 else payloads[::-1]
    assert [id(payload) for payload, _ in round.terms] == [id(payload) for payload in expected]
    assert [weight for _, weight in round.terms] == [0.25, 0.75]
    buffers.commit()
    assert round.state == "applied" and not buffers.rounds
    assert buffers.standings() == {(0, 3): Standing("applied", 2)}


@pytest.mark.parametrize(
    ("standing", "state", "known"),
    [("none", "failed", None), ("voted", "voted", "voted"), ("rejected", "rejected", "rejected")],
)
def test_a_failed_exchange_leaves_its_round_where_its_vote_was(
    standing: str, state: str, known: Any
) -> None:
    buffers = new_buffers()
    round = started(buffers, job(standing, "SyncError"))
    assert buffers.standings() == ({} if known is None else {(0, 3): Standing(known, 2)})
    assert round.state == state and isinstance(round.error, SyncError)
    # Only a round that others may have applied keeps what is needed to apply it.
    assert bool(round.terms) == (state == "voted") == (round in buffers.rounds)
    with pytest.raises(RuntimeError, match="no round of these buffers has been agreed on"):
        buffers.commit()
    if state == "voted":
        buffers.settle([round])
        assert round.state == "applied"
        return
    with pytest.raises(AssertionError, match=f"a round that is {state} cannot be applied"):
        round.advance("applied")


def test_a_dropped_round_keeps_its_payload_until_it_is_released() -> None:
    """Where the caller moves the parameters at each send, nothing else holds what was sent."""
    buffers = new_buffers(carries=True)
    buffers.plan(0, 2, None, 1, 2, "")
    header = Header(round=1)
    round = buffers.open_round(header)
    buffers.add_round(round)
    round.fail(SyncError("as a test wants it"))
    assert round.state == "failed" and buffers.is_idle
    assert buffers.open_round(header).own is not round.own
    buffers.release(round.own.tensor)
    assert buffers.open_round(header).own is round.own


def test_a_round_is_applied_once() -> None:
    buffers = new_buffers()
    round = started(buffers, job())
    round.resolve()
    buffers.commit()
    for state in ("applied", "agreed", "started"):
        with pytest.raises(AssertionError, match="a round that is applied"):
            round.advance(state)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [None, SyncError("as a test wants it"), KeyError("another")])
def test_a_held_round_that_cannot_be_sent_gives_its_event_back_once(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next exchange records the event: whoever asked it then would hear of other values."""
    buffers, given_back = new_buffers(), []
    round = started(buffers, None)
    ballot: Any = SimpleNamespace(host_bad=2)
    round.own.ballot, sending, event = ballot, SimpleNamespace(stochastic=False), object()
    round.sending, round.encoded = cast(Any, sending), cast(Any, event)
    driver = SimpleNamespace(failure="" if error else "it was given up")
    driver.give_back = given_back.extend

    def no_weights(member: Any, round: Round) -> None:
        assert error is not None
        raise error

    monkeypatch.setattr("diloco_comm.exchange.nccl.member._agree_on_weights", no_weights)
    member: Any = SimpleNamespace(_driver=driver, _all_buffers=[buffers])
    with pytest.raises(KeyError) if isinstance(error, KeyError) else nullcontext():
        StreamMember._ship_on_streams(member, round)
        assert round.state == "failed"
    assert given_back == [event] and round.encoded is None
    assert round.has_bad_values()
