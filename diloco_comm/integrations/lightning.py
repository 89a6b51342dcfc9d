"""DiLoCo for the Lightning ``Trainer``.

    trainer = Trainer(callbacks=[DiLoCoCallback(sync_every=100)])

The callback attaches to the module's optimizers; checkpoints carry its state like that of any
callback. Source: lightning 2.6, ``callbacks/callback.py`` and ``trainer/trainer.py``.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from ..diloco import DiLoCo
from .attaching import Make, attach


class DiLoCoCallback(pl.Callback):
    """Make the trainer one replica of several, each of which is a trainer.

    Every replica writes checkpoints of its own, since local parameters differ: give each its own
    ``default_root_dir``. ``trainer.fit(ckpt_path=...)`` goes on to the same bytes. At the end of
    training the replicas share what they have learned since the last outer step, and the module
    holds the outer parameters.

    Args:
        make: ``DiLoCo`` or a preset such as ``eager_diloco``.
        arguments: Of ``make``: ``sync_every=100`` and so on.

    Attributes:
        diloco: The attachment, from the beginning of training on.
    """

    def __init__(self, make: Make = DiLoCo, **arguments: Any) -> None:
        self._make, self._arguments = make, arguments
        self._saved: dict[str, Any] | None = None
        self.diloco: DiLoCo | None = None

    # Weights may only change in the optimizer's own hook: Lightning's on_before_zero_grad runs
    # between the next forward and its backward.
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach to the optimizers; weights and optimizers of a checkpoint are loaded by now."""
        if self.diloco is not None:
            self.diloco.close()
        optimizers = trainer.optimizers
        optimizer = optimizers[0] if len(optimizers) == 1 else optimizers
        saved, self._saved = self._saved, None
        self.diloco = attach(self._make, pl_module, optimizer, self._arguments, saved)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Share what is left and leave the group; the module holds the outer parameters."""
        if self.diloco is not None:
            self.diloco.flush()
            self.diloco.close()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Tell the other replicas at once, rather than by a timeout."""
        if self.diloco is not None:
            self.diloco.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what Lightning writes into a checkpoint; empty before training."""
        return {} if self.diloco is None else self.diloco.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training begins: there is no optimizer yet."""
        self._saved = state_dict or None
