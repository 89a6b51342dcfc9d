"""Start a replica by torchrun, and again when it ends early."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import random
import signal
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from diloco_comm.base.env import PREFIX
from diloco_comm.elastic import exits
from diloco_comm.elastic.state_folder import StateFolder

from ..common.commands import FAILED, note
from . import child
from .nodes import Nodes

# Seconds before the first restart; the pause doubles up to the longest, times 0.5 to 1.5.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
# After a life of so many seconds a failure begins a new row of restarts.
_STEADY_S = 300.0
# A program that ends so soon has not begun: its arguments or its imports are wrong.
_AT_ONCE_S = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Statuses after which the replica is not started again.
_FINAL = (exits.MISFIT, exits.UNAVAILABLE, exits.LEFT)
# Statuses by which the training itself says why it has ended.
_REASONS = (exits.MISFIT, exits.UNAVAILABLE, exits.RESTART)
# Seconds between two looks at signals and at torchrun.
_LOOK_S = 0.1
# Seconds for which torchrun waits for workers that it has told to end, and the launcher waits for
# torchrun.
_SHUTDOWN_S = 10


@dataclass(frozen=True)
class Launch:
    """The replica that a launcher starts.

    Attributes:
        registry, run, replica, key, is_insecure: As in ``Elastic``.
        command: A Python script and its arguments.
        num_workers: Processes of this replica on each node.
        folder: Folder of the replica's state.
        max_restarts: The most restarts in a row.
        num_nodes, node: Nodes of this replica, and the number of this node.
        endpoint: ``host:port`` at which the launcher of node 0 listens.
    """

    registry: str
    run: str
    command: list[str]
    num_workers: int
    folder: Path
    replica: int | None = None
    max_restarts: int = 10
    key: Path | None = None
    is_insecure: bool = False
    num_nodes: int = 1
    node: int = 0
    endpoint: str = ""

    def settings(self) -> dict[str, Any]:
        """Return what must be equal on all nodes, by option."""
        return {
            "--nnodes": self.num_nodes,
            "--nproc-per-node": self.num_workers,
            "--registry": self.registry,
            "--run": self.run,
            "--replica": self.replica,
            "--max-restarts": self.max_restarts,
            "--insecure": self.is_insecure,
        }

    def variables(self) -> dict[str, str]:
        """Return the environment variables by which ``Elastic()`` finds its arguments."""
        values = {
            "REGISTRY": self.registry,
            "RUN": self.run,
            "STATE_DIR": str(self.folder),
            "INSECURE": str(int(self.is_insecure)),
        }
        if self.key is not None:
            values["KEY"] = str(self.key)
        if self.replica is not None:
            values["REPLICA"] = str(self.replica)
        return {PREFIX + name: value for name, value in values.items()}


class Launcher:
    """Run one replica until its training has ended.

    Raises:
        ValueError: If another launcher uses the folder, the folder belongs to another run or is
            damaged, or node 0 cannot listen at the endpoint.
        OSError: If the folder cannot be made or changed.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._folder = StateFolder(launch.folder)
        self._lock = _lock(launch.folder)
        self._folder.last_process(launch.run)
        self._folder.prepare()
        self._signals: list[str] = []
        place = launch.node, launch.num_nodes, launch.endpoint
        self._nodes = Nodes(*place, launch.settings(), self._signals)
        self._has_asked = False

    def run(self) -> int:
        """Start the replica as often as needed; return the exit status of the launcher."""
        status = FAILED
        try:
            status = self._run()
        finally:
            self._nodes.close(status)
            # A late signal would change the status while Python ends.
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)
        return status

    def _run(self) -> int:
        os.environ.update(self._launch.variables())
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SHUTDOWN_S))
        # Hide torchrun's warning that it handles no signals: it runs on a thread here.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)
        num_restarts, before, pause = 0, None, 0.0
        while True:
            ended = self._nodes.begin(pause)
            if ended is not None:
                return ended
            began = time.monotonic()
            failed, lived_s = self._run_once()
            if not self._nodes.is_first:
                # Node 0 alone decides whether the workers begin again.
                continue
            has_left, is_asked = self._has_left(), bool(self._nodes.leaving)
            status = outcome(failed, has_left, is_asked)
            if status in (exits.DONE, *_FINAL) or is_asked or has_left:
                return status
            own = own_status(failed) if lived_s < _AT_ONCE_S else None
            if own is not None and own == before:
                return self._nodes.give_up(
                    own,
                    f"the program has twice ended with status {own} as soon as it was started, "
                    "and is not started again: its output says why",
                )
            before = own
            if time.monotonic() - began > _STEADY_S:
                num_restarts = 0
            if num_restarts >= self._launch.max_restarts:
                return self._nodes.give_up(
                    status,
                    f"the replica has ended with status {status}, after {num_restarts} restarts",
                )
            num_restarts += 1
            pause = pause_s(num_restarts)
            note(
                f"the replica has ended with status {status} and starts again in {pause:.1f} s "
                f"(restart {num_restarts} of {self._launch.max_restarts})"
            )

    def _run_once(self) -> tuple[list[int], float]:
        """Run the workers; return the statuses of failed workers, and the seconds of the run.

        On node 0 these are the workers of all nodes.
        """
        failed: list[list[int]] = []
        # In a thread of its own torchrun cannot take over the signal handlers of this launcher.
        thread = threading.Thread(target=lambda: failed.append(self._torchrun()), daemon=True)
        thread.start()
        began = stopped_at = math.inf
        told: set[int] = set()
        while thread.is_alive():
            thread.join(_LOOK_S)
            # torchrun needs a while before it starts the workers.
            if began == math.inf and _children():
                began = time.monotonic()
            self._heed_signals()
            if not self._nodes.must_stop:
                continue
            stopped_at = min(stopped_at, time.monotonic())
            is_late = time.monotonic() - stopped_at > _SHUTDOWN_S
            if self._nodes.ends_now or is_late:
                _signal_children(signal.SIGKILL, set())
            else:
                _signal_children(signal.SIGTERM, told)
            if self._nodes.ends_now and is_late:
                # Do not wait for torchrun: workers that it may still start die with this launcher.
                break
        lived_s = math.inf if began == math.inf else time.monotonic() - began
        own = own_ends(failed[0], bool(told)) if failed else [FAILED]
        self._nodes.note_end(own, lived_s)
        while self._nodes.is_first:
            if (ends := self._nodes.ends()) is not None:
                return ends
            self._heed_signals()
            time.sleep(_LOOK_S)
        return own, lived_s

    def _has_left(self) -> bool:
        try:
            return self._folder.has_left
        except (OSError, ValueError) as error:
            note(str(error))
            return False

    def _torchrun(self) -> list[int]:
        """Run the workers; return the statuses of those that have failed, the first one first."""
        # All options are given, since torchrun would read others from the environment (PET_NNODES).
        options = ["--standalone", "--nnodes", "1", "--node-rank", "0"]
        options += ["--nproc-per-node", str(self._launch.num_workers)]
        options += ["--max-restarts", "0", "--monitor-interval", "0.2"]
        command = [child.__file__, str(os.getpid()), json.dumps(self._nodes.variables)]
        command += self._launch.command
        try:
            torchrun.run(torchrun.parse_args([*options, *command]))
        except ChildFailedError as error:
            return [failure.exitcode for failure in error.failures.values()]
        return []

    def _on_signal(self, number: int, frame: Any) -> None:
        # A handler that took a lock could wait for the very code that it interrupts.
        self._signals.append(signal.Signals(number).name)

    def _heed_signals(self) -> None:
        """Let the replica leave after a node's first signal."""
        self._nodes.look()
        who = self._nodes.leaving
        if not who or self._has_asked:
            return
        self._has_asked = True
        try:
            self._folder.ask_to_leave()
        except OSError as error:
            note(f"the replica cannot be asked to leave: {error}; a second signal ends it")
            return
        where = "" if self._signals else " there"
        note(f"{who}: the replica leaves at its next boundary; a second signal{where} ends it now")


