"""A module and a trainer of Lightning for tests; import this file only where Lightning is there."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from trainers import WithLoss, make_optimizer


class Module(pl.LightningModule):
    """The regression of the plain loop, with the same inner optimizer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.model = WithLoss(seed)

    def training_step(self, rows: dict[str, Tensor], index: int) -> Tensor | None:
        return self.model(**rows)["loss"]

    def configure_optimizers(self) -> Any:
        return make_optimizer(self.model)


def quiet_trainer(**options: Any) -> pl.Trainer:
    """Return a trainer on one CPU that prints and writes nothing, unless ``options`` say so."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**{**quiet, **options})
