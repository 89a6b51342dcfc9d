"""One replica of the chaos demo: an ordinary loop over ``DiLoCo`` with ``Elastic``."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import torch

from .... import DiLoCo, Nesterov
from ....elastic.happenings import Happening, JoinProgress, ViewChanged
from ....elastic.options import Elastic
from ..data import Batches, load_corpus
from ..model import ByteTransformer, byte_loss
from .crew import Place
from .messages import DONE, LEFT, Copying, Ended, Entered, Stepped
from .settings import ChaosSettings


def train(pipe: Connection, place: Place, settings: ChaosSettings) -> None:
    """Train until the parent process names the last inner step, and all replicas have taken it."""
    shard = load_corpus(settings.data, settings.num_shards).shards[place.number]
    batches = Batches(shard, settings.batch_size, settings.model.context, seed=place.process)
    model = ByteTransformer(settings.model, settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)

    def tell(happening: Happening) -> None:
        now = time.monotonic()
        if isinstance(happening, ViewChanged):
            who = happening.number, happening.members, happening.joined, happening.left
            pipe.send(Entered(now, *who, happening.seconds, happening.copied_bytes))
        elif isinstance(happening, JoinProgress):
            pipe.send(Copying(now, happening.received_bytes, happening.total_bytes))

    diloco = DiLoCo(
        model,
        optimizer,
        sync_every=settings.sync_every,
        wire=settings.wire,
        outer=Nesterov(settings.outer_lr, settings.outer_momentum),
        peers=Elastic(
            place.registry,
            run="chaos",
            replica=place.number,
            min_replicas=2,
            suspect_after=settings.suspect_after_s,
            founding_wait=settings.founding_wait_s,
            quorum_wait=settings.timeout_s,
            on_event=tell,
        ),
    )
    last_step: int | None = None
    num_taken = 0
    while not diloco.is_done:
        while pipe.poll():
            last_step = pipe.recv()
        if last_step is not None and diloco.inner_step >= last_step:
            break
        began = time.monotonic()
        num_taken += 1
        for group in optimizer.param_groups:
            group["lr"] = settings.inner_lr * min(1.0, num_taken / settings.warmup_steps)
        loss = byte_loss(model, *batches.next())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        pipe.send(Stepped(time.monotonic(), diloco.inner_step, float(loss.detach())))
        time.sleep(max(0.0, settings.step_s - (time.monotonic() - began)))
    if not diloco.is_done:
        diloco.flush()
    how = LEFT if diloco.is_done else DONE
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    ended = Ended(time.monotonic(), how, "", diloco.inner_step, diloco.outer_hash(), num_parameters)
    diloco.close()
    pipe.send(ended)
