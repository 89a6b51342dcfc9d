"""DiLoCo for the Hugging Face ``Trainer``.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[DiLoCoCallback(sync_every=100)])

The callback attaches to the optimizer that the trainer makes, adds its state to every checkpoint
that the trainer writes, and goes on from it. Source: transformers 5.23, ``trainer_callback.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..diloco import DiLoCo
from .attaching import Make, attach


class DiLoCoCallback(TrainerCallback):
    """Make the trainer one replica of several, each of which is a trainer.

    Every replica writes checkpoints of its own, since local parameters differ: give each its own
    ``output_dir``. A checkpoint of the trainer then holds ``diloco.pt`` too, and
    ``trainer.train(resume_from_checkpoint=...)`` goes on to the same bytes. At the end of training
    the replicas share what they have learned since the last outer step, and the model holds the
    outer parameters.

    Args:
        make: ``DiLoCo`` or a preset such as ``eager_diloco``.
        resume_from: The checkpoint's folder, when it is neither
            ``TrainingArguments.resume_from_checkpoint`` nor in ``output_dir``.
        arguments: Of ``make``: ``sync_every=100`` and so on.

    Attributes:
        diloco: The attachment, from the beginning of training on.
    """

    def __init__(
        self, make: Make = DiLoCo, *, resume_from: str | Path | None = None, **arguments: Any
    ) -> None:
        self._make, self._arguments = make, arguments
        self._resume_from = resume_from
        self.diloco: DiLoCo | None = None

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
        if args.load_best_model_at_end:
            raise ValueError(
                "load_best_model_at_end=True would put one replica's local parameters in the place "
                "of the shared ones: set it to False"
            )
        if args.deepspeed:
            raise ValueError(
                "under DeepSpeed the optimizer steps inside backward(), where no hook runs: use "
                "FSDP2 or DDP inside a replica"
            )
        if self.diloco is not None:
            self.diloco.close()
        saved = None
        if state.global_step > 0:
            saved = _load(self._folder_to_resume(args, state) / _file_name(args))
        self.diloco = attach(self._make, model, optimizer, self._arguments, saved)

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
        if self.diloco is None or args.save_only_model:
            return
        folder = _folder(args, state)
        folder.mkdir(parents=True, exist_ok=True)
        file, partial = folder / _file_name(args), folder / f"{_file_name(args)}.partial"
        torch.save(self.diloco.state_dict(), partial)
        partial.rename(file)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Share what is left and leave the group; the model holds the outer parameters."""
        if self.diloco is not None:
            self.diloco.flush()
            self.diloco.close()


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
