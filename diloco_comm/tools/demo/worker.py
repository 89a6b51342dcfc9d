"""One replica of the demo: a process that trains row after row as the parent asks."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from ...base.store_host import dial_store
from .data import Batches, load_corpus, validation_windows
from .events import Event, Failed, Finished, Progress, Validation
from .methods import Method, open_method
from .model import ByteTransformer, byte_loss
from .settings import Row, Settings

TIMEOUT = timedelta(minutes=2)


def worker_main(pipe: Connection, replica: int, settings: Settings, store_port: int) -> None:
    """Train the rows that come through the pipe, until ``None``. Runs in its own process.

    Ctrl-C reaches the whole process group, but only the parent acts on it: this process starts
    with the signal blocked.
    """
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dial_store("127.0.0.1", store_port, TIMEOUT.total_seconds())
        dist.init_process_group(
            "gloo", store=store, rank=replica, world_size=settings.num_replicas, timeout=TIMEOUT
        )
        trainer = _Trainer(replica, settings, pipe.send)
        while (row := pipe.recv()) is not None:
            trainer.train(row)
        dist.destroy_process_group()
    except BaseException:
        pipe.send(Failed(traceback.format_exc()))
        raise SystemExit(1) from None


def _exit_with_parent() -> None:
    """End this process when the parent process ends, even if the parent is killed."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


class _Trainer:
    """Data and settings of one replica for all rows; each row has a new model."""

    def __init__(self, replica: int, settings: Settings, emit: Callable[[Event], None]) -> None:
        self._replica = replica
        self._settings = settings
        self._emit = emit
        corpus = load_corpus(settings.data, settings.num_replicas)
        self._shard = corpus.shards[replica]
        windows = validation_windows(
            corpus.validation, settings.num_validation_windows, settings.model.context
        )
        self._windows = windows[replica :: settings.num_replicas]
        self._warm_up()

    def train(self, row: Row) -> None:
        """Train one row from the first step to the last, and emit its events."""
        settings = self._settings
        model = ByteTransformer(settings.model, settings.seed)
        batches = self._batches()
        with contextlib.closing(open_method(row, model, settings)) as method:
            self._validate(model, step=0, seconds=0.0)
            seconds = 0.0
            for begin in range(0, settings.num_steps, settings.sync_every):
                seconds = self._train_round(method, batches, begin, seconds)
                with method.shared_model():
                    self._validate(model, begin + settings.sync_every, seconds)
            traffic = method.traffic()
            self._emit(
                Finished(
                    outer_hash=method.outer_hash(),
                    num_parameters=sum(p.numel() for p in model.parameters()),
                    sent_bytes=traffic.sent_bytes,
                    received_bytes=traffic.received_bytes,
                    exposed_s=traffic.exposed_s,
                    seconds=seconds,
                )
            )

    def _train_round(self, method: Method, batches: Batches, begin: int, seconds: float) -> float:
        """Train ``sync_every`` steps and return the training seconds of the row so far."""
        settings = self._settings
        loss_sum = torch.zeros(())
        dist.barrier()
        clock = time.perf_counter() - seconds
        for step in range(begin, begin + settings.sync_every):
            loss_sum += method.step(*batches.next(), lr=settings.inner_lr_at(step))
            seconds = time.perf_counter() - clock
            if (step + 1) % settings.report_every == 0:
                loss = float(loss_sum) / settings.report_every
                loss_sum.zero_()
                self._emit(Progress(step + 1, loss, seconds))
        if begin + settings.sync_every == settings.num_steps:
            method.finish()
            seconds = time.perf_counter() - clock
        return seconds

    def _validate(self, model: ByteTransformer, step: int, seconds: float) -> None:
        with torch.no_grad():
            parts = self._windows.split(32)
            losses = [byte_loss(model, w[:, :-1], w[:, 1:]) * len(w) for w in parts]
        loss = float(torch.stack(losses).sum()) / len(self._windows)
        self._emit(Validation(step, loss, seconds, weight=len(self._windows)))

    def _batches(self) -> Batches:
        settings = self._settings
        seed = settings.seed * settings.num_replicas + self._replica
        return Batches(self._shard, settings.batch_size, settings.model.context, seed)

    def _warm_up(self) -> None:
        """Let torch set up its threads and kernels before the first row's clock starts."""
        model = ByteTransformer(self._settings.model, seed=0)
        batches = self._batches()
        for _ in range(2):
            byte_loss(model, *batches.next()).backward()
