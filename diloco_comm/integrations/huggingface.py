"""DiLoCo for the Hugging Face ``Trainer``::

    replicas = replica_per_process()    # before TrainingArguments and the Trainer are made
    callback = DiLoCoCallback(sync_every=100, **replicas)
    trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])

The callback attaches DiLoCo to the trainer's optimizer, adds DiLoCo's state to every checkpoint of
the trainer, and restores the state when training resumes.
Source: transformers 5.23, ``trainer_callback.py`` and ``trainer.py``.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import transformers.trainer
from accelerate.data_loader import DataLoaderStateMixin
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..base.checks import choice, flag, logger_of
from ..base.files import load_state, save_state
from ..training.diloco import DiLoCo
from .attachment import (
    CHOICES,
    Evaluate,
    Make,
    Swap,
    TrainerSteps,
    attach,
    check,
    choices_for,
    finish,
    leave_schedules,
    move_schedule,
    refuse_same_folder,
    savable,
    share_best,
    state_with_local,
    step_of,
    with_norms,
    with_total_steps,
)
from .division import Division, refuse_if_alone_in_a_job, refuse_if_spans_replicas
from .writers import FIGURES, Choice, Figures

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..training.arguments import Arguments

_logger = logger_of(__name__)
_REMEDY = (
    "write `replicas = replica_per_process()` (of diloco_comm.integrations.launch) before "
    "TrainingArguments and the Trainer are made, and DiLoCoCallback(..., **replicas)"
)
_FOLDER = "give each replica its own TrainingArguments(output_dir=...)"
_RESUME = "resume all replicas from one step: train(resume_from_checkpoint=FOLDER)"


class DiLoCoCallback(TrainerCallback):
    """Make the trainer one of several replicas, each of which has its own trainer.

    Each replica writes its own checkpoints, since local parameters differ: give each replica its
    own ``output_dir``. A checkpoint of the trainer then also has ``diloco.pt``, and
    ``trainer.train(resume_from_checkpoint=...)`` continues with the same bytes. At the end of
    training the replicas share what they have learned since the last outer step, and the model
    holds the outer parameters.

    All replicas end at the same step: the earliest at which a replica's ``max_steps`` or data end.
    With ``Elastic`` all end at its ``total_steps``, by default the trainer's ``max_steps``. A
    replica that joins goes on at the group's step: ``trainer.state.global_step`` and the
    learning-rate schedule are moved there.

    Four figures go to the trainer's log each time the trainer logs its loss after an exchange:
    ``diloco/sent_mb``, ``diloco/waited_s``, ``diloco/hidden_share`` (of the time of the exchanges)
    and ``diloco/drift`` (L2 distance between local and outer parameters when they are sent). The
    last exchange comes after the end of the trainer's reporters, so its figures go to
    ``trainer.state.log_history`` only.

    Each replica trains on its own part of ``train_dataset``, where the trainer does not divide it,
    like with ``DiLoCo.shard``. The orders of the epochs come from DiLoCo's ``seed``. For this the
    callback must be among the Trainer's ``callbacks=``.

    The trainer does not tell callbacks that training has failed. After a failure call ``close()``,
    so that the other replicas do not wait for this replica. The next training or evaluation closes
    the attachment too.

    Args:
        make: ``DiLoCo`` or a preset such as ``eager_diloco``.
        resume_from: Folder of the checkpoint, if the folder is neither
            ``TrainingArguments.resume_from_checkpoint`` nor in ``output_dir``.
        evaluate: "local" (default) or "outer". With "outer" the trainer evaluates the outer
            parameters, saves them as the model of its checkpoints, and ``load_best_model_at_end``
            chooses among these checkpoints. Training continues from the local parameters, which
            ``diloco.pt`` then holds.
        shard: False if the data are divided already: the callback leaves them as they are.
        figures: "main" (default) for four figures; "all" for the means of the figures of
            ``log_metrics`` too.
        arguments: Arguments of ``make``, such as ``sync_every=100``.

    Attributes:
        diloco: The attached DiLoCo; None before training.

    Raises:
        TypeError, ValueError: For arguments that ``make`` does not have, and for invalid values.
    """

    def __init__(
        self,
        make: Make = DiLoCo,
        *,
        resume_from: str | Path | None = None,
        evaluate: Evaluate = "local",
        shard: bool = True,
        figures: Choice = "main",
        **arguments: Unpack[Arguments],
    ) -> None:
        choice("evaluate", evaluate, CHOICES)
        choice("figures", figures, FIGURES)
        self._make = make
        self._arguments = with_norms(make, check(DiLoCoCallback, make, arguments))
        self._choices = choices_for(make, self._arguments)
        self._division = Division(self._choices, is_wanted=flag("shard", shard))
        self._has_loader = False
        self._choice = figures
        self._resume_from = resume_from
        self._is_outer = evaluate == "outer"
        self._trainer: Trainer | None = None
        self._loop: CodeType | None = None
        self._swap: Swap | None = None  # while training
        self._steps: TrainerSteps | None = None
        # The step of the newest checkpoint, and the function that undoes this object's change of
        # the trainer's method ``_save_checkpoint``.
        self._saved_step = -1
        self._release: Callable[[], None] = _nothing
        # The step of the newest checkpoint that all replicas have saved. For each later one: the
        # number of exchanges after whose end all replicas have saved it, and its step.
        self._common_step = -1
        self._saves: list[tuple[int, int]] = []
        self._figures = Figures()
        self.diloco: DiLoCo | None = None

    # ----------------------------------------------------------------------------------- data

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Let the trainer's loader read this replica's part of the data."""
        trainer, _ = _calling_trainer()
        if trainer is not None:
            self._has_loader = True
            trainer.get_train_dataloader = partial(
                self._own_part, trainer, trainer.get_train_dataloader
            )

    def _own_part(self, trainer: Trainer, get_loader: Callable[[], Any]) -> Any:
        num_processes, prepare = trainer.args.world_size, trainer.accelerator.prepare
        if not self._division.is_needed(num_processes):
            return get_loader()

        def prepare_part(*objects: Any, **options: Any) -> Any:
            objects = tuple(self._division.part_of(one, num_processes) for one in objects)
            return prepare(*objects, **options)

        # A loader that accelerate has prepared cannot be divided any more.
        trainer.accelerator.prepare = prepare_part
        try:
            loader = get_loader()
        finally:
            del trainer.accelerator.prepare
        is_prepared = isinstance(loader, DataLoaderStateMixin)
        return loader if is_prepared else self._division.part_of(loader, num_processes)

    # ------------------------------------------------------------------------------- training

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        optimizer: Any,
        **kwargs: Any,
    ) -> None:
        """Attach to the optimizer, after the trainer has loaded weights and optimizer."""
        self._refuse(args)
        self._trainer, self._loop = _calling_trainer()
        # The argument ``model`` is without the DDP around it, which the check below looks at.
        wrapped = model if self._trainer is None else self._trainer.model_wrapped
        refuse_if_spans_replicas(wrapped, self._choices, _REMEDY)
        refuse_if_alone_in_a_job(args.world_size, self._choices, _REMEDY)
        self._detach()
        saved = None
        if state.global_step > 0:
            file = self._folder_to_resume(args, state) / _file_name(args)
            saved = load_state(file, _RESUME)
            step = step_of(saved)
            if step not in (None, state.global_step):
                raise ValueError(
                    f"the trainer resumes at step {state.global_step}, but {file} is of step "
                    f"{step}: {_RESUME}"
                )
        arguments = with_total_steps(self._arguments, state.max_steps)
        self.diloco = attach(self._make, model, optimizer, arguments, saved)
        self._swap = Swap(self.diloco)
        self._saved_step, self._saves = -1, []
        self._common_step = -1 if saved is None else state.global_step
        if self._trainer is not None:
            self._save_with_state(self._trainer)
        if self.diloco.view >= 0:
            self._move_to_group(state, kwargs.get("lr_scheduler"))
        self._steps = TrainerSteps(self.diloco, state.global_step)
        self._figures = Figures(self.diloco, self._choice)
        self._agree_on_the_end(args, state)
        self._division.check(self.diloco)
        # With several workers the trainer does not tell the loader the epoch of a resumed run.
        self._division.begin_at(int(state.epoch or 0))
        if not self._has_loader and self._division.is_needed(args.world_size):
            self._division.warn_undivided(
                "the callback came after the Trainer was made; give it as Trainer(callbacks=[...])"
            )
        if self._is_outer and args.eval_on_start:
            self._swap.enter()

    def _move_to_group(self, state: TrainerState, schedule: Any) -> None:
        """Go on at the inner step of the group that this replica has joined."""
        assert self.diloco is not None
        num_steps = max(0, self.diloco.inner_step - state.global_step)
        move_schedule(schedule, num_steps)
        leave_schedules(self.diloco)
        state.global_step += num_steps
        # The trainer averages its losses over the steps that it has counted since these numbers.
        for name in ("_initial_global_step", "_globalstep_last_logged"):
            if hasattr(self._trainer, name):
                setattr(self._trainer, name, state.global_step)

    def _refuse(self, args: TrainingArguments) -> None:
        if args.auto_find_batch_size:
            raise ValueError(
                "auto_find_batch_size=True begins the training of one replica anew when its memory "
                "is full, and the others would wait for it: set it to False, and give a "
                "per_device_train_batch_size that fits on every replica"
            )
        if args.load_best_model_at_end and not self._is_outer:
            raise ValueError(
                "load_best_model_at_end=True would put one replica's local parameters in the place "
                'of the shared ones: set it to False, or write DiLoCoCallback(evaluate="outer")'
            )
        if args.deepspeed:
            raise ValueError(
                "under DeepSpeed the trainer holds no optimizer of the model's own parameters: use "
                "FSDP2 or DDP inside a replica, or DeepSpeed without ZeRO in a loop of your own"
            )

    def _detach(self) -> None:
        """Close the attachment of an earlier training, which may have failed at any point."""
        if self._swap is not None:
            # ``keep``: the user may have loaded other parameters since that training.
            self._swap.leave(keep=True)
        if self.diloco is not None:
            self.diloco.close()
        self._release()
        self._swap = self._steps = None

    def close(self) -> None:
        """Leave the group after a failed training; idempotent.

        The model then has its local parameters, bit by bit, even if training failed while the model
        held the outer parameters.
        """
        if self._swap is not None:
            self._swap.leave()
        self._detach()

    def _is_training(self) -> bool:
        """Whether the training loop that called ``on_train_begin`` still runs."""
        return self._loop is None or _calling_trainer(self._loop)[0] is self._trainer

    def _agree_on_the_end(self, args: TrainingArguments, state: TrainerState) -> None:
        assert self.diloco is not None
        if self._choices["membership"] is not None:
            return
        left = self.diloco.agree_on_steps(max(0, state.max_steps - state.global_step))
        saves = args.save_strategy != "no"
        refuse_same_folder(self.diloco, args.output_dir if saves else None, _FOLDER)
        end = state.global_step + left
        if end < state.max_steps:
            _logger.warning(
                "training ends at step %d instead of %d: another replica has no data, or no "
                "max_steps, for more",
                end,
                state.max_steps,
            )
            state.max_steps = end

    def _folder_to_resume(self, args: TrainingArguments, state: TrainerState) -> Path:
        if self._resume_from is not None:
            return Path(self._resume_from)
        given = args.resume_from_checkpoint
        if isinstance(given, str) and Path(given).is_dir():
            return Path(given)
        return _folder(args, state.global_step)

    def _save_with_state(self, trainer: Trainer) -> None:
        """Let the trainer keep older checkpoints until the state is in the new one.

        The trainer deletes them (``save_total_limit``) before it calls ``on_save``.
        """
        save, rotation = trainer._save_checkpoint, _rotation(trainer)
        if rotation is None and trainer.args.save_total_limit:
            _logger.warning(
                "save_total_limit=%d: transformers %s deletes older checkpoints before DiLoCo's "
                "state is in the new one, so a kill meanwhile may leave no whole one",
                trainer.args.save_total_limit,
                transformers.__version__,
            )

        def save_whole(*arguments: Any, **options: Any) -> None:
            is_own = self in trainer.callback_handler.callbacks and self._swap is not None
            if rotation is None or not (is_own and self._is_training()):
                return save(*arguments, **options)
            with _held_deletions(*rotation) as held:
                save(*arguments, **options)
            self._add_state(trainer.args, trainer.state)
            self._delete(trainer, held)

        self._release = _replace(trainer, "_save_checkpoint", save_whole)

    def _delete(self, trainer: Trainer, held: list[Callable[[], None]]) -> None:
        """Delete older checkpoints, but keep the newest that all workers of all replicas have.

        Another replica, or another worker of this one, may be killed while it writes its newest
        checkpoint. Then all must resume from an older one.
        """
        assert self.diloco is not None
        args, limit = trainer.args, trainer.args.save_total_limit or 0
        num_apart = self.diloco.num_replicas
        num_apart *= args.world_size if self.diloco._workers is None else 1
        if not held or limit < 1 or args.save_only_model or num_apart == 1:
            for delete in held:
                delete()
            return
        kept = {Path(trainer.state.best_model_checkpoint or "")}
        steps = [self._common_step, *(step for _, step in self._saves)]
        kept |= {_folder(args, step) for step in steps}
        # Transformers 4 has a method that sorts, transformers 5 a function.
        sort = getattr(trainer, "_sorted_checkpoints", None)
        sort = sort or transformers.trainer.sort_checkpoints
        paths = [Path(path) for path in sort(output_dir=args.output_dir, use_mtime=True)]
        others = [path for path in paths if path not in kept]
        for path in others[: max(0, len(paths) - limit)]:
            shutil.rmtree(path, ignore_errors=True)

    def _note_save(self, step: int) -> None:
        """Note a checkpoint, and which older ones the other replicas have by now.

        The end of an exchange that began after a save shows that all replicas have saved.
        """
        assert self.diloco is not None
        num_syncs = self.diloco.totals().num_syncs
        common = [step for needed, step in self._saves if needed <= num_syncs]
        self._common_step = max([self._common_step, *common])
        self._saves = self._saves[len(common) :]
        under_way = sum(len(part.in_flight) for part in self.diloco._rounds.parts)
        # A single replica has no other to wait for: its workers meet at each step anyway.
        needed = num_syncs + under_way + 1 if self.diloco.num_replicas > 1 else 0
        self._saves.append((needed, step))

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Add the outer state to a checkpoint, unless ``_save_with_state`` has added it."""
        if self._saved_step != state.global_step:
            self._add_state(args, state)

    def _add_state(self, args: TrainingArguments, state: TrainerState) -> None:
        if self.diloco is None or self._swap is None:
            return
        self._saved_step = state.global_step
        has_outer = self._swap.is_entered
        self._swap.leave()
        if args.save_only_model:
            return
        whole = state_with_local(self.diloco) if has_outer else self.diloco.state_dict()
        file = _folder(args, state.global_step) / _file_name(args)
        workers = self.diloco._workers
        # If one worker cannot write its file, all raise.
        with nullcontext() if workers is None else workers.all_workers():
            save_state("DiLoCo's state", savable(whole), file)
        self._note_save(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Share what was learned since the last outer step, and leave the group."""
        if self.diloco is None or self._swap is None:
            return
        step = None
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            step = state.best_global_step
        # The trainer has loaded the best model by now.
        self._swap.leave(keep=step is not None)
        try:
            if not (args.load_best_model_at_end and share_best(self.diloco, step)):
                finish(self.diloco)
        finally:
            self.diloco.close()
            self._release()
        # The trainer's reporters have ended: a further call would begin another file, or run.
        values = self._figures.take()
        if values:
            state.log_history.append({**values, "epoch": state.epoch, "step": state.global_step})
        self._swap = self._steps = self._trainer = self._loop = None

    # ------------------------------------------------------------- evaluation, on outer parameters

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Put the local parameters back, before the next step."""
        if self._swap is not None:
            self._swap.leave()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count a skipped step; put the outer parameters into the model if they are needed."""
        if self._steps is not None:
            self._steps.follow(state.global_step)
        if self.diloco is not None and self.diloco.is_done:
            control.should_training_stop = True
        self._show_outer(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Put the outer parameters into the model if the trainer will evaluate or save."""
        self._show_outer(control)

    def _show_outer(self, control: TrainerControl) -> None:
        is_looked_at = control.should_evaluate or control.should_save
        if self._swap is not None and self._is_outer and is_looked_at:
            self._swap.enter()

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raise if evaluate="outer" and the evaluation ran on the local parameters.

        An evaluation outside of the training loop instead closes DiLoCo: the training has failed.
        """
        if self.diloco is not None and not self._is_training():
            self.diloco.close()
        elif self._is_outer and self._swap is not None and not self._swap.is_outer:
            raise RuntimeError(
                'in spite of evaluate="outer" this evaluation ran on the local parameters, because '
                "the trainer did not plan it before DiLoCoCallback looked: put DiLoCoCallback last "
                "in callbacks, and your own evaluations into `with "
                "callback.diloco.outer_parameters():`"
            )

    # ---------------------------------------------------------------------------------- figures

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, float],
        **kwargs: Any,
    ) -> None:
        """Log the figures of the exchanges since the trainer last logged a loss."""
        if "loss" in logs or "train_loss" in logs:
            self._log()

    def _log(self) -> None:
        values = self._figures.take()
        if values and self._trainer is not None:
            self._trainer.log(values)


