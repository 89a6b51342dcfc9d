"""The figures of the exchanges in the trainers' own logs, read back from TensorBoard's files."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from choice_groups import grouped
from problems import attach, batch, train_step
from torch import nn
from trainers import NUM_STEPS, ROWS, Rows, WithLoss, needs, on_store
from workers import Pool

from diloco_comm.integrations.writers import log_metrics

FIGURES = {"sent_bytes", "received_bytes", "encode_s", "exchange_s", "exposed_s", "is_applied"}
MAIN = {"diloco/sent_mb", "diloco/waited_s", "diloco/hidden_share", "diloco/drift"}


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


class RunOfWandb:
    """The rule of a W&B run: one row for each step, and nothing that comes at an earlier step."""

    def __init__(self) -> None:
        self.step = 0
        self.rows: list[dict[str, float]] = []
        self.dropped: list[dict[str, float]] = []
        self.axes: dict[str, str] = {}
        self._row: dict[str, float] = {}

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes[name] = step_metric

    def log(
        self, data: dict[str, float], step: int | None = None, commit: bool | None = None
    ) -> None:
        if step is not None and step < self.step:
            self.dropped.append(data)
            return
        if step is not None and step > self.step:
            self._end_row(step)
        self._row |= data
        if commit or (commit is None and step is None):
            self._end_row(self.step + 1)

    def _end_row(self, step: int) -> None:
        self.rows += [self._row] * bool(self._row)
        self.step, self._row = step, {}


@pytest.mark.parametrize(("steps_per_log", "fragments"), [(1, 1), (1, 2), (3, 1), (0, 1), (0, 2)])
def test_the_step_of_wandb_is_the_programs(steps_per_log: int, fragments: int) -> None:
    """The program logs its losses at steps of its own count; 0 for a program that logs nothing."""
    run = RunOfWandb()
    model, optimizer, diloco = attach(sync_every=2, fragments=fragments)
    with diloco:
        log_metrics(diloco, run)
        for step in range(8):
            train_step(model, optimizer, 0, step)
            if steps_per_log and step % steps_per_log == 0:
                run.log({"loss": float(step)}, step=step // steps_per_log)
    run.log({}, commit=True)
    # A program that logs less often than replicas exchange loses nothing either.
    assert run.dropped == []
    losses = list(range(0, 8, steps_per_log)) if steps_per_log else []
    assert [row["loss"] for row in run.rows if "loss" in row] == losses
    assert run.axes == {"diloco/*": "diloco/inner_step"}
    tag = "diloco/sent_bytes" if fragments == 1 else "diloco/sent_bytes/fragment_1"
    found = [row["diloco/inner_step"] for row in run.rows if tag in row]
    exchanges = [m.inner_step for m in diloco.metrics() if m.fragment == fragments - 1]
    if steps_per_log == 3:
        assert found == sorted(found) and set(found) <= set(exchanges)
    else:
        assert found == exchanges


# ------------------------------------------------------------------------ Hugging Face's Trainer


def hf_logs(
    rank: int,
    world: int,
    address: tuple[str, int],
    folder: Path,
    figures: str,
    options: dict[str, Any],
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
    place = on_store(rank, world, address, f"hf logs {figures} {options}")
    place |= {"shard": False, "figures": figures}
    callback = DiLoCoCallback(sync_every=3, **grouped({"wire": "fp32", **place}))
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
    results = pool.run(hf_logs, pool.store, tmp_path, "all", options)
    for rank, (log, metrics) in enumerate(results):
        assert [m.inner_step for m in metrics] == [3, 6, 9, 10]
        own = [entry for entry in log if any(key.startswith("diloco/") for key in entry)]
        # With the losses of steps 4 and 8, with the summary at the end, and after the flush.
        assert [entry["step"] for entry in own] == [4, 8, 10, 10]
        assert [entry["step"] for entry in log if "loss" in entry] == [4, 8]
        for entry, sync in zip(own, metrics, strict=True):
            for name in FIGURES:
                assert entry[f"diloco/{name}"] == pytest.approx(float(getattr(sync, name)))
            assert entry["diloco/sent_mb"] == sync.sent_bytes / 1e6
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
    for log, metrics in pool.run(hf_logs, pool.store, tmp_path, "all", options):
        own = [entry for entry in log if "diloco/sent_bytes" in entry]
        assert [entry["step"] for entry in own] == [7, 10, 10]
        assert own[0]["diloco/exchange_s"] == pytest.approx(mean(metrics[:2], "exchange_s"))


@needs("transformers")
def test_hugging_face_logs_four_figures(
    trainer_replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    pool = trainer_replicas(2)
    options = {"logging_steps": 7, "report_to": "none"}
    for log, metrics in pool.run(hf_logs, pool.store, tmp_path, "main", options):
        own = [entry for entry in log if "diloco/sent_mb" in entry]
        assert {tag for entry in own for tag in entry if tag.startswith("diloco/")} == MAIN
        first = own[0]
        assert first["diloco/sent_mb"] == sum(m.sent_bytes for m in metrics[:2]) / 1e6
        waited = sum(m.exposed_s for m in metrics[:2])
        exchange_s = sum(m.exchange_s for m in metrics[:2])
        assert first["diloco/waited_s"] == pytest.approx(waited)
        share = sum(m.overlap_fraction * m.exchange_s for m in metrics[:2]) / exchange_s
        assert first["diloco/hidden_share"] == pytest.approx(share)
        assert first["diloco/drift"] == pytest.approx(metrics[1].pseudo_gradient_norm)
        assert first["diloco/drift"] > 0


# --------------------------------------------------------------------------------- Lightning


def lightning_logs(
    rank: int, world: int, address: tuple[str, int], folder: Path, kind: str, figures: str
) -> tuple[list[Any], Any]:
    from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
    from lightning_runs import Module, quiet_trainer

    from diloco_comm.integrations.lightning import DiLoCoCallback

    class Logging(Module):
        def training_step(self, rows: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            loss = self.model(**rows)["loss"]
            self.log("loss", loss)
            return loss

    class WithWandbsRule(Logger):
        """Logs each row with the step of Lightning, as a W&B run with this step would take it."""

        name, version = "run", 0

        def __init__(self, folder: Path) -> None:
            super().__init__()
            self.run = RunOfWandb()

        def log_hyperparams(self, *_: Any, **__: Any) -> None:
            pass

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.run.log({**metrics, "at": float(step or 0)}, step=step)

    kinds = {"csv": CSVLogger, "tensorboard": TensorBoardLogger, "wandb": WithWandbsRule}
    logger = kinds[kind](folder / f"replica-{rank}")
    place = on_store(rank, world, address, f"lightning logs {kind} {figures}")
    callback = DiLoCoCallback(
        sync_every=3, fragments=2, shard=False, figures=figures, **grouped(place)
    )
    trainer = quiet_trainer(
        max_steps=NUM_STEPS, callbacks=[callback], logger=logger, log_every_n_steps=5
    )
    trainer.fit(Logging(), torch.utils.data.DataLoader(Rows(rank), batch_size=ROWS))
    run = getattr(logger, "run", None)
    return callback.diloco.metrics(), run and (run.rows, run.dropped)


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


def step_of_lightning(inner_step: int) -> int:
    """Return the step at which Lightning logs this step; the flush comes after the last one."""
    return inner_step - 1


@needs("lightning")
@pytest.mark.parametrize("kind", ["csv", pytest.param("tensorboard", marks=needs("tensorboard"))])
def test_lightning(kind: str, trainer_replicas: Callable[[int], Pool], tmp_path: Path) -> None:
    pool = trainer_replicas(2)
    results = pool.run(lightning_logs, pool.store, tmp_path, kind, "all")
    for rank, (metrics, _) in enumerate(results):
        home = tmp_path / f"replica-{rank}"
        found = from_csv(home) if kind == "csv" else events(home)
        assert sorted(found["loss"]) == [4, 9]
        # Each exchange, also between the steps that Lightning itself logs, and the flush.
        steps = {id(m): step_of_lightning(m.inner_step) for m in metrics[:-1]}
        steps[id(metrics[-1])] = NUM_STEPS
        for fragment in (0, 1):
            own = [m for m in metrics if m.fragment == fragment]
            assert len(own) == 4
            for name in FIGURES:
                expected = {steps[id(m)]: float(getattr(m, name)) for m in own}
                assert found[f"diloco/{name}/fragment_{fragment}"] == pytest.approx(expected)


@needs("lightning")
def test_lightning_never_logs_an_earlier_step(
    trainer_replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    pool = trainer_replicas(2)
    for metrics, (rows, dropped) in pool.run(lightning_logs, pool.store, tmp_path, "wandb", "main"):
        assert dropped == []
        assert [row["at"] for row in rows if "loss" in row] == [4.0, 9.0]
        own = [row for row in rows if "diloco/sent_mb" in row]
        assert {tag for row in own for tag in row if tag.startswith("diloco/")} == MAIN
        # The row of the flush stays open until the logger ends.
        exchanged = metrics[:-1]
        assert [row["at"] for row in own] == [step_of_lightning(m.inner_step) for m in exchanged]
        sent_mb = sum(m.sent_bytes for m in exchanged) / 1e6
        assert sum(row["diloco/sent_mb"] for row in own) == pytest.approx(sent_mb)


# ------------------- Metrics go to writers with the methods of TensorBoard's writer or of a W&B run


class TensorBoard:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, global_step: int) -> None:
        self.scalars.append((tag, value, global_step))


class Run:
    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []

    def log(self, data: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.logged.append((data, step))


def train(**arguments: Any) -> Any:
    model, optimizer, diloco = attach(sync_every=2, **arguments)
    tensorboard, run, called = TensorBoard(), Run(), []
    with diloco:
        log_metrics(diloco, tensorboard)
        log_metrics(diloco, run, prefix="outer")
        log_metrics(diloco, lambda values, step: called.append((values, step)))
        for step in range(4):
            x, y = batch(0, step)
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return diloco.metrics(), tensorboard, run, called


def test_every_exchange_is_written() -> None:
    metrics, tensorboard, run, called = train()
    assert [m.inner_step for m in metrics] == [2, 4]
    assert [step for _, step in run.logged] == [step for _, step in called] == [2, 4]
    for (values, _), sync in zip(called, metrics, strict=True):
        assert values["diloco/exposed_s"] == sync.exposed_s
        assert values["diloco/is_applied"] == 1.0
        # This figure was not measured.
        assert "diloco/pseudo_gradient_norm" not in values
        assert "diloco/round" not in values
    assert {tag.replace("outer/", "diloco/") for tag in run.logged[0][0]} == set(called[0][0])
    assert (
        dict((tag, value) for tag, value, step in tensorboard.scalars if step == 4)
        == (called[1][0])
    )


def test_fragments_have_tags_of_their_own() -> None:
    _, _, _, called = train(fragments=2, norms=True)
    tags = {tag for values, _ in called for tag in values}
    assert {"diloco/encode_s/fragment_0", "diloco/pseudo_gradient_norm/fragment_1"} <= tags


def test_a_real_summary_writer(tmp_path: Any) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    model, optimizer, diloco = attach(sync_every=1)
    with diloco, tensorboard.SummaryWriter(str(tmp_path)) as writer:
        log_metrics(diloco, writer)
        model.norm.weight.grad = torch.ones(24)
        optimizer.step()
    assert any(path.stat().st_size > 0 for path in tmp_path.iterdir())


def test_what_is_no_writer() -> None:
    _, _, diloco = attach()
    with diloco, pytest.raises(TypeError, match="writer must have add_scalar"):
        log_metrics(diloco, 3)
