"""Lightning's min_epochs and min_steps, with replicas that have different amounts of data."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from choice_groups import grouped
from trainers import NUM_STEPS, ROWS, Rows, needs, on_store
from workers import Pool


@pytest.fixture(scope="module")
def replicas(trainer_replicas: Callable[[int], Pool]) -> Callable[[int], Pool]:
    return trainer_replicas


def lightning_with_a_minimum(
    rank: int, world: int, address: tuple[str, int], limits: dict[str, int]
) -> str:
    """Replica 0 has data for half as many steps as replica 1, which has a minimum."""
    from lightning_runs import Module, quiet_trainer

    from diloco_comm.integrations.lightning import DiLoCoCallback

    place = on_store(rank, world, address, f"minimum {limits}")
    callback = DiLoCoCallback(sync_every=2, shard=False, **grouped(place))
    trainer = quiet_trainer(
        max_epochs=2,
        **(limits if rank else {}),
        callbacks=[callback],
    )
    rows = Rows(rank, NUM_STEPS * (1 + rank))
    try:
        trainer.fit(Module(rank), torch.utils.data.DataLoader(rows, batch_size=ROWS))
    except ValueError as error:
        return str(error)
    return f"ended at {trainer.global_step}"


@pytest.mark.nightly("3 s each; they differ in the limit", but=["epochs"])
@needs("lightning")
@pytest.mark.parametrize(
    ("limits", "is_refused"),
    [({"min_epochs": 2}, True), ({"min_steps": 25}, True), ({"min_epochs": 1}, False)],
    ids=["epochs", "steps", "one epoch"],
)
def test_lightning_may_not_train_longer_than_the_others(
    limits: dict[str, int], is_refused: bool, replicas: Callable[[int], Pool]
) -> None:
    pool = replicas(2)
    ends = pool.run(lightning_with_a_minimum, pool.store, limits)
    if not is_refused:
        assert ends == ["ended at 20"] * 2
        return
    for text in ends:
        assert "min_epochs or min_steps make Lightning train longer" in text and "\n" not in text
        assert f"min_{'epochs' if 'min_epochs' in limits else 'steps'}=" in text
        assert "on replica 1" in text and "on replica 0" not in text
