"""DiLoCo for the Lightning ``Trainer``::

    replicas = replica_per_process()    # before the Trainer is made
    callback = DiLoCoCallback(sync_every=100, **replicas)
    trainer = Trainer(callbacks=[callback], devices=1)

The callback attaches DiLoCo to the module's optimizers; checkpoints hold the callback's state.
Source: lightning 2.6, ``callbacks/callback.py`` and ``trainer/trainer.py``.
"""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..base.checks import choice, flag, logger_of
from ..rounds import handshake
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
    state_with_local,
    with_norms,
    with_total_steps,
)
from .division import Division, refuse_if_spans_replicas
from .writers import FIGURES, Choice, Figures

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..training.arguments import Arguments

_logger = logger_of(__name__)
_REMEDY = (
    "write `replicas = replica_per_process()` (of diloco_comm.integrations.launch) before the "
    "Trainer is made, DiLoCoCallback(..., **replicas) and Trainer(..., devices=1)"
)
_FOLDER = "give each replica its own Trainer(default_root_dir=...) or ModelCheckpoint(dirpath=...)"


class DiLoCoCallback(pl.Callback):
    """Make the trainer one of several replicas, each of which has its own trainer.

    Each replica writes its own checkpoints, since local parameters differ: give each replica its
    own ``default_root_dir``. ``trainer.fit(ckpt_path=...)`` continues with the same bytes. At the
    end of training the replicas share what they have learned since the last outer step, and the
    module holds the outer parameters.

    All replicas end at the same step: the earliest at which a replica's ``max_steps`` or data end.
    With ``Elastic`` a replica that joins goes on at the group's step: ``trainer.global_step``
    and the learning-rate schedules are moved there.

    Four figures go to the trainer's loggers after each exchange, at the step at which the trainer
    logs: ``diloco/sent_mb``, ``diloco/waited_s``, ``diloco/hidden_share`` (of the time of the
    exchanges) and ``diloco/drift`` (L2 distance between local and outer parameters when they are
    sent).

    Each replica trains on its own part of the data, where the trainer does not divide them, like
    with ``DiLoCo.shard``. The orders of the epochs come from DiLoCo's ``seed``.

    Args:
        make: ``DiLoCo`` or a preset such as ``eager_diloco``.
        evaluate: "local" (default) or "outer". With "outer" validation runs on the outer
            parameters, and checkpoints hold them as the module's state. Training continues from the
            local parameters, which the callback's state then holds.
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
        self._choice, self._figures = figures, Figures()
        self._is_outer = evaluate == "outer"
        self._saved: dict[str, Any] | None = None
        self._swap: Swap | None = None  # while training, and after a failure
        self._steps: TrainerSteps | None = None
        self._last_step = sys.maxsize
        # Whether Slurm's signal must wait now, and the save that a waiting signal asks for.
        self._is_busy = True
        self._signal: Callable[[], object] | None = None
        self.diloco: DiLoCo | None = None

    # ----------------------------------------------------------------------------------- data

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let the trainer's loaders read this replica's part of the data."""
        if stage != "fit":
            return
        _refuse_averages(trainer)
        num_processes = trainer.world_size
        if not self._division.is_needed(num_processes):
            return
        source = trainer.fit_loop._data_source
        get_loaders = source.dataloader

        def own_parts() -> Any:
            found = get_loaders()
            part_of = partial(self._division.part_of, num_processes=num_processes)
            if isinstance(found, CombinedLoader):
                found.flattened = [part_of(loader) for loader in found.flattened]
            else:
                found = tree_map(part_of, found)
            # Lightning begins to read before it tells the loaders the epoch of a resumed run.
            self._division.begin_at(trainer.fit_loop.epoch_progress.current.processed)
            return found

        source.dataloader = own_parts

    # ------------------------------------------------------------------------------- training

    # DiLoCo writes weights in the optimizer's own hook, or at the end of a batch. Lightning's hook
    # on_before_zero_grad is too late: it runs between the next forward and backward pass.
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach to the optimizers, after Lightning has loaded weights and optimizers."""
        self._refuse(trainer)
        # The strategy's model includes the DDP around the module, if there is one.
        wrapped = trainer.strategy.model
        if isinstance(wrapped, nn.Module):
            refuse_if_spans_replicas(wrapped, self._choices, _REMEDY)
        self._detach()
        optimizers = trainer.optimizers
        optimizer = optimizers[0] if len(optimizers) == 1 else optimizers
        saved, self._saved = self._saved, None
        # The trainer counts the steps of each of several optimizers.
        num_steps = trainer.max_steps if len(optimizers) == 1 else -1
        arguments = with_total_steps(self._arguments, num_steps)
        self.diloco = attach(self._make, pl_module, optimizer, arguments, saved)
        self._swap = Swap(self.diloco)
        self._steps = None
        if self.diloco.view >= 0:
            _move_to_group(trainer, self.diloco.inner_step)
            # Under manual optimisation the schedules are the user's.
            if pl_module.automatic_optimization:
                leave_schedules(self.diloco)
        if len(optimizers) == 1:
            self._steps = TrainerSteps(self.diloco, trainer.global_step)
        self._figures = Figures(self.diloco, self._choice)
        self._agree_on_the_end(trainer)
        self._division.check(self.diloco)
        self._delay_requeue(trainer)

    def _delay_requeue(self, trainer: pl.Trainer) -> None:
        """Delay the save that Slurm's signal asks for until no batch and no swap is under way."""
        environment = trainer._accelerator_connector.cluster_environment
        if not isinstance(environment, SLURMEnvironment) or environment.requeue_signal is None:
            return
        requeue = signal.getsignal(environment.requeue_signal)
        is_own = type(requeue).__module__ == trainer._signal_connector.__module__
        if not is_own or not callable(requeue):
            return

        def delay(*arguments: Any) -> None:
            self._signal = partial(requeue, *arguments)
            if not self._is_busy:
                self._heed_signal()

        # Lightning puts the program's own handler back when training has ended.
        self._is_busy = True
        signal.signal(environment.requeue_signal, delay)

    def _heed_signal(self) -> None:
        self._is_busy = False
        saving, self._signal = self._signal, None
        if saving is not None:
            saving()

    def _refuse(self, trainer: pl.Trainer) -> None:
        for saving in trainer.checkpoint_callbacks:
            if self._is_outer and isinstance(saving, ModelCheckpoint) and saving.save_weights_only:
                raise ValueError(
                    'ModelCheckpoint(save_weights_only=True) asks no callback, and with evaluate="'
                    'outer" would save the local parameters: set it to False'
                )

    def _detach(self) -> None:
        """Close the attachment of an earlier training."""
        if self.diloco is not None:
            self.diloco.close()
        self._swap = self._steps = None

    def _agree_on_the_end(self, trainer: pl.Trainer) -> None:
        """Let all replicas end at the step at which the first ends, in Lightning's count."""
        assert self.diloco is not None
        self._last_step = sys.maxsize
        if self._choices["membership"] is not None:
            return
        steps: float = trainer.max_steps
        if _data_tell_the_steps(trainer):
            steps = trainer.estimated_stepping_batches
        else:
            self._refuse_other_data(trainer)
        # Lightning says -1 or infinite when neither the data nor max_steps end the training.
        end = sys.maxsize if steps < 0 or math.isinf(steps) else int(steps)
        own = max(0, end - trainer.global_step)
        left = self.diloco.agree_on_steps(own)
        saving = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
        folder = saving[0].dirpath if saving else None
        refuse_same_folder(self.diloco, None if folder is None else str(folder), _FOLDER)
        self._last_step = sys.maxsize
        self._refuse_minimum(trainer, left < own, trainer.global_step + left)
        if left < own:
            self._last_step = trainer.global_step + left
            _logger.warning(
                "training ends at step %d: another replica has no data, or no max_steps, for more",
                self._last_step,
            )

    def _refuse_minimum(self, trainer: pl.Trainer, ends_early: bool, end: int) -> None:
        """Raise on all replicas if Lightning would train one of them beyond the common end.

        Args:
            ends_early: The common end stops this replica's trainer early, at step ``end``.
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
        """Raise on all replicas if the replicas' data end at different batches."""
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

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Let a signal wait for the end of the batch."""
        self._is_busy = True

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count a skipped step, and stop the trainer at the common end."""
        if self._steps is not None:
            self._steps.follow(trainer.global_step)
        if self.diloco is not None and (
            self.diloco.is_done or trainer.global_step >= self._last_step
        ):
            trainer.should_stop = True
        self._log(trainer)
        self._heed_signal()

    def _log(self, trainer: pl.Trainer) -> None:
        """Write to all loggers; ``self.log`` would drop values between two ``log_every_n_steps``.

        Some loggers drop values whose step is below the last one's, so values are written with the
        step that Lightning itself logs with.
        """
        if values := self._figures.take():
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Share what was learned since the last outer step, and leave the group."""
        if self.diloco is not None:
            self._heed_signal()
            self._is_busy = True
            try:
                finish(self.diloco)
                self._log(trainer)
            finally:
                self._detach()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Leave the group at once, so that the other replicas need not wait for a timeout."""
        swap = self._swap
        if swap is not None:
            swap.leave()
        self._detach()
        # Lightning saves checkpoints of the failure later, which need the outer parameters too.
        self._swap = swap

    # -------------------------------------------------------------------------- outer parameters

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """With ``evaluate="outer"``, put the outer parameters into the model."""
        self._is_busy = True
        if self._swap is not None and self._is_outer and not self._swap.is_over:
            self._swap.enter()
        self._heed_signal()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the local parameters back."""
        self._is_busy = True
        if self._swap is not None:
            self._swap.leave()
        self._heed_signal()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """With ``evaluate="outer"``, save the outer parameters as the module's state."""
        if self._swap is None or not self._is_outer:
            return
        # After a failed training the user may have loaded other parameters.
        if self._swap.is_over and trainer.state.stage is None:
            return
        was_entered = self._swap.is_entered
        self._swap.enter()
        state = trainer.strategy.lightning_module_state_dict()
        # Copies: the module has its local parameters again when Lightning writes the checkpoint.
        checkpoint["state_dict"] = {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in state.items()
        }
        if not was_entered:
            self._swap.leave()

    # ------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's state for a checkpoint; empty before training."""
        if self.diloco is None:
            return {}
        if self._swap is None or not self._is_outer:
            return self.diloco.state_dict()
        was_entered = self._swap.is_entered
        self._swap.leave()
        state = state_with_local(self.diloco)
        if was_entered:
            # The values are the model's own tensors, and ``enter`` writes to these tensors.
            state["local"] = {name: value.clone() for name, value in state["local"].items()}
            self._swap.enter()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training begins, since there is no optimizer yet."""
        self._saved = state_dict or None


def _refuse_averages(trainer: pl.Trainer) -> None:
    """Raise for callbacks that write an average of the local parameters at the end of training."""
    for one in trainer.callbacks:
        if isinstance(one, WeightAveraging | StochasticWeightAveraging):
            raise ValueError(
                f"{type(one).__name__} averages the local parameters of this replica alone, and "
                "the replicas would end apart: leave it out, and average the outer parameters, "
                "equal on all replicas, in a function given to diloco.on_sync()"
            )


def _data_tell_the_steps(trainer: pl.Trainer) -> bool:
    """Whether every N batches make one optimizer step, with a constant N."""
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


def _move_to_group(trainer: pl.Trainer, inner_step: int) -> None:
    """Go on at the inner step of the group that this replica has joined."""
    loop, num_optimizers = trainer.fit_loop.epoch_loop, len(trainer.optimizers)
    num_steps = inner_step - trainer.global_step // num_optimizers
    if num_steps < 1:
        return
    is_automatic = trainer.lightning_module.automatic_optimization
    if is_automatic:
        total = loop.automatic_optimization.optim_progress.optimizer.step.total
    else:
        total = loop.manual_optimization.optim_step_progress.total
    # The trainer counts the steps of each of several optimizers.
    total.ready += num_steps * num_optimizers
    total.completed += num_steps * num_optimizers
    loop._batches_that_stepped += num_steps
    for config in trainer.lr_scheduler_configs if is_automatic else ():
        if config.interval == "epoch" and math.isinf(trainer.num_training_batches):
            _logger.warning(
                "the learning rate of this replica begins anew, and the group has taken %d steps: "
                "a schedule by epochs cannot be moved there, since the data have no length",
                inner_step,
            )
            continue
        before = _turns(trainer, config, inner_step - num_steps)
        move_schedule(config.scheduler, _turns(trainer, config, inner_step) - before)


def _turns(trainer: pl.Trainer, config: LRSchedulerConfig, num_steps: int) -> int:
    """Return how often Lightning steps a schedule in the first ``num_steps`` steps of a training.

    Lightning counts ``frequency`` in batches of the epoch, or in epochs. The last batch of an epoch
    makes a step too. See ``_update_learning_rates`` in ``loops/training_epoch_loop.py``.
    """
    num_batches, accumulated = trainer.num_training_batches, trainer.accumulate_grad_batches
    num_epochs, num_left = 0, num_steps
    if not math.isinf(num_batches):
        steps_per_epoch = math.ceil(num_batches / accumulated)
        num_epochs, num_left = divmod(num_steps, steps_per_epoch)
    if config.interval == "epoch":
        return num_epochs // config.frequency
    batches_per_turn = math.lcm(accumulated, config.frequency)
    turns = num_left * accumulated // batches_per_turn
    if num_epochs:
        last = int(num_batches % config.frequency == 0)
        turns += num_epochs * ((steps_per_epoch - 1) * accumulated // batches_per_turn + last)
    return turns
