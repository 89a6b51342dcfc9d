"""A trainer's checkpoint on a full disk or with SIGKILL while it is saved, and the resume."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_replicas import hash_of
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
    from transformers import Trainer

    from diloco_comm.integrations.huggingface import DiLoCoCallback

    class Filling(Trainer):
        def _save_checkpoint(self, *arguments: Any, **options: Any) -> None:
            super()._save_checkpoint(*arguments, **options)
            if self.state.global_step == 4:
                with contextlib.suppress(OSError), (disk / "full").open("wb", 0) as file:
                    while True:
                        file.write(bytes(4096))

    def run(resume: Any, kind: type[Trainer] = Trainer) -> int:
        args = quiet_arguments(disk / "out", max_steps=6, save_steps=2)
        callback = DiLoCoCallback(sync_every=2, shard=False)
        trainer = kind(WithLoss(), args, train_dataset=Rows(0), callbacks=[callback])
        try:
            trainer.train(resume_from_checkpoint=resume)
        finally:
            callback.close()
        return trainer.state.global_step

    said = []
    for resume, kind in ((None, Filling), (True, Trainer)):
        try:
            run(resume, kind)
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


def attach_with_a_limit(rank: int, world: int, folder: Path, limit: int) -> tuple[list[str], int]:
    """Return the warnings, and how many whole checkpoints a third save leaves that fails."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    from diloco_comm.integrations.accelerate import attach

    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=limit)
    accelerator = Accelerator(cpu=True, project_config=project)
    module = WithLoss()
    model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        diloco = attach(accelerator, model, optimizer, sync_every=2, peers="alone")
    said = [str(one.message) for one in caught if "total_limit" in str(one.message)]
    with diloco:
        for number in range(2):
            project.iteration = number
            accelerator.save_state()
        project.iteration = 2
        accelerator.register_save_state_pre_hook(lambda *_: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            accelerator.save_state()
    return said, len(list(folder.rglob("custom_checkpoint_0.pkl")))


@needs("accelerate")
@pytest.mark.parametrize(("limit", "left"), [(1, 0), (2, 1)])
def test_a_limit_by_which_accelerate_keeps_no_whole_checkpoint(
    limit: int, left: int, replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    [(said, num_whole)] = replicas(1).run(attach_with_a_limit, tmp_path, limit)
    assert num_whole == left
    assert (
        said
        == [
            "ProjectConfiguration(total_limit=1) deletes the only checkpoint before the "
            "next one is written, and a kill meanwhile leaves none: give total_limit=2"
        ][left:]
    )


# Functions that a save calls, in order; "half": SIGKILL comes when a part of its work is done.
PLACES = {
    "model": ("transformers.Trainer", "_save_optimizer_and_scheduler", False),
    "numbers": ("transformers.Trainer", "_save_rng_state", False),
    "state": ("os", "replace", False),
    "whole": ("shutil", "rmtree", False),
    "deletion": ("shutil", "rmtree", True),
}


def die_while_saving(rank: int, world: int, folder: Path, place: str) -> tuple[str, str, bool]:
    """A child is killed at a place of the save of step 4; return a resumed and a whole run."""
    from huggingface_runs import quiet_arguments
    from transformers import Trainer

    from diloco_comm.base.files import newest_whole
    from diloco_comm.integrations.huggingface import DiLoCoCallback

    def run(out: Path, resume: str | None = None, kind: type[Trainer] = Trainer) -> str:
        args = quiet_arguments(out, max_steps=6, save_steps=2, save_total_limit=1)
        callback = DiLoCoCallback(sync_every=4, shard=False)
        trainer = kind(WithLoss(), args, train_dataset=Rows(0), callbacks=[callback])
        trainer.train(resume_from_checkpoint=resume)
        return hash_of([param.detach() for param in trainer.model.parameters()])

    owner, name, is_half = PLACES[place]
    target = {"transformers.Trainer": Trainer, "os": os, "shutil": shutil}[owner]

    class Dying(Trainer):
        def _save_checkpoint(self, *arguments: Any, **options: Any) -> None:
            if self.state.global_step == 4:
                setattr(target, name, die)
            super()._save_checkpoint(*arguments, **options)

    def die(path: Any, *others: Any, **options: Any) -> None:
        if is_half:
            (Path(path) / "diloco.pt").unlink()
        if owner != "os" or str(path).endswith(".pt"):
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            run(folder / "killed", kind=Dying)
        os._exit(1)
    was_killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    newest = newest_whole(folder / "killed" / "checkpoint-4" / "diloco.pt")
    return run(folder / "killed", str(newest)), run(folder / "whole"), was_killed


@needs("transformers")
@pytest.mark.each_value("2 s each; they differ in the place")
@pytest.mark.parametrize("place", PLACES)
def test_a_whole_checkpoint_is_left_wherever_the_save_is_killed(
    place: str, replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    """With ``save_total_limit=1``: the old one goes when the next one has all its files."""
    [(resumed, whole, was_killed)] = replicas(1).run(die_while_saving, tmp_path, place)
    assert was_killed and resumed == whole
    assert [path.name for path in (tmp_path / "whole").iterdir()] == ["checkpoint-6"]
