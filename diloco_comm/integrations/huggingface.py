"""DiLoCo for the Hugging Face ``Trainer``::

    replicas = replica_per_process()    # first of all, before TrainingArguments and the Trainer
    callback = DiLoCoCallback(sync_every=100, **replicas)
    trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])

The callback attaches to the optimizer that the trainer makes, adds its state to every checkpoint
that the trainer writes, and goes on from it. Source: transformers 5.23, ``trainer_callback.py``
and ``trainer.py``.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..base.checks import choice
from ..training.diloco import DiLoCo
from .attaching import Make, attach, savable, state_with_local
from .counting import TrainerSteps
from .evaluating import CHOICES, Swap, share_best
from .wrapping import refuse_if_alone_in_a_job, refuse_if_spans_replicas
from .writers import Figures

_logger = logging.getLogger(__name__)
_REMEDY = (
    "write `replicas = replica_per_process()` (of diloco_comm.integrations.launch) before "
    "TrainingArguments and the Trainer are made, and DiLoCoCallback(..., **replicas)"
)


class DiLoCoCallback(TrainerCallback):
    """Make the trainer one replica of several, each of which is a trainer.

    Every replica writes checkpoints of its own, since local parameters differ: give each its own
    ``output_dir``. A checkpoint of the trainer then holds ``diloco.pt`` too, and
    ``trainer.train(resume_from_checkpoint=...)`` goes on to the same bytes. At the end of training
    the replicas share what they have learned since the last outer step, and the model holds the
    outer parameters.

    All replicas end at the step at which the first of them would, by ``max_steps`` or by its data.
    The means of DiLoCo's figures (see ``log_metrics``) go to the trainer's log as ``diloco/...``,
    each time the trainer logs its loss after an exchange; those of the last one, which comes when
    the trainer's reporters have ended, to ``trainer.state.log_history`` alone.

    The trainer tells no callback that training has failed: call ``close()`` then, so that the other
    replicas do not wait for this one. The next training does it too, and the next evaluation.

    Args:
        make: ``DiLoCo`` or a preset such as ``eager_diloco``.
        resume_from: The checkpoint's folder, when it is neither
            ``TrainingArguments.resume_from_checkpoint`` nor in ``output_dir``.
        evaluate: "local" (default) or "outer": the trainer evaluates the outer parameters, its
            checkpoints hold them as the model, and ``load_best_model_at_end`` chooses among them.
            Training goes on from the local ones, which are in ``diloco.pt`` then.
        arguments: Of ``make``: ``sync_every=100`` and so on.

    Attributes:
        diloco: The attachment, from the beginning of training on.
    """

    def __init__(
        self,
        make: Make = DiLoCo,
        *,
        resume_from: str | Path | None = None,
        evaluate: str = "local",
        **arguments: Any,
    ) -> None:
        choice("evaluate", evaluate, CHOICES)
        self._make, self._arguments = make, arguments
        self._resume_from = resume_from
        self._is_outer = evaluate == "outer"
        self._trainer: Trainer | None = None
        self._loop: CodeType | None = None
        self._swap: Swap | None = None  # while training
        self._steps: TrainerSteps | None = None
        self._figures = Figures()
        self.diloco: DiLoCo | None = None

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
        """Attach to the optimizer; weights and optimizer of a checkpoint are loaded by now."""
        self._refuse(args)
        self._trainer, self._loop = _calling_trainer()
        # Callbacks are given the model without what averages its gradients.
        wrapped = model if self._trainer is None else self._trainer.model_wrapped
        refuse_if_spans_replicas(wrapped, self._arguments, _REMEDY)
        refuse_if_alone_in_a_job(args.world_size, self._arguments, _REMEDY)
        self._let_go()
        saved = None
        if state.global_step > 0:
            saved = _load(self._folder_to_resume(args, state) / _file_name(args))
        self.diloco = attach(self._make, model, optimizer, self._arguments, saved)
        self._swap = Swap(self.diloco)
        self._steps = TrainerSteps(self.diloco, state.global_step)
        self._figures = Figures(self.diloco)
        self._agree_on_the_end(state)
        if self._is_outer and args.eval_on_start:
            self._swap.enter()

    def _refuse(self, args: TrainingArguments) -> None:
        if args.load_best_model_at_end and not self._is_outer:
            raise ValueError(
                "load_best_model_at_end=True would put one replica's local parameters in the place "
                'of the shared ones: set it to False, or write DiLoCoCallback(evaluate="outer")'
            )
        if args.deepspeed:
            raise ValueError(
                "under DeepSpeed the optimizer steps inside backward(), where no hook runs: use "
                "FSDP2 or DDP inside a replica"
            )

    def _let_go(self) -> None:
        """Close the attachment of an earlier training, which may have failed at any point."""
        if self._swap is not None:
            # Whatever has been loaded since then stays.
            self._swap.leave(keep=True)
        if self.diloco is not None:
            self.diloco.close()
        self._swap = self._steps = None

    def close(self) -> None:
        """Leave the group, after a training that has failed; idempotent.

        The model has its local parameters then, bit by bit, also where the training has failed
        while it held the outer ones.
        """
        if self._swap is not None:
            self._swap.leave()
        self._let_go()

    def _is_training(self) -> bool:
        """Whether the trainer's loop, which has called ``on_train_begin``, still runs."""
        return self._loop is None or _calling_trainer(self._loop)[0] is self._trainer

    def _agree_on_the_end(self, state: TrainerState) -> None:
        assert self.diloco is not None
        left = self.diloco.agree_on_steps(max(0, state.max_steps - state.global_step))
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
        return _folder(args, state)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Add the outer state to the checkpoint that the trainer has just written."""
        if self.diloco is None or self._swap is None:
            return
        has_outer = self._swap.is_entered
        self._swap.leave()
        if args.save_only_model:
            return
        folder = _folder(args, state)
        folder.mkdir(parents=True, exist_ok=True)
        file, partial = folder / _file_name(args), folder / f"{_file_name(args)}.partial"
        whole = state_with_local(self.diloco) if has_outer else self.diloco.state_dict()
        torch.save(savable(whole), partial)
        partial.rename(file)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Share what is left and leave the group; the model holds outer parameters."""
        if self.diloco is None or self._swap is None:
            return
        step = None
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            step = state.best_global_step
        # The trainer has loaded the best model by now.
        self._swap.leave(keep=step is not None)
        try:
            if not (args.load_best_model_at_end and share_best(self.diloco, step)):
                self.diloco.flush()
        finally:
            self.diloco.close()
        # The trainer's reporters have ended: one that is called again begins another file, or run.
        values = self._figures.take()
        if values:
            state.log_history.append({**values, "epoch": state.epoch, "step": state.global_step})
        self._swap = self._steps = self._trainer = self._loop = None

    # ------------------------------------------------------------- evaluation, on outer parameters

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Go on from the local parameters."""
        if self._swap is not None:
            self._swap.leave()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count a step that was skipped; have the outer parameters evaluated and saved."""
        if self._steps is not None:
            self._steps.follow(state.global_step)
        self._show_outer(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Have the outer parameters evaluated and saved, if the trainer is about to."""
        self._show_outer(control)

    def _show_outer(self, control: TrainerControl) -> None:
        is_looked_at = control.should_evaluate or control.should_save
        if self._swap is not None and self._is_outer and is_looked_at:
            self._swap.enter()

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refuse metrics of local parameters where those of the outer ones were asked for."""
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
        """Log the figures of the exchanges since the last loss that the trainer has logged."""
        if "loss" in logs or "train_loss" in logs:
            self._log()

    def _log(self) -> None:
        values = self._figures.take()
        if values and self._trainer is not None:
            self._trainer.log(values)


def _calling_trainer(method: CodeType | None = None) -> tuple[Trainer | None, CodeType | None]:
    """Return the trainer that is calling a callback, and by which method of its own.

    The arguments of callbacks lack it.

    Args:
        method: Look for this one, among those that wait for the callback's end.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if method in (None, frame.f_code):
            caller = frame.f_locals.get("self")
            if isinstance(caller, Trainer):
                return caller, frame.f_code
        frame = frame.f_back
    return None, None


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the folder in which the trainer saves at this step."""
    assert args.output_dir is not None
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _file_name(args: TrainingArguments) -> str:
    """Name the file; workers of one replica write to the same folder."""
    return "diloco.pt" if args.world_size == 1 else f"diloco_{args.process_index}.pt"


def _load(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ValueError(
            f"training goes on from a checkpoint, but {file} is not there: give "
            "DiLoCoCallback(resume_from=...) the checkpoint's folder"
        )
    return torch.load(file, map_location="cpu", weights_only=True)
