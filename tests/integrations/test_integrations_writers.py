"""Metrics go to writers with the methods of TensorBoard's writer or of a W&B run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import attach, batch
from torch import nn

from diloco_comm.integrations.writers import log_metrics


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
