"""What a launcher and the replica that it starts tell each other, in a folder on their host."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from .views import Key

REPLICA_FILE, LEAVE_FILE = "replica.json", "leave"


class StateFolder:
    """A folder with the number of one replica, and with the wish that this replica leaves.

    The number outlives the replica's process, so that the next process has the same number. A file
    tells a replica to leave, because a file reaches the replica whatever becomes of signals.

    Raises:
        OSError: If the folder cannot be made.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)

    def owner(self) -> str | None:
        """Return the name of the run whose replica this is; None before the first view."""
        return self._read().get("run")

    def last_process(self, run: str) -> Key | None:
        """Return number and nonce of the replica's last process; None if there was none.

        Raises:
            ValueError: If the folder belongs to another run.
        """
        values = self._read()
        if not values:
            return None
        if values["run"] != run:
            raise ValueError(
                f"the state folder {self.path} belongs to a replica of run {values['run']!r}, and "
                f"this replica is of run {run!r}: give each run its own folder"
            )
        return values["replica"], values["nonce"]

    def remember(self, run: str, key: Key) -> None:
        """Note the number and the nonce of this process, which is in a view."""
        self._write({"run": run, "replica": key[0], "nonce": key[1], "has_left": False})

    def note_leaving(self) -> None:
        """Note that this replica has left its group, as it was asked to."""
        if values := self._read():
            self._write({**values, "has_left": True})

    @property
    def has_left(self) -> bool:
        """Whether the replica's last process has left its group, as it was asked to."""
        return bool(self._read().get("has_left", False))

    def ask_to_leave(self) -> None:
        """Let the replica leave at its next boundary."""
        (self.path / LEAVE_FILE).touch()

    @property
    def is_asked_to_leave(self) -> bool:
        return (self.path / LEAVE_FILE).exists()

    def prepare(self) -> None:
        """Forget what the last process was asked, before the next process starts."""
        (self.path / LEAVE_FILE).unlink(missing_ok=True)
        if values := self._read():
            self._write({**values, "has_left": False})

    def _read(self) -> dict[str, Any]:
        try:
            values = json.loads((self.path / REPLICA_FILE).read_text())
            if _is_sound(values):
                return dict(values)
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError):
            pass
        raise ValueError(
            f"{self.path / REPLICA_FILE} is damaged: delete the file, and the replica gets a number"
        )

    def _write(self, values: dict[str, Any]) -> None:
        partial = self.path / f"{REPLICA_FILE}.{os.getpid()}"
        try:
            partial.write_text(json.dumps(values))
            partial.replace(self.path / REPLICA_FILE)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


def _is_sound(values: Any) -> bool:
    """Whether these are the values that ``StateFolder`` writes."""
    if not isinstance(values, dict):
        return False
    number, texts = values.get("replica"), (values.get("run"), values.get("nonce"))
    return type(number) is int and number >= 0 and all(type(one) is str for one in texts)
