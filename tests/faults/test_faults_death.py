"""A replica is killed at every stage of an exchange; the others go on without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from fault_replicas import Replica, Result, Setup, check_agreement, check_sentence
from fault_simulation import Simulation
from workers import Pool

H = 4


@dataclass(frozen=True)
class Death:
    """Replica ``victim`` of ``world`` dies at a stage of the exchange at inner step ``step``.

    ``commits`` are the survivors that have every vote by then and apply the round.
    """

    world: int
    victim: int
    stage: str
    chunk: int = -1
    num_peers: int = 0
    commits: tuple[int, ...] = ()
    wire: str = "fp32"
    fragments: int = 1
    lanes: int = 1
    backend: str = "tcp"

    @property
    def setup(self) -> Setup:
        return Setup(
            self.wire, self.fragments, H, options={"lanes": self.lanes, "backend": self.backend}
        )

    @property
    def step(self) -> int:
        """Of the third round of fragment 0, or of fragment 1 where there are several."""
        offsets = self.setup.schedule.offsets
        return 2 * H + offsets[min(1, self.fragments - 1)]

    @property
    def fragment(self) -> int:
        return min(1, self.fragments - 1)

    @property
    def survivors(self) -> list[int]:
        return [number for number in range(self.world) if number != self.victim]

    @property
    def may_count(self) -> list[set[bool]]:
        """Whether the round of the death may count, on all survivors alike: when all have voted."""
        if self.commits or (self.stage == "vote" and self.world == 2):
            return [{True}]
        # On a slow machine one survivor may hear of the death before it votes. Of two replicas, one
        # that waits for the other has sent all that the other needs to vote.
        is_open = self.stage == "vote" or (self.stage == "wait_exchange" and self.world == 2)
        return [{True}, {False}] if is_open else [{False}]

    def __str__(self) -> str:
        where = self.stage + (f"{self.chunk}" if self.chunk >= 0 else "")
        where += f"+{self.num_peers}" if self.num_peers else ""
        text = f"w{self.world}-kill{self.victim}-{where}-{self.wire}-f{self.fragments}"
        text += f"-lanes{self.lanes}" if self.lanes > 1 else ""
        return text + ("-gloo" if self.backend == "gloo" else "")


# Two ranks exchange whole chunks in one phase; from three on there are two phases. The first, the
# last and another replica die; wires and fragments alternate over the stages.
DEATHS = [
    Death(2, 0, "header", backend="gloo"),
    Death(2, 1, "post_exchange", 0, wire="int8", fragments=3),
    Death(2, 0, "post_exchange", 1, wire="int8"),
    Death(2, 1, "wait_exchange", 1, fragments=3),
    Death(2, 1, "vote"),
    Death(2, 0, "vote", wire="int8", fragments=3),
    Death(3, 2, "header", wire="int8"),
    Death(3, 0, "header", num_peers=1, fragments=3),
    Death(3, 0, "post_exchange", 0, wire="int8"),
    Death(3, 2, "post_exchange", 1, fragments=3),
    Death(3, 1, "wait_exchange", 0, wire="int8", fragments=3, lanes=2, backend="gloo"),
    Death(3, 0, "reduce", 1),
    Death(3, 2, "reduce", 0, wire="int8", fragments=3, backend="gloo"),
    Death(3, 2, "post_publish", 0, lanes=2),
    Death(3, 0, "wait_publish", 1, wire="int8"),
    Death(3, 1, "vote", wire="int8", fragments=3),
    Death(3, 0, "vote", num_peers=1, commits=(1,), backend="gloo"),
    Death(3, 2, "vote", num_peers=1, commits=(0,), wire="int8", fragments=3),
    Death(4, 3, "header", num_peers=2, wire="int8"),
    Death(4, 0, "reduce", 0, wire="int8", fragments=3),
    Death(4, 2, "post_publish", 1),
    Death(4, 0, "vote", num_peers=1, commits=(1,), wire="int8"),
    Death(4, 3, "vote", num_peers=2, commits=(0, 1), fragments=3),
]


def live_and_die(
    rank: int, world: int, address: tuple[str, int], death: Death, last_step: int
) -> tuple[Result, bool]:
    """Return the end, and whether the round of the death counted."""
    replica = Replica(address, rank, range(world), death.setup)
    replica.train_to(death.step - 1)
    if rank == death.victim:
        replica.fault("kill", death.stage, chunk=death.chunk, num_peers=death.num_peers)
    failure = replica.train_until_failure(2 * H)
    replica.diloco.change_group(death.survivors)
    counts = replica.diloco.parts[death.fragment].round == 3
    replica.train_to(last_step)
    result = replica.result([failure])
    replica.diloco.close()
    return result, counts


@dataclass
class Expected:
    """What the run with this death must give."""

    simulation: Simulation
    failed_at: dict[int, int] = field(default_factory=dict)


def expect(death: Death, last_step: int, counts: bool) -> Expected:
    simulation = Simulation(death.setup, range(death.world))
    due = death.setup.schedule.due
    if not death.commits:
        skipped = () if counts else [(death.step, death.fragment)]
        simulation.run(range(death.world), 1, death.step, frozenset(skipped))
        failed_at = {number: death.step for number in death.survivors}
    else:
        # Who applied the round trains on to the next send; the schedule then waits for the rest.
        simulation.run(range(death.world), 1, death.step)
        next_due = next(step for step in range(death.step + 1, last_step) if due(step))
        failed_at = {number: death.step for number in death.survivors}
        for number in death.commits:
            failed_at[number] = next_due
            simulation.train(number, next_due - death.step)
    simulation.run(death.survivors, death.step + 1, last_step)
    return Expected(simulation, failed_at)


@pytest.mark.nightly(
    "3 s each; deaths before and after the exchange stay, and six of the frozen runs",
    but=["w2-kill1-vote-fp32-f1", "w2-kill0-header-fp32-f1-gloo", "w3-kill0-header+1-fp32-f3"],
)
@pytest.mark.parametrize("death", DEATHS, ids=str)
def test_survivors_of_a_killed_replica_go_on(
    fresh_workers: Callable[..., Pool], death: Death
) -> None:
    pool = fresh_workers(death.world, init_group=False)
    last_step = death.step + 2 * H
    results: list[Any] = pool.run(
        live_and_die, pool.store, death, last_step, expect_exit={death.victim}, timeout=30
    )
    ends = {number: results[number][0] for number in death.survivors}
    counted = {results[number][1] for number in death.survivors}
    assert counted in death.may_count
    expected = expect(death, last_step, counted == {True})
    check_agreement(ends.values())
    for number in death.survivors:
        failure = ends[number].failures[0]
        assert failure.kind == "SyncError", failure
        assert failure.is_state_kept, failure
        assert failure.inner_step == expected.failed_at[number], failure
        if number not in death.commits:
            assert (failure.fragment, failure.round) == (death.fragment, 2), failure
        check_sentence(failure, [death.victim])
        assert f"replica {death.victim} has ended" in failure.message
        assert "the connection was closed" in failure.message and "gloo" not in failure.message
        expected.simulation.check(number, ends[number])
