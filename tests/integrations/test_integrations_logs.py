"""The figures of the exchanges in the trainers' own logs, read back from TensorBoard's files."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import attach, train_step
from trainers import NUM_STEPS, ROWS, Rows, WithLoss, needs, on_store
from workers import Pool

from diloco_comm.integrations.writers import log_metrics

FIGURES = {"sent_bytes", "received_bytes", "encode_s", "exchange_s", "exposed_s", "is_applied"}


def events(folder: Path) -> dict[str, dict[int, float]]:
    """Read TensorBoard's event files: values by tag and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, dict[int, float]] = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        read = EventAccumulator(str(file))
        read.Reload()
        for tag in read.Tags()["scalars"]:
            found.setdefault(tag, {}).update({e.step: e.value for e in read.Scalars(tag)})
    return found


@needs("tensorboard")
def test_a_summary_writer(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    model, optimizer, diloco = attach(sync_every=2)
    with diloco, SummaryWriter(str(tmp_path)) as writer:
        log_metrics(diloco, writer)
        for step in range(4):
            train_step(model, optimizer, 0, step)
    found = events(tmp_path)
    assert {f"diloco/{name}" for name in FIGURES} <= found.keys()
    for name in FIGURES:
        expected = {m.inner_step: float(getattr(m, name)) for m in diloco.metrics()}
        assert sorted(expected) == [2, 4]
        assert found[f"diloco/{name}"] == pytest.approx(expected)


# ------------------------------------------------------------------------ Hugging Face's Trainer


def hf_logs(
    rank: int, world: int, address: tuple[str, int], folder: Path, options: dict[str, Any]
) -> tuple[list[dict[str, float]], list[Any]]:
    """Return the trainer's log, and the metrics of all exchanges."""
    from huggingface_runs import quiet_arguments
    from transformers import Trainer

    from diloco_comm.integrations.huggingface import DiLoCoCallback

    args = quiet_arguments(
        folder / f"replica-{rank}",
        max_steps=NUM_STEPS,
        save_strategy="no",
        **options,
    )
    place = on_store(rank, world, address, f"hf logs {options}")
    callback = DiLoCoCallback(sync_every=3, wire="fp32", **place)
    trainer = Trainer(WithLoss(), args, train_dataset=Rows(rank), callbacks=[callback])
    trainer.train()
    return trainer.state.log_history, callback.diloco.metrics()


def mean(metrics: list[Any], name: str) -> float:
    return sum(float(getattr(m, name)) for m in metrics) / len(metrics)


@needs("transformers")
@needs("tensorboard")
def test_hugging_face(trainer_replicas: Callable[[int], Pool], tmp_path: Path) -> None:
    pool = trainer_replicas(2)
    options = {"logging_steps": 4, "report_to": "tensorboard"}
    results = pool.run(hf_logs, pool.store, tmp_path, options)
    for rank, (log, metrics) in enumerate(results):
        assert [m.inner_step for m in metrics] == [3, 6, 9, 10]
        own = [entry for entry in log if any(key.startswith("diloco/") for key in entry)]
        # With the losses of steps 4 and 8, with the summary at the end, and after the flush.
        assert [entry["step"] for entry in own] == [4, 8, 10, 10]
        assert [entry["step"] for entry in log if "loss" in entry] == [4, 8]
        for entry, sync in zip(own, metrics, strict=True):
            for name in FIGURES:
                assert entry[f"diloco/{name}"] == pytest.approx(float(getattr(sync, name)))
            assert not any(math.isnan(value) for value in entry.values())
        home = tmp_path / f"replica-{rank}"
        found = events(home)
        # The writer is closed when the figures of the flush come, and is not opened again.
        assert len(list(home.rglob("events.out.tfevents.*"))) == 1
        for name in ("exposed_s", "sent_bytes"):
            expected = {entry["step"]: entry[f"diloco/{name}"] for entry in own[:3]}
            assert found[f"train/diloco/{name}"] == pytest.approx(expected)
        assert own[3]["epoch"] == own[2]["epoch"]
        assert sorted(found["train/loss"]) == [4, 8]


@needs("transformers")
def test_hugging_face_logs_means(trainer_replicas: Callable[[int], Pool], tmp_path: Path) -> None:
    pool = trainer_replicas(2)
    options = {"logging_steps": 7, "report_to": "none"}
    for log, metrics in pool.run(hf_logs, pool.store, tmp_path, options):
        own = [entry for entry in log if "diloco/sent_bytes" in entry]
        assert [entry["step"] for entry in own] == [7, 10, 10]
        assert own[0]["diloco/exchange_s"] == pytest.approx(mean(metrics[:2], "exchange_s"))


# --------------------------------------------------------------------------------- Lightning


def lightning_logs(
    rank: int, world: int, address: tuple[str, int], folder: Path, kind: str
) -> list[Any]:
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
    from lightning_runs import Module, quiet_trainer

    from diloco_comm.integrations.lightning import DiLoCoCallback

    class Logging(Module):
        def training_step(self, rows: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            loss = self.model(**rows)["loss"]
            self.log("loss", loss)
            return loss

    home = folder / f"replica-{rank}"
    place = on_store(rank, world, address, f"lightning logs {kind}")
    callback = DiLoCoCallback(sync_every=3, fragments=2, **place)
    trainer = quiet_trainer(
        max_steps=NUM_STEPS,
        callbacks=[callback],
        logger={"csv": CSVLogger, "tensorboard": TensorBoardLogger}[kind](home),
        log_every_n_steps=5,
    )
    trainer.fit(Logging(), torch.utils.data.DataLoader(Rows(rank), batch_size=ROWS))
    return callback.diloco.metrics()


def from_csv(folder: Path) -> dict[str, dict[int, float]]:
    (file,) = folder.rglob("metrics.csv")
    found: dict[str, dict[int, float]] = {}
    with file.open() as lines:
        for row in csv.DictReader(lines):
            step = int(row.pop("step"))
            for tag, value in row.items():
                if value:
                    found.setdefault(tag, {})[step] = float(value)
    return found


@needs("lightning")
@pytest.mark.parametrize("kind", ["csv", pytest.param("tensorboard", marks=needs("tensorboard"))])
def test_lightning(kind: str, trainer_replicas: Callable[[int], Pool], tmp_path: Path) -> None:
    pool = trainer_replicas(2)
    for rank, metrics in enumerate(pool.run(lightning_logs, pool.store, tmp_path, kind)):
        home = tmp_path / f"replica-{rank}"
        found = from_csv(home) if kind == "csv" else events(home)
        assert sorted(found["loss"]) == [4, 9]
        for fragment in (0, 1):
            own = [m for m in metrics if m.fragment == fragment]
            # Each exchange, also between the steps that Lightning itself logs, and the flush.
            assert len(own) == 4
            for name in FIGURES:
                expected = {m.inner_step: float(getattr(m, name)) for m in own}
                assert found[f"diloco/{name}/fragment_{fragment}"] == pytest.approx(expected)
