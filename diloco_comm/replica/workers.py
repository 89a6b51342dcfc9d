"""The workers of one replica; if one worker fails, all raise.

The workers take the same steps. So each block that sends or applies something ends with the same
few small collectives, whatever became of a worker's own rounds in the block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from ..base.errors import ERRORS, NonFiniteError, ReplicaMismatch, SyncError
from . import sharding
from .messages import WorkerMessages

if TYPE_CHECKING:
    from .fragments import Fragment

# Stage of the error of a worker whose replica has lost another worker.
WORKMATE_STAGE = "replica"


class ReplicaWorkers:
    """The workers of one replica, as a process group.

    Args:
        group: This worker and the replica's other workers; carries tensors on the device.
        timeout: Seconds; see ``WorkerMessages``.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self._control = WorkerMessages(group, timeout)

    @classmethod
    def of(cls, params: Sequence[Tensor], timeout: float) -> ReplicaWorkers | None:
        """Return the workers that hold the shards of DTensors; None when this worker is alone."""
        group = sharding.workers_group(params, timeout)
        return None if group is None or group.size() == 1 else cls(group, timeout)

    def close(self) -> None:
        """Close the group that was made for the messages of these workers; idempotent."""
        self._control.close()

    # ------------------------------------------------------------------------ at construction

    def check_alike(self, views: dict[str, Any]) -> None:
        """Compare model and settings of all workers.

        Raises:
            ReplicaMismatch: Naming the first one that differs.
        """
        everyone = self._control.gather(views)
        for rank, theirs in enumerate(everyone):
            for name, value in everyone[0].items():
                if theirs[name] != value:
                    raise ReplicaMismatch(
                        f"{name} differs between the workers of a replica: {value!r} on its "
                        f"worker 0, {theirs[name]!r} on worker {rank}"
                    )

    def gather(self, value: Any) -> list[Any]:
        """Return every worker's value, in the order of the workers.

        Raises:
            SyncError: If another worker is gone.
        """
        with self._while_all_live():
            return self._control.gather(value)

    def counted(self, params: Sequence[Tensor]) -> list[bool]:
        """Say for each parameter whether no worker before this one holds the same elements."""
        keys = [sharding.held_part(param) for param in params]
        before = self._control.gather(keys)[: self.rank]
        return [all(keys[i] != theirs[i] for theirs in before) for i in range(len(params))]

    def least(self, number: int) -> int:
        """Return the least of all workers' numbers; a collective call."""
        with self._while_all_live():
            return -self._control.largest(-number)

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Say for each flag whether any worker has set the flag; a collective call."""
        with self._while_all_live():
            return self._control.any(flags)

    # --------------------------------------------------------------------------- failures

    @contextmanager
    def all_workers(self, fragments: Sequence[Fragment] = ()) -> Iterator[None]:
        """Run a block that all workers enter; if one worker fails, all raise.

        The worst failure is raised: after a NonFiniteError training may go on, after others not.

        Args:
            fragments: Fragments whose parameters are written in the block.

        Raises:
            SyncError: The error of the worker that failed: its class and its attributes.
            RuntimeError: After ``close``.
        """
        if self._control.is_closed:
            raise RuntimeError("this DiLoCo is closed")
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            # The other workers wait for the parameters that were written before the failure.
            failure = error
        try:
            others = self._hear(failure)
            self.hand_out(fragments)
        except SyncError:
            raise
        except RuntimeError as error:
            raise self._gone(error) from (failure or error)
        if others is not None:
            raise others from failure
        if failure is not None:
            raise failure

    def hand_out(self, fragments: Sequence[Fragment]) -> None:
        """Give the other workers the parameters that this worker has written."""

    def _hear(self, failure: Exception | None) -> SyncError | None:
        """Tell the other workers of a failure; return the worst one if another worker has it."""
        own = _severity(failure)
        worst = self._control.largest(own * self.size + self.rank)
        severity, worker = divmod(worst, self.size)
        if severity == 0:
            return None
        report = self._control.broadcast(_report(failure), worker)
        return None if own == severity else _error_of(worker, *report)

    @contextmanager
    def _while_all_live(self) -> Iterator[None]:
        try:
            yield
        except SyncError:
            raise
        except RuntimeError as error:
            raise self._gone(error) from error

    def _gone(self, error: RuntimeError) -> SyncError:
        # The text of gloo without the source line before it and the advice after it.
        text = re.sub(r"^\[\S+:\d+\] ", "", str(error).strip()).split(". ")[0].split("\n")[0]
        return SyncError(
            "another worker of this replica is gone, and the replica cannot go on without it: "
            f"{text or type(error).__name__}",
            stage=WORKMATE_STAGE,
        )


def _severity(failure: Exception | None) -> int:
    if failure is None:
        return 0
    return 1 if isinstance(failure, NonFiniteError) else 2


def _report(failure: Exception | None) -> tuple[str, str, dict[str, Any]]:
    """Put an error into plain values."""
    if isinstance(failure, SyncError):
        return type(failure).__name__, str(failure), dict(vars(failure))
    return "SyncError", f"{type(failure).__name__}: {failure}", {}


def _error_of(worker: int, kind: str, message: str, attributes: dict[str, Any]) -> SyncError:
    error = ERRORS[kind](f"worker {worker} of this replica failed: {message}")
    vars(error).update(attributes)
    return error
