"""A backbone is unfrozen in the middle of a training: refused at once, and the way that works."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from choice_groups import grouped
from problems import Regression, equal, parameters_of, train_step
from trainers import ROWS, WIDTH, Rows, needs, on_store
from workers import Pool

from diloco_comm import DiLoCo, Nesterov

SYNC_EVERY, NUM_STEPS = 4, 6


@pytest.fixture(scope="module")
def replicas(trainer_replicas: Callable[[int], Pool]) -> Callable[[int], Pool]:
    return trainer_replicas


def frozen_backbone(rank: int) -> Any:
    """A module for Lightning's BackboneFinetuning: a backbone, frozen at first, and a head."""
    from lightning_runs import Module
    from torch import nn

    class Finetuned(Module):
        def __init__(self) -> None:
            super().__init__(rank)
            self.head = self.model.net.head
            self.backbone = self.model.net.layers

        def configure_optimizers(self) -> Any:
            trained = [param for param in self.parameters() if param.requires_grad]
            return torch.optim.SGD(trained, lr=0.01)

    module = Finetuned()
    nn.Module.requires_grad_(module.backbone, False)
    return module


def rows_of(rank: int, num_steps: int = NUM_STEPS) -> Any:
    return torch.utils.data.DataLoader(Rows(rank, num_steps), batch_size=ROWS)


def unfreeze_in_mid_run(rank: int, world: int, address: tuple[str, int]) -> tuple[str, int, int]:
    from lightning.pytorch.callbacks import BackboneFinetuning
    from lightning_runs import quiet_trainer

    from diloco_comm.integrations.lightning import DiLoCoCallback

    place = on_store(rank, world, address, "in mid-run")
    callback = DiLoCoCallback(sync_every=100, shard=False, **grouped(place))
    finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)
    trainer = quiet_trainer(max_epochs=2, callbacks=[callback, finetuning])
    with pytest.raises(ValueError) as caught:
        trainer.fit(frozen_backbone(rank), rows_of(rank))
    return str(caught.value), trainer.global_step, callback.diloco.inner_step


@needs("lightning")
def test_a_backbone_that_lightning_unfreezes_is_refused_at_its_first_step(
    replicas: Callable[[int], Pool],
) -> None:
    pool = replicas(1)
    for said, num_steps, inner_step in pool.run(unfreeze_in_mid_run, pool.store):
        assert "trains parameters that are not exchanged: 'model.net.layers.0.weight', " in said
        assert said.endswith("close(), construct DiLoCo anew, and load both")
        # Not at the send, a hundred steps later.
        assert num_steps == inner_step == NUM_STEPS


def train_in_two_runs(
    rank: int, world: int, address: tuple[str, int]
) -> tuple[str, list[int], bool, bool]:
    """One run of Lightning with the frozen backbone, and one that trains all of it."""
    from lightning_runs import quiet_trainer

    from diloco_comm.integrations.lightning import DiLoCoCallback

    module, settings = frozen_backbone(rank), {"outer": Nesterov(0.5, 0.9), "shard": False}
    place = on_store(rank, world, address, "frozen")
    first = DiLoCoCallback(sync_every=SYNC_EVERY, **grouped({**settings, **place}))
    quiet_trainer(max_epochs=1, callbacks=[first]).fit(module, rows_of(rank))
    state = first.state_dict()
    is_kept = {"model.net.head.weight", "model.net.head.bias"} <= state["buffers"][
        "momentum"
    ].keys()
    module.backbone.requires_grad_(True)

    place = on_store(rank, world, address, "unfrozen")
    second = DiLoCoCallback(sync_every=SYNC_EVERY, **grouped({**settings, **place}))
    second.load_state_dict(state)
    quiet_trainer(max_epochs=1, callbacks=[second]).fit(module, rows_of(rank))
    assert second.diloco is not None
    momentum = second.state_dict()["buffers"]["momentum"]
    has_moved = all(
        momentum[name].any() for name in ("model.net.layers.0.weight", "model.net.head.weight")
    )
    steps = [first.diloco.inner_step, second.diloco.inner_step]
    return second.diloco.outer_hash(), steps, is_kept, has_moved


@needs("lightning")
def test_a_second_run_takes_the_state_and_trains_the_backbone(
    replicas: Callable[[int], Pool],
) -> None:
    pool = replicas(2)
    results = pool.run(train_in_two_runs, pool.store)
    assert len({digest for digest, _, _, _ in results}) == 1
    for _, steps, is_kept, has_moved in results:
        assert steps == [NUM_STEPS, 2 * NUM_STEPS]
        assert is_kept and has_moved


def follow_the_sentence(rank: int, world: int) -> tuple[str, str, list[bool]]:
    """In a loop of the program's own, in the middle of a round."""
    model = Regression(WIDTH)
    model.layers.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    diloco = DiLoCo(model, optimizer, sync_every=SYNC_EVERY, outer=Nesterov(0.5, 0.9))
    for step in range(NUM_STEPS):
        train_step(model, optimizer, rank, step, WIDTH)
    model.layers.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.layers.parameters())})
    local = parameters_of(model)
    with pytest.raises(
        ValueError, match=r"not exchanged: 'layers\.0\.weight', .* and others"
    ) as it:
        train_step(model, optimizer, rank, NUM_STEPS, WIDTH)
    assert equal(parameters_of(model), local) and diloco.inner_step == NUM_STEPS

    weights, state = copy.deepcopy([model.state_dict(), diloco.state_dict()])
    diloco.close()
    with DiLoCo(model, optimizer, sync_every=SYNC_EVERY, outer=Nesterov(0.5, 0.9)) as again:
        again.load_state_dict(state)
        model.load_state_dict(weights)
        found = again.state_dict()
        kept = [
            torch.equal(found["outer"][name], tensor) for name, tensor in state["outer"].items()
        ]
        kept.append(equal(parameters_of(model), local))
        for step in range(NUM_STEPS, 2 * NUM_STEPS):
            train_step(model, optimizer, rank, step, WIDTH)
        again.flush()
        return str(it.value), again.outer_hash(), kept


def test_the_sentence_says_what_works_in_a_loop_of_the_programs_own(workers) -> None:
    results = workers(2).run(follow_the_sentence)
    assert len({digest for _, digest, _ in results}) == 1
    for said, _, kept in results:
        assert "on all replicas, keep copies of the state_dict() of the model and of DiLoCo" in said
        assert all(kept)
