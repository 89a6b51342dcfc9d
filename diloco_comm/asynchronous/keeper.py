"""Writes a server's state to disk, and retries after a failed write while the server goes on.

A journal must have no gap. So after a failed write the journal gets no later update: a server that
``waits`` writes the same update again, and any other goes on with a new snapshot and its journal.
Until then the folder holds a valid state that is older than the model.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..base.checks import logger_of
from ..base.log import DamagedLog
from ..base.service.folder_lock import FolderInUse
from .payloads import Payload, PayloadFile
from .snapshots import Storage

logger = logger_of(__name__)

# Seconds until the next attempt to write, doubled after each failure up to the second number.
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0
_HEADER_BYTES = 1 << 16


class Keeper:
    """Writes a server's snapshots and journal; reports failures, and tries again later.

    Args:
        folder: Folder of the snapshot and the journal.
        every: Updates between two snapshots.
        waits: The caller tells nobody of an update before the journal has it, see ``record``. So a
            crash loses no update that anybody knows of.
        keeps_journals: Keep the first snapshot and all journals.

    Attributes:
        storage: The files.
        saved_version: Version of the snapshot; -1 without a snapshot.
        kept_version: Version that the server would restore if it were killed now.

    Raises:
        OSError: If another server has the folder, or if there is no snapshot to restore and none
            can be written.
    """

    def __init__(
        self, folder: Path, every: int, *, waits: bool = False, keeps_journals: bool = False
    ) -> None:
        self.folder, self.every, self._waits = folder, every, waits
        self.keeps_journals = keeps_journals
        try:
            self.storage = Storage(folder, keeps_journals=keeps_journals)
            if not self.storage.exists:
                self._probe()
        except FolderInUse:
            raise
        except OSError as error:
            reason = _reason(error, folder)
            raise OSError(f"{reason}; the folder of the snapshots must be writable") from None
        self.saved_version = self.kept_version = -1
        self._reason = ""
        self._is_journalled = self._was_journalled = False
        self._began_at = self._retry_at = 0.0
        self._wait_s = FIRST_RETRY_S

    def _probe(self) -> None:
        try:
            self.storage.probe()
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Let another server have the folder; nothing is written any more."""
        self.storage.release()

    # ------------------------------------------------------------------------------------ reading

    def replay(self, version: int) -> Iterator[tuple[dict[str, Any], PayloadFile]]:
        """Yield the updates after the snapshot of this version, then continue the journal.

        Raises:
            OSError: If the caller ``waits`` for the disk, and these updates cannot be written to
                the disk (fsync), so that nobody may be told of them.
        """
        self.saved_version = self.kept_version = version
        for record, body in self.storage.replay(version):
            yield record, body
            if not record["outcome"]["refusal"]:
                self.kept_version += 1
        try:
            self.storage.continue_journal(version)
            self._is_journalled = True
        except OSError as error:
            if self._waits:
                raise OSError(
                    f"{_reason(error, self.folder)}; the journal must be on the disk before "
                    "anybody gets the updates in it"
                ) from None
            self._fail(error)

    # ------------------------------------------------------------------------------------ writing

    @property
    def may_write(self) -> bool:
        """Whether the journal is in order, or it is time for another attempt to write it."""
        return self._is_journalled or time.monotonic() >= self._retry_at

    def record(self, record: dict[str, Any], payloads: Sequence[Payload], version: int) -> bool:
        """Write an update to the journal; for a caller that ``waits`` also to the disk (fsync).

        Args:
            record: JSON of the update and its outcome.
            payloads: The payloads of the update.
            version: The model's version after the update.

        Returns:
            False if the update could not be written. The journal then ends with the previous one.
            A caller that ``waits`` repeats the call later, before it tells anybody of the update;
            for others the journal gets no update until the next snapshot.
        """
        if not self._is_journalled and not self._waits:
            return False
        try:
            if not self._is_journalled:
                self.storage.continue_journal(max(0, self.saved_version))
            self.storage.append(record, payloads, is_durable=self._waits)
        except (OSError, DamagedLog) as error:
            self._is_journalled = False
            self._fail(error)
            return False
        self.kept_version = version
        if not self._is_journalled:
            self._is_journalled = True
            self._recover()
        return True

    def is_due(self, version: int) -> bool:
        """Whether a snapshot, or another attempt at one, is due."""
        if self._reason:
            return time.monotonic() >= self._retry_at
        return version - max(0, self.saved_version) >= self.every

    def save(self, version: int, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Write a snapshot and begin a new journal; if the disk fails, note and log that."""
        try:
            if self._reason:
                self._expect_room(tensors)
            self.storage.save(header, tensors)
            self.saved_version = self.kept_version = version
            self._is_journalled = False
            self.storage.begin_journal(version)
            self._is_journalled = True
        except OSError as error:
            self._fail(error)
        else:
            self._recover()

    def _expect_room(self, tensors: dict[str, Tensor]) -> None:
        """Raise OSError if the disk has no room for a snapshot of these tensors."""
        needed = _HEADER_BYTES + sum(tensor.nbytes for tensor in tensors.values())
        if not self.storage.has_room(needed):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder / "snapshot"))

    def close(self, version: int) -> None:
        """Close the journal of a server that ends with this version, and unlock the folder.

        Raises:
            OSError: If the disk has only an older version, and somebody knows of the newer one.
        """
        self.release()
        if self._reason and self.kept_version != version and not self._waits:
            kept = "nothing" if self.kept_version < 0 else f"version {self.kept_version}"
            raise OSError(
                f"version {version} of the model is lost, and {kept} is kept: {self._reason}"
            )

    # ----------------------------------------------------------------------------------- problems

    @property
    def problem(self) -> str:
        """One sentence while the journal or the snapshot cannot be written, else ""."""
        if not self._reason:
            return ""
        if self._is_journalled:
            return f"{self._reason}; the journal is whole, so a crash loses nothing"
        if self._waits:
            return f"{self._reason}; merges wait until the journal takes them"
        if self.kept_version < 0:
            return f"{self._reason}; a crash loses everything"
        return f"{self._reason}; a crash loses the updates after version {self.kept_version}"

    @property
    def problem_s(self) -> float:
        """Seconds since the problem began."""
        return time.monotonic() - self._began_at if self._reason else 0.0

    def _fail(self, error: OSError | DamagedLog) -> None:
        is_new = not self._reason
        self._reason = _reason(error, self.folder)
        if is_new:
            self._began_at, self._wait_s = time.monotonic(), FIRST_RETRY_S
        else:
            self._wait_s = min(2 * self._wait_s, LAST_RETRY_S)
        self._retry_at = time.monotonic() + self._wait_s
        # Log once when the problem begins, and once more when the journal fails as well.
        if is_new or self._was_journalled != self._is_journalled:
            logger.error("%s; the server goes on, and tries again", self.problem)
        self._was_journalled = self._is_journalled

    def _recover(self) -> None:
        if self._reason:
            logger.warning(
                "the snapshot folder %s can be written again after %.0f s: version %d is saved",
                self.folder,
                self.problem_s,
                self.kept_version,
            )
        self._reason = ""

    def report(self, version: int) -> dict[str, Any]:
        """Return the state of the snapshots as JSON types; ``version`` is the model's."""
        return {
            "folder": str(self.folder),
            "snapshot_version": self.saved_version,
            "unsaved_updates": version - max(0, self.kept_version),
            "problem": self.problem,
            "problem_s": round(self.problem_s, 3),
        }


def _reason(error: OSError | DamagedLog, path: Path) -> str:
    if isinstance(error, DamagedLog):
        return f"{error.path} is damaged at byte {error.offset}"
    return f"{error.filename or path} cannot be written: {error.strerror or error}"
