"""Both residuals of error feedback, when rounds are voted down while others are under way.

What the replicas have learned is, in the mean, what was applied, and what encoding and reduction
lost and will add again; nothing counts twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from choice_groups import grouped
from ledger import Ledger
from problems import Regression, train_step
from torch import Tensor, nn
from workers import Pool

from diloco_comm import CO2, Delayed, DiLoCo, Eager, HeavyBall
from diloco_comm.rounds.part import RoundInFlight, SyncedPart

H, WIDTH, BLOCK = 2, 24, 32
POLICIES: dict[str, dict[str, Any]] = {
    "delayed": {"overlap": Delayed()},
    "delayed_2": {"overlap": Delayed(2)},
    "eager_2": {"overlap": Eager(2), "outer": HeavyBall(0.5, 0.0)},
    "co2_2": {"overlap": CO2(rounds=2), "outer": HeavyBall(0.5, 0.5)},
}


class Means(Ledger):
    """Counts the means that were applied, in place of the own payloads."""

    def _commit(self, flight: RoundInFlight, arrival: Any) -> None:
        part = flight.part
        for payload, coefficient in arrival.terms:
            decoded = part.decode(payload, arrival.layout, "").double()
            self.applied[part.index] += coefficient * decoded
        self.commit(flight, arrival)

    def error(self) -> float:
        """Largest of mean(learned - residual) - applied - what reductions lost; block 0 apart."""
        worst = 0.0
        for part, learned, applied in zip(
            self.diloco.parts, self.learned, self.applied, strict=True
        ):
            assert not part.in_flight
            rest = learned - part.buffers.residuals.added.double()
            total = (rest / dist.get_world_size() - lost_by_reduction(part))[BLOCK:]
            dist.all_reduce(total)
            difference = (total - applied[BLOCK:]).abs().max()
            worst = max(worst, (difference / learned[BLOCK:].abs().max()).item())
        return worst


def lost_by_reduction(part: SyncedPart) -> Tensor:
    """Return the residuals of this rank's runs, where their elements are."""
    buffers, lost = part.buffers, torch.zeros(part.num_elements, dtype=torch.float64)
    for residual in buffers.residuals.reductions():
        for chunk in range(buffers.num_chunks):
            begin, end = buffers.layout.run_range(chunk * buffers.world_size + buffers.rank)
            first = chunk * buffers.layout.run_elements
            lost[begin:end] += residual[first : first + end - begin].double()
    return lost


def with_nan(rank: int, values: Tensor) -> None:
    """Replica 0 encodes what is not finite; so does its next round, if that does not wait."""
    if rank == 0:
        values[0] = torch.nan


def with_too_much(rank: int, values: Tensor) -> None:
    """All encode the largest value there is, and its scale is rounded up: their mean is larger."""
    values[0] -= 2.0**126


Spoilers = dict[int, Callable[[int, Tensor], None]]


def lose_rounds(rank: int, world: int, names: list[str], spoilers: list[Spoilers]) -> list[tuple]:
    """Return, for each policy, the error and how many rounds were voted down."""
    return [run(rank, name, own) for name, own in zip(names, spoilers, strict=True)]


def run(rank: int, name: str, spoilers: Spoilers) -> tuple[float, int]:
    """Train 11 rounds; what is in ``spoilers`` is called before the send of that round."""
    model = Regression(width=WIDTH)
    # The first block; nothing depends on it.
    model.spoilt = nn.Parameter(torch.zeros(BLOCK))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps = itertools.count(1)

    def spoil(*_: Any) -> None:
        number, rest = divmod(next(steps), H)
        if not rest and number - 1 in spoilers:
            spoilers[number - 1](rank, model.spoilt.data)

    optimizer.register_step_post_hook(spoil)
    arguments = {"wire": "int4", "block_size": BLOCK, "error_feedback": True, **POLICIES[name]}
    diloco = DiLoCo(
        model, optimizer, sync_every=H, **grouped({"on_nonfinite": "skip", **arguments})
    )
    with diloco:
        ledger = Means(diloco)
        for step in range(11 * H):
            train_step(model, optimizer, rank, step, WIDTH)
        diloco.flush()
        return ledger.error(), diloco.totals().num_skipped


@pytest.mark.nightly("3 s each; they differ in the round that is lost", but=["lost0"])
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lost", [[3, 4], [3, 5]])
def test_a_lost_round_leaves_no_residual_behind(
    workers: Callable[[int], Pool], lost: list[int]
) -> None:
    spoilers = [dict.fromkeys(lost, with_nan)] * len(POLICIES)
    for results in workers(3).run(lose_rounds, list(POLICIES), spoilers):
        for name, (error, num_skipped) in zip(POLICIES, results, strict=True):
            # A round that was encoded meanwhile is not lost with it.
            assert num_skipped == len(lost), name
            assert error < 1e-6, (name, error)


@pytest.mark.filterwarnings("ignore")
def test_a_round_lost_by_its_reduction_counts_once(workers: Callable[[int], Pool]) -> None:
    """The round after it is applied: what its own reduction began with was not the lost one's."""
    spoilers = [{3: with_too_much}] * len(POLICIES)
    for results in workers(3).run(lose_rounds, list(POLICIES), spoilers):
        for name, (error, num_skipped) in zip(POLICIES, results, strict=True):
            assert num_skipped == 1, name
            assert error < 1e-6, (name, error)
