"""A trainer's checkpoint on a full disk or with SIGKILL while it is saved, and the resume."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from choice_groups import grouped
from fault_replicas import hash_of
from small_disk import mounted
from trainers import Rows, WithLoss, needs, on_store
from workers import Pool

from diloco_comm import Streaming, SyncError


@pytest.fixture(scope="module")
def replicas(trainer_replicas: Callable[[int], Pool]) -> Callable[[int], Pool]:
    return trainer_replicas


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    with mounted(tmp_path / "disk", "4m") as folder:
        yield folder


RESUME = "resume all replicas from one step: train(resume_from_checkpoint=FOLDER)"


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

    def run(resume: Any, kind: type[Trainer] = Trainer, state_of: Path | None = None) -> int:
        args = quiet_arguments(disk / "out", max_steps=6, save_steps=2)
        callback = DiLoCoCallback(sync_every=2, shard=False, resume_from=state_of)
        trainer = kind(WithLoss(), args, train_dataset=Rows(0), callbacks=[callback])
        try:
            trainer.train(resume_from_checkpoint=resume)
        finally:
            callback.close()
        return trainer.state.global_step

    said = []
    before = disk / "out" / "checkpoint-2"
    for resume, kind, state_of in (
        (None, Filling, None),
        (True, Trainer, None),
        (True, Trainer, before),
    ):
        try:
            run(resume, kind, state_of)
        except (OSError, ValueError) as error:
            said.append(str(error))
        (disk / "full").unlink(missing_ok=True)
    left = [str(path.relative_to(disk)) for path in disk.rglob("*diloco*")]
    return said, left, run(str(before))


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
        f"there: the newest checkpoint that is whole is {out / 'checkpoint-2'}: {RESUME}"
    )
    assert said[2] == (
        f"the trainer resumes at step 4, but {out / 'checkpoint-2' / 'diloco.pt'} is of step 2: "
        f"{RESUME}"
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


def save_in_another_version(
    rank: int, world: int, folder: Path, has_method: bool
) -> tuple[list[bool], list[str]]:
    """Return whether the state was there at each deletion, and the warnings about deletions.

    In transformers 4 the trainer has a method that deletes checkpoints, and no function has this
    task.
    """
    import transformers.trainer
    from huggingface_runs import quiet_arguments
    from transformers import Trainer

    from diloco_comm.integrations import huggingface

    rotate, remove = transformers.trainer.rotate_checkpoints, shutil.rmtree
    rotations: list[Callable[..., None]] = []
    there: list[bool] = []
    said: list[str] = []

    def call(*, output_dir: str, use_mtime: bool, **others: Any) -> None:
        rotations[0](use_mtime=use_mtime, output_dir=output_dir)

    class Other(Trainer):
        _save_checkpoint = FunctionType(
            Trainer._save_checkpoint.__code__,
            {**vars(transformers.trainer), "rotate_checkpoints": call},
        )

        def _rotate(self, use_mtime: bool = False, output_dir: str = "") -> None:
            rotate(output_dir, self.args.save_total_limit, use_mtime=use_mtime)

    if has_method:
        Other._rotate_checkpoints = Other._rotate  # type: ignore[attr-defined]

    def look(path: Any, *others: Any, **options: Any) -> None:
        there.append((folder / f"checkpoint-{trainer.state.global_step}" / "diloco.pt").exists())
        remove(path, *others, **options)

    args = quiet_arguments(folder, max_steps=6, save_steps=2, save_total_limit=1)
    callback = huggingface.DiLoCoCallback(sync_every=4, shard=False)
    trainer = Other(WithLoss(), args, train_dataset=Rows(0), callbacks=[callback])
    name = "_rotate_checkpoints" if has_method else "_rotate"
    rotations.append(lambda **given: getattr(trainer, name)(**given))
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    huggingface._logger.addHandler(handler)
    del transformers.trainer.rotate_checkpoints
    shutil.rmtree = look  # type: ignore[assignment]
    try:
        trainer.train()
    finally:
        shutil.rmtree, transformers.trainer.rotate_checkpoints = remove, rotate
        huggingface._logger.removeHandler(handler)
    return there, [text for text in said if "save_total_limit" in text]


@needs("transformers")
@pytest.mark.parametrize("has_method", [True, False])
def test_the_versions_of_transformers_that_delete_in_another_way(
    has_method: bool, replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    [(there, said)] = replicas(1).run(save_in_another_version, tmp_path, has_method)
    assert there == [has_method] * 2 and len(said) == (not has_method)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-6"]


def save_without_training(rank: int, world: int, folder: Path) -> tuple[list[str], bool, bool]:
    """Return the saves after a failed training, and the trainer's way of saving after others."""
    from huggingface_runs import quiet_arguments
    from transformers import Trainer, TrainerCallback

    from diloco_comm.integrations.huggingface import DiLoCoCallback

    class Failing(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == 3:
                raise ZeroDivisionError

    def trainer_of(name: str, *others: Any) -> Any:
        args = quiet_arguments(folder / name, max_steps=6, save_steps=2)
        callbacks = [DiLoCoCallback(sync_every=2, shard=False), *others]
        return Trainer(WithLoss(), args, train_dataset=Rows(0), callbacks=callbacks)

    failed, good, own = trainer_of("failed", Failing()), trainer_of("good"), trainer_of("own")
    with contextlib.suppress(ZeroDivisionError):
        failed.train()
    callback = failed.callback_handler.pop_callback(DiLoCoCallback)
    failed._save_checkpoint(failed.model, None)
    failed.pop_callback(Failing)
    failed.train()
    callback.close()
    good.train()
    save = own._save_checkpoint
    own._save_checkpoint = lambda *given: save(*given)
    before = own._save_checkpoint
    own.train()
    files = [str(path.parent.name) for path in (folder / "failed").rglob("diloco.pt")]
    others = {"_save_checkpoint"} & (vars(good).keys() | vars(failed).keys())
    return files, not others, vars(own)["_save_checkpoint"] is before


@needs("transformers")
def test_a_trainer_saves_in_its_own_way_when_diloco_does_not_train(
    replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    [(files, is_taken_away, is_put_back)] = replicas(1).run(save_without_training, tmp_path)
    assert files == ["checkpoint-2"] and is_taken_away and is_put_back


# ---------------------------------------------------------------- several replicas, or workers


def train_one_of_two(
    rank: int,
    world: int,
    address: tuple[str, int],
    folder: Path,
    options: dict[str, Any],
    step: int | None,
    dies: bool,
) -> tuple[set[int], str]:
    """Train from a checkpoint; with ``dies`` a child of replica 1 is killed in the third save.

    Returns:
        The steps of the checkpoints that are whole, and the hash of the parameters at the end.
    """
    from huggingface_runs import quiet_arguments
    from transformers import Trainer

    from diloco_comm.integrations.huggingface import DiLoCoCallback

    replace, out, found = os.replace, folder / str(rank), ""

    def die(source: Any, target: Any) -> None:
        if Path(target) == out / "checkpoint-6" / "diloco.pt":
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    def run() -> str:
        place = on_store(rank, world, address, f"killed {options} {step} {folder}")
        args = quiet_arguments(out, max_steps=10, save_steps=2, save_total_limit=1)
        callback = DiLoCoCallback(shard=False, **grouped({**place, **options}))
        trainer = Trainer(WithLoss(rank), args, train_dataset=Rows(rank), callbacks=[callback])
        try:
            trainer.train(resume_from_checkpoint=step and f"{out}/checkpoint-{step}")
        finally:
            callback.close()
        return hash_of([param.detach() for param in trainer.model.parameters()])

    if not dies:
        found = run()
    elif rank == 0:
        with pytest.raises(SyncError):
            run()
    elif not (child := os.fork()):
        os.replace = die
        with contextlib.suppress(BaseException):
            run()
        os._exit(1)
    else:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    files = out.glob("checkpoint-*/diloco.pt")
    return {int(file.parent.name.rpartition("-")[2]) for file in files}, found


@needs("transformers")
@pytest.mark.parametrize(
    "options",
    [
        {"sync_every": 2},
        {"sync_every": 4},
        {"sync_every": 4, "fragments": 2, "overlap": Streaming(delay=2, alpha=0.5)},
    ],
    ids=str,
)
def test_replicas_keep_a_checkpoint_in_common_when_one_is_killed_while_saving(
    options: dict[str, Any], replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    """Each keeps one checkpoint (``save_total_limit=1``), and what the others may lack besides."""
    pool = replicas(2)
    (first, _), (second, _) = pool.run(
        train_one_of_two, pool.store, tmp_path / "killed", options, None, True
    )
    assert 6 in first and 6 not in second and len(first) <= 4
    step = max(first & second)
    resumed = pool.run(train_one_of_two, pool.store, tmp_path / "killed", options, step, False)
    whole = pool.run(train_one_of_two, pool.store, tmp_path / "whole", options, None, False)
    assert [end[1] for end in resumed] == [end[1] for end in whole]
    # The newest, and those since the last exchange.
    assert all(len(steps) <= 4 for steps, _ in whole)


def train_beside_other_folders(
    rank: int, world: int, address: tuple[str, int], folder: Path, case: str, limit: int
) -> set[str]:
    """Train while the oldest checkpoint is the best, or the newest folder is another one.

    Returns:
        The names of the folders that are left.
    """
    from huggingface_runs import quiet_arguments
    from transformers import Trainer

    from diloco_comm.integrations.huggingface import DiLoCoCallback

    out = folder / str(rank)

    class Meddling(Trainer):
        def _save_checkpoint(self, *arguments: Any, **options: Any) -> None:
            if case == "best":
                self.state.best_model_checkpoint = str(out / "checkpoint-2")
            elif self.state.global_step > 2:
                other = out / f"checkpoint-{case}"
                other.mkdir(exist_ok=True)
                os.utime(other, (2**32, 2**32))
            super()._save_checkpoint(*arguments, **options)

    place = on_store(rank, world, address, f"other folders {case}")
    args = quiet_arguments(out, max_steps=10, save_steps=2, save_total_limit=limit)
    callback = DiLoCoCallback(sync_every=4, shard=False, **grouped(place))
    Meddling(WithLoss(rank), args, train_dataset=Rows(rank), callbacks=[callback]).train()
    return {path.name for path in out.iterdir()}


@needs("transformers")
@pytest.mark.parametrize(("case", "limit"), [("best", 3), ("2", 1), ("own", 1)])
def test_the_checkpoint_in_common_stays_whatever_other_folders_there_are(
    case: str, limit: int, replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    """The second exchange, at step 8, shows that all have the checkpoint of step 6."""
    pool = replicas(2)
    names = pool.run(train_beside_other_folders, pool.store, tmp_path, case, limit)
    expected = {f"checkpoint-{step}" for step in (6, 8, 10)}
    assert names == [expected | ({"checkpoint-2"} if case == "best" else set())] * 2


def save_on_one_worker(
    rank: int, world: int, address: tuple[str, int], folder: Path
) -> tuple[str, list[str]]:
    """Two workers of a replica save; where worker 1's second state would lie is a folder."""
    from accelerate.state import AcceleratorState
    from huggingface_runs import quiet_arguments
    from transformers import Trainer, TrainerCallback

    from diloco_comm.integrations.huggingface import DiLoCoCallback

    class Blocking(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == 3:
                (folder / "checkpoint-4" / "diloco_1.pt" / "folder").mkdir(
                    parents=True, exist_ok=True
                )

    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    before = dict(os.environ)
    os.environ |= {name: str(value) for name, value in launched.items()}
    os.environ |= {"MASTER_ADDR": address[0], "MASTER_PORT": str(address[1])}
    job = on_store(rank, 2, address, "one job")["store"]
    dist.init_process_group("gloo", store=job, rank=rank, world_size=2)
    AcceleratorState._reset_state(reset_partial_state=True)
    place = {**on_store(0, 1, address, "one replica"), "shard_group": dist.group.WORLD}
    args = quiet_arguments(folder, max_steps=4, save_steps=2, save_total_limit=1)
    callback = DiLoCoCallback(sync_every=2, shard=False, **grouped(place))
    trainer = Trainer(WithLoss(), args, train_dataset=Rows(0), callbacks=[callback, Blocking()])
    said = ""
    try:
        trainer.train()
    except (OSError, SyncError) as error:
        said = str(error)
    callback.close()
    dist.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.clear()
    os.environ |= before
    return said, sorted(path.name for path in folder.glob("checkpoint-2/diloco*"))


@needs("transformers")
def test_no_worker_waits_for_another_that_cannot_save(
    replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    pool = replicas(2)
    (first, left), (second, _) = pool.run(save_on_one_worker, pool.store, tmp_path, timeout=60)
    assert second.startswith("cannot write DiLoCo's state") and "diloco_1.pt" in second
    assert first.startswith("worker 1 of this replica failed: OSError: cannot write DiLoCo's state")
    assert left == ["diloco_0.pt", "diloco_1.pt"]
