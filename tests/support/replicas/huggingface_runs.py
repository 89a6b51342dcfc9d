"""Arguments of Hugging Face's Trainer for tests; import this file only where transformers is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainers import ROWS
from transformers import TrainingArguments


def quiet_arguments(folder: Path | str, **options: Any) -> TrainingArguments:
    """Return arguments of a training on the CPU that reports nothing, unless ``options`` say so."""
    quiet: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": ROWS,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
    }
    return TrainingArguments(**{**quiet, **options})