def _calling_trainer(method: CodeType | None = None) -> tuple[Trainer | None, CodeType | None]:
    """Return the trainer that is calling a callback, and the calling method.

    Callbacks do not get the trainer as an argument, so this function looks at the call stack.

    Args:
        method: Look for a call of this method; None for the innermost method of a trainer.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if method in (None, frame.f_code):
            caller = frame.f_locals.get("self")
            if isinstance(caller, Trainer):
                return caller, frame.f_code
        frame = frame.f_back
    return None, None


def _nothing() -> None:
    """Serve as ``_release`` while the trainer's method is unchanged: there is nothing to undo."""


def _replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute of an object; return a function that undoes this, once."""
    had, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)

    def put_back() -> None:
        if vars(owner).get(name) is not value:
            return  # The user has replaced the attribute since then.
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)

    return put_back


def _rotation(trainer: Trainer) -> tuple[Any, str] | None:
    """Return the owner and the name of the function that deletes the trainer's old checkpoints.

    Source: transformers 5, ``trainer_utils.py``; transformers 4, ``trainer.py``.
    """
    places = (transformers.trainer, "rotate_checkpoints"), (trainer, "_rotate_checkpoints")
    return next((place for place in places if hasattr(*place)), None)


@contextmanager
def _held_deletions(owner: Any, name: str) -> Iterator[list[Callable[[], None]]]:
    """Enter a block in which a trainer deletes no checkpoint; the list gets the withheld calls."""
    rotate, held = getattr(owner, name), list[Callable[[], None]]()

    def hold(*arguments: Any, **options: Any) -> None:
        held.append(partial(rotate, *arguments, **options))

    put_back = _replace(owner, name, hold)
    try:
        yield held
    finally:
        put_back()


def _folder(args: TrainingArguments, step: int) -> Path:
    """Return the folder in which the trainer saves at a step."""
    assert args.output_dir is not None
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def _file_name(args: TrainingArguments) -> str:
    """Return the name of this worker's file: workers of one replica share a folder."""
    return "diloco.pt" if args.world_size == 1 else f"diloco_{args.process_index}.pt"
