"""Start the demo's replicas and train the rows of its table on them, one after the other."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

from ...base.store_host import open_store
from ..common.printing import progress_bar
from ..common.ranks import WITH_OPTIMIZER
from .data import load_corpus
from .events import Failed
from .report.results import Results, RowResult
from .settings import ROWS, Settings
from .worker import worker_main

STOP_SECONDS = 10.0


class ReplicaError(RuntimeError):
    """A replica of the demo raised or died."""


def run_demo(settings: Settings, tell: Callable[[Results], None]) -> Results:
    """Train every row on the same replica processes and return their results.

    Args:
        tell: Called with the results before there are any.

    Raises:
        ValueError: If the text is missing or too short.
        ReplicaError: If a replica failed. All processes have ended then, as after an interrupt.
    """
    started = time.perf_counter()
    corpus = load_corpus(settings.data, settings.num_replicas)
    results = Results(settings, corpus.source, corpus.unigram_entropy)
    tell(results)
    with _replicas(settings) as replicas:
        for row in ROWS:
            result = results.rows[row] = RowResult(row, settings.num_replicas)
            with progress_bar(row.name, settings.num_steps, is_kept=True) as advance:
                _train_row(result, replicas, advance)
    results.total_seconds = time.perf_counter() - started
    return results


class _Replica:
    """One worker process and the pipe to it."""

    def __init__(self, process: ForkServerProcess, pipe: Connection) -> None:
        self.process = process
        self.pipe = pipe


@contextlib.contextmanager
def _replicas(settings: Settings) -> Iterator[list[_Replica]]:
    """Start the worker processes, and at the end kill those that still run."""
    store = open_store("127.0.0.1", 0)
    # A fresh process imports torch and what an optimizer needs once, and forks the replicas.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([worker_main.__module__, *WITH_OPTIMIZER])
    replicas: list[_Replica] = []
    try:
        for index in range(settings.num_replicas):
            pipe, child_pipe = context.Pipe()
            process = context.Process(
                target=worker_main,
                args=(child_pipe, index, settings, store.port),
                name=f"diloco_comm demo replica {index}",
                daemon=True,
            )
            with interrupts_blocked():
                process.start()
                replicas.append(_Replica(process, pipe))
            child_pipe.close()
        yield replicas
        for replica in replicas:
            replica.pipe.send(None)
        for replica in replicas:
            replica.process.join(STOP_SECONDS)
    finally:
        for replica in replicas:
            replica.process.kill()
        for replica in replicas:
            replica.process.join()


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Delay Ctrl-C; processes started inside inherit the mask, and never get the signal."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _train_row(
    result: RowResult, replicas: Sequence[_Replica], advance: Callable[..., None]
) -> None:
    for replica in replicas:
        replica.pipe.send(result.row)
    index_of = {replica.pipe: index for index, replica in enumerate(replicas)}
    while not result.is_finished:
        for pipe in connection.wait(list(index_of)):
            assert isinstance(pipe, Connection)
            index = index_of[pipe]
            try:
                event = pipe.recv()
            except (EOFError, ConnectionResetError):
                process = replicas[index].process
                process.join(STOP_SECONDS)
                raise ReplicaError(
                    f"replica {index} died during {result.row.name}, exit code {process.exitcode}"
                ) from None
            if isinstance(event, Failed):
                raise ReplicaError(f"replica {index}, {result.row.name}:\n{event.traceback}")
            before = result.step
            result.add(index, event)
            loss = f"loss {result.final_loss:.3f}" if result.validation else ""
            advance(result.step - before, loss)
