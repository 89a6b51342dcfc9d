"""Workers of replicas of several die while rounds are under way; others go on, new ones come."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from choice_groups import grouped
from fault_replicas import REPORT_S, connect
from ledger import Ledger
from problems import Regression, batch, equal
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from workers import Pool

from diloco_comm import CO2, DiLoCo, Eager, HeavyBall, Streaming, SyncError

# Replicas 0 to 2 train, replica 3 comes later; worker 1 of replica 2 dies.
NUM_REPLICAS, NUM_SHARDS, VICTIM = 4, 2, (2, 1)
H, WIDTH, LR = 4, 25, 0.5
FRAGMENTS = [["layers.0*", "layers.1*"], ["layers.2*", "layers.3*"], "rest"]
PLAIN, MOMENTUM = HeavyBall(LR, 0.0), HeavyBall(LR, 0.5)
POLICIES: dict[str, dict[str, Any]] = {
    "streaming": {"overlap": Streaming(3, 0.5), "outer": MOMENTUM},
    "eager_2": {"overlap": Eager(2), "outer": PLAIN},
    "co2": {"overlap": CO2(0.5, "gap-aware"), "outer": MOMENTUM},
}


class Worker:
    """One worker in training; both of a replica have its batches."""

    def __init__(self, rank: int, address: tuple[str, int], kind: str, name: str) -> None:
        os.environ["DILOCO_COMM_REPORT_S"] = str(REPORT_S)
        names = ("replica", "shard")
        self.mesh = init_device_mesh("cpu", (NUM_REPLICAS, NUM_SHARDS), mesh_dim_names=names)
        self.replica, self.shard = rank // NUM_SHARDS, rank % NUM_SHARDS
        self.kind, self.name = kind, f"{kind}/{name}"
        self.store = connect(address)
        self.model: nn.Module = Regression(width=WIDTH)
        if kind == "fsdp":
            shard(self.model, self.mesh["shard"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.optimizer.register_step_post_hook(lambda *_: self.remember())
        self.settings = {"wire": "int4", "error_feedback": True, **POLICIES[name]}
        self.num_steps = 0

    def start(self, members: list[int], **arguments: Any) -> None:
        group = self.mesh["shard"] if self.kind == "shard_group" else None
        self.diloco = DiLoCo(
            self.model,
            self.optimizer,
            sync_every=H,
            fragments=FRAGMENTS,
            shard_group=group,
            norms=True,
            **grouped(
                {
                    "block_size": 32,
                    "store": self.store,
                    "name": self.name,
                    "replica": self.replica,
                    "members": members,
                    "timeout": 30,
                    **self.settings,
                    **arguments,
                }
            ),
        )

    def step(self) -> None:
        self.num_steps += 1
        x, y = batch(self.replica, self.num_steps, WIDTH)
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(x), y).backward()
        self.optimizer.step()

    def train_to(self, inner_step: int) -> None:
        while self.diloco.inner_step < inner_step:
            self.step()

    def remember(self) -> None:
        self.before = self.state() if hasattr(self, "diloco") else []

    def state(self) -> list[tuple[int, list[Tensor]]]:
        """Copy what this worker owns of each fragment."""
        return [
            (part.round, [t.clone() for t in (part.outer, part.state.momentum, *part.tensors())])
            for part in self.diloco.parts
        ]

    def is_state_kept(self) -> bool:
        """Whether each fragment is as before this step, or its round was agreed on and applied."""
        pairs = zip(self.before, self.state(), strict=True)
        return all(now[0] > old[0] or equal(now[1], old[1]) for old, now in pairs)

    def in_flight(self) -> int:
        return sum(len(part.in_flight) for part in self.diloco.parts)

    def shared(self) -> list[Tensor]:
        """Return what must be equal on this shard's workers of all replicas after a flush."""
        return [t for _, tensors in self.state() for t in tensors]


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    for module in [*model.layers, model]:
        fully_shard(module, mesh=mesh)


