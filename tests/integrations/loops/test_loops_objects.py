"""Loops with several DiLoCo objects, and with other ends of training: no check objects.

Each loop is near one that the library refuses or warns of. A program that ends in order prints
nothing that the library has to say.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from choice_groups import grouped
from commands import run_python
from ordinary_loops import ConvNet, Loop, Replica, check, images
from problems import Regression, train_step
from torch import nn

from diloco_comm import Delayed, DiLoCo, Streaming

NUM_STEPS = 10


def attach(model: nn.Module, **options: object) -> tuple[nn.Module, torch.optim.Optimizer, DiLoCo]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, DiLoCo(model, optimizer, sync_every=4, **options)  # type: ignore[arg-type]


def train(
    replica: Replica, *attached: tuple[nn.Module, torch.optim.Optimizer, DiLoCo]
) -> list[DiLoCo]:
    """Train all models in turns; flush and close."""
    for step in range(NUM_STEPS):
        for model, optimizer, _ in attached:
            train_step(model, optimizer, replica.rank, step)
    for _, _, diloco in attached:
        diloco.flush(final=True)
        diloco.close()
    return [diloco for _, _, diloco in attached]


# ---------------------------------------------------------------------------------- several objects


def models_of_two_layouts(replica: Replica) -> list[DiLoCo]:
    """Neither object has a name: their layouts tell them apart."""
    small = nn.Sequential(nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 1))
    return train(replica, attach(Regression()), attach(small))


def models_of_one_layout_at_two_places(replica: Replica) -> list[DiLoCo]:
    """Twins whose peers meet under two names."""
    places = [replica.place(name) for name in ("one", "two")]
    made = [attach(Regression(), overlap=Delayed(1), **grouped(place)) for place in places]
    return train(replica, *made)


def models_of_one_layout_in_turns(replica: Replica) -> list[DiLoCo]:
    """Each object is closed before the next is made, as in a search over seeds."""
    return [train(replica, attach(Regression(seed=seed)))[0] for seed in range(3)]


def one_model_trained_again(replica: Replica) -> list[DiLoCo]:
    """Successive fits of one model in one process: pretraining, then fine-tuning."""
    model = Regression()
    (first,) = train(replica, attach(model))
    (second,) = train(replica, attach(model, overlap=Streaming(1)))
    return [first, second]


# ----------------------------------------------------------------------------- averages, statistics


def averages_at_every_round(replica: Replica) -> DiLoCo:
    """An average of the weights that all replicas have after a round, taken by ``on_sync``."""
    attached = model, _, diloco = attach(Regression())
    average = [parameter.detach().clone() for parameter in model.parameters()]

    def update(_: object) -> None:
        with torch.no_grad():
            for mean, parameter in zip(average, model.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)

    diloco.on_sync(update)
    train(replica, attached)
    with torch.no_grad():  # The averages are what the program keeps.
        for mean, parameter in zip(average, model.parameters(), strict=True):
            parameter.copy_(mean)
    return diloco


def batch_norm_of_each_replica(replica: Replica) -> DiLoCo:
    """Statistics that no replica shares during training, and an evaluation of the outer model."""
    model, optimizer, diloco = attach(ConvNet())
    for x, y in images(replica.rank, NUM_STEPS):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    with diloco.outer_parameters(), torch.no_grad():
        model.eval()
        model(images(9, 1)[0][0])
        model.train()
    diloco.flush(final=True)
    diloco.close()
    return diloco


# -------------------------------------------------------------------------------- ends of training


def end_of_a_block(replica: Replica) -> DiLoCo:
    model, optimizer, diloco = attach(Regression())
    with diloco:
        for step in range(NUM_STEPS):
            train_step(model, optimizer, replica.rank, step)
    return diloco


def a_flush_and_no_more_steps(replica: Replica) -> DiLoCo:
    """The object is not closed before the loop's last evaluation and save."""
    model, optimizer, diloco = attach(Regression())
    for step in range(NUM_STEPS):
        train_step(model, optimizer, replica.rank, step)
    diloco.flush(final=True)
    torch.save(model.state_dict(), replica.folder / "model.pt")
    diloco.flush(final=True)
    diloco.close()
    diloco.close()
    return diloco


def a_state_that_goes_on_later(replica: Replica) -> list[DiLoCo]:
    """The steps since the last round are in the state, and the next job has them."""
    model, optimizer, first = attach(Regression())
    for step in range(6):
        train_step(model, optimizer, replica.rank, step)
    states = model.state_dict(), optimizer.state_dict(), first.state_dict()
    first.close()
    model, optimizer, second = attach(Regression())
    for target, state in zip((model, optimizer, second), states, strict=True):
        target.load_state_dict(state)
    for step in range(6, NUM_STEPS):
        train_step(model, optimizer, replica.rank, step)
    second.flush(final=True)
    second.close()
    return [first, second]


def accumulated_gradients(replica: Replica) -> DiLoCo:
    """Four backward passes a step, a norm that is clipped, and steps that a NaN skips."""
    model, optimizer, diloco = attach(Regression())
    for step in range(NUM_STEPS):
        for part in range(4):
            generator = torch.Generator().manual_seed(100 * replica.rank + 10 * step + part)
            x = torch.randn(8, 24, generator=generator)
            (model(x).square().mean() / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    diloco.flush()
    diloco.close()
    return diloco


LOOPS: dict[Loop, Sequence[tuple[int, int]]] = {
    models_of_two_layouts: [(10, 3)] * 2,
    models_of_one_layout_at_two_places: [(10, 3)] * 2,
    models_of_one_layout_in_turns: [(10, 3)] * 3,
    one_model_trained_again: [(10, 3)] * 2,
    averages_at_every_round: [(10, 3)],
    batch_norm_of_each_replica: [(10, 3)],
    end_of_a_block: [(10, 3)],
    a_flush_and_no_more_steps: [(10, 3)],
    a_state_that_goes_on_later: [(6, 1), (10, 2)],
    accumulated_gradients: [(10, 3)],
}


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_no_check_objects(loop: Loop, workers, tmp_path: Path) -> None:
    check(workers(2), loop, tmp_path, *LOOPS[loop])


# ----------------------------------------------------------------------------- the end of a program

PROGRAM = """
import torch
from diloco_comm import DiLoCo

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
diloco = DiLoCo(model, optimizer, sync_every=2)
for step in range({steps}):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
{end}
print("trained", diloco.inner_step)
"""


@pytest.mark.parametrize(
    ("steps", "end"),
    [
        (3, "diloco.flush(final=True)"),
        (3, "diloco.flush(final=True); diloco.close()"),
        (3, "torch.save(diloco.state_dict(), 'diloco.pt')"),
        (4, ""),
        (0, ""),
    ],
    ids=["flushed", "closed", "saved", "after-a-round", "without-a-step"],
)
@pytest.mark.usefixtures("forked_programs")
def test_a_program_that_ends_in_order_hears_nothing(steps: int, end: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(steps=steps, end=end))
    ended = run_python(script, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, f"trained {steps}\n")
    assert not re.findall(r".*(?:diloco_comm|DiLoCo|Warning).*", ended.stderr)
