"""Replicas die, are repaired and join while rounds of several fragments are under way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fault_replicas import Replica, Setup, check_sentence, describe
from ledger import Ledger
from workers import Pool

from diloco_comm import CO2, Delayed, Eager, HeavyBall, Streaming, SyncError

H = 4
LR = 0.5


POLICIES: dict[str, dict[str, Any]] = {
    "streaming": {"overlap": Streaming(3, 0.5)},
    "delayed": {"overlap": Delayed()},
    "delayed_2": {"overlap": Delayed(2)},
    # Without error feedback the lost payloads are owed by themselves; fp32 loses nothing else.
    "plain": {"overlap": Delayed(), "error_feedback": False},
    "eager": {"overlap": Eager(), "outer": HeavyBall(LR, 0.0)},
    "eager_2": {"overlap": Eager(2), "outer": HeavyBall(LR, 0.0)},
    "co2": {"overlap": CO2(0.5, "gap-aware"), "outer": HeavyBall(LR, 0.5)},
}


def start(address: tuple[str, int], rank: int, members: Any, name: str, **options: Any) -> Replica:
    settings = {"error_feedback": True, **POLICIES[name], **options}
    wire = "int4" if settings["error_feedback"] else "fp32"
    return Replica(address, rank, members, Setup(wire, 3, H, name=name, options=settings))


def live_on(
    rank: int, world: int, address: tuple[str, int], name: str, stage: str, num_peers: int
) -> dict[str, Any]:
    """The last replica dies at a stage while fragments are under way; the others go on."""
    replica = start(address, rank, range(world), name)
    ledger = Ledger(replica.diloco) if POLICIES[name]["overlap"].rounds else None
    replica.train_to(3 * H + 1)
    in_flight = sum(len(part.in_flight) for part in replica.diloco.parts)
    # Nobody is ahead by steps that the others would have to take after the death.
    replica.diloco.exchange.exchange_objects(b"")
    if rank == world - 1:
        replica.fault("kill", stage, num_peers=num_peers)
    failure = replica.train_until_failure(4 * H)
    held = ledger.error() if ledger else 0.0
    replica.diloco.change_group(range(world - 1))
    rounds = [part.round for part in replica.diloco.parts]
    settled = ledger.error() if ledger else 0.0
    hashes = []
    for _ in range(3 * H):
        replica.step()
        hashes.append(replica.diloco.outer_hash())
    trained = ledger.error() if ledger else 0.0
    replica.diloco.flush()
    result = {
        "failure": failure,
        "in_flight": in_flight,
        "rounds": rounds,
        "hashes": hashes,
        "end": replica.result(),
        "errors": [held, settled, trained, ledger.error() if ledger else 0.0],
    }
    replica.diloco.close()
    return result


DEATHS = [
    ("streaming", "header", 0),
    ("streaming", "vote", 1),
    ("delayed", "reduce", 0),
    ("delayed", "vote", 1),
    ("delayed_2", "vote", 1),
    ("plain", "vote", 1),
    ("eager", "vote", 1),
    ("eager_2", "post_exchange", 0),
    ("co2", "vote", 1),
]


@pytest.mark.nightly("3 s each; they differ in policy and point of death", but=["eager-vote-1"])
@pytest.mark.parametrize(("name", "stage", "num_peers"), DEATHS)
def test_survivors_lose_nothing(
    fresh_workers: Callable[..., Pool], name: str, stage: str, num_peers: int
) -> None:
    """One error, state as before; nothing that was learned is lost, and all agree in the end."""
    pool = fresh_workers(3, init_group=False)
    results: list[Any] = pool.run(
        live_on, pool.store, name, stage, num_peers, expect_exit={2}, timeout=40
    )
    first, second = results[:2]
    for result in (first, second):
        failure = result["failure"]
        assert failure.kind == "SyncError" and failure.is_state_kept, failure
        check_sentence(failure, [2])
        assert result["in_flight"] >= 2
        assert all(error < 1e-6 for error in result["errors"]), result["errors"]
    assert first["rounds"] == second["rounds"]
    assert first["end"].outer == second["end"].outer
    assert first["end"].momentum == second["end"].momentum
    assert first["end"].local == second["end"].local
    if POLICIES[name]["overlap"].is_shared:
        assert first["hashes"] == second["hashes"]


def settle_a_first_round(
    rank: int, world: int, address: tuple[str, int], error_feedback: bool, dies: bool
) -> dict[str, torch.Tensor]:
    """Wait for the first round at once; when replica 1 dies in its vote, 0 settles that round."""
    options = {"overlap": Eager(first="sync"), "outer": HeavyBall(LR, 0.0)}
    options |= {"error_feedback": error_feedback}
    setup = Setup("int4", 1, H, name=f"{error_feedback}/{dies}", options=options)
    replica = Replica(address, rank, range(world), setup)
    part = replica.diloco.parts[0]
    sent: list[torch.Tensor] = []
    replica.before_exchange = lambda: sent.append(part.progress())
    replica.train_to(H - 1)
    if rank == 1 and dies:
        replica.fault("kill", "vote")
    failure = replica.failing_step()
    if dies:
        assert failure is not None and failure.stage == "vote"
        replica.diloco.change_group([0])
    assert part.round == 1 and part.buffers is not None and not part.in_flight
    owed = part.buffers.residuals.added
    result = {
        "outer": part.outer.clone(),
        "local": torch.cat([tensor.flatten() for tensor in part.tensors()]),
        "owed": torch.zeros(part.num_elements) if owed is None else owed.float(),
        "sent": sent[-1],
    }
    replica.diloco.close()
    return result


@pytest.mark.nightly("3 s each", but=["True"])
@pytest.mark.parametrize("error_feedback", [True, False])
def test_a_round_that_was_waited_for_at_once_counts_once(
    fresh_workers: Callable[..., Pool], error_feedback: bool
) -> None:
    """The local parameters still hold what was sent: it is not owed, too."""
    pool = fresh_workers(2, init_group=False)
    expected = pool.run(settle_a_first_round, pool.store, error_feedback, False)[0]
    settled = pool.run(settle_a_first_round, pool.store, error_feedback, True, expect_exit={1})[0]
    assert torch.equal(settled["outer"], expected["outer"])
    assert torch.equal(settled["local"], expected["local"])
    if error_feedback:
        torch.testing.assert_close(settled["owed"], expected["owed"], rtol=0, atol=1e-6)
    # No more than what encoding loses: half of a step of the wire, of 15 steps.
    assert settled["owed"].abs().max() < 0.1 * settled["sent"].abs().max()


# ----------------------------------------------------------------------- a state after a failure


def save_after_failure(
    rank: int, world: int, address: tuple[str, int], names: list[str]
) -> list[tuple[float, bool]]:
    """The group dies with rounds under way; the saved state owes what they had."""
    results = []
    for name in names:
        replica = start(address, rank, range(world), name)
        ledger = Ledger(replica.diloco)
        replica.train_to(2 * H + 1)
        replica.diloco.exchange.exchange_objects(b"")
        if rank == 1:
            replica.fault("fail", "header")
        try:
            while True:
                replica.step()
        except SyncError as error:
            describe(error, replica, 0.0)
        learned = replica.diloco.state_dict()
        own = learned[f"replica_{rank}"]
        owes = any('"owes": true' in text for text in own["own"].values())
        worst = 0.0
        for part in replica.diloco.parts:
            flat = torch.zeros(part.num_elements)
            for view_name, view in part.fragment.views(flat).items():
                view.copy_(own["residual"][view_name])
            total = ledger.applied[part.index] + flat.double()
            for flight in part.in_flight:
                with contextlib.suppress(SyncError):
                    flight.wait()
                    total += part.decode(flight.own, flight.layout, "").double()
            scale = ledger.learned[part.index].abs().max()
            worst = max(worst, ((ledger.learned[part.index] - total).abs().max() / scale).item())
        results.append((worst, owes))
        replica.diloco.close()
    return results


def test_a_state_of_after_a_failure_owes_what_was_lost(fresh_workers: Callable[..., Pool]) -> None:
    pool = fresh_workers(2, init_group=False)
    for result in pool.run(save_after_failure, pool.store, ["delayed", "eager"], timeout=40):
        for error, owes in result:
            assert error < 1e-6 and owes
