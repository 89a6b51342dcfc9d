"""Start the syncer and the learners, kill one learner in the middle, and note every step."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any, cast

from ....asynchronous import DecoupledServer
from ....methods.outer import Nesterov
from ...common.printing import progress_bar
from ..data import load_corpus
from ..events import Failed
from ..run import STOP_SECONDS, ReplicaError, interrupts_blocked
from .learner import Ended, Ready, Stepped, learner_main
from .results import Results, Track
from .settings import DecoupledDemo


class _Learner:
    """One process and the pipe to it."""

    def __init__(self, index: int, process: ForkServerProcess, pipe: Connection) -> None:
        self.index, self.process, self.pipe = index, process, pipe


def run_learners(demo: DecoupledDemo, tell: Callable[[str], None]) -> Results:
    """Train, and return what the learners said.

    Args:
        tell: Called with a sentence about each event.

    Raises:
        ValueError: If the text is missing or too short.
        ReplicaError: If a learner failed. All processes have ended then, as after an interrupt.
    """
    load_corpus(demo.data, demo.num_learners)
    outer = Nesterov(demo.outer_lr, demo.outer_momentum)
    with DecoupledServer(demo.run, outer=outer) as server, _learners(demo, server.address) as all_:
        results = Results(demo, [Track() for _ in all_])
        tell(f"the syncer listens on {server.address}, {demo.num_learners} learners attach")
        _collect(all_, results, demo.timeout_s, lambda: all(t.ready for t in results.tracks))
        results.began = time.monotonic()
        for learner in all_:
            learner.pipe.send("begin")
        tell(f"learner {demo.slow} takes {demo.slow_factor:g} times as long for a step")
        with progress_bar("before the kill", demo.seconds / 2) as advance:
            _collect(all_, results, demo.seconds / 2, advance=advance)
        killed = all_[demo.killed]
        killed.process.kill()
        results.killed_at = time.monotonic()
        tell(f"learner {demo.killed} is killed")
        rest = [learner for learner in all_ if learner is not killed]
        with progress_bar("after the kill", demo.seconds / 2) as advance:
            _collect(rest, results, demo.seconds / 2, advance=advance)
        results.ended_at = time.monotonic()
        for learner in rest:
            learner.pipe.send("end")
        tracks = [results.tracks[learner.index] for learner in rest]
        _collect(rest, results, demo.timeout_s, lambda: all(t.ended for t in tracks))
        results.status = server.report()
    return results


def _collect(
    learners: list[_Learner],
    results: Results,
    seconds: float,
    is_over: Callable[[], bool] | None = None,
    advance: Callable[..., None] = lambda seconds: None,
) -> None:
    """Note what the learners say for some seconds, or until ``is_over``, which must come true.

    Args:
        advance: Called with the seconds since the last call.
    """
    last = time.monotonic()
    end = last + seconds
    while not (is_over is not None and is_over()):
        before, last = last, time.monotonic()
        advance(last - before)
        left_s = end - last
        if left_s <= 0:
            if is_over is not None:
                raise ReplicaError(f"the learners did not answer for {seconds:g} s")
            return
        # A process that has said its last word closes its pipe.
        by_pipe = {one.pipe: one for one in learners if not results.tracks[one.index].ended}
        for pipe in connection.wait(list(by_pipe), left_s):
            learner = by_pipe[cast(Connection, pipe)]
            try:
                said = learner.pipe.recv()
            except (EOFError, ConnectionResetError):
                learner.process.join(STOP_SECONDS)
                code = learner.process.exitcode
                raise ReplicaError(f"learner {learner.index} died, exit code {code}") from None
            _note(results.tracks[learner.index], said, learner.index)


def _note(track: Track, said: Any, index: int) -> None:
    if isinstance(said, Failed):
        raise ReplicaError(f"learner {index}:\n{said.traceback}")
    if isinstance(said, Stepped):
        track.steps.append(said)
    elif isinstance(said, Ready):
        track.ready = said
    elif isinstance(said, Ended):
        track.ended = said


@contextlib.contextmanager
def _learners(demo: DecoupledDemo, address: str) -> Iterator[list[_Learner]]:
    """Start the processes, and at the end kill those that still run."""
    # A fresh process imports torch once and forks the learners.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([learner_main.__module__])
    learners: list[_Learner] = []
    try:
        for index in range(demo.num_learners):
            pipe, child_pipe = context.Pipe()
            process = context.Process(
                target=learner_main,
                args=(child_pipe, index, demo, address),
                name=f"diloco_comm demo learner {index}",
                daemon=True,
            )
            with interrupts_blocked():
                process.start()
                learners.append(_Learner(index, process, pipe))
            child_pipe.close()
        yield learners
    finally:
        for learner in learners:
            learner.process.kill()
        for learner in learners:
            learner.process.join()
