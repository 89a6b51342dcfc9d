"""DiLoCo for the Lightning ``Trainer``::

    replicas = replica_per_process()    # first of all, before the Trainer
    callback = DiLoCoCallback(sync_every=100, **replicas)
    trainer = Trainer(callbacks=[callback], devices=1)

The callback attaches to the module's optimizers; checkpoints carry its state like that of any
callback. Source: lightning 2.6, ``callbacks/callback.py`` and ``trainer/trainer.py``.
"""

from __future__ import annotations

import logging
import math
import sys
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch import Tensor, nn

from ..base.checks import choice
from ..rounds.agreement import handshake
from ..training.diloco import DiLoCo
from .attaching import Make, attach, state_with_local
from .counting import TrainerSteps
from .evaluating import CHOICES, Swap
from .wrapping import refuse_if_spans_replicas
from .writers import log_metrics

_logger = logging.getLogger(__name__)
_REMEDY = (
    "write `replicas = replica_per_process()` (of diloco_comm.integrations.launch) before the "
    "Trainer is made, DiLoCoCallback(..., **replicas) and Trainer(..., devices=1)"
)


class DiLoCoCallback(pl.Callback):
    """Make the trainer one replica of several, each of which is a trainer.

    Every replica writes checkpoints of its own, since local parameters differ: give each its own
    ``default_root_dir``. ``trainer.fit(ckpt_path=...)`` goes on to the same bytes. At the end of
    training the replicas share what they have learned since the last outer step, and the module
    holds the outer parameters.

    All replicas end at the step at which the first of them would, by ``max_steps`` or by its data.
    DiLoCo's figures (see ``log_metrics``) go to the trainer's loggers as ``diloco/...``.

    Args:
        make: ``DiLoCo`` or a preset such as ``eager_diloco``.
        evaluate: "local" (default) or "outer": validation runs on the outer parameters, and
            checkpoints hold them as the module's state. Training goes on from the local ones, which
            are in the callback's state then.
        arguments: Of ``make``: ``sync_every=100`` and so on.

    Attributes:
        diloco: The attachment, from the beginning of training on.
    """

    def __init__(self, make: Make = DiLoCo, *, evaluate: str = "local", **arguments: Any) -> None:
        choice("evaluate", evaluate, CHOICES)
        self._make, self._arguments = make, arguments
        self._is_outer = evaluate == "outer"
        self._saved: dict[str, Any] | None = None
        self._swap: Swap | None = None  # while training, and after a failure
        self._steps: TrainerSteps | None = None
        self._last_step = sys.maxsize
        self.diloco: DiLoCo | None = None

    # ------------------------------------------------------------------------------- training

    # Weights may only change in the optimizer's own hook, or when a batch has ended: Lightning's
    # on_before_zero_grad runs between the next forward and its backward.
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach to the optimizers; weights and optimizers of a checkpoint are loaded by now."""
        self._refuse(trainer)
        # The strategy has the module together with what averages its gradients.
        wrapped = trainer.strategy.model
        if isinstance(wrapped, nn.Module):
            refuse_if_spans_replicas(wrapped, self._arguments, _REMEDY)
        self._let_go()
        optimizers = trainer.optimizers
        optimizer = optimizers[0] if len(optimizers) == 1 else optimizers
        saved, self._saved = self._saved, None
        self.diloco = attach(self._make, pl_module, optimizer, self._arguments, saved)
        self._swap = Swap(self.diloco)
        self._steps = None
        if len(optimizers) == 1:
            self._steps = TrainerSteps(self.diloco, trainer.global_step)
        log_metrics(self.diloco, lambda values, step: _log(trainer, values, step))
        self._agree_on_the_end(trainer)

    def _refuse(self, trainer: pl.Trainer) -> None:
        for saving in trainer.checkpoint_callbacks:
            if self._is_outer and isinstance(saving, ModelCheckpoint) and saving.save_weights_only:
                raise ValueError(
                    'ModelCheckpoint(save_weights_only=True) asks no callback, and with evaluate="'
                    'outer" would save the local parameters: set it to False'
                )

    def _let_go(self) -> None:
        """Close the attachment of an earlier training."""
        if self.diloco is not None:
            self.diloco.close()
        self._swap = self._steps = None

    def _agree_on_the_end(self, trainer: pl.Trainer) -> None:
        """Find the step at which the first replica ends, as Lightning counts steps."""
        assert self.diloco is not None
        steps: float = trainer.max_steps
        if _data_tell_the_steps(trainer):
            steps = trainer.estimated_stepping_batches
        else:
            self._refuse_other_data(trainer)
        # Lightning says -1 or infinite when neither the data nor max_steps end the training.
        end = sys.maxsize if steps < 0 or math.isinf(steps) else int(steps)
        own = max(0, end - trainer.global_step)
        left = self.diloco.agree_on_steps(own)
        self._last_step = sys.maxsize
        self._refuse_minimum(trainer, left < own, trainer.global_step + left)
        if left < own:
            self._last_step = trainer.global_step + left
            _logger.warning(
                "training ends at step %d: another replica has no data, or no max_steps, for more",
                self._last_step,
            )

    def _refuse_minimum(self, trainer: pl.Trainer, ends_early: bool, end: int) -> None:
        """Raise, on all replicas, if one of them may not end at the step at which the first does.

        Args:
            ends_early: The trainer of this replica is to be stopped at step ``end``.
        """
        assert self.diloco is not None
        own = ""
        if ends_early and _forced_steps(trainer) > end:
            own = f"min_epochs={trainer.min_epochs}, min_steps={trainer.min_steps}"
        views = handshake.gather_json(self.diloco.exchange, own)
        if any(views):
            replicas = zip(self.diloco.members, views, strict=True)
            found = ", ".join(f"{view} on replica {replica}" for replica, view in replicas if view)
            raise ValueError(
                f"training must end when the first replica has no more data or max_steps, but "
                f"min_epochs or min_steps make Lightning train longer ({found}): leave out "
                "min_epochs and min_steps, or give all replicas as many batches"
            )

    def _refuse_other_data(self, trainer: pl.Trainer) -> None:
        """Raise, on all replicas, if their data end the training at different batches."""
        assert self.diloco is not None
        own = f"max_epochs={trainer.max_epochs}"
        if trainer.max_epochs != -1:
            own += f" of {trainer.num_training_batches} batches"
        views = handshake.gather_json(self.diloco.exchange, own)
        if any(view != views[0] for view in views):
            replicas = zip(self.diloco.members, views, strict=True)
            found = ", ".join(f"{view} on replica {replica}" for replica, view in replicas)
            raise ValueError(
                "under manual optimisation, and with a GradientAccumulationScheduler, the batches "
                "do not tell how many steps the optimizer takes, and they differ between replicas "
                f"({found}): give all of them as many, by limit_train_batches, or let max_steps "
                "alone end the training (max_epochs=-1)"
            )

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count a step that was skipped; end at the step at which the first replica does."""
        if self._steps is not None:
            self._steps.follow(trainer.global_step)
        if self.diloco is not None and trainer.global_step >= self._last_step:
            trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Share what is left and leave the group; the module holds the outer parameters."""
        if self.diloco is not None:
            try:
                self.diloco.flush()
            finally:
                self._let_go()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Tell the other replicas at once, rather than by a timeout."""
        swap = self._swap
        if swap is not None:
            swap.leave()
        self._let_go()
        # Checkpoints of the failure are saved after this, and want the outer parameters too.
        self._swap = swap

    # -------------------------------------------------------------------------- outer parameters

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Have the outer parameters validated."""
        if self._swap is not None and self._is_outer and not self._swap.is_over:
            self._swap.enter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on from the local parameters."""
        if self._swap is not None:
            self._swap.leave()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Have the outer parameters saved as the module's."""
        if self._swap is None or not self._is_outer:
            return
        # When a failure has been dealt with, the user may have loaded other parameters.
        if self._swap.is_over and trainer.state.stage is None:
            return
        was_entered = self._swap.is_entered
        self._swap.enter()
        state = trainer.strategy.lightning_module_state_dict()
        # The module has its local parameters again when this is written.
        checkpoint["state_dict"] = {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in state.items()
        }
        if not was_entered:
            self._swap.leave()

    # ------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return what Lightning writes into a checkpoint; empty before training."""
        if self.diloco is None:
            return {}
        if self._swap is None or not self._is_outer:
            return self.diloco.state_dict()
        was_entered = self._swap.is_entered
        self._swap.leave()
        state = state_with_local(self.diloco)
        if was_entered:
            # These are the model's own tensors, which the outer parameters are written to again.
            state["local"] = {name: value.clone() for name, value in state["local"].items()}
            self._swap.enter()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training begins: there is no optimizer yet."""
        self._saved = state_dict or None


def _data_tell_the_steps(trainer: pl.Trainer) -> bool:
    """Whether each batch, or each so many of them, is a step of the optimizer."""
    kinds = [type(callback) for callback in trainer.callbacks]
    is_scheduled = any(issubclass(kind, GradientAccumulationScheduler) for kind in kinds)
    return trainer.lightning_module.automatic_optimization and not is_scheduled


def _forced_steps(trainer: pl.Trainer) -> float:
    """Return the step before which Lightning does not let a callback stop the training."""
    steps: float = trainer.min_steps or 0
    if not trainer.min_epochs:
        return steps
    if not _data_tell_the_steps(trainer) or math.isinf(trainer.num_training_batches):
        return math.inf
    epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
    return max(steps, trainer.min_epochs * epoch)


def _log(trainer: pl.Trainer, values: dict[str, float], step: int) -> None:
    """Write to all loggers: what ``self.log`` takes is lost between two ``log_every_n_steps``."""
    for logger in trainer.loggers:
        logger.log_metrics(values, step=step)