def live_through(
    rank: int, world: int, address: tuple[str, int], kind: str, name: str, stage: str
) -> dict[str, Any]:
    worker = Worker(rank, address, kind, name)
    result: dict[str, Any] = {}
    if worker.replica == 3:
        # Construction waits until the others let it in.
        worker.start([0, 1, 3], init="join")
        return finish(worker, result)
    worker.start([0, 1, 2])
    ledger = Ledger(worker.diloco) if worker.settings["overlap"].rounds else None
    worker.train_to(3 * H + 1)
    result["in_flight"] = worker.in_flight()
    worker.diloco.exchange.exchange_objects(b"")
    if (worker.replica, worker.shard) == VICTIM:
        worker.diloco.exchange.inject_fault(action="kill", stage=stage)
    try:
        worker.train_to(7 * H)
    except (SyncError, RuntimeError) as error:
        result["error"] = error
    result["is_state_kept"] = worker.is_state_kept()
    if worker.replica == 2:
        worker.diloco.close()
        return result
    errors = [ledger.error()] if ledger else []
    # Workers whose own exchange did not fail go on with the members that the other workers chose.
    worker.diloco.change_group("survivors" if stage == "vote" else [0, 1])
    assert worker.diloco.members == (0, 1)
    worker.train_to(8 * H + 1)
    errors += [ledger.error()] if ledger else []
    result["in_flight_at_join"] = worker.in_flight()
    worker.diloco.change_group([0, 1, 3])
    errors += [ledger.error()] if ledger else []
    finish(worker, result)
    errors += [ledger.error()] if ledger else []
    return {**result, "errors": errors}


def finish(worker: Worker, result: dict[str, Any]) -> dict[str, Any]:
    worker.train_to(11 * H + 1)
    worker.diloco.flush()
    norms = [part.step_norms.read() for part in worker.diloco.parts]
    result |= {"end": worker.shared(), "step": worker.diloco.inner_step, "norms": norms}
    worker.diloco.close()
    return result


CASES = [
    ("shard_group", "streaming", "header"),
    ("shard_group", "eager_2", "vote"),
    ("fsdp", "co2", "vote"),
]


@pytest.mark.nightly("5 s each; policies have tests of their own", but=["shard_group-eager_2-vote"])
@pytest.mark.parametrize(("kind", "name", "stage"), CASES)
def test_a_worker_dies_and_a_replica_joins(
    fresh_workers: Callable[..., Pool], kind: str, name: str, stage: str
) -> None:
    """One clear error on every survivor; nothing is lost; a replica of two workers joins."""
    pool = fresh_workers(NUM_REPLICAS * NUM_SHARDS)
    victim = VICTIM[0] * NUM_SHARDS + VICTIM[1]
    results: list[Any] = pool.run(
        live_through, pool.store, kind, name, stage, expect_exit={victim}, timeout=60
    )
    for result in results[:4]:
        error = result["error"]
        assert isinstance(error, SyncError), error
        assert {*error.missing, *getattr(error, "replicas", ())} == {2}, error
        assert "\n" not in str(error)
        assert result["is_state_kept"], error
        assert result["in_flight"] >= 2 and result["in_flight_at_join"] >= 2
        assert all(error < 1e-6 for error in result["errors"]), result["errors"]
    check_other_worker(kind, results[4]["error"])
    going_on = [*results[:4], *results[6:]]
    assert len({result["step"] for result in going_on}) == 1
    for shard_index in range(NUM_SHARDS):
        first, *others = [result["end"] for result in going_on[shard_index::NUM_SHARDS]]
        assert all(equal(first, other) for other in others)
    if name == "co2":
        assert all(result["norms"] == going_on[0]["norms"] for result in going_on)


def check_other_worker(kind: str, error: Exception) -> None:
    """The worker of the dead one's replica is told; FSDP's own collectives may find out first."""
    if kind == "shard_group":
        assert isinstance(error, SyncError)
    if isinstance(error, SyncError):
        assert "another worker of this replica is gone" in str(error)