def outcome(failed: Collection[int], has_left: bool, is_asked: bool) -> int:
    """Return the exit status of a replica.

    Args:
        failed: Exit statuses of the workers that have failed, negative for a signal.
        has_left: The replica has left its group; then it is not started again.
        is_asked: The launcher has asked the replica to leave.
    """
    for status in _FINAL:
        if status in failed:
            return status
    if not failed:
        return exits.LEFT if has_left else exits.DONE
    if is_asked and set(failed) == {-signal.SIGTERM}:
        # The signal came before the training had begun.
        return exits.LEFT
    # If one worker is lost, the other workers of its replica fail, too: all begin again.
    return FAILED if is_asked or has_left else exits.RESTART


def own_ends(failed: list[int], is_stopped: bool) -> list[int]:
    """Return the exit statuses of a node's workers, without those that are answers to SIGTERM.

    A worker that was ended counts as ended by SIGTERM, whatever its program has made of that.

    Args:
        failed: Exit statuses of the workers that have failed, the first one first: torchrun has
            ended the others after it.
        is_stopped: The launcher has sent SIGTERM to them all.
    """
    return [
        status if status < 0 or status in _REASONS or not (place or is_stopped) else -signal.SIGTERM
        for place, status in enumerate(failed)
    ]


def own_status(failed: Collection[int]) -> int | None:
    """Return the status of a program that failed by itself; None if it asks for a restart."""
    own = [status for status in failed if status > 0]
    return own[0] if own and exits.RESTART not in own else None


def pause_s(num_restarts: int) -> float:
    """Return the seconds before a restart: jittered, and longer with each restart in a row."""
    longest = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (num_restarts - 1))
    return longest * random.uniform(0.5, 1.5)


def _lock(folder: Path) -> Any:
    """Return the open file that keeps other launchers out of a folder."""
    file = (folder / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(
            f"another launcher uses the state folder {folder}: give each replica of a host its own "
            "--state-dir"
        ) from None
    return file


def _signal_children(number: signal.Signals, told: set[int]) -> None:
    """Send a signal to the processes that this one has started; each leads a session of its own.

    Args:
        told: Those that have got the signal, who do not get it again.
    """
    for pid in {*_children()} - told:
        told.add(pid)
        with contextlib.suppress(OSError):
            os.killpg(pid, number)


def _children() -> list[int]:
    """Return the processes that this one has started, and that nobody has waited for."""
    found: list[int] = []
    for one in list(Path("/proc/self/task").glob("*/children")):
        # A thread may have ended meanwhile.
        with contextlib.suppress(OSError):
            found += map(int, one.read_text().split())
    return found
