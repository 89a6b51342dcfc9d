"""One learner of the demo: an ordinary training loop with ``DecoupledDiLoCo``."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from ....asynchronous import DecoupledDiLoCo
from ....options import Link
from ...common.workers import die_with_parent
from ..data import Batches, load_corpus, validation_windows
from ..events import Failed
from ..model import ByteTransformer, byte_loss
from .settings import DecoupledDemo

_NUM_WINDOWS = 128


@dataclass(frozen=True)
class Ready:
    """The learner has the shared model, whose held-out loss this is."""

    loss: float


@dataclass(frozen=True)
class Stepped:
    """One inner step.

    Attributes:
        at: When the step ended, on the monotonic clock.
        seconds: Of the step without the wait that makes it last its time.
        loss: Training loss.
        version: Sum of the versions of the learner's fragments.
    """

    at: float
    seconds: float
    loss: float
    version: int


@dataclass(frozen=True)
class Ended:
    """The end of a learner that was not killed.

    Attributes:
        loss: Held-out loss of the shared model.
        merged, refused: Reports.
        hook_s: Seconds that ``DecoupledDiLoCo`` took of the training loop, in all.
        sent_bytes, received_bytes: Of all messages.
    """

    loss: float
    merged: int
    refused: int
    hook_s: float
    sent_bytes: int
    received_bytes: int


def learner_main(pipe: Connection, index: int, demo: DecoupledDemo, address: str) -> None:
    """Train from the first message on the pipe to the second. Runs in its own process."""
    die_with_parent()
    torch.set_num_threads(1)
    try:
        _train(pipe, index, demo, address)
    except BaseException:
        pipe.send(Failed(traceback.format_exc()))
        raise SystemExit(1) from None


def _train(pipe: Connection, index: int, demo: DecoupledDemo, address: str) -> None:
    corpus = load_corpus(demo.data, demo.num_learners)
    context = demo.model.context
    batches = Batches(corpus.shards[index], demo.batch_size, context, seed=index)
    windows = validation_windows(corpus.validation, _NUM_WINDOWS, context)
    model = ByteTransformer(demo.model, demo.seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
    tokens = demo.batch_size * context
    name, link = f"learner-{index}", Link(timeout=demo.timeout_s)
    with DecoupledDiLoCo(
        model, optimizer, server=address, name=name, tokens=tokens, link=link
    ) as diloco:

        def held_out() -> float:
            with diloco.outer_parameters(), torch.no_grad():
                return float(byte_loss(model, windows[:, :-1], windows[:, 1:]))

        pipe.send(Ready(held_out()))
        pipe.recv()
        while not pipe.poll():
            began = time.monotonic()
            warmth = min(1.0, (diloco.metrics.steps + 1) / demo.warmup_steps)
            optimizer.param_groups[0]["lr"] = demo.inner_lr * warmth
            loss = byte_loss(model, *batches.next())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds = time.monotonic() - began
            time.sleep(max(0.0, demo.step_s_of(index) - seconds))
            version = sum(diloco.metrics.versions)
            pipe.send(Stepped(time.monotonic(), seconds, float(loss.detach()), version))
        figures, loss_at_end = diloco.metrics, held_out()
    # The syncer has the goodbye before the parent process ends this one.
    pipe.send(
        Ended(
            loss_at_end,
            figures.merged,
            figures.refused,
            figures.hook_s,
            figures.sent_bytes,
            figures.received_bytes,
        )
    )
