"""A trainer's checkpoint on a full disk, and the resume after it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_disk import mounted
from trainers import Rows, WithLoss, needs
from workers import Pool


@pytest.fixture(scope="module")
def replicas(trainer_replicas: Callable[[int], Pool]) -> Callable[[int], Pool]:
    return trainer_replicas


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    with mounted(tmp_path / "disk", "4m") as folder:
        yield folder


def save_on_a_full_disk(rank: int, world: int, disk: Path) -> tuple[list[str], list[str], int]:
    """The disk has no room left when DiLoCo's state of the second checkpoint is written."""
    from huggingface_runs import quiet_arguments
    from transformers import Trainer, TrainerCallback

    from diloco_comm.integrations.huggingface import DiLoCoCallback

    class Filling(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == 4:
                with contextlib.suppress(OSError), (disk / "full").open("wb", 0) as file:
                    while True:
                        file.write(bytes(4096))

    def run(resume: Any, *before: TrainerCallback) -> int:
        args = quiet_arguments(disk / "out", max_steps=6, save_steps=2)
        callback = DiLoCoCallback(sync_every=2, shard=False)
        callbacks = [*before, callback]
        trainer = Trainer(WithLoss(), args, train_dataset=Rows(0), callbacks=callbacks)
        try:
            trainer.train(resume_from_checkpoint=resume)
        finally:
            callback.close()
        return trainer.state.global_step

    said = []
    for resume, before in ((None, [Filling()]), (True, [])):
        try:
            run(resume, *before)
        except (OSError, ValueError) as error:
            said.append(str(error))
        (disk / "full").unlink(missing_ok=True)
    left = [str(path.relative_to(disk)) for path in disk.rglob("*diloco*")]
    return said, left, run(str(disk / "out" / "checkpoint-2"))


@needs("transformers")
def test_a_resume_names_the_checkpoint_from_before_the_disk_was_full(
    replicas: Callable[[int], Pool], small_disk: Path
) -> None:
    [(said, left, num_steps)] = replicas(1).run(save_on_a_full_disk, small_disk)
    out = small_disk / "out"
    assert said[0].startswith(
        f"cannot write DiLoCo's state {out / 'checkpoint-4' / 'diloco.pt'}: No space left on "
    )
    assert said[0].endswith(" bytes are free")
    assert said[1] == (
        f"training goes on from a checkpoint, but {out / 'checkpoint-4' / 'diloco.pt'} is not "
        f"there: the newest checkpoint that is whole is {out / 'checkpoint-2'}: give "
        "DiLoCoCallback(resume_from=...) the checkpoint's folder"
    )
    assert left == ["out/checkpoint-2/diloco.pt"]
    assert num_steps == 6
