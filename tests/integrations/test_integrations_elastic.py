"""A trainer's replica leaves an elastic group, and the other one trains on to the last step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from elastic_replicas import registry as registry
from registries import Host
from trainers import Rows, WithLoss, make_optimizer, needs
from workers import Pool

from diloco_comm import Elastic

LAST_STEP = 40


def train(rank: int, world: int, registry: str, folder: str) -> tuple[int, int, bool]:
    """Return the trainer's steps, the group's inner steps, and whether this replica was done."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    from huggingface_runs import quiet_arguments
    from transformers import Trainer, TrainerCallback

    from diloco_comm.integrations.huggingface import DiLoCoCallback

    membership = Elastic(registry, run="hf", replica=rank, min_replicas=1, founding_wait=3.0)
    callback = DiLoCoCallback(sync_every=4, membership=membership, timeout=40)

    class Leave(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
            time.sleep(0.01)
            if rank == 1 and state.global_step == 10:
                callback.diloco.leave()

    model = WithLoss()
    trainer = Trainer(
        model,
        quiet_arguments(Path(folder) / str(rank), max_steps=LAST_STEP, save_strategy="no"),
        train_dataset=Rows(rank, LAST_STEP),
        optimizers=(make_optimizer(model), None),
        callbacks=[callback, Leave()],
    )
    trainer.train()
    assert callback.diloco is not None
    return trainer.state.global_step, callback.diloco.inner_step, callback.diloco.is_done


@pytest.mark.nightly("25 s; test_elastic_training has a replica that leaves")
@pytest.mark.slow
@needs("transformers")
def test_a_trainers_replica_leaves_and_the_other_ends(
    trainer_replicas: Callable[[int], Pool], registry: Host, tmp_path: Path
) -> None:
    pool = trainer_replicas(2)
    stays, leaves = pool.run(train, registry.address, str(tmp_path), timeout=60)
    assert stays == (LAST_STEP, LAST_STEP, True)
    assert leaves[2] and leaves[0] < LAST_STEP and leaves[1] < LAST_STEP
